"""What a GGUF header says about the cache, and whether the file is whole; read by llama.cpp's own parser."""
from __future__ import annotations

import ctypes
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pykvq.native import library
from pykvq.support import row_bytes

_VERSIONS = 2, 3                                    # of the GGUF format
_MAX_LAYERS = 512                                   # LLAMA_MAX_LAYERS
_UINT32, _INT32, _ARRAY, _STRING = 4, 5, 9, 8       # enum gguf_type
_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class ModelFileError(ValueError):
    """The file is missing, no GGUF, or incomplete; the message is one line and says what to do."""


@dataclass(frozen=True)
class Header:
    """Cache geometry of a model. heads_kv holds the KV heads of each layer that caches (recurrent layers are left out)."""
    path: Path
    architecture: str
    name: str
    context_train: int
    heads_kv: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    window: int                      # 0: no sliding window
    mla: bool                        # V is a view of K and takes no room
    calibrated: bool                 # carries kvq.* keys, or a sidecar beside it does

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head sizes of K and V, in values."""
        return self.head_dim_k, self.head_dim_v

    @property
    def block_dims(self) -> tuple[int, int]:
        """What the blocks of K and V must divide: the head sizes; with MLA also the part of the key that is the value."""
        return (math.gcd(*self.head_dims),) * 2 if self.mla else self.head_dims

    def cache_bytes(self, type_k: str, type_v: str, context: int) -> int:
        """Estimated bytes of a cache of `context` cells.

        A lower bound where there is a sliding window: no known model has fewer full layers than one in six.
        Raises ValueError when the head size does not fit the type.
        """
        per_head = row_bytes(type_k, self.block_dims[0]) * self.head_dim_k // self.block_dims[0]
        per_head += 0 if self.mla else row_bytes(type_v, self.head_dim_v)
        full = len(self.heads_kv) if not self.window else len(self.heads_kv) // 6
        cells = [context] * full + [min(context, self.window)] * (len(self.heads_kv) - full)
        return sum(heads * n * per_head for heads, n in zip(self.heads_kv, cells))


def sidecar_path(path: Path) -> Path:
    """foo.gguf -> foo.kvq.gguf, the file in which llama.cpp looks for calibrated data beside the model."""
    return path.with_name(f"{path.name.removesuffix('.gguf')}.kvq.gguf")


def read_header(path: str | Path) -> Header:
    """Geometry of the model at `path`. Raises ModelFileError for a file that llama.cpp could not load whole."""
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"no model file at {path}; check the path")
    size = path.stat().st_size
    with path.open("rb") as f:
        magic, version = f.read(4), f.read(4)
    if size and magic != b"GGUF"[:len(magic)]:
        raise ModelFileError(f"{path} is no GGUF file; convert the model with convert_hf_to_gguf.py or download a .gguf")
    if len(version) == 4 and int.from_bytes(version, "little") not in _VERSIONS:
        if int.from_bytes(version, "big") in _VERSIONS:
            raise ModelFileError(f"{path} is a big-endian GGUF file; turn it with: gguf-convert-endian {path} little")
        raise ModelFileError(f"{path} is GGUF version {int.from_bytes(version, 'little')}, and this llama.cpp reads "
                             f"{' and '.join(map(str, _VERSIONS))}; download the model as one of those, or a newer pykvq")
    with _gguf(path) as g:
        if g is None:
            raise ModelFileError(f"{path} is truncated or damaged in its header ({size} bytes); download it again")
        need = g.end_of_data()
        if need > size:
            raise ModelFileError(f"{path} is truncated: {size} of {need} bytes; download it again")
        return g.header(path)


class _Gguf:
    """One open gguf_context."""

    def __init__(self, lib: ctypes.CDLL, handle: int):
        self.lib, self.handle = lib, handle

    def end_of_data(self) -> int:
        """Bytes that the file must have to hold every tensor."""
        lib, h = self.lib, self.handle
        ends = [lib.gguf_get_tensor_offset(h, i) + lib.gguf_get_tensor_size(h, i) for i in range(lib.gguf_get_n_tensors(h))]
        return lib.gguf_get_data_offset(h) + max(ends, default=0)

    def text(self, key: str) -> str:
        """A string value, "" when absent."""
        i = self.lib.gguf_find_key(self.handle, key.encode())
        if i < 0 or self.lib.gguf_get_kv_type(self.handle, i) != _STRING:
            return ""
        return self.lib.gguf_get_val_str(self.handle, i).decode(errors="replace")

    def numbers(self, key: str) -> list[int]:
        """A 32-bit integer or an array of them as a list, [] when absent."""
        lib, h = self.lib, self.handle
        i = lib.gguf_find_key(h, key.encode())
        if i < 0:
            return []
        if lib.gguf_get_kv_type(h, i) in (_UINT32, _INT32):
            return [ctypes.c_int32.from_address(lib.gguf_get_val_data(h, i)).value]
        if lib.gguf_get_kv_type(h, i) == _ARRAY and lib.gguf_get_arr_type(h, i) in (_UINT32, _INT32):
            n = lib.gguf_get_arr_n(h, i)
            return list((ctypes.c_int32 * n).from_address(lib.gguf_get_arr_data(h, i)))
        return []

    def header(self, path: Path) -> Header:
        """The cache geometry, by the rules of llama.cpp's load_hparams."""
        arch = self.text("general.architecture")

        def number(key: str, default: int = 0) -> int:
            return max(self.numbers(f"{arch}.{key}"), default=default)

        layers = number("block_count")
        if layers > _MAX_LAYERS:                 # a damaged number would become a list of that length
            raise ModelFileError(f"{path} says that it has {layers} layers, and llama.cpp reads {_MAX_LAYERS}; download it again")
        heads = self.numbers(f"{arch}.attention.head_count") or [0]
        heads_kv = self.numbers(f"{arch}.attention.head_count_kv") or heads
        heads_kv = heads_kv * layers if len(heads_kv) == 1 else heads_kv[:layers]
        head_dim = number("embedding_length") // max(max(heads), 1)
        return Header(path, arch, self.text("general.name") or path.stem, number("context_length"), tuple(n for n in heads_kv if n > 0),
                      number("attention.key_length", head_dim), number("attention.value_length", head_dim),
                      number("attention.sliding_window"), mla=number("attention.key_length_mla") > 0,
                      calibrated=self.lib.gguf_find_key(self.handle, b"kvq.version") >= 0
                      or sidecar_path(path).exists())


