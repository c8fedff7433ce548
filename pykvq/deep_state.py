"""A deep cache without its prefill: the saved state of a short prefix, its rows repeated at further positions.

For measuring speed: attention reads as much as after a real prefill; what the model says after it means nothing.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvq.engine import Context

PIECE = 16384                            # tokens put into the cache at a time
_CELL = np.dtype([("position", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])
_ROWS = np.dtype([("type", "<i4"), ("row_bytes", "<u8")])


class SequenceState:
    """What Context.save(0) wrote, in parts: head, cells, then the rows of K of every layer and those of V.

    Layout: llama_kv_cache::state_write of the pinned llama.cpp, for one attention cache under flash attention. Raises ValueError
    for others: sliding windows, recurrent layers, M-RoPE, values kept transposed.
    """

    def __init__(self, state: bytes):
        self._raw, self._at = np.frombuffer(state, np.uint8), 0
        try:
            self._head = self._take("<u4", 3)                    # magic, sequence, streams
            end = len(self._raw) - 4 * (int(self._head[2]) - 1)  # of stream 0; the others are empty
            self.tokens = int(self._take("<u4")[0])
            self._cells = self._take(_CELL, self.tokens)
            self._shape = self._take("<u4", 2)                   # V transposed, layers with K
            known = (self._cells["n_seq"] == 1).all() and self._shape[0] == 0 and not self._raw[end:].any()
            self._layers: list[tuple[np.ndarray, np.ndarray]] = []
            windowed = False
            while known and self._at < end and not (windowed and len(self._layers) == 2 * self._shape[1]):
                kind = self._take(_ROWS).copy()
                windowed = windowed or kind["type"][0] < 0       # rows of an f16 window follow the values: left out
                kind["type"] &= 0x7FFFFFFF
                self._layers.append((kind, self._take(np.uint8, self.tokens * int(kind["row_bytes"][0])).reshape(self.tokens, -1)))
            known = known and (windowed or self._at == end) and len(self._layers) in (self._shape[1], 2 * self._shape[1])
        except (ValueError, IndexError):
            known = False
        if not known:
            raise ValueError("the saved state is not that of one attention cache under flash attention; this model needs a real prefill")

    def _take(self, dtype, count: int = 1) -> np.ndarray:
        size = np.dtype(dtype).itemsize * count
        part = self._raw[self._at:self._at + size].view(dtype)
        if len(part) != count:
            raise ValueError("the state ends early")
        self._at += size
        return part

    def repeated(self, start: int, count: int) -> np.ndarray:
        """The state of `count` tokens at positions start, start + 1, ...; uint8. A token at position p has the rows of the
        prefix's token p mod `tokens`."""
        source = np.arange(start, start + count) % self.tokens
        cells = self._cells[source]
        cells["position"] = np.arange(start, start + count)
        out = np.empty(4 * (3 + int(self._head[2])) + cells.nbytes + 8 + sum(12 + count * rows.shape[1] for _, rows in self._layers), np.uint8)
        at = 0

        def put(part: np.ndarray) -> None:
            nonlocal at
            out[at:at + part.nbytes] = part.view(np.uint8)
            at += part.nbytes

        for part in (self._head, np.uint32([count]), cells, self._shape):
            put(part)
        for kind, rows in self._layers:
            put(kind)
            np.take(rows, source, axis=0, out=out[at:at + count * rows.shape[1]].reshape(count, -1))
            at += count * rows.shape[1]
        out[at:] = 0
        return out


def fill_from_prefix(context: Context, tokens: Sequence[int], depth: int, n_seq: int = 1) -> None:
    """Put `depth` tokens into each of the sequences 0 to n_seq - 1, of which only `tokens` are computed.

    One sequence needs a context of two with a unified cache: pieces are loaded as sequence 1 and given to sequence 0, because
    a load replaces what a sequence had. More need a cache without unified=True: the first is loaded whole, then copied. Where the cache
    has an f16 window, the last tokens are computed, so that it is as full as after a prefill.
    Raises ValueError for a cache of another kind.
    """
    context.clear()
    if not depth:
        return
    context.decode(tokens[:depth], 0, logits="none")
    state = SequenceState(context.save(0, bare=True))
    context.clear()
    filled = max(depth - context.info()[0].n_window, 0)
    if n_seq > 1 and filled:
        context.load(state.repeated(0, filled), 0, bare=True)
    else:
        for start in range(0, filled, PIECE):
            context.load(state.repeated(start, min(PIECE, filled - start)), 1, bare=True)
            context.copy(1, 0)
            context.remove(1, 0)
    context.decode([tokens[i % len(tokens)] for i in range(filled, depth)], filled, logits="none")
    for seq in range(1, n_seq):
        context.copy(0, seq)
