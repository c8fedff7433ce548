"""Where the native libraries lie, and access to them by ctypes without importing llama_cpp."""
from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from functools import lru_cache
from pathlib import Path

REINSTALL = "pip install '.[compat]' (in the folder of the pykvq source)"


class NativeError(RuntimeError):
    """A native library is missing or is not the one that pykvq installs."""


def bindings_dir() -> Path | None:
    """The folder of the package llama_cpp, None when it is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    return Path(spec.origin).parent if spec and spec.origin else None


def library_dir() -> Path:
    """The folder of libllama: LLAMA_CPP_LIB_PATH when set, as in llama_cpp. Raises NativeError when there is none."""
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    if override:
        return Path(override)
    package = bindings_dir()
    if package is None:
        raise NativeError(f"the package llama_cpp is not installed; run: {REINSTALL}")
    return package / "lib"


def bindings_are_patched() -> bool | None:
    """False when another llama-cpp-python has overwritten llama_cpp, None when llama_cpp is absent. Reads one file."""
    package = bindings_dir()
    return None if package is None else b"kv_type" in (package / "llama.py").read_bytes()


@lru_cache(None)
def library(name: str) -> ctypes.CDLL:
    """The shared library lib<name> of the installation, e.g. "ggml-base". Raises NativeError when it cannot be loaded."""
    folder = library_dir()
    suffixes = {"darwin": ("dylib", "so"), "win32": ("dll",)}.get(sys.platform, ("so",))
    candidates = [folder / f"{prefix}{name}.{suffix}" for suffix in suffixes for prefix in ("lib", "")]
    for path in candidates:
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise NativeError(f"cannot load {path.name}: {error}; run: {REINSTALL}") from error
    raise NativeError(f"{candidates[0].name} is not in {folder}; run: {REINSTALL}")


def has_cache_types() -> bool:
    """True when libggml-base is ours. Raises NativeError when there is no library at all."""
    return hasattr(library("ggml-base"), "kvq_quantize_row_ref")


def llama_commit() -> str:
    """Commit of the llama.cpp that the libraries were built from. Raises NativeError when they are missing."""
    lib = library("llama")
    if not hasattr(lib, "llama_kvq_commit"):
        raise NativeError(f"libllama is not the one that pykvq installs; run: {REINSTALL}")
    lib.llama_kvq_commit.restype = ctypes.c_char_p
    return lib.llama_kvq_commit().decode()
