"""Which tokens stay in each layer and head."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def select(scores: Sequence[np.ndarray], pinned: np.ndarray, budgets: Sequence[int], shared: bool = False) -> list[np.ndarray]:
    """Cells that stay: per layer int64 [heads_kv, max(budgets)], ascending. Where a layer keeps fewer than another, cells of its own
    that nothing should be read from fill the end: ~i, i the least attended one, see SequenceState.gather.

    scores: per layer float [heads_kv, cells], -inf for what must not stay; pinned: bool [cells], kept everywhere. Each head keeps its own
    best, the published "pair-uniform". shared: the same cells everywhere, by the mean score; `budgets` are then equal.
    Raises ValueError when the pinned cells alone exceed a budget.
    """
    if pinned.sum() > min(budgets):
        raise ValueError(f"{pinned.sum()} tokens of system prompt and sinks must stay, and the budget is {min(budgets)}; raise it")
    if shared:
        # Not of ranks: few heads look for a fact, and theirs are the weights that stand out.
        chosen = _best(np.mean([layer.mean(0) for layer in scores], 0)[None], pinned, budgets[0], budgets[0])
        return [np.repeat(chosen, len(layer), 0) for layer in scores]
    return [_best(layer, pinned, n, max(budgets)) for layer, n in zip(scores, budgets)]


def _best(scores: np.ndarray, pinned: np.ndarray, n: int, width: int) -> np.ndarray:
    weighed = np.where(pinned, np.inf, scores)
    order = (-weighed).argsort(-1, kind="stable")
    filler = ~np.where(np.isneginf(weighed), np.inf, weighed).argmin(-1)[:, None]
    kept = order[:, :n]
    kept = np.where(np.isneginf(np.take_along_axis(weighed, kept, -1)), len(pinned), kept)       # what must not stay, to the end
    kept = np.pad(np.sort(kept, -1), ((0, 0), (0, width - kept.shape[1])), constant_values=len(pinned))
    return np.where(kept == len(pinned), filler, kept)
