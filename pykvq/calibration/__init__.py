"""Calibrated transforms: statistics of a model's keys, values and queries, and the GGUF metadata made of them."""

KEY_BIAS = ("none", "attn_k.bias", "measured")   # pre-RoPE bias that is removed from the keys before the statistics
CACHE_KEY_BIAS = {"attn_k.bias": ("qwen2", "qwen2moe")}      # of which architectures the cache leaves it out; see build.cache_returns
