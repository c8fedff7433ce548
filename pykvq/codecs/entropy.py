"""Entropy-coded size of the indices (arXiv 2504.19874, section 3.1, "Entropy encoding codebook pointers").

The codes of an optimal codebook are not equally likely. A range coder (rANS; Duda, arXiv 1311.2540) reaches their entropy;
the stream is for storage and transfer, it has no random access.
"""
from __future__ import annotations

import numpy as np

from pykvq.codecs.density import cell_probabilities

LANES = 64                                               # independent coder states, so that numpy codes 64 values at a time
SCALE_BITS = 14
LOW = 1 << 16                                            # states live in [LOW, LOW << 16)


def entropy(probabilities: np.ndarray) -> float:
    """Shannon entropy in bits of float [n]."""
    p = np.asarray(probabilities, float)
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def index_entropy(codebook: np.ndarray, d: int) -> float:
    """Entropy in bits of one index of `codebook` on the unit sphere of R^d."""
    return entropy(cell_probabilities(codebook, d))


class RangeCoder:
    """rANS with fixed probabilities: float [n], 2 <= n <= 256, every symbol that occurs must have one above zero.

    Raises ValueError for other shapes or for probabilities that are negative or all zero.
    """

    def __init__(self, probabilities: np.ndarray):
        p = np.asarray(probabilities, float)
        if p.ndim != 1 or not 2 <= len(p) <= 256 or not ((p >= 0) & np.isfinite(p)).all() or not p.max() > 0:
            raise ValueError("probabilities must be a vector of 2 to 256 non-negative values")
        share = p / p.max()
        share *= ((1 << SCALE_BITS) - len(p)) / share.sum()
        f = 1 + share.astype(np.int64)                   # one for every symbol, the rest by largest remainder
        f[np.argsort(share % 1)[len(p) - ((1 << SCALE_BITS) - f.sum()):]] += 1
        self.frequency = f.astype(np.uint64)
        self.start = np.concatenate([[0], np.cumsum(f)[:-1]]).astype(np.uint64)
        self.symbol = np.repeat(np.arange(len(p), dtype=np.uint8), f)

    def encode(self, codes: np.ndarray) -> bytes:
        """Integer codes of any shape to bytes. Raises ValueError for a code without a probability."""
        flat = np.asarray(codes).ravel()
        if flat.size and (flat.dtype.kind not in "iu" or flat.min() < 0 or flat.max() >= len(self.frequency)):
            raise ValueError(f"codes must be integers in 0..{len(self.frequency) - 1}")
        flat = flat.astype(np.uint8)
        state, words = np.full(LANES, LOW, np.uint64), []
        for i in reversed(range(0, len(flat), LANES)):
            s = flat[i:i + LANES]
            x, f = state[:len(s)], self.frequency[s]
            full = x >= f << np.uint64(32 - SCALE_BITS)
            words.append((x[full] & np.uint64(0xffff)).astype("<u2")[::-1])
            x[full] >>= np.uint64(16)
            x[:] = (x // f << np.uint64(SCALE_BITS)) + x % f + self.start[s]
        body = np.concatenate(words)[::-1] if words else np.empty(0, "<u2")
        return state.astype("<u4").tobytes() + body.tobytes()

    def decode(self, data: bytes, count: int) -> np.ndarray:
        """The inverse of encode: the first `count` codes, uint8 [count]. Raises ValueError for a stream that is too short or of odd length."""
        try:
            state = np.frombuffer(data, "<u4", LANES).astype(np.uint64)
            words = np.frombuffer(data, "<u2", offset=4 * LANES)
        except ValueError as error:
            raise ValueError(f"a stream of {len(data)} bytes is not one of this coder") from error
        out, at = np.empty(count, np.uint8), 0
        for i in range(0, count, LANES):
            x = state[:min(LANES, count - i)]
            low = x & np.uint64((1 << SCALE_BITS) - 1)
            s = self.symbol[low]
            out[i:i + LANES] = s
            x[:] = self.frequency[s] * (x >> np.uint64(SCALE_BITS)) + low - self.start[s]
            empty = x < LOW
            taken = words[at:at + empty.sum()]
            if len(taken) < empty.sum():
                raise ValueError(f"the stream ends before code {i + LANES}")
            x[empty] = x[empty] << np.uint64(16) | taken
            at += len(taken)
        return out
