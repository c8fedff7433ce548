"""Packages of the extra [epicache]."""
from __future__ import annotations

from contextlib import contextmanager


@contextmanager
def needed(package: str):
    """Around an import: says in one line what to install. Raises RuntimeError."""
    try:
        yield
    except ImportError as error:
        raise RuntimeError(f"EpiCache needs {package}; run: pip install 'pykvq[epicache]'") from error
