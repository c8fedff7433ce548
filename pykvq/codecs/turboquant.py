"""TurboQuant (Zandieh, Daliri, Hadian, Mirrokni; arXiv 2504.19874): the MSE codec and the unbiased inner-product codec.

Every method takes any number of leading dimensions. Vectors may have any length: the norm is stored beside the codes.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pykvq.codecs.checks import integer, vectors
from pykvq.codecs.density import MAX_BITS, MAX_D, gaussian_codebook, sphere_codebook
from pykvq.codecs.rotation import generator, make_rotation

CODEBOOKS = {"sphere": sphere_codebook, "gaussian": gaussian_codebook}
SCALES = ("norm", "least-squares", "unbiased")
CHUNK = 1 << 20                                          # values a pass: temporaries stay near the processor


class MSECodes(NamedTuple):
    """codes: uint8 [..., d]; scale: float32 [...], the factor of the centroids."""
    codes: np.ndarray
    scale: np.ndarray


class ProdCodes(NamedTuple):
    """codes: uint8 [..., d] of bits - 1 bits; signs: uint8 [..., d], 1 for plus; norm, residual: float32 [...]."""
    codes: np.ndarray
    signs: np.ndarray
    norm: np.ndarray
    residual: np.ndarray


class TurboQuantMSE:
    """Algorithm 1 (section 3.1): rotate, then the nearest Lloyd-Max centroid for each coordinate.

    d: values per vector, 2 or more. bits: 1..8 (1..6 with the Gaussian codebook). rotation: "haar" (the paper's) or "hadamard".
    codebook: "sphere" (exact for d) or "gaussian" (its limit). scale: "norm" stores |x| as the paper does; "least-squares"
    minimises the error of each vector; "unbiased" makes <x, x'> = |x|^2, which takes the shrinkage out of inner products.
    Raises ValueError for values outside these.
    """

    def __init__(self, d: int, bits: int, *, rotation: str = "haar", codebook: str = "sphere", scale: str = "norm", seed: int = 0):
        if codebook not in CODEBOOKS or scale not in SCALES:
            raise ValueError(f"codebook is one of {', '.join(CODEBOOKS)} and scale one of {', '.join(SCALES)}")
        self.d, self.bits, self.scale = integer("d", d, 2, MAX_D), integer("bits", bits, 1, MAX_BITS), scale
        self.centroids = CODEBOOKS[codebook](self.d, self.bits).astype(np.float32)
        self.rotation = make_rotation(rotation, d, seed)

    def quantise(self, x: np.ndarray) -> MSECodes:
        """float [..., d] to codes. Raises ValueError for another last dimension, values that are not finite or a norm beyond float32."""
        rows, shape = _rows(x, self.d)
        codes, scale = np.empty(rows.shape, np.uint8), np.empty(len(rows), np.float32)
        for part in _chunks(rows):
            y, norm = _unit(rows[part])
            y = self.rotation.apply(y)
            codes[part] = nearest(y, self.centroids)
            with np.errstate(over="ignore"):             # told below
                scale[part] = norm * self._gain(y, codes[part])
        _representable(scale)
        return MSECodes(codes.reshape(shape), scale.reshape(shape[:-1]))

    def _gain(self, y: np.ndarray, codes: np.ndarray) -> np.ndarray | float:
        """Factor of the norm for unit vectors y, float32 [rows]."""
        if self.scale == "norm":
            return 1.0
        c = self.centroids[codes]
        dot = np.einsum("ij,ij->i", y, c)
        if self.scale == "least-squares":
            return dot / np.maximum(np.einsum("ij,ij->i", c, c), 1e-30)
        return np.divide(1, dot, out=np.zeros_like(dot), where=dot > 0)      # zero only for the zero vector

    def dequantise(self, q: MSECodes) -> np.ndarray:
        """Reconstruction, float32 [..., d]."""
        return self.rotation.invert(self.centroids[q.codes]) * q.scale[..., None]

    def inner(self, y: np.ndarray, q: MSECodes) -> np.ndarray:
        """<y_i, x'_j> of queries float [n, d] with quantised vectors of shape [m, d], without un-rotating them: float32 [n, m].

        Biased towards zero by the factor 1 - MSE unless scale is "unbiased" (section 3.2).
        """
        return self.rotation.apply(np.asarray(y, np.float32)) @ self.centroids[q.codes].T * q.scale

    def bits_per_value(self, norm_bits: int = 32) -> float:
        """Bits per value with one stored factor of `norm_bits`; the paper's figures leave it out."""
        return self.bits + norm_bits / self.d


class TurboQuantProd:
    """Algorithm 2 (section 3.2): bits - 1 bits of TurboQuant-MSE, then one QJL bit on the residual; unbiased inner products.

    d, rotation, codebook and seed as in TurboQuantMSE; bits: 1..8, where one bit is QJL alone. projection: float32 [d, d], Gaussian.
    Raises ValueError as TurboQuantMSE does.
    """

    def __init__(self, d: int, bits: int, *, rotation: str = "haar", codebook: str = "sphere", seed: int = 0):
        if codebook not in CODEBOOKS:
            raise ValueError(f"codebook is one of {', '.join(CODEBOOKS)}")
        self.d, self.bits = integer("d", d, 2, MAX_D), integer("bits", bits, 1, MAX_BITS)
        self.centroids = CODEBOOKS[codebook](self.d, self.bits - 1).astype(np.float32)
        self.rotation = make_rotation(rotation, d, seed)
        self.projection = generator(seed, 1).standard_normal((d, d), dtype=np.float32)

    @property
    def gain(self) -> np.float32:
        """sqrt(pi/2)/d: makes sign(S r) an unbiased estimate of the direction of r (lemma 4)."""
        return np.float32(np.sqrt(np.pi / 2) / self.d)

    def quantise(self, x: np.ndarray) -> ProdCodes:
        """float [..., d] to codes. Raises ValueError for another last dimension, values that are not finite or a norm beyond float32."""
        rows, shape = _rows(x, self.d)
        codes, signs = np.empty(rows.shape, np.uint8), np.empty(rows.shape, np.uint8)
        norm, residual = np.empty(len(rows), np.float32), np.empty(len(rows), np.float32)
        for part in _chunks(rows):
            y, norm[part] = _unit(rows[part])
            y = self.rotation.apply(y)
            codes[part] = nearest(y, self.centroids)
            r = y - self.centroids[codes[part]]          # S is rotation invariant: the residual need not be rotated back
            residual[part] = np.linalg.norm(r, axis=-1)
            signs[part] = r @ self.projection.T > 0
        _representable(norm)
        flat = shape[:-1]
        return ProdCodes(codes.reshape(shape), signs.reshape(shape), norm.reshape(flat), residual.reshape(flat))

    def _signs(self, q: ProdCodes) -> np.ndarray:
        return q.signs.astype(np.float32) * 2 - 1

    def dequantise(self, q: ProdCodes) -> np.ndarray:
        """Reconstruction whose inner product with any fixed vector is unbiased, float32 [..., d]; its own error is larger than MSE's."""
        r = self._signs(q) @ self.projection * (self.gain * q.residual[..., None])
        return self.rotation.invert(self.centroids[q.codes] + r) * q.norm[..., None]

    def inner(self, y: np.ndarray, q: ProdCodes) -> np.ndarray:
        """Unbiased estimates of <y_i, x_j>: queries float [n, d], quantised vectors of shape [m, d], result float32 [n, m]."""
        z = self.rotation.apply(np.asarray(y, np.float32))
        first = z @ self.centroids[q.codes].T if self.bits > 1 else 0
        second = (z @ self.projection.T) @ self._signs(q).T
        return (first + second * (self.gain * q.residual)) * q.norm

    def bits_per_value(self, norm_bits: int = 32) -> float:
        """Bits per value with the two stored norms of `norm_bits` each; the paper's figures leave them out."""
        return self.bits + 2 * norm_bits / self.d


def mse_bounds(bits: float) -> tuple[float, float]:
    """Lower and upper bound on E|x - x'|^2 for a unit vector: 4**-b and sqrt(3) pi / 2 * 4**-b (theorems 3 and 1)."""
    return 4.0 ** -bits, np.sqrt(3) * np.pi / 2 * 4.0 ** -bits


def prod_bounds(bits: float) -> tuple[float, float]:
    """Lower and upper bound on d E|<y, x> - <y, x'>|^2 for unit x and y: 4**-b and sqrt(3) pi^2 * 4**-b (theorems 3 and 2)."""
    return 4.0 ** -bits, np.sqrt(3) * np.pi ** 2 * 4.0 ** -bits


def nearest(y: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Index of the nearest of the ascending centroids for every value: float32 [...] to uint8 [...]."""
    thresholds = (centroids[1:] + centroids[:-1]) / 2
    if len(thresholds) > 31:
        return np.searchsorted(thresholds, y).astype(np.uint8)
    codes = np.zeros(y.shape, np.uint8)
    for t in thresholds:                                 # a few vector comparisons beat a branching search
        codes += y > t
    return codes


def _rows(x: np.ndarray, d: int) -> tuple[np.ndarray, tuple[int, ...]]:
    x = vectors(x, d)
    return x.reshape(-1, d), x.shape


def _representable(factors: np.ndarray) -> None:
    if not np.isfinite(factors).all():
        raise ValueError("a norm exceeds the range of float32: scale the vectors down")


def _chunks(rows: np.ndarray) -> list[slice]:
    step = max(1, CHUNK // rows.shape[1])
    return [slice(i, i + step) for i in range(0, len(rows), step)]


def _unit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x / |x| and |x|, which is zero for the zero vector and leaves it zero."""
    peak = np.abs(x).max(-1, keepdims=True)              # first to the order of one: squares must not leave float32
    x = x / np.where(peak > 0, peak, 1)
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    with np.errstate(over="ignore"):                     # the caller looks
        return x / np.where(norm > 0, norm, 1), (norm * peak)[..., 0]
