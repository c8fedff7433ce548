"""A thin session over libllama for measuring: one loaded model, any number of contexts with different cache types.

llama_cpp.Llama ties a model to one context; comparing cache types wants the weights in memory once.
"""
from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np

from pykvq.gguf_header import read_header
from pykvq.kv_info import BufferMemory, CacheInfo, cache_info, memory_info
from pykvq.llama_glue import check_cache, forget, kvq_is_off, reason, record, split_kv_type, window
from pykvq.support import is_quantised, type_id


class Model:
    """Weights and vocabulary of a GGUF. no_alloc: the vocabulary and the sizes alone, for contexts that only plan (Context.memory_info).

    Raises ModelFileError for a missing or truncated file, ValueError when llama.cpp refuses it.
    """

    def __init__(self, path: str | Path, gpu_layers: int = 0, *, no_alloc: bool = False):
        self.header, self.gpu_layers, self.no_alloc = read_header(path), gpu_layers, no_alloc
        params = native.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        if no_alloc:
            params.no_alloc, params.load_mode = True, native.LLAMA_LOAD_MODE_NONE
        forget()
        self.handle = native.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ValueError(reason(f"llama.cpp cannot load {path}"))
        self._take_vocabulary()
        self._owner = None

    @classmethod
    def of(cls, llama) -> "Model":
        """The weights of a llama_cpp.Llama, which goes on owning them."""
        model = cls.__new__(cls)
        model.header, model.gpu_layers = read_header(llama.model_path), llama.model_params.n_gpu_layers
        model.handle, model.no_alloc, model._owner = llama.model, False, llama
        model._take_vocabulary()
        return model

    def _take_vocabulary(self) -> None:
        self.vocab = native.llama_model_get_vocab(self.handle)
        self.n_vocab = native.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str, bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text; `special` parses control tokens such as <|im_start|>. Raises ValueError without a vocabulary."""
        if native.llama_vocab_type(self.vocab) == native.LLAMA_VOCAB_TYPE_NONE:
            raise ValueError(f"{self.header.name} has no tokenizer; use a model file with one")     # llama.cpp would abort
        raw = text.encode()
        room = len(raw) + 8
        out = (native.llama_token * room)()
        n = native.llama_tokenize(self.vocab, raw, len(raw), out, room, bos, special)
        return list(out[:n])

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens left out; bytes of a cut character become the replacement character."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes of a token, none for a control token; a character may be cut."""
        buffer = ctypes.create_string_buffer(512)
        n = native.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[:n]

    def ends(self, token: int) -> bool:
        """True for tokens that end a generation."""
        return native.llama_vocab_is_eog(self.vocab, token)

    def chat_tokens(self, prompt: str) -> list[int]:
        """The prompt as one user turn in the model's chat template; the bare text when llama.cpp knows no template for it."""
        text = self.chat_text([("user", prompt)], True)
        return self.tokenize(prompt) if text is None else self.tokenize(text, special=True)

    def chat_text(self, messages: Sequence[tuple[str, str]], answer: bool) -> str | None:
        """(role, content) pairs in the model's chat template, with the opening of an answer if `answer`; None when llama.cpp knows no template."""
        template = native.llama_model_chat_template(self.handle, None)
        if not template:
            return None
        raw = [(role.encode(), content.encode()) for role, content in messages]
        array = (native.llama_chat_message * len(raw))(*(native.llama_chat_message(*pair) for pair in raw))
        buffer = ctypes.create_string_buffer(sum(2 * len(content) + 256 for _, content in raw) + 4096)
        n = native.llama_chat_apply_template(template, array, len(raw), answer, buffer, len(buffer))
        return buffer.raw[:n].decode("utf-8", "replace") if 0 < n <= len(buffer) else None

    def close(self) -> None:
        """Free the weights; contexts must be closed before."""
        if self.handle and self._owner is None:
            native.llama_model_free(self.handle)
        self.handle = None

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Context:
    """One context of a Model with a cache of kv_type (one name or the pair K, V), flash attention on unless told otherwise.
    offload=False keeps the cache and the attention on the host (llama.cpp's --no-kv-offload); n_ubatch is n_batch unless given.
    n_outputs: most tokens of a batch whose logits will be asked for, 0: all of them.
    kv_sink, kv_recent: first and last tokens that are kept in f16 too (docs/windows.md); None is the default, 64 and 256, less in a short context.
    layer_types: the (K, V) of layers that get other types than kv_type, f16 or ours.

    Raises ValueError for a wrong type or a refusal of llama.cpp, MemoryError when the cache cannot fit.
    """

    def __init__(self, model: Model, n_ctx: int, kv_type: str | tuple[str, str] = "f16", *, n_seq: int = 1, unified: bool = False,
                 n_batch: int = 512, n_ubatch: int | None = None, threads: int | None = None, flash: bool = True, swa_full: bool = True, offload: bool = True,
                 kvq: str = "auto", kv_sink: int | None = None, kv_recent: int | None = None, n_outputs: int = 0,
                 layer_types: Mapping[int, tuple[str, str]] | None = None, on_tensor=None):
        k, v = split_kv_type(kv_type)
        if is_quantised(v) and not flash:
            raise ValueError(f"a V cache of type {v} needs flash attention; leave it on")
        beside = window(kv_sink, kv_recent)
        check_cache(model.header, type_id(k), type_id(v), n_ctx, cache_on_host=not (model.no_alloc or model.gpu_layers and offload), f16_window=beside)
        params = native.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_batch, n_ubatch or n_batch, n_seq
        params.n_threads = params.n_threads_batch = threads or os.cpu_count()
        params.type_k, params.type_v, params.kv_unified, params.swa_full = type_id(k), type_id(v), unified, swa_full
        params.offload_kqv, params.kvq_off, params.n_outputs_max = offload, kvq_is_off(kvq), n_outputs
        params.kv_sink, params.kv_recent = beside
        params.flash_attn_type = native.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else native.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if on_tensor is not None:                # ggml_backend_sched_eval_callback; must live as long as the context
            params.cb_eval = self._on_tensor = native.ggml_backend_sched_eval_callback(on_tensor)
            params.op_offload = False            # or large batches of layers on the CPU read copies of caches, with names of their own
        self.model, self.n_batch, self.n_seq, self.kv_type = model, n_batch, n_seq, (k, v)
        forget()
        with _layer_types(layer_types or {}):
            self.handle = native.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise ValueError(reason(f"no context of {n_ctx} tokens with cache type K {k} V {v}"))
        self.memory = native.llama_get_memory(self.handle)
        self._batch = native.llama_batch_init(n_batch, 0, 1)

    def decode(self, tokens: Sequence[int], start: int, seq: int = 0, logits: str = "last") -> np.ndarray:
        """Run tokens at positions start, start + 1, ... of one sequence, n_batch at a time.

        Returns float32 [rows, n_vocab]: the logits after every token ("all"), after the last ("last") or none.
        Raises RuntimeError when llama.cpp cannot decode, e.g. when the cache is full.
        """
        rows = []
        for first in range(0, len(tokens), self.n_batch):
            part = [(token, start + first + i, seq, logits == "all" or logits == "last" and first + i == len(tokens) - 1)
                    for i, token in enumerate(tokens[first:first + self.n_batch])]
            rows.append(self.decode_batch(part))
        return np.concatenate(rows) if rows else np.empty((0, self.model.n_vocab), np.float32)

    def decode_batch(self, entries: Sequence[tuple[int, int, int, bool]]) -> np.ndarray:
        """One llama_decode of (token, position, sequence, wants logits); returns the logits asked for, in order."""
        self.run(entries)
        n = sum(bool(entry[3]) for entry in entries)
        if not n:
            return np.empty((0, self.model.n_vocab), np.float32)
        return np.ctypeslib.as_array(native.llama_get_logits(self.handle), shape=(n, self.model.n_vocab)).copy()

    def run(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """decode_batch without a copy of the logits, for timing: wait() tells when a GPU is done."""
        b = self._batch
        b.n_tokens = len(entries)
        for i, (token, position, seq, wanted) in enumerate(entries):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, position, 1, seq, wanted
        forget()
        status = native.llama_decode(self.handle, b)
        if status:
            raise RuntimeError(reason(f"llama_decode failed with status {status}"))

    def wait(self) -> None:
        """Return when everything asked for is computed."""
        native.llama_synchronize(self.handle)

    def encode(self, tokens: Sequence[int]) -> None:
        """Give the encoder of an encoder-decoder model its text, at most n_batch tokens. Raises RuntimeError when llama.cpp cannot."""
        array = (native.llama_token * len(tokens))(*tokens)
        forget()
        status = native.llama_encode(self.handle, native.llama_batch_get_one(array, len(tokens)))
        if status:
            raise RuntimeError(reason(f"llama_encode failed with status {status}"))

    def info(self) -> CacheInfo:
        """Effective types and bytes per layer."""
        return cache_info(native._lib, self.handle)

    def memory_info(self) -> tuple[BufferMemory, ...]:
        """Bytes of weights, caches and compute buffers, per buffer type: allocated, or what would be with a no_alloc model."""
        return memory_info(native._lib, self.handle)

    def clear(self) -> None:
        """Forget every sequence."""
        native.llama_memory_clear(self.memory, True)

    def remove(self, seq: int, start: int, end: int = -1) -> bool:
        """Drop positions start..end-1 of a sequence (end -1: to its end)."""
        return native.llama_memory_seq_rm(self.memory, seq, start, end)

    def last_position(self, seq: int) -> int:
        """The largest position in the cache of a sequence, -1 when it is empty."""
        return native.llama_memory_seq_pos_max(self.memory, seq)

    def copy(self, source: int, target: int) -> None:
        """Make sequence `target` a copy of `source`."""
        native.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def shift(self, seq: int, start: int, delta: int) -> None:
        """Move positions from `start` on by delta; the keys are turned at the next decode. Raises ValueError where none can be."""
        if not native.llama_memory_can_shift(self.memory):
            raise ValueError(f"{self.model.header.name} keeps a cache whose positions cannot be shifted")
        native.llama_memory_seq_add(self.memory, seq, start, -1, delta)

    def save(self, seq: int | None = None, bare: bool = False) -> bytes:
        """State of one sequence, or of the whole context. bare: a sequence without the header that says what it is (docs/trust.md),
        for code that takes states apart. Raises RuntimeError when llama.cpp cannot read the cache."""
        forget()
        size = native.llama_state_get_size(self.handle) if seq is None else native.llama_state_seq_get_size(self.handle, seq)
        data = np.empty(size, np.uint8)
        n = (native.llama_state_get_data(self.handle, _bytes(data), size) if seq is None
             else native.llama_state_seq_get_data(self.handle, _bytes(data), size, seq))
        if not n:
            raise RuntimeError(reason("the state cannot be saved"))
        return data[self._sealed(0) if bare else 0:n].tobytes()

    def load(self, state: bytes | np.ndarray, seq: int | None = None, bare: bool = False) -> None:
        """Restore what save() returned, or its bytes in an array. bare: rows of this very context, which get a header of their own.
        Raises ValueError when llama.cpp refuses the state (another type, model, size, or damaged)."""
        data = np.frombuffer(state, np.uint8)
        if bare:
            rows, data = data, np.empty(self._sealed(len(data)), np.uint8)
            self._sealed(len(rows), rows, data)
        forget()
        n = (native.llama_state_set_data(self.handle, _bytes(data), len(data)) if seq is None
             else native.llama_state_seq_set_data(self.handle, _bytes(data), len(data), seq))
        if not n or n != len(data):
            raise ValueError(reason("the state does not fit this context"))

    def _sealed(self, n: int, rows: np.ndarray | None = None, out: np.ndarray | None = None) -> int:
        """Size of a state of n bytes with its header; written to `out`."""
        seal = native._lib.llama_kvq_seal_state
        seal.argtypes, seal.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_size_t
        return seal(self.handle, None if out is None else out.ctypes.data, None if rows is None else rows.ctypes.data, n)

    def close(self) -> None:
        """Free the context."""
        if self.handle:
            native.llama_batch_free(self._batch)
            native.llama_free(self.handle)
            self.handle = None

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _bytes(data: np.ndarray):
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@contextmanager
def _layer_types(types: Mapping[int, tuple[str, str]]):
    """Single layers' types for the context made inside. Raises ValueError for an unknown name."""
    n = max(types, default=-1) + 1
    array = np.full((n, 2), -1, np.int32)
    for layer, pair in types.items():
        array[layer] = [type_id(name) for name in pair]
    tell = native._lib.llama_kvq_set_layer_types
    tell.argtypes, tell.restype = [ctypes.c_void_p, ctypes.c_int32], None
    tell(array.ctypes.data, n)
    try:
        yield
    finally:
        tell(None, 0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis; float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) in nats over the last axis of two logits arrays."""
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(-1)


def quiet_log() -> None:
    """Send llama.cpp's log to the error recorder alone."""
    native.llama_log_set(_recorder, None)


@native.llama_log_callback
def _recorder(level, text, _):
    record(level, text)
