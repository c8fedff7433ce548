"""Read tensors inside an eval callback: ggml's struct through ctypes, data from the host or from a device."""
from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np

from pykvq.native import library


class Tensor(ctypes.Structure):
    """struct ggml_tensor of the pinned llama.cpp."""


Tensor._fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
                   ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
                   ("src", ctypes.POINTER(Tensor) * 12), ("view_src", ctypes.POINTER(Tensor)), ("view_offs", ctypes.c_size_t),
                   ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64)]

OP_OFFSET = Tensor.op.offset            # a callback sees every node: reading one integer is cheaper than a struct
_F32, _F16, _I32 = 0, 1, 26             # enum ggml_type
_DTYPES = {_F32: np.float32, _F16: np.float16, _I32: np.int32}


@lru_cache(None)
def op_number(name: str) -> int:
    """enum ggml_op of "ROPE", "SET_ROWS", ... Raises ValueError for a name that this ggml does not know."""
    lib = library("ggml-base")
    lib.ggml_op_name.argtypes, lib.ggml_op_name.restype = [ctypes.c_int], ctypes.c_char_p
    for op in range(1 << 16):
        found = lib.ggml_op_name(op)
        if found == name.encode():
            return op
        if found == b"GLU":                  # the last one: ggml does not check the bound
            break
    raise ValueError(f"ggml has no operation {name}")


def root(t: Tensor) -> Tensor:
    """The tensor whose memory a view shows; the tensor itself when it is no view."""
    return t.view_src.contents if t.view_src else t


def read(t: Tensor) -> np.ndarray:
    """A copy of the data, shape ne reversed; float32, float16 or int32. Raises TypeError for another ggml type.

    Only the bytes between the first and the last element are fetched, so strided views of a fused tensor work.
    """
    if t.type not in _DTYPES:
        raise TypeError(f"tensor {t.name.decode()} has ggml type {t.type}, no plain numbers")
    dtype, ne, nb = np.dtype(_DTYPES[t.type]), tuple(t.ne), tuple(t.nb)
    size = sum((n - 1) * stride for n, stride in zip(ne, nb)) + dtype.itemsize
    lib = _backend()
    if lib.ggml_backend_buffer_is_host(root(t).buffer):
        raw = np.ctypeslib.as_array(ctypes.cast(t.data, ctypes.POINTER(ctypes.c_uint8)), shape=(size,))
    else:
        raw = np.empty(size, np.uint8)
        lib.ggml_backend_tensor_get(ctypes.byref(t), raw.ctypes.data, 0, size)
    return np.array(np.ndarray(ne[::-1], dtype, raw, strides=nb[::-1]))


@lru_cache(None)
def _backend() -> ctypes.CDLL:
    lib = library("ggml-base")
    lib.ggml_backend_buffer_is_host.argtypes, lib.ggml_backend_buffer_is_host.restype = [ctypes.c_void_p], ctypes.c_bool
    lib.ggml_backend_tensor_get.argtypes = [ctypes.POINTER(Tensor), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    lib.ggml_backend_tensor_get.restype = None
    return lib
