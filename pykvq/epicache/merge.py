"""The caches of several episodes as one, inside the same number of cells."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pykvq.epicache.archive import joined
from pykvq.epicache.build import Compressed, Plan, gathered
from pykvq.epicache.select import select


def merged(caches: Sequence[Compressed], weights: Sequence[float], plan: Plan, end: int) -> Compressed:
    """The most attended tokens of all caches, scores times `weights`; tokens that several keep are taken from the first of these.

    end: the position that comes next, at or after that of every cache: an episode that has not seen the latest turns is used as it is.
    """
    whole = caches[0] if len(caches) == 1 else _chosen(caches, weights, plan)
    last = whole.state.positions.argmax()
    positions = whole.state.positions.copy()
    positions[last] = end - 1                    # the next token must follow directly; the key itself does not turn
    return replace(whole, state=replace(whole.state, positions=positions), end=end)


def _chosen(caches: Sequence[Compressed], weights: Sequence[float], plan: Plan) -> Compressed:
    end, pinned = max(c.end for c in caches), caches[0].pinned
    scores = []
    for layer in range(len(caches[0].tokens)):
        seen, parts = np.full((len(caches[0].tokens[layer]), 0), -1), []
        for cache, weight in zip(caches, weights):
            tokens = cache.tokens[layer]
            repeated = np.stack([np.isin(row, before) for row, before in zip(tokens, seen)])
            stays = (tokens < pinned) | (tokens >= end - plan.recent)
            score = np.where(stays, np.inf, cache.scores[layer] * weight)
            parts.append(np.where(repeated | (tokens < 0), -np.inf, score))
            seen = np.concatenate([seen, tokens], 1)
        scores.append(np.concatenate(parts, 1))
    whole = Compressed(joined([c.state for c in caches]), tuple(np.concatenate(t, 1) for t in zip(*(c.tokens for c in caches))),
                        tuple(np.concatenate(s, 1) for s in zip(*(c.scores for c in caches))), end, pinned)
    budgets = plan.layers or [min(plan.budget, scores[0].shape[1])] * len(scores)
    chosen = select(scores, np.zeros(scores[0].shape[1], bool), budgets, plan.shared)
    return gathered(whole, whole.state, chosen, plan.shared)
