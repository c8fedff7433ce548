"""The rows of every token of a history, outside the cache: what a question takes its cells from."""
from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pykvq.sequence_state import Rows, SequenceState


@dataclass(frozen=True)
class Chunk:
    """Rows of successive tokens. version: another one after each change, so that a store knows what to write."""
    state: SequenceState
    version: str


@dataclass(frozen=True)
class Archive:
    """Chunks that follow each other from token 0 on."""
    chunks: tuple[Chunk, ...] = ()

    @property
    def end(self) -> int:
        """Tokens that it holds."""
        return int(self.chunks[-1].state.positions[-1]) + 1 if self.chunks else 0

    @property
    def bytes(self) -> int:
        return sum(chunk.state.bytes for chunk in self.chunks)

    def rows(self, tokens: np.ndarray) -> SequenceState:
        """The rows of tokens, which ascend, at their own positions."""
        starts = np.array([chunk.state.positions[0] for chunk in self.chunks])
        chunk_of = np.searchsorted(starts, tokens, "right") - 1
        return joined([_part(self.chunks[c].state, tokens[chunk_of == c] - starts[c]) for c in np.unique(chunk_of)])

    def grown(self, states: Sequence[SequenceState], least: int) -> "Archive":
        """With the rows of the next tokens. A last chunk of fewer than `least` tokens is taken up into the new one, so that a store has few files."""
        kept = list(self.chunks)
        last = [kept.pop().state] if kept and len(kept[-1].state.positions) < least else []
        return replace(self, chunks=(*kept, Chunk(joined([*last, *states]), uuid.uuid4().hex)))


def joined(states: Sequence[SequenceState]) -> SequenceState:
    """The cells of several states, one after another."""
    def rows(parts: Sequence[Rows]) -> Rows:
        return Rows(parts[0].type, np.concatenate([part.data for part in parts]))
    if len(states) == 1:
        return states[0]
    return SequenceState(np.concatenate([s.positions for s in states]), tuple(map(rows, zip(*(s.keys for s in states)))),
                         tuple(map(rows, zip(*(s.values for s in states)))))


def latest(state: SequenceState, n: int) -> SequenceState:
    """The rows of the n last positions, ascending; copied, so that the whole state's bytes can go."""
    return _taken(state, np.argsort(state.positions, kind="stable")[-n:])


def _part(state: SequenceState, cells: np.ndarray) -> SequenceState:
    """Cells that ascend; not copied when they are all."""
    return state if len(cells) == len(state.positions) else _taken(state, cells)


def _taken(state: SequenceState, cells: np.ndarray) -> SequenceState:
    def rows(parts: Sequence[Rows]) -> tuple[Rows, ...]:
        return tuple(Rows(r.type, r.data[cells]) for r in parts)
    return SequenceState(state.positions[cells], rows(state.keys), rows(state.values))
