"""Long conversations in a fixed number of cache cells, after EpiCache (arXiv 2509.17396)."""
from __future__ import annotations


def __getattr__(name: str):
    """EpiCache, Settings and Turn on first use, so that the encoders alone do not load llama_cpp."""
    if name in ("EpiCache", "Turn"):
        from pykvq.epicache import chat
        return getattr(chat, name)
    if name == "Settings":
        from pykvq.epicache.memory import Settings
        return Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