@lru_cache(None)
def _declared() -> ctypes.CDLL:
    lib = library("ggml-base")
    pointer, index, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t

    class InitParams(ctypes.Structure):
        _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]

    lib.kvq_gguf_params = InitParams
    for name, arguments, result in [
            ("gguf_init_from_file", [ctypes.c_char_p, InitParams], pointer), ("gguf_free", [pointer], None),
            ("gguf_find_key", [pointer, ctypes.c_char_p], index), ("gguf_get_kv_type", [pointer, index], ctypes.c_int),
            ("gguf_get_arr_type", [pointer, index], ctypes.c_int), ("gguf_get_val_str", [pointer, index], ctypes.c_char_p),
            ("gguf_get_val_data", [pointer, index], pointer), ("gguf_get_arr_data", [pointer, index], pointer),
            ("gguf_get_arr_n", [pointer, index], size), ("gguf_get_n_tensors", [pointer], index),
            ("gguf_get_tensor_offset", [pointer, index], size), ("gguf_get_tensor_size", [pointer, index], size),
            ("gguf_get_data_offset", [pointer], size), ("ggml_log_get", [pointer, pointer], None), ("ggml_log_set", [pointer, pointer], None)]:
        f = getattr(lib, name)
        f.argtypes, f.restype = arguments, result
    return lib


_QUIET = _LOG_CALLBACK(lambda level, text, user: None)


@contextmanager
def _gguf(path: Path):
    """A _Gguf of the file, None when it does not parse. The parser's log is silenced: the caller words the error."""
    lib = _declared()
    callback, user = ctypes.c_void_p(), ctypes.c_void_p()
    lib.ggml_log_get(ctypes.byref(callback), ctypes.byref(user))
    lib.ggml_log_set(ctypes.cast(_QUIET, ctypes.c_void_p), None)
    try:
        handle = lib.gguf_init_from_file(str(path).encode(), lib.kvq_gguf_params(True, None))
    finally:
        lib.ggml_log_set(callback, user)
    try:
        yield _Gguf(lib, handle) if handle else None
    finally:
        if handle:
            lib.gguf_free(handle)
