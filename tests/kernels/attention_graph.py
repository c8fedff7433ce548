"""Runs one attention operation of ggml's CPU backend through ctypes, and the same in numpy double precision."""
import ctypes
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass

import numpy as np

from pykvq.ggml_tensor import Tensor
from pykvq.native import library

F32, F16, Q4_0, Q8_0, I32 = 0, 1, 2, 8, 26
GROUP_OF_FLOAT_TYPES = {F32: np.float32, F16: np.float16}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Plan(ctypes.Structure):
    _fields_ = [("work_size", c_size_t), ("work_data", c_void_p), ("n_threads", c_int), ("threadpool", c_void_p),
                ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("use_ref", c_bool)]


class CpuTraits(ctypes.Structure):
    _fields_ = [("from_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
                ("vec_dot", ctypes.CFUNCTYPE(None, c_int, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_size_t, c_int)),
                ("vec_dot_type", c_int), ("nrows", c_int64)]


class Traits(ctypes.Structure):
    _fields_ = [("type_name", c_char_p), ("blck_size", c_int64), ("blck_size_interleave", c_int64), ("type_size", c_size_t),
                ("is_quantized", c_bool), ("to_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
                ("from_float_ref", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64))]


def _declare(lib, name, result, *arguments):
    f = getattr(lib, name)
    f.restype, f.argtypes = result, arguments
    return f


class Ggml:
    """The functions of ggml-base and ggml-cpu that the tests call."""

    def __init__(self):
        base, cpu = library("ggml-base"), library("ggml-cpu")
        tensor = c_void_p
        self.init = _declare(base, "ggml_init", c_void_p, InitParams)
        self.free = _declare(base, "ggml_free", None, c_void_p)
        self.new_tensor = _declare(base, "ggml_new_tensor_4d", tensor, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64)
        self.permute = _declare(base, "ggml_permute", tensor, c_void_p, tensor, c_int, c_int, c_int, c_int)
        self.attention = _declare(base, "ggml_flash_attn_ext", tensor, c_void_p, tensor, tensor, tensor, tensor, c_float, c_float, c_float)
        self.add_sinks = _declare(base, "ggml_flash_attn_ext_add_sinks", None, tensor, tensor)
        self.data = _declare(base, "ggml_get_data", c_void_p, tensor)
        self.new_graph = _declare(base, "ggml_new_graph", c_void_p, c_void_p)
        self.expand = _declare(base, "ggml_build_forward_expand", None, c_void_p, tensor)
        self.row_size = _declare(base, "ggml_row_size", c_size_t, c_int, c_int64)
        self.traits = _declare(base, "ggml_get_type_traits", ctypes.POINTER(Traits), c_int)
        self.cpu_traits = _declare(cpu, "ggml_get_type_traits_cpu", ctypes.POINTER(CpuTraits), c_int)
        self.window_type = _declare(base, "kvq_window_type", c_int, c_int)
        self.plan = _declare(cpu, "ggml_graph_plan", Plan, c_void_p, c_int, c_void_p)
        self.compute = _declare(cpu, "ggml_graph_compute", c_int, c_void_p, ctypes.POINTER(Plan))
        _declare(cpu, "ggml_cpu_init", None)()

    def quantise(self, ggml_type, x):
        """Rows x, float32 [..., k], to uint8 [..., row bytes], by the CPU backend's own kernel."""
        if ggml_type in GROUP_OF_FLOAT_TYPES:
            return x.astype(GROUP_OF_FLOAT_TYPES[ggml_type]).view(np.uint8)
        x = np.ascontiguousarray(x)
        out = np.empty((*x.shape[:-1], self.row_size(ggml_type, x.shape[-1])), np.uint8)
        quantise = self.cpu_traits(ggml_type).contents.from_float
        for i in np.ndindex(x.shape[:-1]):
            quantise(x[i].ctypes.data, out[i].ctypes.data, x.shape[-1])
        return out

    def dequantise(self, ggml_type, data, k):
        """The float32 values of rows of bytes, by the scalar reference."""
        if ggml_type in GROUP_OF_FLOAT_TYPES:
            return data.view(GROUP_OF_FLOAT_TYPES[ggml_type]).astype(np.float32)
        out = np.empty((*data.shape[:-1], k), np.float32)
        dequantise = self.traits(ggml_type).contents.to_float
        for i in np.ndindex(data.shape[:-1]):
            dequantise(data[i].ctypes.data, out[i].ctypes.data, k)
        return out

    def run_attention(self, q, k, v, k_type, v_type, mask=None, sinks=None, max_bias=0.0, softcap=0.0, key_bias=None, window=None, threads=1, use_ref=False):
        """q [tokens, heads, dk] float32; k, v uint8 [kv heads, n_kv, row bytes]; mask [tokens, n_kv]; a KeyBias over all rows; a Window.

        Gives [tokens, heads, dv]."""
        tokens, heads, dk = q.shape
        kv_heads, n_kv = k.shape[:2]
        dv = v.shape[2]*self.traits(v_type).contents.blck_size//self.traits(v_type).contents.type_size
        n_ring = 0 if window is None else window.k.shape[1]
        size = (3 << 20) + 2*(4*kv_heads*n_ring*(dk + dv) + 2*tokens*n_ring) + 2*(2*q.nbytes + k.nbytes + v.nbytes + tokens*n_kv*2 + tokens*heads*dv*4)
        ctx = self.init(InitParams(size, None, False))
        try:
            def tensor(ggml_type, shape, array):
                t = self.new_tensor(ctx, ggml_type, *shape)
                array = np.ascontiguousarray(array)
                ctypes.memmove(self.data(t), array.ctypes.data, array.nbytes)
                return t
            tq = self.permute(ctx, tensor(F32, (dk, heads, tokens, 1), q), 0, 2, 1, 3)
            tk = tensor(k_type, (dk, n_kv, kv_heads, 1), k)
            tv = tensor(v_type, (dv, n_kv, kv_heads, 1), v)
            tm = None if mask is None else tensor(F16, (n_kv, tokens, 1, 1), mask.astype(np.float16))
            out = self.attention(ctx, tq, tk, tv, tm, dk**-0.5, max_bias, softcap)
            if sinks is not None:
                self.add_sinks(out, tensor(F32, (heads, 1, 1, 1), sinks.astype(np.float32)))
            if key_bias is not None:
                node = ctypes.cast(out, ctypes.POINTER(Tensor)).contents
                table, position = key_bias.table(), key_bias.position.astype(np.int32)
                sources = (self.permute(ctx, tensor(F32, (dk, heads, tokens, 1), key_bias.q), 0, 2, 1, 3),
                           tensor(F32, (dk, kv_heads, 1, 1), key_bias.b), tensor(F32, (table.shape[1], len(table), 1, 1), table),
                           tensor(I32, (n_kv + n_ring, 1, 1, 1), position))
                for i, source in enumerate(sources, 5):
                    node.src[i] = ctypes.cast(source, ctypes.POINTER(Tensor))
                node.op_params[8] = key_bias.interleaved
                node.op_params[9:13] = key_bias.pair_bits()
            if window is not None:
                node = ctypes.cast(out, ctypes.POINTER(Tensor)).contents
                sources = (tensor(self.window_type(k_type), (dk, n_ring, kv_heads, 1), window.k),
                           tensor(self.window_type(v_type), (dv, n_ring, kv_heads, 1), window.v),
                           tensor(F16, (n_ring, tokens, 1, 1), window.mask.astype(np.float16)))
                for i, source in enumerate(sources, 9):
                    node.src[i] = ctypes.cast(source, ctypes.POINTER(Tensor))
            graph = self.new_graph(ctx)
            self.expand(graph, out)
            plan = self.plan(graph, threads, None)
            work = np.full(plan.work_size + 64, 0xFF, np.uint8)
            plan.work_data, plan.use_ref = work.ctypes.data, use_ref
            assert self.compute(graph, ctypes.byref(plan)) == 0
            assert (work[plan.work_size:] == 0xFF).all(), "attention wrote past its work buffer"
            result = np.empty((tokens, heads, dv), np.float32)
            ctypes.memmove(result.ctypes.data, self.data(out), result.nbytes)
            return result
        finally:
            self.free(ctx)


@dataclass
class Window:
    """f16 copies of some tokens: k, v uint8 [kv heads, n_ring, row bytes] of the window's types; mask [tokens, n_ring]."""
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray


@dataclass
class KeyBias:
    """A bias b [kv heads, d] that stored keys lack, met by queries q [tokens, heads, d]; n_rot values of a head turn with the position."""
    q: np.ndarray
    b: np.ndarray
    position: np.ndarray
    n_rot: int
    interleaved: bool = False
    steps: int = 64
    pairs: np.ndarray | None = None      # that carry it, ascending; None: all. What b holds for the others is not read

    def pair_bits(self):
        """Four int32, a bit a pair."""
        bits = np.zeros(128, bool)
        bits[np.arange(self.n_rot//2) if self.pairs is None else self.pairs] = True
        return np.packbits(bits, bitorder="little").view(np.int32).tolist()

    def angles(self, position):
        return np.multiply.outer(position, 10000.0**(-np.arange(self.n_rot//2)/(self.n_rot//2)))

    def table(self):
        """Cosines and sines of positions 0..255 and of the multiples of 256; float32 [256 + steps, n_rot]."""
        a = self.angles(np.concatenate([np.arange(256), 256*np.arange(self.steps)]))
        return np.concatenate([np.cos(a), np.sin(a)], axis=1).astype(np.float32)

    def turned(self):
        """R(j) b of every token, without the values that do not turn; float64 [kv heads, n_kv, d]."""
        i = np.arange(self.n_rot//2) if self.pairs is None else self.pairs
        x, y = (2*i, 2*i + 1) if self.interleaved else (i, i + self.n_rot//2)
        a, b = self.angles(self.position)[:, i], self.b.astype(np.float64)[:, None, :]
        out = np.zeros((len(self.b), len(self.position), self.b.shape[1]))
        out[..., x] = b[..., x]*np.cos(a) - b[..., y]*np.sin(a)
        out[..., y] = b[..., x]*np.sin(a) + b[..., y]*np.cos(a)
        return out


def attention_in_double(q, k, v, mask=None, sinks=None, max_bias=0.0, softcap=0.0, key_bias=None, query16=None):
    """q [tokens, heads, dk]; k [kv heads, n_kv, dk]; v [kv heads, n_kv, dv]; mask [tokens, n_kv]; sinks [heads].

    query16: (q', n), another query that meets the rows from n on, those of an f16 window."""
    heads = q.shape[1]
    group = heads//k.shape[0]
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (k, v))
    logit = np.einsum("thd,hkd->thk", q.astype(np.float64), k)
    if query16 is not None:
        other, first = query16
        logit[..., first:] = np.einsum("thd,hkd->thk", other.astype(np.float64), k[:, first:])
    if key_bias is not None:
        logit += np.einsum("thd,hkd->thk", key_bias.q.astype(np.float64), np.repeat(key_bias.turned(), group, axis=0))
    logit *= q.shape[2]**-0.5
    if softcap:
        logit = softcap*np.tanh(logit/softcap)
    if mask is not None:
        power = 2**int(np.log2(heads))
        slope = [1.0 if not max_bias else 2.0**(-max_bias/power*(h + 1)) if h < power else 2.0**(-max_bias/2/power*(2*(h - power) + 1))
                 for h in range(heads)]
        logit = logit + np.asarray(slope)[:, None]*mask.astype(np.float16).astype(np.float64)[:, None, :]
    top = logit.max(axis=2, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[None, :, None])
    weight = np.exp(logit - np.where(np.isinf(top), 0.0, top))
    total = weight.sum(axis=2)
    if sinks is not None:
        total = total + np.exp(sinks[None, :] - top[:, :, 0])
    return np.einsum("thk,hkd->thd", weight, v)/np.where(total == 0.0, 1.0, total)[:, :, None]
