"""Lloyd-Max codebooks for the densities that a random rotation produces, known in closed form.

A coordinate of a uniform point on the unit sphere in d dimensions has a (shifted) Beta density (TurboQuant, arXiv 2504.19874,
lemma 1), which tends to N(0, 1/d). The angles of the recursive polar transform have densities proportional to
sin(2 psi)**(m - 1) (PolarQuant, arXiv 2502.02617, lemma 2).
"""
from __future__ import annotations

from functools import lru_cache
from typing import Callable, NamedTuple

import numpy as np
from scipy.linalg import solve_banded
from scipy.special import betainc, betaincinv, gammaln
from scipy.stats import norm

from pykvq.codecs.checks import integer
from pykvq.codecs.lloyd_max import lloyd_max

MAX_BITS = 8
MAX_D = 1 << 24
BETA_D = 100_000                                         # beyond, scipy's betainc loses more digits than the limit N(0, 1) does


class Density(NamedTuple):
    """A density on [low, high]; every function maps float64 arrays to float64 arrays of the same shape."""
    pdf: Callable[[np.ndarray], np.ndarray]
    cdf: Callable[[np.ndarray], np.ndarray]
    moment: Callable[[np.ndarray], np.ndarray]          # integral of x pdf(x) up to the argument, up to a constant
    quantile: Callable[[np.ndarray], np.ndarray]
    low: float
    high: float


def sphere_density(d: int) -> Density:
    """Density of one coordinate of a uniform point on the unit sphere of R^d, in units of 1/sqrt(d) (so that its variance is 1).

    Raises ValueError for d outside 2..2**24; from 100000 on it is the limit, N(0, 1), which differs by 1e-5.
    """
    d = integer("d", d, 2, MAX_D)
    r, a = np.sqrt(d), (d - 1) / 2
    if d > BETA_D:
        return Density(pdf=norm.pdf, cdf=norm.cdf, moment=lambda z: -norm.pdf(z), quantile=norm.ppf, low=-r, high=r)
    log_c = gammaln(d / 2) - gammaln(a) - np.log(np.pi * d) / 2
    inside = lambda z: np.maximum(1 - z * z / d, 0)
    return Density(
        pdf=lambda z: np.exp(log_c) * inside(z) ** (a - 1),
        cdf=lambda z: betainc(a, a, (1 + z / r) / 2),
        moment=lambda z: -np.exp(log_c) * d / (d - 1) * inside(z) ** a,
        quantile=lambda p: r * (2 * betaincinv(a, a, p) - 1),
        low=-r, high=r)


def polar_density(level: int) -> Density:
    """Density of the angle psi of level 2, 3, ... of the polar transform, on [0, pi/2]; level 1 is uniform on the circle.

    psi = atan(b / a) with a, b the norms of two independent Gaussian vectors of m = 2**(level - 1) values each, so that
    sin(psi)**2 has the density Beta(m/2, m/2). Raises ValueError for level < 2.
    """
    if level < 2:
        raise ValueError("level 1 is uniform on the circle and needs no codebook")
    m = 2 ** (level - 1)
    log_c = gammaln(m) - (m - 2) * np.log(2) - 2 * gammaln(m / 2)
    pdf = lambda psi: np.exp(log_c) * np.sin(2 * psi) ** (m - 1)
    nodes, weights = np.polynomial.legendre.leggauss(64)

    def moment(psi: np.ndarray) -> np.ndarray:
        half = np.asarray(psi)[..., None] / 2            # no closed form worth having: Gauss-Legendre on [0, psi]
        x = half * (1 + nodes)
        return (half * weights * x * pdf(x)).sum(-1)

    return Density(pdf=pdf, cdf=lambda psi: betainc(m / 2, m / 2, np.sin(psi) ** 2), moment=moment,
                   quantile=lambda p: np.arcsin(np.sqrt(betaincinv(m / 2, m / 2, p))), low=0.0, high=np.pi / 2)


