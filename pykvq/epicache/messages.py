"""Chat messages as tokens, each message apart, so that a growing list has a growing history of tokens."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pykvq.engine import Model
from pykvq.epicache.segment import Utterance


class Message(NamedTuple):
    """One message of a chat. role: system, user or assistant."""
    role: str
    content: str


def message(value: Message | dict) -> Message:
    """A Message of an OpenAI-like dictionary; content may be a list of text parts. Raises ValueError for anything else."""
    if isinstance(value, Message):
        return value
    role, content = value.get("role"), value.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("only text is understood in the content of a message")
        content = "".join(part["text"] for part in content)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise ValueError(f"a message needs a role (system, user, assistant) and text as content, not role {role!r}")
    return Message(role, content)


class Renderer:
    """Messages in the model's chat template; plain "role: content" lines when llama.cpp knows no template of the model."""

    def __init__(self, model: Model):
        self.model = model
        self.plain = model.chat_text([("user", "x")], False) is None

    def prefix(self, system: Sequence[Message]) -> list[int]:
        """What stands before the first utterance: the start of the text and the system prompt."""
        return self.model.tokenize(self._text(system, False) if system else "", special=True)

    def utterance(self, said: Message, system: Sequence[Message]) -> Utterance:
        """One message with its tokens."""
        return Utterance(f"{said.role}: {said.content}", tuple(self._tokens(system, [said], False)))

    def question(self, said: Message, system: Sequence[Message]) -> list[int]:
        """The last message and the opening of the answer."""
        return self._tokens(system, [said], True)

    def _tokens(self, system: Sequence[Message], said: Sequence[Message], answer: bool) -> list[int]:
        # Behind the system prompt, as some templates put a default one before a first message.
        before = self._text(system, False) if system else ""
        whole = self._text([*system, *said], answer)
        if not whole.startswith(before):
            raise ValueError("the chat template of this model rewrites earlier messages; EpiCache needs one that only appends")
        return self.model.tokenize(whole[len(before):], bos=False, special=True)

    def _text(self, said: Sequence[Message], answer: bool) -> str:
        if self.plain:
            return "".join(f"{m.role}: {m.content}\n" for m in said) + ("assistant:" if answer else "")
        text = self.model.chat_text(said, answer)
        if text is None:
            raise ValueError("the chat template of this model does not take these messages")
        return text
