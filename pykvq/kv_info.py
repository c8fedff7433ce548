"""The cache as it was allocated: effective types and bytes per layer, from libllama itself."""
from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pykvq.support import type_name


def times(ratio: float) -> str:
    """How a size compares with that of an f16 cache, which is `ratio` times as large."""
    if round(ratio, 2) == 1:
        return "1.00x"
    return f"{ratio:.2f}x smaller" if ratio > 1 else f"{1 / ratio:.2f}x larger"


@dataclass(frozen=True)
class LayerCache:
    """One cached layer. Types are the effective ones (turbo3_64); bytes cover all streams; bytes_f16 is what f16 would take."""
    layer: int
    type_k: str
    type_v: str
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int                  # 0: MLA, V is a view of K
    swa: bool
    cells: int
    bytes_k: int
    bytes_v: int
    bytes_f16: int
    device: str
    transform: int = 0               # hash of what keys go through before they are stored, 0: nothing
    calibrated: bool = False         # by the model's own data
    n_window: int = 0                # rows of the f16 window, of one stream; 0: none
    bytes_window: int = 0            # its K and V, all streams
    key_bias: str = "none"           # of the model: "none", "kept" in the keys, or "left out" and returned to the logit
    bias_pairs: int = 0              # pairs of RoPE's frequencies of which it is left out
    sink: int = 0                    # first and last tokens of a sequence that the f16 window holds
    recent: int = 0


@dataclass(frozen=True)
class CacheInfo:
    """All layers of a context's cache; iterates over LayerCache."""
    layers: tuple[LayerCache, ...]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> LayerCache:
        return self.layers[index]

    @property
    def types(self) -> dict[tuple[str, str], int]:
        """Number of layers per effective (K, V) pair."""
        return dict(Counter((layer.type_k, layer.type_v) for layer in self.layers))

    @property
    def bytes(self) -> int:
        """Bytes of K and V in all layers, f16 windows included."""
        return sum(layer.bytes_k + layer.bytes_v + layer.bytes_window for layer in self.layers)

    @property
    def bytes_window(self) -> int:
        """Bytes of the f16 windows alone."""
        return sum(layer.bytes_window for layer in self.layers)

    @property
    def bytes_f16(self) -> int:
        """Bytes that the same cache would take as f16."""
        return sum(layer.bytes_f16 for layer in self.layers)

    @property
    def ratio(self) -> float:
        """How many times smaller than f16."""
        return self.bytes_f16 / self.bytes if self.bytes else 1.0

    @property
    def calibrated(self) -> int:
        """Number of calibrated layers."""
        return sum(layer.calibrated for layer in self.layers)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} x K {k} V {v}" for (k, v), n in self.types.items())
        calibrated = f"; {self.calibrated} layers calibrated" if self.calibrated else ""
        window = f", {self.bytes_window / 2**20:.1f} MiB of it f16 windows" if self.bytes_window else ""
        return (f"KV cache {self.bytes / 2**20:.1f} MiB{window}, f16 {self.bytes_f16 / 2**20:.1f} MiB ({times(self.ratio)}); "
                f"{kinds or 'no layers'}{calibrated}")


class _LayerInfo(ctypes.Structure):                  # struct llama_kvq_layer_info of ggml_kernels/include/kvq-llama.h
    _fields_ = [("il", ctypes.c_int32), ("type_k", ctypes.c_int32), ("type_v", ctypes.c_int32), ("n_head_kv", ctypes.c_int32),
                ("head_dim_k", ctypes.c_int32), ("head_dim_v", ctypes.c_int32), ("is_swa", ctypes.c_int32), ("n_cells", ctypes.c_uint32),
                ("bytes_k", ctypes.c_uint64), ("bytes_v", ctypes.c_uint64), ("bytes_f16", ctypes.c_uint64), ("device", ctypes.c_char * 32),
                ("transform", ctypes.c_uint32), ("calibrated", ctypes.c_int32), ("key_bias", ctypes.c_int32),
                ("bias_pairs", ctypes.c_int32), ("n_window", ctypes.c_uint32), ("bytes_window", ctypes.c_uint64), ("n_sink", ctypes.c_uint32),
                ("n_recent", ctypes.c_uint32)]

_KEY_BIAS = ("none", "kept", "left out")


def cache_info(libllama: ctypes.CDLL, context: int) -> CacheInfo:
    """The cache of a llama_context (its address). A context without attention layers has no layers."""
    f = libllama.llama_kvq_cache_info
    f.argtypes, f.restype = [ctypes.c_void_p, ctypes.POINTER(_LayerInfo), ctypes.c_int32], ctypes.c_int32
    n = f(context, None, 0)
    rows = (_LayerInfo * n)()
    f(context, rows, n)
    return CacheInfo(tuple(
        LayerCache(r.il, type_name(r.type_k), type_name(r.type_v), r.n_head_kv, r.head_dim_k, r.head_dim_v, bool(r.is_swa), r.n_cells,
                   r.bytes_k, r.bytes_v, r.bytes_f16, r.device.decode(), r.transform, bool(r.calibrated),
                   r.n_window, r.bytes_window, _KEY_BIAS[r.key_bias], r.bias_pairs, r.n_sink, r.n_recent) for r in rows))


@dataclass(frozen=True)
class BufferMemory:
    """What a context holds in one buffer type such as CPU or CUDA0, in bytes; `context` are caches and recurrent states."""
    device: str
    host: bool
    weights: int
    context: int
    compute: int


class _Memory(ctypes.Structure):                     # struct llama_kvq_memory of ggml_kernels/include/kvq-llama.h
    _fields_ = [("device", ctypes.c_char * 32), ("host", ctypes.c_int32), ("weights", ctypes.c_uint64), ("context", ctypes.c_uint64),
                ("compute", ctypes.c_uint64)]


def memory_info(libllama: ctypes.CDLL, context: int) -> tuple[BufferMemory, ...]:
    """The memory of a llama_context (its address)."""
    f = libllama.llama_kvq_memory_info
    f.argtypes, f.restype = [ctypes.c_void_p, ctypes.POINTER(_Memory), ctypes.c_int32], ctypes.c_int32
    rows = (_Memory * f(context, None, 0))()
    f(context, rows, len(rows))
    return tuple(BufferMemory(r.device.decode(), bool(r.host), r.weights, r.context, r.compute) for r in rows)