def optimal_levels(density: Density, count: int) -> np.ndarray:
    """The `count` levels of least mean squared error, ascending float64 [count]: Lloyd's iteration, then Newton's.

    Every density here is symmetric about the middle of its support and has one stationary point (Max 1960).
    """
    middle = (density.low + density.high) / 2
    c = density.quantile((np.arange(count) + 0.5) / count)
    for step in range(500):
        edges = np.concatenate([[density.low], (c[1:] + c[:-1]) / 2, [density.high]])
        p, m = np.diff(density.cdf(edges)), np.diff(density.moment(edges))
        residual = m - c * p
        new = c - _newton_step(density, c, edges, p, residual) if step >= 20 else m / p
        if (np.diff(new) <= 0).any() or new[0] <= density.low or new[-1] >= density.high:
            new = m / p                                  # too far for Newton: one more step of Lloyd
        new = middle + ((new - middle) - (new - middle)[::-1]) / 2
        if np.abs(new - c).max() < 1e-13 * (density.high - middle):
            return new
        c = new
    if np.abs(residual / p).max() > 1e-9:
        raise AssertionError("the codebook iteration did not converge")
    return c


def _newton_step(density: Density, c: np.ndarray, edges: np.ndarray, p: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Solution of the tridiagonal system of the stationarity conditions moment_i = c_i p_i."""
    inner = edges[1:-1]
    f = density.pdf(inner) / 2
    upper, lower = (inner - c[:-1]) * f, (c[1:] - inner) * f
    bands = np.zeros((3, len(c)))
    bands[0, 1:], bands[2, :-1] = upper, lower
    bands[1] = -p
    bands[1, :-1] += upper
    bands[1, 1:] += lower
    return solve_banded((1, 1), bands, residual)


@lru_cache(None)
def sphere_codebook(d: int, bits: int) -> np.ndarray:
    """Centroids for a coordinate of the unit sphere in R^d: ascending, symmetric, read-only float64 [2**bits] (section 3.1, equation 4).

    Raises ValueError for d outside 2..2**24 or bits outside 0..8; zero bits give the one level 0.
    """
    bits = integer("bits", bits, 0, MAX_BITS)
    c = (optimal_levels(sphere_density(d), 1 << bits) if bits else np.zeros(1)) / np.sqrt(d)
    c.flags.writeable = False
    return c


@lru_cache(None)
def gaussian_codebook(d: int, bits: int) -> np.ndarray:
    """The limit of sphere_codebook for many dimensions: Lloyd-Max for N(0, 1/d), read-only float64 [2**bits].

    Raises ValueError for d outside 2..2**24 or bits outside 0..6.
    """
    d, bits = integer("d", d, 2, MAX_D), integer("bits", bits, 0, 6)
    c = (lloyd_max(bits) if bits else np.zeros(1)) / np.sqrt(d)
    c.flags.writeable = False
    return c


@lru_cache(None)
def polar_codebook(level: int, bits: int) -> np.ndarray:
    """Angle centroids of a level of the polar transform, in radians: read-only float64 [2**bits].

    Level 1: 2**bits equal arcs of the circle [0, 2 pi). Raises ValueError for bits outside 1..8.
    """
    bits = integer("bits", bits, 1, MAX_BITS)
    c = 2 * np.pi * (np.arange(1 << bits) + 0.5) / (1 << bits) if level == 1 else optimal_levels(polar_density(level), 1 << bits)
    c.flags.writeable = False
    return c


def cell_probabilities(codebook: np.ndarray, d: int) -> np.ndarray:
    """Probability of each code for a coordinate of the unit sphere in R^d: float64 [len(codebook)], sums to one."""
    c = np.asarray(codebook, float) * np.sqrt(d)
    edges = np.concatenate([[-np.sqrt(d)], (c[1:] + c[:-1]) / 2, [np.sqrt(d)]])
    return np.diff(sphere_density(d).cdf(edges))


def sphere_mse(d: int, bits: int) -> float:
    """E|x - x'|^2 of TurboQuant-MSE for a unit vector of d values: d times the distortion of one coordinate (theorem 1).

    Raises ValueError as sphere_codebook does.
    """
    c = sphere_codebook(d, bits)
    return float(1 - d * (c * c * cell_probabilities(c, d)).sum())      # centroids are cell means, so E[x c] = E[c^2]
