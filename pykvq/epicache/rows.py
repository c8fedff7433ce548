"""Values of rows of any cache type, by ggml's own functions."""
from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np

from pykvq.native import library

_F32 = 0


class _Traits(ctypes.Structure):                     # struct ggml_type_traits
    _fields_ = [("type_name", ctypes.c_char_p), ("blck_size", ctypes.c_int64), ("blck_size_interleave", ctypes.c_int64),
                ("type_size", ctypes.c_size_t), ("is_quantized", ctypes.c_bool),
                ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)), ("from_float_ref", ctypes.c_void_p)]


@lru_cache(None)
def _traits(ggml_type: int) -> _Traits:
    lib = library("ggml-base")
    lib.ggml_get_type_traits.argtypes, lib.ggml_get_type_traits.restype = [ctypes.c_int], ctypes.POINTER(_Traits)
    return lib.ggml_get_type_traits(ggml_type).contents


def values(data: np.ndarray, ggml_type: int) -> np.ndarray:
    """Float32 [..., n] of rows uint8 [..., bytes] as the cache holds them: what attention multiplies the query with."""
    traits = _traits(ggml_type)
    n = data.shape[-1] // traits.type_size * traits.blck_size
    raw = np.ascontiguousarray(data)
    if ggml_type == _F32:
        return raw.view(np.float32).reshape(*data.shape[:-1], n)
    out = np.empty((*data.shape[:-1], n), np.float32)
    if out.size:
        traits.to_float(raw.ctypes.data, out.ctypes.data, out.size)
    return out
