"""Calibrated transforms: statistics of a model's keys, values and queries, and the GGUF metadata made of them."""

KEY_BIAS = ("none", "attn_k.bias", "measured")   # pre-RoPE bias that is removed from the keys before the statistics
CACHE_KEY_BIAS = ("none",)                       # those that the cache of this version can return to the logit; it refuses the others
