"""Tiny models with random weights of the architectures that keep their cache in other ways than a plain transformer.

Each has a vocabulary of bytes, so that the programs can be asked something, and a width of 128.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

WIDTH, HIDDEN, CONTEXT = 128, 256, 2048


class _Writer:
    """A GGUF in the making: metadata by GGUFWriter, tensors drawn from one seeded generator."""

    def __init__(self, path: Path, architecture: str, layers: int, heads: int, heads_kv: int | list[int], tied: bool = False):
        from gguf import GGUFWriter
        self.path, self.rng = path, np.random.default_rng(0)
        self.gguf = w = GGUFWriter(str(path), architecture)
        w.add_name(f"tiny-{architecture}")
        w.add_context_length(CONTEXT)
        w.add_embedding_length(WIDTH)
        w.add_block_count(layers)
        w.add_feed_forward_length(HIDDEN)
        w.add_head_count(heads)
        w.add_head_count_kv(heads_kv)
        w.add_layer_norm_rms_eps(1e-5)
        self._bytes()
        self.weight("token_embd", self.vocabulary, WIDTH, gain=np.sqrt(WIDTH))
        if not tied:
            self.weight("output", self.vocabulary, WIDTH, gain=4)

    def _bytes(self) -> None:
        """A SentencePiece vocabulary of three control tokens and the 256 bytes."""
        from gguf import TokenType
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581"]
        self.vocabulary = len(tokens)
        self.gguf.add_tokenizer_model("llama")
        self.gguf.add_token_list(tokens)
        self.gguf.add_token_scores([0.0] * len(tokens))
        self.gguf.add_token_types([TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, TokenType.NORMAL])
        self.gguf.add_bos_token_id(1)
        self.gguf.add_eos_token_id(2)
        self.gguf.add_unk_token_id(0)

    def weight(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """Random weights, numpy order: the input size comes last."""
        self.gguf.add_tensor(f"{name}.weight", (self.rng.standard_normal(shape) * gain / np.sqrt(shape[-1])).astype(np.float32))

    def norm(self, name: str, size: int = WIDTH, value: float = 1.0) -> None:
        """Weights of a norm."""
        self.gguf.add_tensor(f"{name}.weight", np.full(size, value, np.float32))

    def feed_forward(self, prefix: str) -> None:
        """A gated feed-forward part with its norm."""
        self.norm(f"{prefix}.ffn_norm")
        self.weight(f"{prefix}.ffn_gate", HIDDEN, WIDTH)
        self.weight(f"{prefix}.ffn_up", HIDDEN, WIDTH)
        self.weight(f"{prefix}.ffn_down", WIDTH, HIDDEN)

    def attention(self, prefix: str, heads: int, heads_kv: int, head_dim: int, output: str = "output", gain: float = 1.5) -> None:
        """Projections of one attention layer, sharp enough to matter: random keys would meet a flat softmax."""
        self.weight(f"{prefix}_q", heads * head_dim, WIDTH, gain=gain)
        self.weight(f"{prefix}_k", heads_kv * head_dim, WIDTH, gain=gain)
        self.weight(f"{prefix}_v", heads_kv * head_dim, WIDTH)
        self.weight(f"{prefix}_{output}", WIDTH, heads * head_dim)

    def close(self) -> Path:
        """Write the file."""
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()
        return self.path


def sliding_window(path: Path, window: int = 64) -> Path:
    """Gemma 3: five layers that see `window` tokens and one that sees all, head size 64, query and key norms."""
    w = _Writer(path, "gemma3", layers=6, heads=2, heads_kv=1)
    w.gguf.add_key_length(64)
    w.gguf.add_value_length(64)
    w.gguf.add_sliding_window(window)
    w.norm("output_norm")
    for i in range(6):
        w.norm(f"blk.{i}.attn_norm")
        w.attention(f"blk.{i}.attn", 2, 1, 64)
        w.norm(f"blk.{i}.attn_q_norm", 64, 1.5)
        w.norm(f"blk.{i}.attn_k_norm", 64, 1.5)
        w.norm(f"blk.{i}.post_attention_norm")
        w.feed_forward(f"blk.{i}")
        w.norm(f"blk.{i}.post_ffw_norm")
    return w.close()


def plain(path: Path) -> Path:
    """Llama: two layers of four heads in two groups, head size 64."""
    w = _Writer(path, "llama", layers=2, heads=4, heads_kv=2)
    w.gguf.add_key_length(64)
    w.gguf.add_value_length(64)
    w.gguf.add_rope_dimension_count(64)
    w.norm("output_norm")
    for i in range(2):
        w.norm(f"blk.{i}.attn_norm")
        w.attention(f"blk.{i}.attn", 4, 2, 64)
        w.feed_forward(f"blk.{i}")
    return w.close()


def soft_capped(path: Path, cap: float = 4.0) -> Path:
    """Gemma 2: logits through cap * tanh(x / cap), which sees a shift that softmax would not; every other layer has a window."""
    w = _Writer(path, "gemma2", layers=2, heads=2, heads_kv=1, tied=True)
    w.gguf.add_key_length(64)
    w.gguf.add_value_length(64)
    w.gguf.add_sliding_window(64)
    w.gguf.add_attn_logit_softcapping(cap)
    w.gguf.add_final_logit_softcapping(30.0)
    w.norm("output_norm")
    for i in range(2):
        w.norm(f"blk.{i}.attn_norm")
        w.attention(f"blk.{i}.attn", 2, 1, 64)
        w.norm(f"blk.{i}.post_attention_norm")
        w.feed_forward(f"blk.{i}")
        w.norm(f"blk.{i}.post_ffw_norm")
    return w.close()


def hybrid(path: Path, window: int = 0) -> Path:
    """LFM2: short convolutions in layers 0 and 2, attention of head size 64 in layers 1 and 3, with a sliding window if given."""
    heads_kv = [0, 1, 0, 1]
    w = _Writer(path, "lfm2", layers=4, heads=2, heads_kv=heads_kv)
    w.gguf.add_shortconv_l_cache(3)
    if window:
        w.gguf.add_sliding_window(window)
    w.norm("token_embd_norm")
    for i, n in enumerate(heads_kv):
        w.norm(f"blk.{i}.attn_norm")
        if n:
            w.attention(f"blk.{i}.attn", 2, n, 64)
            w.norm(f"blk.{i}.attn_q_norm", 64, 1.5)
            w.norm(f"blk.{i}.attn_k_norm", 64, 1.5)
        else:
            w.weight(f"blk.{i}.shortconv.conv", WIDTH, 3)
            w.weight(f"blk.{i}.shortconv.in_proj", 3 * WIDTH, WIDTH)
            w.weight(f"blk.{i}.shortconv.out_proj", WIDTH, WIDTH)
        w.feed_forward(f"blk.{i}")
    return w.close()


def encoder_decoder(path: Path) -> Path:
    """T5: two encoder and two decoder layers, relative positions as a bias on the attention logits, head size 64.

    T5 does not divide its logits by the root of the head size, so its weights are smaller.
    """
    w = _Writer(path, "t5", layers=2, heads=2, heads_kv=2)
    w.gguf.add_key_length(64)
    w.gguf.add_value_length(64)
    w.gguf.add_relative_attn_buckets_count(32)
    w.gguf.add_decoder_start_token_id(1)
    for side in ("enc", "dec"):
        w.norm(f"{side}.output_norm")
        w.weight(f"{side}.blk.0.attn_rel_b", 32, 2)
        for i in range(2):
            w.norm(f"{side}.blk.{i}.attn_norm")
            w.attention(f"{side}.blk.{i}.attn", 2, 2, 64, "o", gain=0.5)
            if side == "dec":
                w.norm(f"dec.blk.{i}.cross_attn_norm")
                w.attention(f"dec.blk.{i}.cross_attn", 2, 2, 64, "o", gain=0.5)
            w.feed_forward(f"{side}.blk.{i}")
    return w.close()


def latent(path: Path, rank: int = 512, rope: int = 64) -> Path:
    """DeepSeek 2 with MLA: one latent key of rank + rope values for 4 heads, whose first `rank` values are the value too."""
    heads, nope, value = 4, 128, 128
    w = _Writer(path, "deepseek2", layers=2, heads=heads, heads_kv=1)
    g = w.gguf
    g.add_q_lora_rank(64)
    g.add_kv_lora_rank(rank)
    g.add_key_length(rank + rope)
    g.add_value_length(rank)
    g.add_key_length_mla(nope + rope)
    g.add_value_length_mla(value)
    g.add_rope_dimension_count(rope)
    g.add_leading_dense_block_count(2)
    g.add_expert_feed_forward_length(HIDDEN)
    g.add_expert_shared_count(0)
    g.add_expert_weights_scale(1.0)
    w.norm("output_norm")
    for i in range(2):
        w.norm(f"blk.{i}.attn_norm")
        w.weight(f"blk.{i}.attn_q_a", 64, WIDTH)
        w.norm(f"blk.{i}.attn_q_a_norm", 64)
        w.weight(f"blk.{i}.attn_q_b", heads * (nope + rope), 64, gain=1.5)
        w.weight(f"blk.{i}.attn_kv_a_mqa", rank + rope, WIDTH)
        w.norm(f"blk.{i}.attn_kv_a_norm", rank)
        w.weight(f"blk.{i}.attn_k_b", heads, rank, nope)
        w.weight(f"blk.{i}.attn_v_b", heads, value, rank)
        w.weight(f"blk.{i}.attn_output", WIDTH, heads * value)
        w.feed_forward(f"blk.{i}")
    return w.close()
