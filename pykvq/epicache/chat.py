"""EpiCache: one conversation after another in a fixed number of cache cells."""
from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pykvq.engine import Context, Model, quiet_log
from pykvq.epicache.build import Builder, Plan
from pykvq.epicache.embed import encoder
from pykvq.epicache.identity import identity
from pykvq.epicache.memory import INSTRUCTION, Keeper, Memory, Settings
from pykvq.epicache.messages import Message, Renderer, message
from pykvq.epicache.queries import QueryCapture
from pykvq.epicache.recall import Asked
from pykvq.epicache.sampling import Sampler
from pykvq.epicache.segment import Utterance

_ONLY = "conversation"                    # id of the one that save() writes


@dataclass
class Turn:
    """How one answer came about. evaluated: prompt tokens that were run; looked: run before, to see which cells the question needs; reused: cells of
    the cache they found; restored: saved rows were loaded for it, and evaluated counts only what they lacked; episodes: read for the question, empty
    while the history fits; rebuilt: episodes that got news before; answer: tokens written; finish: "stop" or "length"."""
    evaluated: int = 0
    looked: int = 0
    reused: int = 0
    restored: bool = False
    episodes: tuple[int, ...] = ()
    rebuilt: int = 0
    answer: int = 0
    finish: str = "length"


@dataclass
class Conversation:
    """Messages, and the memory that was made of the first of them."""
    system: list[Message] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    memory: Memory | None = None


