"""The saved state of one sequence, as llama_state_seq_get_data lays it out: positions of cells, then rows of K and V per layer.

Only what is written here is understood. A state of another layout is refused instead of guessed at.
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MAGIC = 0xaf143cd8                       # io_magic in llama-context.cpp
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
    """One sequence: positions int32 [cells], which all layers share, and the rows of every layer."""
    positions: np.ndarray
    keys: tuple[Rows, ...]
    values: tuple[Rows, ...]

    @classmethod
    def parse(cls, data: bytes) -> "SequenceState":
        """Read a state; its arrays are views of `data`. Raises StateError for several streams, transposed V (no flash attention),
        sliding-window, hybrid, latent (MLA) and multi-axis RoPE caches, and for anything that does not end where it should."""
        at = _Cursor(data)
        magic, _, streams, cells = at.unpack("<IiII")
        if magic != _MAGIC:
            raise StateError("not a sequence state of this llama.cpp")
        if streams != 1:
            raise StateError(f"a state of {streams} streams; use one sequence, or a unified cache")
        if not cells:
            if at.left:
                raise StateError(f"an empty state with {at.left} more bytes")
            return cls(np.empty(0, np.int32), (), ())
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
        return cls(meta["pos"].astype(np.int32), keys, values)

    def to_bytes(self) -> bytes:
        """What llama_state_seq_set_data reads."""
        n = len(self.positions)
        if not n:
            return struct.pack("<IiII", _MAGIC, 0, 1, 0)
        meta = np.zeros(n, _CELL)
        meta["pos"], meta["n_seq"] = self.positions, 1
        parts = [struct.pack("<IiII", _MAGIC, 0, 1, n), meta.tobytes(), struct.pack("<II", 0, len(self.keys))]
        for rows in (*self.keys, *self.values):
            parts += [struct.pack("<iQ", rows.type, rows.data.shape[1]), np.ascontiguousarray(rows.data).tobytes()]
        return b"".join(parts)

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
