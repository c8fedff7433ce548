"""Which conversation a growing list of messages belongs to, and where its memory is: in the process, on disk, or to be made again."""
from __future__ import annotations

import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path

from pykvq.epicache.chat import Conversation, EpiCache, Turn
from pykvq.epicache.identity import identity
from pykvq.epicache.messages import Message, message
from pykvq.epicache.store import Store

log = logging.getLogger("pykvq.epicache")


class Answer:
    """Pieces of one answer. Of a complete one: id of its conversation, why a saved cache was not used, and how it came about."""

    def __init__(self):
        self.pieces: Iterator[str] = iter(())
        self.id, self.reason, self.turn = "", None, Turn()

    def __iter__(self) -> Iterator[str]:
        return self.pieces

    def close(self) -> None:
        """Give up the rest; the conversation stays as it was."""
        self.pieces.close()


class Conversations:
    """Many conversations through one EpiCache. memory_limit: bytes of caches kept in the process, least recently used first out; disk_limit: of the
    store in `root`. Threads take turns: one answer at a time.
    """

    def __init__(self, epicache: EpiCache, root: str | Path, memory_limit: int = 2 << 30, disk_limit: int | None = None):
        self.epicache, self.memory_limit = epicache, memory_limit
        self.store = Store(root, disk_limit)
        self.identity = epicache.identity()
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        self._lock = threading.Lock()            # no RLock: a streamed answer may be closed by another thread
        self.last = Answer()

    def chat(self, messages: Sequence[Message | dict], **options) -> "Answer":
        """The answer to a list of messages, with the options of EpiCache.chat; saved when it is complete."""
        self.last = answer = Answer()
        answer.pieces = self._pieces(answer, [message(m) for m in messages], options)
        return answer

    def _pieces(self, answer: "Answer", messages: list[Message], options: dict) -> Iterator[str]:
        with self._lock:
            answer.id, conversation, answer.reason = self._of(messages)
            if answer.reason:
                log.warning("conversation %s: the saved cache is not used (%s); its text is read again", answer.id, answer.reason)
            self.epicache.adopt(conversation)
            yield from self.epicache.chat(messages, stream=True, **options)
            conversation, answer.turn = self.epicache.conversation, self.epicache.last
            self._kept[answer.id] = conversation
            self._kept.move_to_end(answer.id)
            self.store.put(answer.id, conversation, self.identity)
            self._make_room()

    def close(self) -> None:
        """Close the store; the EpiCache stays open."""
        self.store.close()

    def _of(self, messages: Sequence[Message]) -> tuple[str, Conversation, str | None]:
        found = self.store.find(messages[:-1])
        if found is None:
            return uuid.uuid4().hex, Conversation(), None
        id, known = found
        conversation, reason = (self._kept[id], None) if id in self._kept else self.store.get(id, self.identity)
        if known < self.store.length(id) - 2:    # not its end and not its last question asked again: another branch, which gets its own entry
            conversation, id = copy(conversation), uuid.uuid4().hex
        return id, conversation, reason

    def _make_room(self) -> None:
        while len(self._kept) > 1 and sum(c.memory.bytes for c in self._kept.values() if c.memory) > self.memory_limit:
            self._kept.popitem(last=False)