class EpiCache:
    """A model that talks within `budget` cells of history, whatever the length of the conversation.

    model: a GGUF path, an engine.Model or a llama_cpp.Llama, whose weights are used and whose cache type becomes the default. Shorter
    histories than `budget` stay whole. room: tokens for a question and its answer. block: tokens prefilled between two evictions, by
    default half the budget, at most 1024. The cache has budget + block + room cells. encoder: see embed.encoder. layer_budgets: see
    budget.layer_budgets; cells are then as many as the largest. progress(tokens): called with the tokens just run while episodes are built.
    Raises ModelFileError, ValueError for a model whose cache does not serve, MemoryError.

    Not thread-safe inside one conversation; the lock lets threads take turns.
    """

    def __init__(self, model, budget: int = 4096, *, kv_type=None, block: int | None = None, room: int = 1024, encoder_name: str = "auto",
                 settings: Settings = Settings(), layer_budgets: Sequence[int] | None = None, threads: int | None = None, gpu_layers: int = 0,
                 progress: Callable[[int], None] = lambda tokens: None):
        if budget < 64:
            raise ValueError(f"a budget of {budget} cells holds no conversation; use 64 or more")
        self.model, default = _model(model, gpu_layers)
        self._owns = isinstance(model, (str, Path))
        self.budget, self.block, self.room = budget, block or max(32, min(1024, budget // 2)), room
        self._capture = QueryCapture()
        widest = max(layer_budgets or [budget])
        self.context = Context(self.model, widest + self.block + max(room, settings.prompt), kv_type or default, threads=threads,
                               on_tensor=self._capture)
        shared = any(layer.key_bias == "left out" for layer in self.context.info())
        self.encoder_name, encode = encoder(encoder_name, self.model)
        plan = Plan(budget, self.block, tuple(layer_budgets) if layer_budgets else None, recent=min(16, budget // 8), shared=shared)
        self.builder = Builder(self.context, self._capture, plan, progress)
        self.renderer = Renderer(self.model)
        opening = self.renderer.question(Message("user", INSTRUCTION), [])
        self.keeper = Keeper(self.builder, encode, opening, lambda text: self.model.tokenize(text, bos=False), settings)
        self.conversation = Conversation()
        self.last = Turn()
        self.lock = threading.Lock()
        self._base: object = None                # what the first cells hold, by identity of rows and the question; None: nothing known
        self._cells = 0                          # how many of these there are
        self._read: tuple[int, ...] = ()         # episodes that they are from
        self._live: list[int] = []               # tokens behind them
        self._start = 0                          # position of the first of those

    def ask(self, question: str, **options) -> str:
        """The answer to the next user message of the conversation; options as of chat()."""
        said = [*self.conversation.system, *self.conversation.said, Message("user", question)]
        return self.chat(said, **options)

    def chat(self, messages: Sequence[Message | dict], stream: bool = False, **options) -> str | Iterator[str]:
        """The answer to the last of `messages`, the whole list as a client sends it; with `stream` an iterator of its pieces.

        Messages that the conversation already has cost nothing; a list that goes another way than it drops what no longer fits. options:
        max_tokens, temperature, top_p, seed, stop (a list of texts). Raises ValueError for a list that does not end with a user message
        and for a question that the room does not hold.
        """
        pieces = self._answer([message(m) for m in messages], **options)
        return pieces if stream else "".join(pieces)

    def close(self) -> None:
        """Free the cache; the weights too, when a path was given."""
        self.context.close()
        if self._owns:
            self.model.close()

    def __enter__(self) -> "EpiCache":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def identity(self) -> dict[str, object]:
        """What saved caches of this model, cache type, budget and encoder are checked against."""
        plan = self.builder.plan
        return identity(self.context, self.encoder_name, list(plan.layers or [plan.budget]), self.keeper.settings.recall)

    def save(self, path: str | Path) -> None:
        """Save the conversation into a folder. Raises OSError, ValueError when another process uses it."""
        from pykvq.epicache.store import Store
        store = Store(path)
        try:
            store.put(_ONLY, self.conversation, self.identity())
        finally:
            store.close()

    def load(self, path: str | Path) -> str | None:
        """Go on with a saved conversation. Returns why its caches cannot be used, and the text is then read again at the next question; None when
        they can. Raises ValueError when there is none."""
        from pykvq.epicache.store import Store
        if not Path(path).is_dir():
            raise ValueError(f"no conversation is saved in {path}")
        store = Store(path)
        try:
            conversation, reason = store.get(_ONLY, self.identity())
        except KeyError as error:
            raise ValueError(f"no conversation is saved in {path}") from error
        finally:
            store.close()
        self.adopt(conversation)
        return reason

    def adopt(self, conversation: Conversation) -> None:
        """Go on with another conversation."""
        self.conversation = conversation

    def _answer(self, messages: list[Message], max_tokens: int | None = None, temperature: float = 0.0, top_p: float = 1.0,
                seed: int | None = None, stop: Sequence[str] = ()) -> Iterator[str]:
        system = messages[:next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))]
        said = messages[len(system):]
        if not said or said[-1].role != "user":
            raise ValueError("the last message must be the user's")
        question = self.renderer.question(said[-1], system)
        longest = self.room - len(question)
        if longest < 1:
            raise ValueError(f"the question takes {len(question)} tokens, and the room for question and answer is {self.room}; raise room")
        with self.lock:
            self.last = turn = Turn()
            self._follow(system, said[:-1])
            try:
                logits = self._prefill(said[-1].content, question, turn)
                text = yield from self._generate(logits, min(max_tokens or longest, longest), Sampler(temperature, top_p, seed), stop, turn)
            except Exception:
                self._base = None                # nobody knows what the cache holds now
                raise
            self.conversation.said = [*said, Message("assistant", text)]

    def _follow(self, system: list[Message], history: list[Message]) -> None:
        """Take up the history; the memory stays if it was made of the same beginning."""
        now = self.conversation
        memory = now.memory
        if memory and (now.system != system or now.said[:memory.built] != history[:memory.built] or memory.built > len(history)):
            memory = None
        self.conversation = Conversation(system, history, memory)

    def utterances(self) -> list[Utterance]:
        """The conversation as the memory sees it."""
        return [self.renderer.utterance(m, self.conversation.system) for m in self.conversation.said]

    def _prefill(self, text: str, question: list[int], turn: Turn):
        """Bring history and question into the cache; logits behind them."""
        now, utterances = self.conversation, self.utterances()
        prefix = self.renderer.prefix(now.system)
        lengths = [len(u.tokens) for u in utterances]
        if not now.memory and len(prefix) + sum(lengths) <= self.budget:
            return self._evaluate(None, 0, [*prefix, *(t for u in utterances for t in u.tokens), *question], turn)
        if not now.memory or self._due(lengths[now.memory.built:]):
            self._base = None                    # building uses the same cells
            now.memory, turn.rebuilt = self.keeper.update(now.memory or Memory(prefix), utterances[:self._settled(lengths)])
        memory = now.memory
        tail = [t for u in utterances[memory.built:] for t in u.tokens]
        end = len(memory.tokens(utterances[:memory.built]))
        if self.keeper.settings.recall == "question":
            turn.looked = (2 if self.keeper.settings.draft else 1) * (len(tail) + len(question))
            return self._evaluate(((memory.archive,), (text, *tail)), end, [*tail, *question], turn,
                                  lambda: self.keeper.lookup(memory, text, Asked(tail, question)))
        chosen, weights = self.keeper.match(memory, text)
        caches = tuple(memory.episodes[e].cache for e in chosen)
        return self._evaluate((caches, tuple(weights)), end, [*tail, *question], turn,
                              lambda: (chosen, self.keeper.recall(memory, chosen, weights, end).state))

    def _due(self, lengths: list[int]) -> bool:
        """Whether the memory takes up what came since: an archive as soon as it is a segment, since it only reads on; caches when it outgrows a block."""
        if sum(lengths) > self.block:
            return True
        return self.keeper.settings.recall == "question" and len(lengths) - 2 >= self.keeper.settings.width

    def _settled(self, lengths: list[int]) -> int:
        """How many utterances go into the episodes: all but the last two, unless those are longer than a block."""
        n = max(1, len(lengths) - 2)
        while sum(lengths[n:]) > self.block:
            n += 1
        return n

    def _evaluate(self, base, start: int, tokens: list[int], turn: Turn, recall=None):
        """Logits behind base and tokens; what the cache already holds of them is not run again."""
        if self._base is None or not _same(self._base[0], base):
            self.context.clear()
            self._base, self._live, self._start, self._read, self._cells = None, [], start, (), start
            if base is not None:
                episodes, state = recall()
                self.builder.restore(state)
                self._read, self._cells, turn.restored = tuple(episodes), len(state.positions), True
            self._base = (base,)
        elif base is not None:
            turn.looked = 0
        known = 0
        while known < min(len(self._live), len(tokens) - 1) and self._live[known] == tokens[known]:
            known += 1
        if known < len(self._live):
            self.context.remove(0, start + known)
        self._live = tokens[:known]
        turn.episodes, turn.reused, turn.evaluated = self._read, self._cells + known, len(tokens) - known
        logits = self.context.decode(tokens[known:], start + known)[-1]
        self._live = list(tokens)
        return logits

    def _generate(self, logits, most: int, sampler: Sampler, stop: Sequence[str], turn: Turn) -> Iterator[str]:
        """Yield pieces of the answer, return all of it. Text that may be the start of a stop text is held back."""
        decoder, text, sent = codecs.getincrementaldecoder("utf-8")("replace"), "", 0
        held = max((len(s) for s in stop), default=1) - 1
        while turn.answer < most:
            token = sampler(logits)
            if self.model.ends(token):
                turn.finish = "stop"
                break
            turn.answer += 1
            text += decoder.decode(self.model.piece(token))
            cut = min((at for at in (text.find(s, max(0, sent - held)) for s in stop) if at >= 0), default=-1)
            if cut >= 0:
                text, turn.finish = text[:cut], "stop"
                break
            if len(text) - held > sent:
                yield text[sent:len(text) - held]
                sent = len(text) - held
            if turn.answer < most:
                logits = self.context.decode([token], self._start + len(self._live))[-1]
                self._live.append(token)
        if turn.finish == "length":
            text += decoder.decode(b"", True)
        if len(text) > sent:
            yield text[sent:]
        return text


def _same(a, b) -> bool:
    """The same caches, by identity, read with the same weights."""
    if a is None or b is None:
        return a is b
    return len(a[0]) == len(b[0]) and all(x is y for x, y in zip(a[0], b[0])) and a[1] == b[1]


def _model(model, gpu_layers: int) -> tuple[Model, str | tuple[str, str]]:
    """An engine.Model and the cache type to use unless another is named."""
    if isinstance(model, Model):
        return model, "f16"
    if isinstance(model, (str, Path)):
        quiet_log()                              # its lines are for llama.cpp's own programs; errors come as exceptions
        return Model(model, gpu_layers), "f16"
    from pykvq.support import family_of
    layer = model.kv_cache_info()[0]
    return Model.of(model), (family_of(layer.type_k), family_of(layer.type_v))
