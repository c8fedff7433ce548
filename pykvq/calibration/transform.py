"""From statistics to the transform of one layer: the basis in which keys are stored and what each coordinate costs."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pykvq.calibration.key_bias import key_moments
from pykvq.calibration.moments import LayerSums

RIDGE = 0.01                             # share of the mean eigenvalue that is added to both moments: bounds the transform's condition


class Transform(NamedTuple):
    """One layer. k ~ y B + mean, where y has unit variance per coordinate, and coordinate i then costs lam[i] of squared logit.

    mean [h, d], basis B [h, d, d] (row i: coordinate i), lam [h, d] descending, bias [h, d] or None; float64. pairs: frequency pairs of
    the key bias that the keys were without, ascending; None: all, or there is no bias.
    """
    mean: np.ndarray
    basis: np.ndarray
    lam: np.ndarray
    bias: np.ndarray | None = None
    pairs: np.ndarray | None = None


def key_transform(cov: np.ndarray, second: np.ndarray, ridge: float = RIDGE) -> tuple[np.ndarray, np.ndarray]:
    """B [d, d] and lam [d] of one head, from the covariance S of its stored keys and the second moment Q of its queries.

    Eigenbasis U of S^1/2 Q S^1/2, largest first; B = U^T S^1/2. An error e in stored coordinates of unit variance costs
    sum lam_i e_i^2 of squared logit.
    """
    d = len(cov)
    S = cov + ridge * np.trace(cov) / d * np.eye(d)
    Q = second + ridge * np.trace(second) / d * np.eye(d)
    w, u = np.linalg.eigh(S)
    root = (u * np.sqrt(np.maximum(w, w.max() * 1e-9))) @ u.T
    lam, U = np.linalg.eigh(root @ Q @ root)
    order = lam.argsort()[::-1]
    lam = np.maximum(lam[order], lam.max() * 1e-9)
    return U[:, order].T @ root, lam


def layer_transform(s: LayerSums, bias: np.ndarray | None = None, keep_bias: bool = False, keep_mean: bool = False) -> Transform:
    """The Transform of a layer; `bias` [h, d] is taken from the keys first and, with keep_bias, stored.

    keep_mean: keys are stored with their mean, so their second moment takes the covariance's place. Raises ValueError for no tokens.
    """
    if not s.n or not s.n_q:
        raise ValueError("a layer has seen no tokens; calibrate with at least one chunk")
    mean, cov = key_moments(s, bias)
    if keep_mean:
        mean, cov = np.zeros_like(mean), cov + mean[:, :, None] * mean[:, None, :]
    second = s.qq / s.n_q
    pairs = [key_transform(c, q) for c, q in zip(cov, second)]
    return Transform(mean, np.stack([b for b, _ in pairs]), np.stack([lam for _, lam in pairs]), bias if keep_bias else None)
