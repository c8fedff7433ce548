"""GGUF files of any architecture, from its metadata alone: libllama itself is asked which tensors it wants and of which shape.

The weights are a hole in the file, so that a model of many GB takes no room and loads in milliseconds; all of them are zero.
"""
from __future__ import annotations

import math
import re
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFWriter

from pykvq.engine import Model, quiet_log

_MISSING, _SHAPE = re.compile(r"tensor '(\S+?)' not found|missing tensor '(\S+?)'"), re.compile(r"tensor '(.+?)' has wrong shape; expected([\d,\s]+), got")
_FLOATS = re.compile(r"\.bias$|conv|ssm_(?!in|out)")         # matrices that ggml takes in f32 only

BASE = {"context_length": 8192, "embedding_length": 256, "block_count": 4, "feed_forward_length": 256, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64,
        "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 512}
_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
_STATE = {"ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 16, "ssm.time_step_rank": 8, "ssm.group_count": 1}

# architecture, what it has beyond BASE (None takes a key away), and tensors without which it loads but does not run
ARCHITECTURES = {
    "dense": ("llama", {}),
    "key bias": ("qwen2", {}),
    "query and key norms": ("qwen3", {"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128}),
    "experts": ("qwen3moe", _EXPERTS),
    "alternating window, soft cap": ("gemma2", {"attention.sliding_window": 512, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "five windows to one": ("gemma3", {"block_count": 6, "attention.sliding_window": 512, "attention.head_count_kv": 1}),
    "shared caches": ("gemma3n", {"block_count": 30, "attention.sliding_window": 512, "embedding_length_per_layer_input": 32}),
    "sinks, window, experts": ("gpt-oss", {"attention.sliding_window": 128, **_EXPERTS}),
    "latent": ("deepseek2", {"attention.head_count_kv": 1, "attention.q_lora_rank": 64, "attention.kv_lora_rank": 512, "attention.key_length": 576,
                             "attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128,
                             "leading_dense_block_count": 4, "expert_shared_count": 0, "expert_weights_scale": 1.0, **_EXPERTS}),
    "heads by layer": ("openelm", {"attention.head_count": [4, 4, 8, 8], "attention.head_count_kv": [1, 1, 2, 2],
                                   "feed_forward_length": [128, 192, 256, 320]}),
    "convolutions": ("lfm2", {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3}),
    "fused projections": ("phi3", {"rope.scaling.original_context_length": 8192}, "blk.0.attn_qkv.weight"),
    "state beside attention": ("falcon-h1", _STATE, "blk.0.ssm_norm.weight", "blk.0.ssm_conv1d.bias"),
    "state or attention": ("jamba", {"attention.head_count_kv": [0, 0, 2, 0], **_STATE, "ssm.inner_size": 512, **_EXPERTS}),
    "state alone": ("mamba2", {**_STATE, "attention.head_count": 0, "attention.head_count_kv": 0, "attention.key_length": None,
                               "attention.value_length": None, "rope.dimension_count": None}),
    "linear attention": ("qwen3next", {**_EXPERTS, "ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 64, "ssm.time_step_rank": 4,
                                       "ssm.group_count": 2, "full_attention_interval": 4},
                         *(f"blk.{i}.attn_{name}.weight" for i in range(3) for name in ("qkv", "gate"))),
    "learned positions": ("gpt2", {"attention.layer_norm_epsilon": 1e-5}),
    "position bias": ("bloom", {"attention.layer_norm_epsilon": 1e-5}),
    "parallel blocks, window": ("cohere2", {"attention.sliding_window": 512, "logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5}),
    "width of 8B": ("qwen3", {"context_length": 40960, "embedding_length": 4096, "block_count": 2, "feed_forward_length": 12288,
                            "attention.head_count": 32, "attention.head_count_kv": 8, "attention.key_length": 128, "attention.value_length": 128,
                            "rope.dimension_count": 128, "vocab_size": 151936}),
    "width of 12B, window": ("gemma3", {"context_length": 131072, "embedding_length": 3840, "block_count": 2, "feed_forward_length": 15360,
                               "attention.head_count": 16, "attention.head_count_kv": 8, "attention.key_length": 256, "attention.value_length": 256,
                               "rope.dimension_count": 256, "attention.sliding_window": 1024, "vocab_size": 262144}),
    "width of 30B, experts": ("qwen3moe", {"context_length": 40960, "embedding_length": 2048, "block_count": 2, "feed_forward_length": 6144,
                                  "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128, "attention.value_length": 128,
                                  "rope.dimension_count": 128, "expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768,
                                  "vocab_size": 151936}),
}


def write(path: Path, architecture: str, extra: dict, *tensors: str) -> Path:
    """Write the model. Raises ValueError with libllama's reason when the metadata do not make one."""
    quiet_log()
    keys = BASE | extra
    try:
        return _asked(path, architecture, keys, tensors, range(keys["block_count"]))
    except ValueError:
        return _asked(path, architecture, keys, tensors, range(0))        # its layers differ


def _asked(path: Path, architecture: str, keys: dict, wanted: tuple[str, ...], alike: range) -> Path:
    """Add what libllama misses until it is content; what layer 0 has, all layers in `alike` have."""
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (1,)}

    def put(name: str, shape: tuple[int, ...]) -> None:
        tensors[name] = shape
        if name.startswith("blk.0."):
            tensors.update({name.replace(".0.", f".{i}.", 1): shape for i in alike})
    for name in wanted:
        put(name, (1,))
    while True:
        _write(path, architecture, keys, tensors)
        try:
            Model(path, no_alloc=True).close()
            return path
        except ValueError as error:
            missing, shape = _MISSING.search(str(error)), _SHAPE.search(str(error))
            if missing:
                put(missing[1] or missing[2], (1,))
            elif shape and tensors[shape[1]] != (ne := tuple(int(n) for n in shape[2].split(","))):
                put(shape[1], ne)
            else:
                raise


def _write(path: Path, architecture: str, keys: dict, tensors: dict[str, tuple[int, ...]]) -> None:
    w = GGUFWriter(str(path), architecture)
    w.add_name(architecture)
    w.add_tokenizer_model("no_vocab")
    for key, value in keys.items():
        if value is not None:
            kind = {list: "array", float: "float32", bool: "bool"}.get(type(value), "uint32")
            add = getattr(w, f"add_{kind}")
            add(f"{architecture}.{key}", value)
    size = 0
    for name, ne in tensors.items():
        half = len(ne) > 1 and not _FLOATS.search(name)
        n = math.prod(ne) * (2 if half else 4)
        w.add_tensor_info(name, ne[::-1], "float16" if half else "float32", n, GGMLQuantizationType.F16 if half else GGMLQuantizationType.F32)
        size += -(-n // 32) * 32
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()
    with path.open("r+b") as f:
        f.truncate(-(-path.stat().st_size // 32) * 32 + size)
