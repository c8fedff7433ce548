"""Signed Hadamard rotations of order 2**k and, through Paley's construction, 80, 96 and 112."""
from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(None)
def paley(m: int) -> np.ndarray:
    """Hadamard matrix of order m in {1, 12, 20, 28}: entries +-1, rows orthogonal; int64 [m, m] (Paley 1933).

    m - 1 prime and 3 mod 4 gives construction I (12, 20); m / 2 - 1 prime and 1 mod 4 construction II (28).
    Raises ValueError for another order.
    """
    if m == 1:
        return np.ones((1, 1), int)
    if m in (12, 20):
        core = _bordered_residues(m - 1, -1)
        return core + np.eye(m, dtype=int)
    if m == 28:
        core = _bordered_residues(m // 2 - 1, 1)
        return np.kron(core, [[1, 1], [1, -1]]) + np.kron(np.eye(m // 2, dtype=int), [[1, -1], [-1, -1]])
    raise ValueError(f"no Paley matrix of order {m} is declared")


def _bordered_residues(q: int, border: int) -> np.ndarray:
    """Quadratic residues chi(i - j) mod the prime q, with a first row of 1 and a first column of `border`."""
    residues = {x * x % q for x in range(1, q)}
    chi = np.array([0] + [1 if a in residues else -1 for a in range(1, q)])
    s = np.zeros((q + 1, q + 1), int)
    s[0, 1:], s[1:, 0] = 1, border
    s[1:, 1:] = chi[(np.arange(q)[:, None] - np.arange(q)) % q]
    return s


def sylvester(n: int) -> np.ndarray:
    """Hadamard matrix of order n, a power of two, in Sylvester's order; int64 [n, n], symmetric."""
    h = np.ones((1, 1), int)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h
