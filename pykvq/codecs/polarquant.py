"""PolarQuant (Han, Kacham, Karbasi, Mirrokni, Zandieh; arXiv 2502.02617): a rotated vector as angles and one radius per block.

Level 1 turns pairs of values into radius and angle; every further level does the same with the radii of the level before.
The angles' densities are known, so each level has a fixed codebook and no norm is stored per angle.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pykvq.codecs.checks import integer, vectors
from pykvq.codecs.density import MAX_D, polar_codebook
from pykvq.codecs.rotation import make_rotation
from pykvq.codecs.turboquant import nearest


class PolarCodes(NamedTuple):
    """angles: one uint8 [..., d / 2**level] for each level; radius: float16 [..., d / 2**levels]."""
    angles: tuple[np.ndarray, ...]
    radius: np.ndarray


def to_polar(x: np.ndarray, levels: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Recursive polar form: float [..., d] to the angles of each level, [..., d / 2**level], and the radii [..., d / 2**levels].

    Level 1 angles lie in [0, 2 pi), the others in [0, pi/2]. Raises ValueError unless levels >= 1 and 2**levels divides d.
    """
    d = x.shape[-1]
    if levels < 1 or d % (1 << levels):
        raise ValueError(f"{levels} levels need a multiple of {1 << max(levels, 1)} values, not {d}")
    angles, r = [], x
    for level in range(levels):
        a, b = r[..., 0::2], r[..., 1::2]
        angle = np.arctan2(b, a)
        angles.append(np.where(angle < 0, angle + 2 * np.pi, angle).astype(x.dtype) if level == 0 else angle)
        r = np.hypot(a, b)
    return angles, r


def from_polar(angles: list[np.ndarray], radius: np.ndarray) -> np.ndarray:
    """The inverse of to_polar: float [..., d]."""
    r = radius
    for angle in reversed(angles):
        r = np.stack([r * np.cos(angle), r * np.sin(angle)], -1).reshape(*angle.shape[:-1], 2 * angle.shape[-1])
    return r


class PolarQuant:
    """Random rotation, recursive polar form, one codebook for the angles of each level, fp16 radii.

    d: values per vector, a multiple of 2**len(bits). bits: of each level's angles, 1..8; the paper's (4, 2, 2, 2) with one radius
    per 16 values is 3.875 bits a value. fp16 radii keep their digits from 6e-5 on; smaller ones fade to zero.
    Raises ValueError for values outside these.
    """

    def __init__(self, d: int, bits: tuple[int, ...] = (4, 2, 2, 2), *, rotation: str = "haar", seed: int = 0):
        d = integer("d", d, 1, MAX_D)
        if not bits or d % (1 << len(bits)):
            raise ValueError(f"{len(bits)} levels need a multiple of {1 << len(bits)} values, not {d}")
        self.d, self.bits = d, tuple(bits)
        self.codebooks = [polar_codebook(level + 1, b).astype(np.float32) for level, b in enumerate(bits)]
        self.rotation = make_rotation(rotation, d, seed)

    def quantise(self, x: np.ndarray) -> PolarCodes:
        """float [..., d] to codes. Raises ValueError for another last dimension, values that are not finite or radii beyond fp16."""
        with np.errstate(over="ignore", invalid="ignore"):       # told below
            angles, radius = to_polar(self.rotation.apply(vectors(x, self.d)), len(self.bits))
        if not (radius <= 65504).all():
            raise ValueError("a radius exceeds the range of fp16: scale the vectors down")
        codes = [np.minimum(angles[0] * ((1 << self.bits[0]) / (2 * np.pi)), (1 << self.bits[0]) - 1).astype(np.uint8)]
        codes += [nearest(a, c) for a, c in zip(angles[1:], self.codebooks[1:])]
        return PolarCodes(tuple(codes), radius.astype(np.float16))

    def dequantise(self, q: PolarCodes) -> np.ndarray:
        """Reconstruction, float32 [..., d]."""
        angles = [c[codes] for c, codes in zip(self.codebooks, q.angles)]
        return self.rotation.invert(from_polar(angles, q.radius.astype(np.float32)))

    def bits_per_value(self, radius_bits: int = 16) -> float:
        """Bits per value with the radii counted."""
        return sum(b / 2 ** (level + 1) for level, b in enumerate(self.bits)) + radius_bits / 2 ** len(self.bits)
