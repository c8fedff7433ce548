"""The saved state of one sequence, as llama_state_seq_get_data lays it out: positions of cells, then rows of K and V per layer.

Only what is written here is understood. A state of another layout is refused instead of guessed at.
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAGIC = 0xaf143cd8                       # io_magic in llama-context.cpp
_ROWS = struct.calcsize("<iQ")            # before the rows of a layer: type, bytes of a row
_CELL = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])


class StateError(ValueError):
    """Bytes that are no sequence state of the layout that this module knows."""


@dataclass(frozen=True)
class Rows:
    """K or V of one layer. type: ggml type, with the hash of the keys' transform above bit 8; data: uint8 [cells, bytes of a row]."""
    type: int
    data: np.ndarray

    @property
    def ggml_type(self) -> int:
        """The type without the hash."""
        return self.type & 0xFF

    def heads(self, n: int) -> np.ndarray:
        """uint8 [cells, n, bytes of a head]: a row is the concatenation of its heads, each of whole blocks. Raises StateError."""
        cells, size = self.data.shape
        if size % n:
            raise StateError(f"rows of {size} bytes do not split into {n} heads")
        return self.data.reshape(cells, n, size // n)


@dataclass(frozen=True)
class SequenceState:
    """One sequence: positions int32 [cells], which all layers share, and the rows of every layer. streams: of its cache; where it has several, the first is
    this sequence's."""
    positions: np.ndarray
    keys: tuple[Rows, ...]
    values: tuple[Rows, ...]
    streams: int = 1

    @classmethod
    def parse(cls, data: bytes, split: bool = False) -> "SequenceState":
        """Read a state; its arrays are views of `data`. split: also that of sequence 0 of a cache with several streams.

        Raises StateError for other streams, transposed V (no flash attention), sliding-window, hybrid, latent (MLA) and multi-axis RoPE
        caches, and for anything that does not end where it should.
        """
        at = _Cursor(data)
        magic, _, streams, cells = at.unpack("<IiII")
        if magic != MAGIC:
            raise StateError("not a sequence state of this llama.cpp")
        if streams != 1 and not split:
            raise StateError(f"a state of {streams} streams; use one sequence, or a unified cache")
        empty = at.cut(4 * (streams - 1))
        if empty.any():
            raise StateError("a sequence that is not in the first stream")
        if not cells:
            if at.left:
                raise StateError(f"an empty state with {at.left} more bytes")
            return cls(np.empty(0, np.int32), (), (), streams)
        meta = at.array(cells * _CELL.itemsize).view(_CELL)
        if (meta["n_seq"] != 1).any():
            raise StateError("cells with more than plain positions, as multi-axis RoPE keeps them")
        transposed, layers = at.unpack("<II")
        if transposed:
            raise StateError("V is transposed, as without flash attention")
        keys = tuple(at.rows(cells) for _ in range(layers))
        values = tuple(at.rows(cells) for _ in range(layers))
        if at.left and not at.windowed:          # f16 copies of sinks and recent tokens (docs/windows.md) are left out
            raise StateError(f"{at.left} bytes after the values of the last layer: another kind of cache, or a newer layout")
        return cls(meta["pos"].astype(np.int32), keys, values, streams)

    def to_bytes(self) -> bytes:
        """What llama_state_seq_set_data reads."""
        return self._written(self.positions).tobytes()

    def repeated(self, start: int, count: int) -> np.ndarray:
        """The state, as bytes in uint8, of `count` tokens at positions start, start + 1, ...: one at position p has the rows of token p mod len(positions)."""
        return self._written(np.arange(start, start + count), np.arange(start, start + count) % len(self.positions))

    def _written(self, positions: np.ndarray, source: np.ndarray | None = None) -> np.ndarray:
        """Bytes of a state with these positions whose rows are those of `source`, as they are when it is None."""
        n, every = len(positions), (*self.keys, *self.values)
        meta = np.zeros(n, _CELL)
        meta["pos"], meta["n_seq"] = positions, 1
        front = struct.pack("<IiII", MAGIC, 0, self.streams, n) + meta.tobytes() + (struct.pack("<II", 0, len(self.keys)) if n else b"")
        out = np.zeros(len(front) + sum(_ROWS + n * rows.data.shape[1] for rows in every if n) + 4 * (self.streams - 1), np.uint8)      # the end: empty streams
        out[:len(front)] = np.frombuffer(front, np.uint8)
        at = len(front)
        for rows in every if n else ():
            size = rows.data.shape[1]
            out[at:at + _ROWS] = np.frombuffer(struct.pack("<iQ", rows.type, size), np.uint8)
            place = out[at + _ROWS:at + _ROWS + n * size].reshape(n, size)
            if source is None:
                place[:] = rows.data
            else:
                np.take(rows.data, source, axis=0, out=place)
            at += _ROWS + n * size
        return out

    def gather(self, chosen: Sequence[np.ndarray], positions: np.ndarray) -> "SequenceState":
        """A state made of chosen rows: chosen[layer] int [heads_kv, cells] says which cell each head takes K and V from.

        Keys keep the rotation they were stored with, so heads of one cell may come from different tokens; `positions` [cells] then
        serve the causal mask alone. ~i fills a cell that nothing should be read from: the key of cell i and a value of zero.
        """
        keys, values = [], []
        for cells, k, v in zip(chosen, self.keys, self.values):
            heads, source = np.arange(len(cells)), np.where(cells < 0, ~cells, cells).T
            keys.append(Rows(k.type, k.heads(len(cells))[source, heads].reshape(cells.shape[1], -1)))
            out = v.heads(len(cells))[source, heads]
            out[cells.T < 0] = 0                 # all bits zero is a block of zeros in every cache type
            values.append(Rows(v.type, out.reshape(cells.shape[1], -1)))
        return SequenceState(np.asarray(positions, np.int32), tuple(keys), tuple(values))

    @property
    def bytes(self) -> int:
        """Bytes of K and V."""
        return sum(rows.data.size for rows in (*self.keys, *self.values))


class _Cursor:
    """Reads from the front; running out raises StateError."""

    def __init__(self, data: bytes):
        self.data, self.at = np.frombuffer(data, np.uint8), 0
        self.windowed = False                    # the type of some rows says that f16 copies follow

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def cut(self, size: int) -> np.ndarray:
        """Takes from the end."""
        if size > self.left:
            raise StateError(f"the state ends {size - self.left} bytes early")
        end = len(self.data) - size
        taken, self.data = self.data[end:], self.data[:end]
        return taken

    def array(self, size: int) -> np.ndarray:
        if size > self.left:
            raise StateError(f"the state ends {size - self.left} bytes early")
        self.at += size
        return self.data[self.at - size:self.at]

    def unpack(self, layout: str) -> tuple:
        return struct.unpack(layout, self.array(struct.calcsize(layout)).tobytes())

    def rows(self, cells: int) -> Rows:
        type_, size = self.unpack("<iQ")
        self.windowed = self.windowed or type_ < 0
        return Rows(type_ & 0x7FFFFFFF, self.array(cells * size).reshape(cells, size))
