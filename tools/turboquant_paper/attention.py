"""MSE against Prod inside attention: real keys and queries of a model, and the model's own next-token distribution.

The eval callback of llama.cpp sees the keys after RoPE. A codec's reconstruction written back there gives the logits that the
codec would give as a cache type; for Prod this is exact too, since its estimate is linear in the query. Values stay as they are.
"""
from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Callable

import numpy as np

from pykvq.codecs import MixedTurboQuant, TurboQuantMSE, TurboQuantProd, outlier_channels, turbo
from pykvq.native import library
from pykvq.support import effective_type

Codec = Callable[[np.ndarray], np.ndarray]               # float32 [tokens, heads, d] to the same
SINKS = 4                                                # the first tokens, whose keys are unlike all others
STRIDE = 4                                               # of the queries whose attention weights are compared
SKIP, SPACING = 40_000, 250_000                          # characters before the first chunk of text, and between two


class Probe:
    """A model in llama.cpp with access to its rotated keys and queries; one context of n tokens, greedy about nothing."""

    def __init__(self, path: Path, n: int, threads: int):
        import llama_cpp.llama_cpp as bindings
        self.api, self.n, self.codec, self.seen = bindings, n, None, None
        self.ggml = library("ggml-base")
        for name, result, arguments in (("ggml_get_name", ctypes.c_char_p, 1), ("ggml_op_desc", ctypes.c_char_p, 1), ("ggml_nelements", ctypes.c_int64, 1)):
            getattr(self.ggml, name).restype, getattr(self.ggml, name).argtypes = result, [ctypes.c_void_p] * arguments
        for name in ("ggml_backend_tensor_get", "ggml_backend_tensor_set"):
            getattr(self.ggml, name).restype = None
            getattr(self.ggml, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self.quiet = bindings.llama_log_callback(lambda *_: None)      # must outlive the library's use of it
        bindings.llama_log_set(self.quiet, None)
        bindings.llama_backend_init()
        self.callback = bindings.ggml_backend_sched_eval_callback(self._on_tensor)
        self.model = bindings.llama_model_load_from_file(str(path).encode(), bindings.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path} cannot be loaded")
        self.heads = {b"Qcur": bindings.llama_model_n_head(self.model), b"Kcur": bindings.llama_model_n_head_kv(self.model)}
        p = bindings.llama_context_default_params()
        p.n_ctx = p.n_batch = p.n_ubatch = n
        p.n_threads = p.n_threads_batch = threads
        p.cb_eval, p.flash_attn_type = self.callback, 1
        self.context = bindings.llama_init_from_model(self.model, p)
        self.vocabulary = bindings.llama_model_get_vocab(self.model)

    def _on_tensor(self, tensor, ask, _):
        kind, _, layer = self.ggml.ggml_get_name(tensor).partition(b"-")
        wanted = kind in self.heads and self.ggml.ggml_op_desc(tensor) == b"ROPE" and (kind == b"Kcur" or self.seen is not None)
        if ask or not wanted:
            return wanted if ask else True
        x = np.empty((self.n, self.heads[kind], self.ggml.ggml_nelements(tensor) // (self.n * self.heads[kind])), np.float32)
        self.ggml.ggml_backend_tensor_get(tensor, x.ctypes.data, 0, x.nbytes)
        if self.seen is not None:
            self.seen.setdefault(int(layer), {})[kind[:1].decode()] = x
        if self.codec is not None and kind == b"Kcur":
            y = np.ascontiguousarray(self.codec(x), np.float32)
            self.ggml.ggml_backend_tensor_set(tensor, y.ctypes.data, 0, y.nbytes)
        return True

    def tokens(self, text: str) -> list[int]:
        raw = text.encode()
        out = (self.api.llama_token * (len(raw) + 8))()
        return list(out[:self.api.llama_tokenize(self.vocabulary, raw, len(raw), out, len(out), True, False)])

    def log_probs(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities of the token after each of the second half of n tokens, float32 [n - n // 2, vocabulary]."""
        a, n = self.api, self.n
        a.llama_memory_clear(a.llama_get_memory(self.context), True)
        batch = a.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, t in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = t, i, 1, 0, i >= n // 2
        if a.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        a.llama_batch_free(batch)
        size = a.llama_vocab_n_tokens(self.vocabulary)
        x = np.ctypeslib.as_array(a.llama_get_logits(self.context), shape=(n - n // 2, size)).copy()
        x -= x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    def keys_and_queries(self, tokens: list[int]) -> dict[int, dict[str, np.ndarray]]:
        """For each layer {"K": [n, KV heads, d], "Q": [n, heads, d]}, after RoPE, float32."""
        self.seen = {}
        self.log_probs(tokens)
        seen, self.seen = self.seen, None
        return seen

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def through(codec) -> Codec:
    return lambda x: codec.dequantise(codec.quantise(x))


def mixed(d: int, high: int, low: int, seed: int) -> Codec:
    """Half of the channels of each head, chosen on the very keys, at `high` bits."""
    def f(x: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        for h in range(x.shape[1]):
            out[:, h] = through(MixedTurboQuant(d, outlier_channels(x[:, h], d // 2), high, low, seed=seed))(x[:, h])
        return out
    return f


def cache_type(family: str, d: int) -> Codec:
    name = effective_type(family, d)
    return lambda x: turbo.dequantise(turbo.quantise(x, name), name)


def centred(codec: Codec) -> Codec:
    """The codec on keys less their mean per head, which softmax does not see: what a calibrated cache does about key bias."""
    def f(x: np.ndarray) -> np.ndarray:
        mean = x[SINKS:].mean(0)
        return codec(x - mean) + mean
    return f


def codecs(d: int, bits: int, seed: int) -> dict[str, Codec]:
    return {"MSE": through(TurboQuantMSE(d, bits, seed=seed)), "Prod": through(TurboQuantProd(d, bits, seed=seed)),
            "cache type": cache_type(f"turbo{bits}", d)}


def head_errors(layers: dict[int, dict[str, np.ndarray]], codec: Codec) -> dict[str, float]:
    """Means over layers, heads and every fourth query of the second half: relative key error, rms logit error, KL of the attention weights."""
    totals = []
    for x in layers.values():
        k, q = x["K"], x["Q"]
        n, group, d = len(k), q.shape[1] // k.shape[1], k.shape[-1]
        new = codec(k)
        rows = slice(n // 2, None, STRIDE)
        mask = np.tril(np.ones((n, n), bool))[rows]
        for h in range(q.shape[1]):
            a, b = ((q[rows, h] @ keys[:, h // group].T) / np.sqrt(d) for keys in (k, new))
            error = (a - b)[mask]
            p, r = (log_softmax(np.where(mask, v, -np.inf)) for v in (a, b))
            kl = np.where(mask, np.exp(p) * (p - r), 0).sum(1).mean()
            head = h // group
            totals.append((np.square(new[:, head] - k[:, head]).sum() / np.square(k[:, head]).sum(), np.square(error).mean(), kl))
    key, logit, kl = np.mean(totals, axis=0)
    return {"key_error": key, "logit_rms": np.sqrt(logit), "attention_kl": kl}


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return np.where(np.isfinite(y), y, 0)


def measure(path: Path, text: str, n: int, chunks: int, threads: int, bits: tuple[int, ...] = (2, 3, 4)) -> dict:
    """Every codec on `chunks` pieces of n tokens of `text`, each with rotations of its own; every figure is a list, one of each piece."""
    probe = Probe(path, n, threads)
    head, model = {}, {}
    for chunk in range(chunks):
        at = SKIP + SPACING * chunk
        tokens = probe.tokens(text[at:at + 12 * n])[:n]
        if len(tokens) < n:
            raise SystemExit(f"the text ends before chunk {chunk + 1} of {n} tokens")
        layers = probe.keys_and_queries(tokens)
        d = layers[0]["K"].shape[-1]
        base = probe.log_probs(tokens)
        for b in bits:
            for name, codec in codecs(d, b, chunk).items():
                for keys, f in (("raw", codec),) if name == "cache type" else (("raw", codec), ("centred", centred(codec))):
                    add(head, (name, b, keys), head_errors(layers, f))
                    probe.codec = f
                    add(model, (name, b, keys), compare(base, probe.log_probs(tokens)))
                    probe.codec = None
        for high, low in ((3, 2), (4, 3)):
            f = mixed(d, high, low, chunk)
            for keys, f in (("raw", f), ("centred", centred(f))):
                add(head, ("mixed", (high + low) / 2, keys), head_errors(layers, f))
    probe.close()
    rows = lambda found: [dict(zip(("codec", "bits", "keys"), key)) | values for key, values in found.items()]
    return {"model": path.stem, "d": d, "layers": len(layers), "tokens": n, "chunks": chunks, "head": rows(head), "next_token": rows(model)}


def compare(base: np.ndarray, new: np.ndarray) -> dict[str, float]:
    """Mean KL divergence of log-probabilities [n, vocabulary] against base, and the share of equal most likely tokens."""
    return {"kl": (np.exp(base) * (base - new)).sum(1).mean(), "same_top": (base.argmax(1) == new.argmax(1)).mean()}


def add(rows: dict[tuple, dict[str, list[float]]], key: tuple, values: dict[str, float]) -> None:
    for name, value in values.items():
        rows.setdefault(key, {}).setdefault(name, []).append(float(value))
