"""What enters the KV cache and what reads it, caught in llama.cpp's graph while a chunk is decoded.

Architectures name their tensors as they like and reuse names before and after RoPE and norms. Two operations are the
same in all of them: SET_ROWS into cache_k_l<N> and cache_v_l<N>, and the FLASH_ATTN_EXT whose keys are a view of that
cache. So fused qkv, MoE, GQA, MQA, sliding windows, hybrid layers and layers that reuse the cache of another one need no case.
"""
from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pykvq.calibration.rope import Rope, rope_of
from pykvq.ggml_tensor import OP_OFFSET, Tensor, op_number, read, root

_CACHE = re.compile(rb"cache_([kv])_l(\d+)")


class Keys(NamedTuple):
    """Vectors that one layer wrote into its cache: k [tokens, heads_kv, d], v [tokens, heads_kv, d_v]; float32."""
    layer: int
    k: np.ndarray
    v: np.ndarray
    rope: Rope | None                    # the rotation that k went through last, None when there was none


class Queries(NamedTuple):
    """Queries that read the cache of `layer`: q [tokens, heads, d] float32, times the factor that scales the logits."""
    layer: int
    q: np.ndarray


class Observer:
    """An eval callback that hands every Keys and Queries to `sink`, layer by layer.

    An exception of the sink cannot pass through llama.cpp: the first one is kept, the chunk is broken off, and check() raises it.
    """

    def __init__(self, sink: Callable[[Keys | Queries], None]):
        self.sink, self.error = sink, None
        self._rows: dict[tuple[str, int], np.ndarray] = {}
        self._rope: dict[int, Rope | None] = {}
        self._set_rows, self._attention, self._turn = op_number("SET_ROWS"), op_number("FLASH_ATTN_EXT"), op_number("ROPE")

    def __call__(self, pointer, ask, _) -> bool:
        op = ctypes.c_int.from_address(pointer + OP_OFFSET).value
        if ask:
            # asking for ROPE too keeps backends from fusing it with the cache write, which would leave no keys to read
            return op in (self._set_rows, self._attention, self._turn)
        if op == self._turn or self.error:
            return self.error is None
        try:
            self._take(ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents, op)
        except Exception as error:       # noqa: BLE001  whatever the sink raises
            self.stop(error)
        return self.error is None

    def stop(self, error: BaseException) -> None:
        """Break off the running chunk at its next observed node; check() will raise `error`."""
        self.error = self.error or error

    def check(self) -> None:
        """Raise what went wrong inside the last chunk; forget it."""
        error, self.error = self.error, None
        self._rows.clear()
        if error is not None:
            raise error

    def _take(self, t: Tensor, op: int) -> None:
        if op == self._set_rows:
            cache = _CACHE.fullmatch(root(t).name)
            if cache:
                kind, layer = cache[1].decode(), int(cache[2])
                source = t.src[0].contents
                self._rows[kind, layer] = read(source).reshape(-1, source.ne[0])
                if kind == "k" and layer not in self._rope:
                    self._rope[layer] = rope_of(source)
            return
        cache = _CACHE.fullmatch(root(t.src[1].contents).name)
        if not cache:
            return
        layer = int(cache[2])
        scale = struct.unpack("<f", struct.pack("<i", t.op_params[0]))[0]
        if ("k", layer) in self._rows:
            k, v = self._rows.pop(("k", layer)), self._rows.pop(("v", layer), None)
            if v is None:
                raise ValueError(f"layer {layer} caches no values of its own (MLA); such models are not calibrated")
            heads = t.src[1].contents.ne[2]
            self.sink(Keys(layer, k.reshape(len(k), heads, -1), v.reshape(len(v), heads, -1), self._rope[layer]))
        q = read(t.src[0].contents)      # [streams, heads, tokens, d]
        self.sink(Queries(layer, np.moveaxis(q, 1, 2).reshape(-1, q.shape[1], q.shape[3]) * np.float32(scale)))
