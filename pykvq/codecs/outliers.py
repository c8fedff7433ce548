"""Mixed bits: outlier channels in their own TurboQuant instance with more bits (arXiv 2504.19874, section 4.3)."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pykvq.codecs.checks import integer, vectors
from pykvq.codecs.density import MAX_D
from pykvq.codecs.turboquant import MSECodes, TurboQuantMSE


class MixedCodes(NamedTuple):
    """Codes of the two channel groups."""
    outliers: MSECodes
    rest: MSECodes


def outlier_channels(x: np.ndarray, count: int) -> np.ndarray:
    """The `count` channels of largest mean square over all leading dimensions of float [..., d]: ascending int64 [count].

    Raises ValueError unless 0 < count < d, and without a vector or with values that are not finite.
    """
    if np.ndim(x) == 0 or np.size(x) == 0 or np.shape(x)[-1] < 2:
        raise ValueError(f"channels are chosen from at least one vector of at least two values, not from shape {np.shape(x)}")
    d = np.shape(x)[-1]
    x = vectors(x, d)
    count = integer("count", count, 1, d - 1)
    energy = np.square(x.reshape(-1, d), dtype=np.float64).mean(0)
    return np.sort(np.argsort(energy)[d - count:])


class MixedTurboQuant:
    """Two independent TurboQuant-MSE instances: `channels` with `high` bits, the other channels with `low`.

    d: values per vector. channels: int [k], distinct, two or more on either side. Other keywords go to both instances.
    Bits per value without norms: (k high + (d - k) low) / d; 2.5 bits are half of the channels at 3 and half at 2.
    Raises ValueError for channels outside 0..d-1 or repeated, and as TurboQuantMSE does.
    """

    def __init__(self, d: int, channels: np.ndarray, high: int, low: int, **keywords):
        self.d, channels = integer("d", d, 4, MAX_D), np.asarray(channels)
        if channels.ndim != 1 or channels.dtype.kind not in "iu" or len(np.unique(channels)) != len(channels) or not ((0 <= channels) & (channels < d)).all():
            raise ValueError(f"channels must be a list of distinct integers in 0..{d - 1}")
        if not 2 <= len(channels) <= d - 2:
            raise ValueError(f"two to {d - 2} of {d} channels can have more bits, not {len(channels)}")
        self.channels, self.rest = channels.astype(int), np.setdiff1d(np.arange(d), channels)
        seed = keywords.pop("seed", 0)
        self.high = TurboQuantMSE(len(self.channels), high, seed=seed, **keywords)
        self.low = TurboQuantMSE(len(self.rest), low, seed=seed + 1, **keywords)

    def quantise(self, x: np.ndarray) -> MixedCodes:
        """float [..., d] to codes. Raises ValueError as TurboQuantMSE.quantise does."""
        x = vectors(x, self.d)
        return MixedCodes(self.high.quantise(x[..., self.channels]), self.low.quantise(x[..., self.rest]))

    def dequantise(self, q: MixedCodes) -> np.ndarray:
        """Reconstruction, float32 [..., d]."""
        out = np.empty((*q.rest.scale.shape, self.d), np.float32)
        out[..., self.channels], out[..., self.rest] = self.high.dequantise(q.outliers), self.low.dequantise(q.rest)
        return out

    def inner(self, y: np.ndarray, q: MixedCodes) -> np.ndarray:
        """<y_i, x'_j>: queries float [n, d], quantised vectors of shape [m, d], result float32 [n, m]."""
        y = np.asarray(y, np.float32)
        return self.high.inner(y[..., self.channels], q.outliers) + self.low.inner(y[..., self.rest], q.rest)

    def bits_per_value(self, norm_bits: int = 0) -> float:
        """Bits per value; each of the two groups keeps a factor of `norm_bits`."""
        k = len(self.channels)
        return (k * self.high.bits + (self.d - k) * self.low.bits + 2 * norm_bits) / self.d
