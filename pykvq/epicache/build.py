"""Block prefill of a history under a fixed number of cells, guided by the prompt of an episode."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pykvq.engine import Context
from pykvq.epicache.archive import Archive, latest
from pykvq.epicache.importance import state_scores
from pykvq.epicache.queries import LayerQueries, QueryCapture
from pykvq.epicache.select import select
from pykvq.sequence_state import SequenceState


@dataclass(frozen=True)
class Compressed:
    """The cache of one episode after `end` tokens of history.

    tokens: per layer int32 [heads_kv, cells], the history's token that each head keeps in a cell, -1 for a filled one. scores: per layer float32
    of the same shape, the attention it got last. pinned: how many tokens at the start always stay.
    """
    state: SequenceState
    tokens: tuple[np.ndarray, ...]
    scores: tuple[np.ndarray, ...]
    end: int
    pinned: int


@dataclass(frozen=True)
class Plan:
    """budget: cells; block: tokens prefilled between two evictions; layers: tokens per layer where they differ; recent: last tokens that
    always stay; shared: every layer and head keeps the same tokens, as a key bias left out of the keys demands (it belongs to positions)."""
    budget: int
    block: int = 1024
    layers: tuple[int, ...] | None = None
    recent: int = 16
    shared: bool = False


class Builder:
    """Prefills through one engine.Context of budget + block + prompt cells, whose eval callback is `capture`; sequence 0 is overwritten.

    Raises ValueError for a cache that is not understood: sliding windows, hybrids, MLA, no flash attention.
    """

    def __init__(self, context: Context, capture: QueryCapture, plan: Plan, step: Callable[[int], None] = lambda tokens: None):
        self.context, self.capture, self.plan, self.step = context, capture, plan, step
        info = list(context.info())
        if not info or any(layer.swa or not layer.head_dim_v for layer in info):
            raise ValueError("EpiCache needs a model whose layers all keep keys and values of every token: no sliding window, no latent cache")
        self.layers, self.heads_kv = [layer.layer for layer in info], [layer.n_head_kv for layer in info]
        context.clear()
        SequenceState.parse(context.save(0, bare=True))     # a hybrid's recurrent part shows even when nothing is cached
        if plan.layers and (plan.shared or len(plan.layers) != len(info)):
            raise ValueError("layer budgets need one number per layer, and layers that may keep different tokens")
        if not plan.shared and any(layer.key_bias == "left out" for layer in info):
            raise ValueError("this cache leaves a key bias out of its keys and returns it by position; its layers must share their tokens")

    def start(self, tokens: Sequence[int], pinned: int) -> Compressed:
        """The blocks before the first eviction, which all episodes have in common; nothing is scored. pinned: tokens at the start that stay."""
        blocks = max(1, -(-min(len(tokens), self.plan.budget) // self.plan.block))
        n = min(len(tokens), blocks * self.plan.block)
        self.context.clear()
        self._decode(tokens[:n], 0)
        state = SequenceState.parse(self.context.save(0, bare=True))
        at = tuple(np.repeat(state.positions[None], heads, 0) for heads in self.heads_kv)
        return Compressed(state, at, tuple(np.zeros(x.shape, np.float32) for x in at), n, pinned)

    def extend(self, cache: Compressed, tokens: Sequence[int], prompt: Sequence[int]) -> Compressed:
        """`cache` after all of `tokens`, the whole history, from cache.end on; evicted to the budget by the attention of `prompt`."""
        self.restore(cache.state)
        while True:
            cache = self._scored(cache, prompt)
            if len(cache.state.positions) > self.cells:
                cache = self._evicted(cache)
                if cache.end < len(tokens):
                    self.restore(cache.state)
            if cache.end == len(tokens):
                return cache
            part = tokens[cache.end:cache.end + self.plan.block]
            self._decode(part, cache.end)
            cache = self._grown(cache, len(part))

    def append(self, archive: Archive, state: SequenceState | None, tokens: Sequence[int]) -> Archive:
        """`archive` with the rows of the next tokens, a block at most, run behind `state`."""
        if state:
            self.restore(state)
        else:
            self.context.clear()
        self._decode(tokens, archive.end)
        return archive.grown([latest(SequenceState.parse(self.context.save(0, bare=True)), len(tokens))], self.plan.block)

    def look(self, state: SequenceState, tail: Sequence[int], question: Sequence[int], draft: int = 0,
             every: int = 1) -> dict[int, LayerQueries]:
        """The queries of a question that stands behind `state` and `tail`, of each `every`-th token, and of the first `draft` tokens of an answer."""
        at = int(state.positions.max()) + 1
        self.restore(state)
        self._decode(tail, at)
        at += len(tail)
        draft = min(draft, self.context.info()[0].cells - len(state.positions) - len(tail) - len(question))
        with self.capture.capture(every) as queries:
            logits = self.context.decode(question, at)[-1]
            self.step(len(question))
            for at in range(at + len(question), at + len(question) + draft):
                token = int(logits.argmax())
                if self.context.model.ends(token):
                    break
                logits = self.context.decode([token], at)[-1]
        return queries

    def restore(self, state: SequenceState) -> None:
        """Load a state as sequence 0 and see that it is there. Raises ValueError when llama.cpp refuses it, RuntimeError when it does not arrive."""
        self.context.clear()
        self.context.load(state.to_bytes(), 0, bare=True)
        last = self.context.last_position(0)
        if last != state.positions.max():
            raise RuntimeError(f"a restored state ends at position {last}, not {state.positions.max()}")

    @property
    def cells(self) -> int:
        """Cells that an evicted cache takes."""
        return max(self.plan.layers or (self.plan.budget,))

    def _decode(self, tokens: Sequence[int], start: int) -> None:
        self.context.decode(tokens, start, logits="none")
        self.step(len(tokens))

    def _scored(self, cache: Compressed, prompt: Sequence[int]) -> Compressed:
        """Scores of every cell by the prompt, which then leaves the cache."""
        with self.capture.capture() as queries:
            self._decode(prompt, cache.end)
        self.context.remove(0, cache.end)
        state = SequenceState.parse(self.context.save(0, bare=True))
        scores = state_scores(queries, self.layers, self.heads_kv, state)
        return replace(cache, state=state, scores=tuple(np.where(at < 0, -np.inf, s) for at, s in zip(cache.tokens, scores)))

    def _grown(self, cache: Compressed, n: int) -> Compressed:
        new = np.arange(cache.end, cache.end + n, dtype=np.int32)
        at = tuple(np.concatenate([old, np.repeat(new[None], len(old), 0)], 1) for old in cache.tokens)
        return replace(cache, tokens=at, end=cache.end + n)

    def _evicted(self, cache: Compressed) -> Compressed:
        chosen = select(cache.scores, self._pinned(cache), self.plan.layers or [self.plan.budget] * len(self.layers), self.plan.shared)
        return gathered(cache, cache.state, chosen, self.plan.shared)

    def _pinned(self, cache: Compressed) -> np.ndarray:
        """Cells that stay in every layer: the first are the pinned tokens of the start, the last the newest."""
        cells = np.arange(len(cache.state.positions))
        return (cells < cache.pinned) | (cells >= len(cells) - self.plan.recent)


def gathered(cache: Compressed, state: SequenceState, chosen: Sequence[np.ndarray], shared: bool) -> Compressed:
    """`cache` with the chosen cells of `state`, whose cells are those of cache.tokens."""
    at = tuple(np.where(c < 0, -1, np.take_along_axis(t, c.clip(0), 1)) for c, t in zip(chosen, cache.tokens))
    scores = tuple(np.where(c < 0, -np.inf, np.take_along_axis(s, c.clip(0), 1)).astype(np.float32) for c, s in zip(chosen, cache.scores))
    width = chosen[0].shape[1]
    positions = at[0][0] if shared else before(cache.end, width)
    return replace(cache, state=state.gather(chosen, positions), tokens=at, scores=scores)


def before(end: int, n: int) -> np.ndarray:
    """Positions of n cells whose heads keep different tokens: any before the next token's, `end`, serve the mask. Several episodes can have more cells
    than there are positions."""
    return np.arange(end - n, end).clip(0)
