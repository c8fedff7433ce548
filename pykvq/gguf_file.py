"""The raw parts of a GGUF file: where each key and each tensor lies, so that both can be copied byte for byte.

gguf-py builds an object per array element and would re-encode what it copies; a file of many GB with a vocabulary of
250,000 entries is indexed here in tenths of a second, and untouched bytes stay untouched.
"""
from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pykvq.gguf_header import ModelFileError

_SIZES = {GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I",
          GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?", GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q",
          GGUFValueType.FLOAT64: "d"}
VERSIONS = (2, 3)                        # 32-bit sizes (version 1) and big-endian files are refused


@dataclass(frozen=True)
class Key:
    """One metadata entry: its bytes in the file are start..end, the value begins at `value`."""
    name: str
    type: int
    start: int
    value: int
    end: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ne as ggml counts (fastest first), offset from the start of the data section."""
    name: str
    ne: tuple[int, ...]
    type: int
    offset: int

    @property
    def bytes(self) -> int:
        """Size of the data. Raises ValueError for a type that gguf-py does not know."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.type)]
        n = 1
        for length in self.ne:
            n *= length
        return n // block * size


class GgufFile:
    """The index of one file. Raises ModelFileError when it is missing, truncated or of a version that is not 2 or 3."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelFileError(f"no model file at {self.path}; check the path")
        self.size = self.path.stat().st_size
        with self.path.open("rb") as f:
            try:
                self._index(_Cursor(f))
            except (EOFError, struct.error, UnicodeDecodeError, KeyError) as error:
                raise ModelFileError(f"{self.path} is truncated or damaged in its header ({self.size} bytes); download it again") from error

    def _index(self, c: "_Cursor") -> None:
        if c.take(4) != b"GGUF":
            raise ModelFileError(f"{self.path} is no GGUF file; convert the model with convert_hf_to_gguf.py or download a .gguf")
        self.version = c.number("I")
        if self.version not in VERSIONS:
            raise ModelFileError(f"{self.path} has GGUF version {self.version}, only little-endian {VERSIONS} are read; convert the model again")
        n_tensors, n_keys = c.number("Q"), c.number("Q")
        self.keys: dict[str, Key] = {}
        for _ in range(n_keys):
            start = c.tell()
            name, kind = c.text(), c.number("I")
            value = c.tell()
            c.skip(kind)
            self.keys[name] = Key(name, kind, start, value, c.tell())
        self.infos_start = c.tell()
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(n_tensors):
            name = c.text()
            ne = tuple(c.number("Q") for _ in range(c.number("I")))
            self.tensors[name] = TensorInfo(name, ne, c.number("I"), c.number("Q"))
        self.infos_end = c.tell()

    @cached_property
    def alignment(self) -> int:
        """general.alignment, 32 by default."""
        return self.get("general.alignment", 32)

    @property
    def data_start(self) -> int:
        """Where the tensor data begin."""
        return -(-self.infos_end // self.alignment) * self.alignment

    def get(self, name: str, default=None):
        """The value of a key: a number, a string, or a list of numbers; `default` when absent. Lists of strings are not read."""
        key = self.keys.get(name)
        if key is None:
            return default
        with self.path.open("rb") as f:
            f.seek(key.value)
            return _Cursor(f).read(key.type)

    def tensor_data(self, name: str) -> bytes:
        """The raw bytes of one tensor. Raises KeyError for an unknown name, ModelFileError when the file ends before them."""
        info = self.tensors[name]
        with self.path.open("rb") as f:
            f.seek(self.data_start + info.offset)
            data = f.read(info.bytes)
        if len(data) < info.bytes:
            raise ModelFileError(f"{self.path} is truncated in tensor {name}; download it again")
        return data


class _Cursor:
    """Reads the little-endian parts of a GGUF header from an open file."""

    def __init__(self, f):
        self.f, self.size = f, os.fstat(f.fileno()).st_size

    def tell(self) -> int:
        return self.f.tell()

    def take(self, n: int) -> bytes:
        if n > self.size - self.tell():          # a damaged length may be larger than any memory
            raise EOFError
        return self.f.read(n)

    def jump(self, n: int) -> None:
        """Move n bytes on, inside the file."""
        if n > self.size - self.tell():
            raise EOFError
        self.f.seek(n, 1)

    def number(self, code: str):
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def skip(self, kind: int) -> None:
        """Move past a value of this type."""
        if kind == GGUFValueType.STRING:
            self.jump(self.number("Q"))
        elif kind == GGUFValueType.ARRAY:
            item, n = self.number("I"), self.number("Q")
            if item == GGUFValueType.STRING:     # an array of arrays is none that llama.cpp reads
                self._skip_strings(n)
            else:
                self.jump(n * struct.calcsize(f"<{_SIZES[item]}"))
        else:
            self.jump(struct.calcsize(f"<{_SIZES[kind]}"))

    def _skip_strings(self, n: int) -> None:
        """Move past n strings, in as few steps as can be: a vocabulary has 250,000."""
        read, seek, length = self.f.read, self.f.seek, struct.Struct("<Q").unpack
        for _ in range(n):
            size, = length(read(8))              # struct.error at the end of the file
            if size > self.size:
                raise EOFError
            seek(size, 1)

    def read(self, kind: int):
        """The value of this type."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            item, n = self.number("I"), self.number("Q")
            if item in _SIZES:
                code = f"<{n}{_SIZES[item]}"
                return list(struct.unpack(code, self.take(struct.calcsize(code))))
            return [self.read(item) for _ in range(n)]
        return self.number(_SIZES[kind])


def encode(values: Mapping[str, object]) -> bytes:
    """Metadata entries as GGUF stores them: str, int (uint32) and list of int (array of int32). Raises TypeError for others."""
    out = []
    for name, value in values.items():
        out.append(_string(name))
        if isinstance(value, str):
            out.append(struct.pack("<I", GGUFValueType.STRING) + _string(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            out.append(struct.pack("<II", GGUFValueType.UINT32, value))
        elif isinstance(value, list):
            out.append(struct.pack(f"<IIQ{len(value)}i", GGUFValueType.ARRAY, GGUFValueType.INT32, len(value), *value))
        else:
            raise TypeError(f"{name}: a value of type {type(value).__name__} is not written")
    return b"".join(out)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def header(version: int, tensors: int, keys: int) -> bytes:
    """The first 24 bytes of a file."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)
