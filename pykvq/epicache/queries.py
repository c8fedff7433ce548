"""Queries of a prompt, caught where attention reads the cache, with what it adds to the logits for a key bias left out of the keys."""
from __future__ import annotations

import ctypes
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pykvq.ggml_tensor import OP_OFFSET, Tensor, op_number, read, root

_CACHE = re.compile(rb"cache_k_l(\d+)")


@dataclass(frozen=True)
class KeyBias:
    """A bias of the keys that the cache lacks; the logit of the token at position j gains z . turn(j).

    z: float32 [tokens, heads, r], made of query and bias; trig: float32 [256 + n, r], see kvq_key_bias in kvq-llama.h.
    """
    z: np.ndarray
    trig: np.ndarray

    def turn(self, positions: np.ndarray) -> np.ndarray:
        """Cosines, then sines, of positions: float32 [positions, r], as ggml_kernels/cpu/kvq-key-bias.h composes them."""
        a, c = self.trig[256 + (positions >> 8)], self.trig[positions & 255]
        half = a.shape[1] // 2
        return np.concatenate([a[:, :half] * c[:, :half] - a[:, half:] * c[:, half:],
                               a[:, half:] * c[:, :half] + a[:, :half] * c[:, half:]], 1)


@dataclass(frozen=True)
class LayerQueries:
    """q: float32 [tokens, heads, d] times the factor that scales the logits, in the space of the stored keys."""
    q: np.ndarray
    bias: KeyBias | None


class QueryCapture:
    """An eval callback that is silent outside of capture()."""

    def __init__(self):
        self._attention = op_number("FLASH_ATTN_EXT")
        self._found: dict[int, list[LayerQueries]] | None = None
        self._error: Exception | None = None
        self._every = 1

    def __call__(self, pointer, ask, _) -> bool:
        if self._found is None or ctypes.c_int.from_address(pointer + OP_OFFSET).value != self._attention:
            return not ask
        if not ask:
            try:
                self._take(ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents)
            except Exception as error:           # noqa: BLE001  cannot pass through llama.cpp
                self._error = self._error or error
                return False
        return True

    @contextmanager
    def capture(self, every: int = 1) -> Iterator[dict[int, LayerQueries]]:
        """Collect the queries of what is decoded inside, of each `every`-th token; the dictionary by layer is filled at the end. Raises what reading
        raised."""
        self._found, self._error, self._every = defaultdict(list), None, every
        out: dict[int, LayerQueries] = {}
        try:
            yield out
        finally:
            found, self._found, error = self._found, None, self._error
            if error is not None:
                raise error
        for layer, parts in found.items():
            biases = [part.bias for part in parts]
            bias = KeyBias(np.concatenate([b.z for b in biases]), biases[0].trig) if biases[0] else None
            out[layer] = LayerQueries(np.concatenate([part.q for part in parts]), bias)

    def _take(self, t: Tensor) -> None:
        cache = _CACHE.fullmatch(root(t.src[1].contents).name)
        if not cache:
            return
        scale, max_bias, soft_cap = struct.unpack("<3f", struct.pack("<3i", *t.op_params[:3]))
        if max_bias or soft_cap:
            raise ValueError("attention with ALiBi or a soft cap is not scored; EpiCache needs plain RoPE attention")
        q = self._rows(t.src[0].contents) * np.float32(scale)
        self._found[int(cache[1])].append(LayerQueries(q, self._bias(t, scale) if t.src[6] else None))

    def _rows(self, t: Tensor) -> np.ndarray:
        """[streams, heads, tokens, d] as [tokens, heads, d], the tokens that count."""
        x = read(t)
        return np.moveaxis(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])[self._every - 1::self._every]

    def _bias(self, t: Tensor, scale: float) -> KeyBias:
        return _bias(t, self._rows(t.src[5].contents) * np.float32(scale))


def _bias(t: Tensor, q: np.ndarray) -> KeyBias:
    trig = read(t.src[7].contents)[0, 0]
    b = read(t.src[6].contents)[0, 0]                        # [heads_kv, d]
    b = np.repeat(b, q.shape[1] // len(b), 0)
    half = trig.shape[1] // 2
    i = np.arange(half)
    x, y = (2 * i, 2 * i + 1) if t.op_params[8] else (i, i + half)
    z = np.concatenate([q[..., x] * b[:, x] + q[..., y] * b[:, y], q[..., y] * b[:, x] - q[..., x] * b[:, y]], -1)
    return KeyBias(z, trig)
