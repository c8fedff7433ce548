"""A bias of the pre-RoPE keys, b, appears as R(j) b at position j. Removing it from sums that are already taken.

R(j) b is linear in the row t of cosines and sines of position j: R(j) b = L t + c, with L made of b.
"""
from __future__ import annotations

import numpy as np

from pykvq.calibration.moments import LayerSums
from pykvq.calibration.rope import Rope


def turned(bias: np.ndarray, rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """L [h, d, r] and c [h, d] of R(j) b = L t(j) + c; bias [h, d]. c holds the coordinates that do not turn."""
    x, y = rope.pairs
    half = len(x)
    i = np.arange(half)
    L, c = np.zeros((*bias.shape, 2 * half)), bias.astype(np.float64).copy()
    L[:, x, i], L[:, x, half + i] = bias[:, x], -bias[:, y]
    L[:, y, i], L[:, y, half + i] = bias[:, y], bias[:, x]
    c[:, x] = c[:, y] = 0
    return L, c


def key_moments(s: LayerSums, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean [h, d] and centred covariance [h, d, d] of the keys, of k - R(j) b when `bias` [h, d] is given.

    Raises ValueError for a bias in a layer whose rotation is not known.
    """
    mean = s.k / s.n
    cov = s.kk / s.n - mean[:, :, None] * mean[:, None, :]
    if bias is None:
        return mean, cov
    if s.rope is None:
        raise ValueError("the rotation of a layer with a key bias is not understood; calibrate with key_bias none")
    L, c = turned(bias, s.rope)
    t = s.t / s.n
    with_t = s.kt / s.n - mean[:, :, None] * t
    of_t = s.tt / s.n - np.outer(t, t)
    cross = with_t @ L.swapaxes(1, 2)
    return mean - L @ t - c, cov - cross - cross.swapaxes(1, 2) + L @ of_t @ L.swapaxes(1, 2)


def measured_bias(s: LayerSums) -> np.ndarray:
    """Mean pre-RoPE key of every head, float64 [h, d], from the sums. Raises ValueError without a known rotation."""
    if s.rope is None:
        raise ValueError("the rotation of a layer is not understood, so its key bias cannot be measured")
    x, y = s.rope.pairs
    half = len(x)
    i = np.arange(half)
    power = np.diag(s.tt)[:half] + np.diag(s.tt)[half:]         # sum of cos^2 + sin^2, the squared magnitude times n
    bias = s.k / s.n
    cos, sin = s.kt[:, :, :half], s.kt[:, :, half:]
    bias[:, x] = (cos[:, x, i] + sin[:, y, i]) / power
    bias[:, y] = (cos[:, y, i] - sin[:, x, i]) / power
    return bias
