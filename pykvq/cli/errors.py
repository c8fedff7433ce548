"""Exceptions that are bad input, and the next command to run."""
from __future__ import annotations

from pykvq.gguf_header import ModelFileError
from pykvq.native import NativeError


class InputError(ValueError):
    """Input that a command refuses; the message says what to do."""


def explain(error: Exception) -> str | None:
    """One line for the user, None for a bug, which keeps its traceback."""
    if isinstance(error, (InputError, ModelFileError, NativeError, ValueError, MemoryError, OSError, RuntimeError)):
        return " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        return f"{error}; run: pykvq doctor"
    return None
