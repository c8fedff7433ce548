"""OSCAR as published (arXiv 2605.17757 and its code, per-head rotations), the reference that our calibrated types are measured beside.

Keys turn with R = U H P: U the eigenvectors of the query second moment of the head's group, H a Hadamard matrix, P a bit-reversal
permutation. Values likewise, from a second moment weighted by how strongly queries read each token's key. Then clipping to a
quantile of the magnitudes and asymmetric min-max INT2, one scale and zero per group of 128 values or per head.
It cannot be a cache type of ours: head sizes must be powers of two, and scale and zero are float32 (2.5 bits per value at 128).
"""
from __future__ import annotations

import numpy as np

from pykvq.codecs.hadamard import sylvester

CLIP_KEYS, CLIP_VALUES = 0.96, 0.92
GROUP, LEVELS = 128, 4


def bit_reversal(d: int) -> np.ndarray:
    """Position i with its bits in reverse order; int64 [d]. Raises ValueError when d is no power of two."""
    if d < 2 or d & (d - 1):
        raise ValueError(f"OSCAR's rotation needs a head size that is a power of two, not {d}")
    bits = d.bit_length() - 1
    return np.array([int(f"{i:0{bits}b}"[::-1], 2) for i in range(d)])


def rotation(second_moment: np.ndarray) -> np.ndarray:
    """R [..., d, d], orthogonal, from an uncentred second moment [..., d, d]; rows are vectors: x' = x R. Raises ValueError as bit_reversal."""
    d = second_moment.shape[-1]
    order = bit_reversal(d)
    _, U = np.linalg.eigh(second_moment)         # ascending, as published
    return (U @ sylvester(d) / np.sqrt(d))[..., order]


def value_moment(k: np.ndarray, v: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Second moment of the values of one head, each token weighted by k^T S_q k, the weights rescaled to mean 1.

    k [n, d], v [n, d_v], queries: S_q [d, d]. Returns [d_v, d_v]. The published code does this; the paper weights by softmax.
    """
    w = np.einsum("ni,ij,nj->n", k, queries, k)
    return np.einsum("n,ni,nj->ij", w / w.mean(), v, v) / len(v)


def quantise(x: np.ndarray, clip: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 [..., g, n], scale and zero float32 [..., g, 1] of rotated vectors [..., d], in groups of n = min(d, 128).

    clip: quantile of the magnitudes in a group beyond which values are clamped. Raises ValueError when a group does not divide d.
    """
    d = x.shape[-1]
    n = max(min(d, GROUP), 1)
    if d % n:
        raise ValueError(f"groups of {n} values do not divide {d}")
    y = np.asarray(x, np.float32).reshape(*x.shape[:-1], d // n, n)
    tau = np.sort(np.abs(y), -1)[..., min(int(clip * n), n - 1), None]
    y = np.clip(y, -tau, tau)
    low = y.min(-1, keepdims=True)
    scale = np.maximum(y.max(-1, keepdims=True) - low, np.float32(1e-8)) / np.float32(LEVELS - 1)
    zero = -low / scale
    return np.clip(np.floor(y / scale + zero + np.float32(0.5)), 0, LEVELS - 1).astype(np.uint8), scale, zero


def dequantise(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Inverse of quantise: float32 [..., d]."""
    return ((codes.astype(np.float32) - zero) * scale).reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])


def pack(codes: np.ndarray) -> np.ndarray:
    """Published layout of one group: byte j holds elements j, j + n/4, j + n/2, j + 3n/4, two bits each; uint8 [..., n] to [..., n / 4]."""
    q = np.split(codes, 4, -1)
    return q[0] | q[1] << 2 | q[2] << 4 | q[3] << 6


def round_trip(x: np.ndarray, R: np.ndarray, clip: float) -> np.ndarray:
    """What attention sees of vectors x [..., d] in the original basis: rotate by R [d, d], quantise, dequantise, rotate back."""
    return dequantise(*quantise(x @ R, clip)) @ np.swapaxes(R, -1, -2)


def bits_per_value(d: int) -> float:
    """Two bits and a float32 scale and zero per group."""
    return 2 + 64 / min(d, GROUP)
