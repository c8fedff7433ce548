"""Lloyd-Max scalar quantisers for the unit Gaussian (Lloyd 1982, Max 1960; TurboQuant, arXiv 2504.19874, section 3.1)."""
from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.stats import norm


@lru_cache(None)
def lloyd_max(bits: int) -> np.ndarray:
    """Centroids of the MSE-optimal quantiser of N(0, 1) with 2**bits levels.

    Returns float64 [2**bits], ascending and symmetric, converged to 1e-13 by Lloyd's iteration.
    Raises ValueError for bits outside 1..6.
    """
    if not 1 <= bits <= 6:
        raise ValueError(f"bits must be 1..6, not {bits}")
    n = 1 << bits
    c = norm.ppf((np.arange(n) + 0.5) / n)
    for _ in range(100_000):
        edges = np.concatenate([[-np.inf], (c[1:] + c[:-1]) / 2, [np.inf]])
        new = (norm.pdf(edges[:-1]) - norm.pdf(edges[1:])) / np.diff(norm.cdf(edges))
        new = (new - new[::-1]) / 2              # rounding must not break the symmetry
        if np.abs(new - c).max() < 1e-13:
            return new
        c = new
    raise AssertionError("Lloyd's iteration did not converge")


def _moments(thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probability and first moment of N(0, 1) in each cell; both float64 [len(thresholds) + 1]."""
    edges = np.concatenate([[-np.inf], thresholds, [np.inf]])
    return np.diff(norm.cdf(edges)), norm.pdf(edges[:-1]) - norm.pdf(edges[1:])


def gain_of_levels(levels: np.ndarray, thresholds: np.ndarray) -> float:
    """Table units per sigma: the s that minimises E|x - levels[cell(x)] / s|^2 for x ~ N(0, 1)."""
    p, m = _moments(np.asarray(thresholds, float))
    t = np.asarray(levels, float)
    return float((t * t * p).sum() / (t * m).sum())


def mse_of_levels(levels: np.ndarray, thresholds: np.ndarray) -> float:
    """Mean squared error per unit-variance value of the table `levels` at its best gain."""
    p, m = _moments(np.asarray(thresholds, float))
    t = np.asarray(levels, float)
    return float(1 - (t * m).sum() ** 2 / (t * t * p).sum())
