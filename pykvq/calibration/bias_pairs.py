"""Which frequency pairs of a key bias the cache leaves out of the keys and returns to the logit: those that carry it.

What is returned is exact but costs time, pair by pair; what stays in the keys costs bits, which the predicted error of a logit tells.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pykvq.calibration.loss import uniform_loss
from pykvq.calibration.moments import LayerSums
from pykvq.calibration.rope import Rope
from pykvq.calibration.transform import layer_transform

MAX_PAIRS = 128                          # KVQ_BIAS_PAIRS_MAX of ggml_kernels/include/kvq-bias-pairs.h
STEP = 8                                 # pairs that kernels take together
SHARE = 0.2                              # of the layers' mean squared error that leaving pairs in the keys may add to a layer's


class Biased(NamedTuple):
    """A layer with its bias [h, d] before RoPE."""
    sums: LayerSums
    bias: np.ndarray
    keep_mean: bool


def only(bias: np.ndarray, rope: Rope, pairs: np.ndarray) -> np.ndarray:
    """The bias [h, d] in those pairs, zero elsewhere; what does not turn is zero too."""
    x, y = rope.pairs
    out = np.zeros_like(bias)
    for i in (x[pairs], y[pairs]):
        out[:, i] = bias[:, i]
    return out


def by_energy(layer: Biased) -> np.ndarray:
    """All pairs, those first that add most to the squared logits: |b|^2 E|q|^2 of the pair, over the heads."""
    x, y = layer.sums.rope.pairs
    queries = np.diagonal(layer.sums.qq, axis1=1, axis2=2)
    energy = (layer.bias[:, x] ** 2 + layer.bias[:, y] ** 2) * (queries[:, x] + queries[:, y])
    return np.argsort(-energy.sum(0), kind="stable")


def choose(layers: Mapping[int, Biased]) -> dict[int, np.ndarray]:
    """Pairs of each layer, ascending: the fewest STEPs of them that do nearly as well as all, maybe none.

    Raises ValueError for a layer whose rotation is not known.
    """
    if any(layer.sums.rope is None for layer in layers.values()):
        raise ValueError("the rotation of a layer with a key bias is not understood; calibrate with key_bias none")
    orders = {i: by_energy(layer) for i, layer in layers.items()}
    orders = {i: order[order < MAX_PAIRS] for i, order in orders.items()}

    def error(i: int, n: int) -> float:
        layer = layers[i]
        return float(uniform_loss(layer_transform(layer.sums, only(layer.bias, layer.sums.rope, orders[i][:n]), keep_mean=layer.keep_mean).lam, 3).mean())

    best = {i: error(i, len(order)) for i, order in orders.items()}
    most = SHARE * float(np.mean(list(best.values())))
    return {i: np.sort(order[:next(n for n in (*range(0, len(order), STEP), len(order)) if n == len(order) or error(i, n) - best[i] <= most)])
            for i, order in orders.items()}
