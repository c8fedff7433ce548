"""What a cache type is expected to cost: squared error of an attention logit, from the transform alone.

Lloyd-Max codes of b bits leave D_b of a unit variance. In calibrated coordinates the error of coordinate i costs lam_i; scaling by
lam^1/4 before the mixing makes equal bits optimal: D_b (sum sqrt(lam))^2 / d. Without calibration the error spreads evenly over
the head: D_b E|k|^2 / d E|q|^2.
"""
from __future__ import annotations

from functools import lru_cache

import numpy as np

from pykvq.calibration.transform import Transform
from pykvq.codecs.lloyd_max import lloyd_max, mse_of_levels
from pykvq.formats import TIERED

TIERS = tuple((16 // tier.part, tier.bits) for tier in TIERED["oscar2"].tiers)   # sixteenths of the head and bits, most important first


@lru_cache(None)
def mse(bits: int) -> float:
    """D_b for a Gaussian coordinate."""
    c = lloyd_max(bits)
    return mse_of_levels(c, (c[1:] + c[:-1]) / 2)


def uniform_loss(lam: np.ndarray, bits: int) -> np.ndarray:
    """Squared logit error of calibrated keys with equal bits; lam [..., d] to [...]."""
    return mse(bits) * np.sqrt(lam).sum(-1) ** 2 / lam.shape[-1]


def tiered_loss(lam: np.ndarray, tiers: tuple[tuple[int, int], ...] = TIERS) -> np.ndarray:
    """The same with bits by importance; lam [..., d], descending, to [...]."""
    out, start = np.zeros(lam.shape[:-1]), 0
    for sixteenths, bits in tiers:
        stop = start + lam.shape[-1] * sixteenths // 16
        out += uniform_loss(lam[..., start:stop], bits)
        start = stop
    return out


def plain_loss(t: Transform, bits: int) -> np.ndarray:
    """Squared logit error of keys rotated without calibration, per head; [h]."""
    inverse = np.linalg.inv(t.basis)
    keys = (t.basis ** 2).sum((1, 2)) + (t.mean ** 2).sum(1)                       # E|k|^2
    queries = np.einsum("hij,hj,hij->h", inverse, t.lam, inverse)                 # E|q|^2: q second moment is F diag(lam) F^T
    return mse(bits) * keys * queries / t.lam.shape[1]


def met_loss(t: Transform, mean: np.ndarray, cov: np.ndarray, second: np.ndarray, bits: int) -> np.ndarray:
    """uniform_loss of calibrated keys when other text is met; [h].

    mean [h, d], cov [h, d, d] of its keys, second [h, d, d] of its queries. Equal to uniform_loss(t.lam, bits) for the calibration
    text itself, but for the ridge.
    """
    w = t.lam ** .25
    into, back = np.linalg.inv(t.basis) * w[:, None, :], t.basis / w[:, :, None]
    off = mean - t.mean
    stored = np.einsum("hji,hjk,hki->h", into, cov + off[:, :, None] * off[:, None, :], into) / w.shape[1]
    return mse(bits) * stored * np.einsum("hij,hjk,hik->h", back, second, back)


def summary(t: Transform) -> dict[str, float]:
    """Figures of one layer, averaged over its heads; errors are root mean square, in units of the attention logit."""
    energy = (t.mean ** 2).sum(1)
    lam = t.lam
    rms = lambda x: float(np.sqrt(x.mean()))
    return {"mean_share": float((energy / (energy + (t.basis ** 2).sum((1, 2)))).mean()),
            "effective_dims": float((lam.sum(1) ** 2 / (lam ** 2).sum(1)).mean()),
            "error_turbo3_uncalibrated": rms(plain_loss(t, 3)), "error_turbo4": rms(uniform_loss(lam, 4)),
            "error_turbo3": rms(uniform_loss(lam, 3)), "error_turbo2": rms(uniform_loss(lam, 2)), "error_oscar2": rms(tiered_loss(lam))}
