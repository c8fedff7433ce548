#!/usr/bin/env python3
"""Write a GGUF of random Q4_0 weights in the shape of a known model, for speed measurements.

    python tools/random_gguf.py OUT.gguf [--shape qwen3-8b | qwen3-tiny] [--layers N] [--context N]

The file loads like the real model and runs at its speed; what it says is noise. The 8B shape takes half a minute and
4.6 GB. Needs numpy and gguf (pip install gguf, or the vendored gguf-py on PYTHONPATH).
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import gguf
import numpy as np


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3-style dense transformer."""
    layers: int
    width: int
    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    vocab: int


SHAPES = {
    "qwen3-8b":   Shape(36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3-tiny": Shape(4, 256, 512, 8, 2, 64, 512),
}


class Weights:
    """Slices of one pool of random Q4_0 blocks: making 4.6 GB of random numbers would take most of the time."""

    def __init__(self, seed: int, blocks: int = 1 << 23):
        rng = np.random.default_rng(seed)
        pool = np.frombuffer(rng.bytes(blocks * 18), np.uint8).reshape(blocks, 18).copy()
        # scale of a block: 0.02 to 0.03 sigma-like weights, so that activations neither vanish nor overflow
        scales = rng.uniform(0.004, 0.006, blocks).astype(np.float16)
        pool[:, :2] = scales.view(np.uint8).reshape(blocks, 2)
        self.pool, self.rng = pool, rng

    def q4_0(self, rows: int, cols: int) -> np.ndarray:
        """Rows of packed Q4_0 blocks; uint8 [rows, cols / 32 * 18]."""
        need, have = rows * cols // 32, len(self.pool)
        start = int(self.rng.integers(have))
        parts, left = [self.pool[start:start + need]], need - min(need, have - start)
        while left > 0:
            parts.append(self.pool[:left])
            left -= min(left, have)
        return np.concatenate(parts).reshape(rows, cols // 32 * 18)


def write(path: str, s: Shape, context: int, seed: int) -> None:
    """Write the model; OSError if the file cannot be written."""
    w = gguf.GGUFWriter(path, "qwen3")
    w.add_name("random weights")
    w.add_block_count(s.layers)
    w.add_context_length(context)
    w.add_embedding_length(s.width)
    w.add_feed_forward_length(s.hidden)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.heads_kv)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_rope_freq_base(1e6)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_vocab_size(s.vocab)
    w.add_tokenizer_model("no_vocab")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)

    weights = Weights(seed)

    def matrix(name: str, cols: int, rows: int) -> None:
        w.add_tensor(f"{name}.weight", weights.q4_0(rows, cols), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str, n: int) -> None:
        w.add_tensor(f"{name}.weight", np.ones(n, np.float32))

    matrix("token_embd", s.width, s.vocab)
    matrix("output", s.width, s.vocab)
    norm("output_norm", s.width)
    for i in range(s.layers):
        b = f"blk.{i}"
        for name in ("attn_norm", "ffn_norm"):
            norm(f"{b}.{name}", s.width)
        for name in ("attn_q_norm", "attn_k_norm"):
            norm(f"{b}.{name}", s.head_dim)
        matrix(f"{b}.attn_q", s.width, s.heads * s.head_dim)
        matrix(f"{b}.attn_k", s.width, s.heads_kv * s.head_dim)
        matrix(f"{b}.attn_v", s.width, s.heads_kv * s.head_dim)
        matrix(f"{b}.attn_output", s.heads * s.head_dim, s.width)
        matrix(f"{b}.ffn_gate", s.width, s.hidden)
        matrix(f"{b}.ffn_up", s.width, s.hidden)
        matrix(f"{b}.ffn_down", s.hidden, s.width)

    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    ap.add_argument("--layers", type=int, help="override the number of layers")
    ap.add_argument("--context", type=int, default=1 << 20, help="trained context that the file claims")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    shape = SHAPES[args.shape]
    if args.layers:
        shape = Shape(args.layers, *list(vars(shape).values())[1:])
    write(args.out, shape, args.context, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
