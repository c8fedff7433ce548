"""Calibrated transforms: statistics of a model's keys, values and queries, and the GGUF metadata made of them."""

KEY_BIAS = ("none", "attn_k.bias", "measured")   # pre-RoPE bias that is removed from the keys before the statistics
CACHE_KEY_BIAS = {"attn_k.bias": ("qwen2", "qwen2moe")}      # what the cache of this version returns to the logit, and for which architectures
