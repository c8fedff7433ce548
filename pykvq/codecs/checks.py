"""What every codec asks of its input."""
from __future__ import annotations

import operator

import numpy as np


def vectors(x: np.ndarray, d: int) -> np.ndarray:
    """Real numbers of any dtype and memory order, [..., d], as finite float32 [..., d]; a view where nothing had to change.

    Raises ValueError for another last dimension, complex numbers, NaN, infinity or values beyond float32.
    """
    if np.iscomplexobj(x):
        raise ValueError("vectors must be real")
    with np.errstate(over="ignore"):                     # told below
        x = np.asarray(x, np.float32)
    if x.ndim == 0 or x.shape[-1] != d:
        raise ValueError(f"vectors must have {d} values, not shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("vectors must be finite, within the range of float32")
    return x


def integer(name: str, value: int, low: int, high: int) -> int:
    """value as int. Raises ValueError unless it is an integer in low..high."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be {low}..{high}, not {number}")
    return number
