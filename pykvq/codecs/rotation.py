"""Random rotations: dense Haar (what TurboQuant's theorems assume) and signed Hadamard (what is fast)."""
from __future__ import annotations

from functools import lru_cache

import numpy as np

from pykvq.codecs.checks import integer
from pykvq.codecs.hadamard import paley, sylvester

PALEY_ORDERS = (1, 12, 20, 28)
MAX_ORDER = 1 << 24


def generator(seed: int, use: int) -> np.random.Generator:
    """A stream of its own for each use, so that data drawn with the same seed is not the rotation's own matrix."""
    return np.random.default_rng([seed, use, 0x6b7671])


class HaarRotation:
    """Uniformly random rotation of R^d: QR of a Gaussian matrix, columns signed so that it is Haar (Mezzadri 2007).

    matrix: float32 [d, d]; y = x @ matrix.T. Raises ValueError for d < 1.
    """

    def __init__(self, d: int, seed: int = 0):
        d = integer("d", d, 1, MAX_ORDER)
        q, r = np.linalg.qr(generator(seed, 2).standard_normal((d, d)))
        self.matrix = (q * np.sign(np.diag(r))).astype(np.float32)

    def apply(self, x: np.ndarray) -> np.ndarray:
        """float [..., d] to float32 [..., d]; norms and inner products are kept. Raises ValueError for another last dimension."""
        return np.asarray(x, np.float32) @ self.matrix.T

    def invert(self, y: np.ndarray) -> np.ndarray:
        """The inverse of apply: float [..., d] to float32 [..., d]. Raises ValueError for another last dimension."""
        return np.asarray(y, np.float32) @ self.matrix

    def state(self) -> np.ndarray:
        """What a file must keep: the matrix, since no generator is promised to repeat itself in later versions of numpy."""
        return self.matrix

    @classmethod
    def from_state(cls, matrix: np.ndarray) -> HaarRotation:
        rotation = cls.__new__(cls)
        rotation.matrix = np.asarray(matrix, np.float32)
        return rotation


class HadamardRotation:
    """Random signs, then an orthonormal Hadamard matrix, in O(d sqrt(d)) as two small matrix products.

    Where d is no order that Paley and Sylvester give (m 2**k, m in 1, 12, 20, 28), the first and the last p values are
    turned in turn, twice, p being the largest order below d: still a rotation, without padding.
    signs: float32 [passes, p], entries +-1. Raises ValueError for d < 1.
    """

    def __init__(self, d: int, seed: int = 0):
        d = integer("d", d, 1, MAX_ORDER)
        p = largest_order(d)
        passes = 1 if p == d else 4
        self._set(d, generator(seed, 3).choice(np.float32([-1, 1]), (passes, p)))

    def _set(self, d: int, signs: np.ndarray) -> None:
        self.d, self.signs = d, signs
        self.order = signs.shape[1]
        self.left, self.right = factors(self.order)

    def apply(self, x: np.ndarray) -> np.ndarray:
        """float [..., d] to float32 [..., d]; norms and inner products are kept. Raises ValueError for another last dimension."""
        y = self._copy(x)
        for i, signs in enumerate(self.signs):
            part = self._part(y, i)
            part[...] = self._hadamard(part * signs, self.left, self.right)
        return y

    def invert(self, y: np.ndarray) -> np.ndarray:
        """The inverse of apply: float [..., d] to float32 [..., d]. Raises ValueError for another last dimension."""
        x = self._copy(y)
        for i, signs in reversed(list(enumerate(self.signs))):
            part = self._part(x, i)
            part[...] = self._hadamard(part, self.left.T, self.right.T) * signs
        return x

    def _copy(self, x: np.ndarray) -> np.ndarray:
        x = np.array(x, np.float32)
        if x.ndim == 0 or x.shape[-1] != self.d:
            raise ValueError(f"vectors must have {self.d} values, not shape {x.shape}")
        return x

    def _part(self, x: np.ndarray, i: int) -> np.ndarray:
        return x[..., :self.order] if i % 2 == 0 else x[..., self.d - self.order:]

    def _hadamard(self, v: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        grid = v.reshape(*v.shape[:-1], len(left), len(right))
        return np.matmul(left, grid @ right.T).reshape(v.shape)

    def state(self) -> np.ndarray:
        """What a file must keep: the signs."""
        return self.signs.astype(np.int8)

    @classmethod
    def from_state(cls, signs: np.ndarray, d: int) -> HadamardRotation:
        rotation = cls.__new__(cls)
        rotation._set(d, np.asarray(signs, np.float32))
        return rotation


def largest_order(d: int) -> int:
    """The largest order m 2**k <= d, m in 1, 12, 20, 28 (0 < d)."""
    return max(m << (d // m).bit_length() - 1 for m in PALEY_ORDERS if m <= d)


@lru_cache(None)
def factors(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Two Hadamard matrices whose Kronecker product is an orthonormal one of `order`, as square as may be; float32."""
    m = next(m for m in reversed(PALEY_ORDERS) if order % m == 0 and (order // m).bit_count() == 1)
    k = (order // m).bit_length() - 1
    in_left = min(range(k + 1), key=lambda j: abs((m << j) - (1 << k - j)))
    left, right = np.kron(paley(m), sylvester(1 << in_left)), sylvester(1 << k - in_left)
    return tuple((h / np.sqrt(len(h))).astype(np.float32) for h in (left, right))


ROTATIONS = {"haar": HaarRotation, "hadamard": HadamardRotation}


def make_rotation(kind: str, d: int, seed: int) -> HaarRotation | HadamardRotation:
    """A rotation by name: "haar" or "hadamard". Raises ValueError for another name."""
    if kind not in ROTATIONS:
        raise ValueError(f"unknown rotation {kind!r}; valid: {', '.join(ROTATIONS)}")
    return ROTATIONS[kind](d, seed)
