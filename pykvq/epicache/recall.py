"""The cells that one question needs, taken from an archive when the question is known."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import maximum_filter1d

from pykvq.epicache.archive import Archive
from pykvq.epicache.build import Builder, before
from pykvq.epicache.importance import state_scores
from pykvq.epicache.select import select
from pykvq.sequence_state import SequenceState


@dataclass(frozen=True)
class Asked:
    """A question as it will stand in the cache: `tail`, the tokens between archive and question, and its own."""
    tail: Sequence[int]
    tokens: Sequence[int]


def nearest(pieces: Sequence[np.ndarray], similarity: np.ndarray, always: np.ndarray, budget: int) -> np.ndarray:
    """Bool [tokens]: `always`, and pieces (indices of tokens) by falling similarity while they fit into `budget` tokens."""
    kept = always.copy()
    used = int(kept.sum())
    for i in np.argsort(-similarity, kind="stable"):
        new = int((~kept[pieces[i]]).sum())
        if used + new <= budget:
            kept[pieces[i]] = True
            used += new
    return kept


def recalled(builder: Builder, archive: Archive, guess: np.ndarray, candidates: np.ndarray, always: np.ndarray, asked: Asked, width: int,
             by: str = "max", draft: int = 0) -> SequenceState:
    """The `budget` cells of each head that the question attends to most, among the candidates; bool [tokens] all three.

    The question is read once behind the `guess`, and its queries, and those of `draft` tokens of an answer, are put to the keys of all candidates. A token counts as much as the most
    attended of the `width` tokens around it, so that a name or a date stays whole; width 0 leaves it at the guess. `always` stays.
    by: see attention_scores.
    """
    plan, at = builder.plan, np.flatnonzero(candidates)
    rows = archive.rows(at)
    budgets = plan.layers or (plan.budget,) * len(builder.layers)
    if len(at) <= min(budgets):
        return rows
    if not width:
        return archive.rows(np.flatnonzero(guess))
    queries = builder.look(archive.rows(np.flatnonzero(guess)), asked.tail, asked.tokens, draft)
    scores = [maximum_filter1d(s, width, axis=-1, mode="nearest") for s in state_scores(queries, builder.layers, builder.heads_kv, rows, by)]
    chosen = select(scores, always[at], budgets, plan.shared)
    return rows.gather(chosen, rows.positions[chosen[0][0]] if plan.shared else before(archive.end, chosen[0].shape[1]))
