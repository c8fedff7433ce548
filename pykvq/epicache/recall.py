"""The cells that one question needs, taken from an archive when the question is known; and the archive's own rows, read the same way."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pykvq.epicache.archive import Archive
from pykvq.epicache.build import Builder, before
from pykvq.epicache.importance import state_scores
from pykvq.epicache.queries import LayerQueries
from pykvq.epicache.select import select
from pykvq.sequence_state import SequenceState

ENOUGH = 64                               # tokens of a text whose queries choose, at least, of one that has more
WORDS = 8                                 # tokens that stay together for a block of history, which asks for words, not for statements


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


def recalled(builder: Builder, archive: Archive, guess: np.ndarray, candidates: np.ndarray, always: np.ndarray, asked: Asked, starts: np.ndarray,
             by: str = "mean", draft: int = 0) -> SequenceState:
    """The `budget` cells of each head that the question attends to most, among the candidates; bool [tokens] all three. `always` stays.

    The question is read once behind the `guess`, and its queries are put to the keys of all candidates. starts: first tokens, from 0 on, of what
    stays together: each token counts as much as the most attended one of its kind. draft: the question is then read again behind these cells, with
    that many tokens of an answer, and both choose anew: the queries of an answer look for what comes next in it. by: see attention_scores.
    """
    plan, at = builder.plan, np.flatnonzero(candidates)
    rows = archive.rows(at)
    budgets = plan.layers or (plan.budget,) * len(builder.layers)
    if len(at) <= min(budgets):
        return rows
    groups = np.flatnonzero(np.diff(np.searchsorted(starts, at, "right"), prepend=-1))

    def taken(queries: dict[int, LayerQueries]) -> SequenceState:
        scores = [_together(s, groups) for s in state_scores(queries, builder.layers, builder.heads_kv, rows, by)]
        chosen = select(scores, always[at], budgets, plan.shared)
        return rows.gather(chosen, rows.positions[chosen[0][0]] if plan.shared else before(archive.end, chosen[0].shape[1]))
    state = taken(builder.look(archive.rows(np.flatnonzero(guess)), asked.tail, asked.tokens, every=max(1, len(asked.tokens) // ENOUGH)))
    return taken(builder.look(state, asked.tail, asked.tokens, draft)) if draft else state


def read(builder: Builder, archive: Archive, tokens: Sequence[int], pinned: int, chosen: bool = True) -> Archive:
    """`archive` with the rows of all of `tokens`, the whole history, from archive.end on.

    A block is a question to what was said before it: it is run once behind the last cells that fit the budget, then behind those that it attends to.
    chosen: False leaves it at the last cells, whose rows lack what names and pronouns in them stand for. pinned: tokens at the start that stay.
    """
    plan = builder.plan
    while archive.end < len(tokens):
        end, state = archive.end, None
        part, at = tokens[end:end + plan.block], np.arange(end)
        if end:
            last = (at < pinned) | (at >= end - max(0, plan.budget - pinned))
            always = (at < pinned) | (at >= end - plan.recent)
            state = recalled(builder, archive, last, last | chosen, always, Asked([], part), np.arange(0, end, WORDS), "max")
        archive = builder.append(archive, state, part)
    return archive


def _together(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """[heads, cells], each the highest of its group, which begin at `groups`; inside a group that does not fit whole its own decides."""
    size = np.diff([*groups, scores.shape[1]])
    return np.repeat(np.maximum.reduceat(scores, groups, axis=1), size, axis=1) + 1e-3 * scores
