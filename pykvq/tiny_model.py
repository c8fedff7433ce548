"""A tiny GGUF with random weights and any head size, for self-tests without a download."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_tiny_model(path: str | Path, head_dim: int = 64, heads: int = 4, heads_kv: int = 2, layers: int = 2, vocabulary: int = 256,
                     context: int = 2048, seed: int = 0, architecture: str = "llama", key_bias: float | Sequence[float] = 0) -> Path:
    """Write a GGUF without a tokenizer: a few MB, loads in milliseconds. Returns the path.

    key_bias: standard deviation of a bias of the keys, or of each of its heads_kv * head_dim values, for an architecture that has one, such as qwen2.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    rng, hidden = np.random.default_rng(seed), 256
    width = 128 if architecture == "llama" else heads * head_dim      # the others want heads that fill it
    w = GGUFWriter(str(path), architecture)
    w.add_name(f"tiny-{head_dim}")
    w.add_context_length(context)
    w.add_embedding_length(width)
    w.add_block_count(layers)
    w.add_feed_forward_length(hidden)
    w.add_head_count(heads)
    w.add_head_count_kv(heads_kv)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_rope_dimension_count(head_dim)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(vocabulary)
    w.add_tokenizer_model("no_vocab")

    def add(name: str, *shape: int, gain: float = 1.0) -> None:
        w.add_tensor(name, (rng.standard_normal(shape) * gain / np.sqrt(shape[-1])).astype(np.float32), raw_dtype=GGMLQuantizationType.F32)

    def norm(name: str) -> None:
        w.add_tensor(name, np.ones(width, np.float32))

    add("token_embd.weight", vocabulary, width, gain=np.sqrt(width))
    norm("output_norm.weight")
    add("output.weight", vocabulary, width, gain=4)
    for i in range(layers):
        norm(f"blk.{i}.attn_norm.weight")
        add(f"blk.{i}.attn_q.weight", heads * head_dim, width, gain=1.5)      # attention sharp enough to matter
        add(f"blk.{i}.attn_k.weight", heads_kv * head_dim, width, gain=1.5)
        if np.any(key_bias):
            w.add_tensor(f"blk.{i}.attn_k.bias", (rng.standard_normal(heads_kv * head_dim) * key_bias).astype(np.float32))
        add(f"blk.{i}.attn_v.weight", heads_kv * head_dim, width)
        add(f"blk.{i}.attn_output.weight", width, heads * head_dim)
        norm(f"blk.{i}.ffn_norm.weight")
        add(f"blk.{i}.ffn_gate.weight", hidden, width)
        add(f"blk.{i}.ffn_up.weight", hidden, width)
        add(f"blk.{i}.ffn_down.weight", width, hidden)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return Path(path)
