"""Smaller KV caches for llama.cpp: cache types turbo2, turbo3, turbo4 and oscar2, and tools around them."""
from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

from pykvq.native import REINSTALL, bindings_are_patched
from pykvq.support import Support, block_for, effective_type, supports

__all__ = ["Support", "block_for", "effective_type", "supports", "__version__"]

try:
    __version__ = version("pykvq")
except PackageNotFoundError:                     # a source tree that was never installed
    __version__ = "0+source"

if bindings_are_patched() is False:
    warnings.warn("another llama-cpp-python has overwritten the package llama_cpp, so kv_type= and the turbo types are gone; "
                  f"mend it with: {REINSTALL}", stacklevel=2)
