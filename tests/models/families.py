"""Architectures with random weights, of every kind of cache: what docs/models.md tells of each type is measured on them.

shapes.py finds the tensors; here they are filled.
"""
from __future__ import annotations

import re
from pathlib import Path

import architectures
import calibrated
import numpy as np
import shapes

from pykvq.engine import Context, Model, quiet_log

_EXPERTS = {**shapes._EXPERTS, "expert_count": 4}
_NORM = {"attention.layer_norm_epsilon": 1e-5}
_HEAD = {"attention.key_length": None, "attention.value_length": None}     # follows from width and heads


def _head(d: int, v: int | None = None) -> dict:
    return {"attention.key_length": d, "attention.value_length": v or d, "rope.dimension_count": d}


# name in the table: architecture, metadata beyond shapes.BASE, tensors that libllama would do without
FAMILIES = {
    **{name: entry for name, entry in shapes.ARCHITECTURES.items() if not name.startswith("width") and name != "shared caches"},
    # (gemma3n is left out: thirty layers of random weights answer chaotically, with q8_0 as with f16)
    "encoder-decoder": ("t5", architectures.encoder_decoder),
    "head size 80": ("llama", _head(80)),
    "head size 96": ("llama", _head(96)),
    "head size 112": ("llama", _head(112)),
    "head size 192, value 128": ("deepseek2", {"attention.head_count_kv": 4, "attention.q_lora_rank": 64, "attention.kv_lora_rank": 64, **_head(192, 128),
                                               "rope.dimension_count": 64, "leading_dense_block_count": 2, "expert_shared_count": 0,
                                               "expert_weights_scale": 1.0, **_EXPERTS}),
    "head size 256": ("gemma", _head(256)),
    "head size 72": ("llama", _head(72)),
    "head size 48": ("llama", _head(48)),
    "half of the head rotates": ("stablelm", {**_NORM, "rope.dimension_count": 32}),
    "parallel attention and MLP": ("phi2", {**_NORM, "rope.dimension_count": 32}),
    "one KV head, LayerNorm": ("falcon", {**_NORM, "attention.head_count_kv": 1}),
    "parallel residual": ("gptneox", {**_NORM, "use_parallel_residual": True, "attention.head_count_kv": 4}),
    "ALiBi": ("mpt", {**_NORM, "attention.max_alibi_bias": 8.0, "attention.head_count_kv": 4}),
    "biases, grouped heads": ("starcoder2", _NORM),
    "multi-query, learned positions": ("starcoder", {**_NORM, "attention.head_count_kv": 1}),
    "norms after the blocks": ("olmo2", {}),
    "scaled residuals": ("granite", {"attention.scale": 0.125, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 2.0}),
    "scaled embeddings": ("minicpm", {}),
    "norms before and after": ("glm4", {"rope.dimension_count": 32}),
    "squared ReLU": ("nemotron", {**_NORM, "rope.dimension_count": 32}),
    "window, norms of keys": ("exaone4", {"attention.sliding_window": 64, "block_count": 4}),
    "many experts": ("olmoe", {**_EXPERTS, "attention.head_count_kv": 4}),
    "experts, fused projections": ("dbrx", {**_NORM, **_EXPERTS, "attention.clamp_kqv": 8.0}),
    "experts in some layers": ("ernie4_5-moe", {**_EXPERTS, "interleave_moe_layer_step": 1, "leading_dense_block_count": 1, "expert_shared_count": 1,
                                              "expert_shared_feed_forward_length": 64}),
    "no RoPE in every fourth layer": ("smollm3", {}),
    "clamped experts, soft cap": ("grok", {**_EXPERTS, "attn_logit_softcapping": 30.0}),
    "latent, not absorbed": ("minicpm3", {"attention.head_count_kv": 4, "attention.q_lora_rank": 64, "attention.kv_lora_rank": 64, **_head(96, 64),
                                          "rope.dimension_count": 32}),
    "states, some attention": ("granitehybrid", {"attention.head_count_kv": [0, 2, 0, 2], **shapes._STATE, "ssm.inner_size": 512, "ssm.time_step_rank": 8},
                               *(f"blk.{i}.{name}" for i in (0, 2) for name in ("ssm_norm.weight", "ssm_conv1d.bias"))),
    "states or attention or MLP": ("nemotron_h", {"attention.head_count_kv": [0, 2, 0, 0], "feed_forward_length": [0, 0, 0, 256], **shapes._STATE,
                                                 "ssm.inner_size": 512, "ssm.time_step_rank": 8, **_NORM},
                                   *(f"blk.{i}.{name}" for i in (0, 2) for name in ("ssm_norm.weight", "ssm_conv1d.bias"))),
}
_ONES, _ZEROS = re.compile(r"norm|ssm_d$|ssm_d\.|_scale"), re.compile(r"\.bias$")


def write(path: Path, name: str) -> Path:
    """Write a family's model with weights that make attention sharp enough to matter."""
    from gguf import GGUFReader
    architecture, extra, *tensors = FAMILIES[name]
    if callable(extra):
        return extra(path)
    extra = {"block_count": 4 if len(tensors) > 3 or any(isinstance(v, list) for v in extra.values()) else 2, **extra}
    shapes.write(path, architecture, extra, *tensors)
    rng = np.random.default_rng(0)
    for tensor in GGUFReader(path, "r+").tensors:
        x = rng.standard_normal(tensor.data.shape)
        if tensor.name.endswith("ssm_a"):
            x = -np.exp(0.3 * x)
        elif _ONES.search(tensor.name) and not tensor.name.endswith("bias"):
            x = 1 + 0.1 * x
        elif tensor.data.ndim == 1:
            x *= 0.1
        elif tensor.name.startswith("token_embd"):
            pass
        else:
            gain = 4 if tensor.name.startswith("output") else 1.5 if re.search(r"attn_(q|k|qkv)\.", tensor.name) else 1
            x *= gain / np.sqrt(tensor.data.shape[-1])
        tensor.data[:] = x.astype(tensor.data.dtype)
    return path


TOLERANCE = {"turbo2": 0.7, "turbo3": 0.5, "turbo4": 0.3, "oscar2": 0.95}   # of the logits, relative to f16; random weights forgive less than real ones
_TOKENS = [(7 * i * i + 3) % 256 for i in range(56)]
_BATCH = 48                                      # tokens in one batch, the others one by one


def _logits(model: Model, kv_type) -> tuple[np.ndarray, np.ndarray]:
    """Of the batch and of the tokens after it, without the f16 window that would hold them all."""
    with Context(model, 128, kv_type, n_batch=64, threads=1, kv_sink=0, kv_recent=0) as context:
        if context.model.header.architecture == "t5":
            context.encode(_TOKENS[:32])
        return (context.decode(_TOKENS[:_BATCH], 0, logits="all"),
                np.concatenate([context.decode([t], _BATCH + i) for i, t in enumerate(_TOKENS[_BATCH:])]))


def errors(model: Model, kv_type, exact) -> list[float]:
    """Relative errors of the logits in prefill and decode. Raises ValueError where the type is refused."""
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(_logits(model, kv_type), exact)]


def batch_beside_a_window(path: Path) -> float | None:
    """Relative error of a batch's logits beside an f16 window with less room than the batch needs; None where the cache has no window."""
    quiet_log()
    with Model(path) as model:
        if model.header.architecture == "t5":
            return None
        with Context(model, 128, "f16", n_batch=64, threads=1) as context:
            exact = context.decode(_TOKENS[:_BATCH], 0, logits="all")
        try:
            with Context(model, 128, "turbo2", n_batch=64, threads=1, kv_sink=4, kv_recent=32) as context:
                if not any(layer.n_window for layer in context.info()):
                    return None
                assert {layer.n_window for layer in context.info()} == {64} and _BATCH > 63 - 36
                return float(np.linalg.norm(context.decode(_TOKENS[:_BATCH], 0, logits="all") - exact) / np.linalg.norm(exact))
        except ValueError:
            return None


def _reason(error: ValueError, kv_type: str) -> str:
    """Without what belongs to this file alone, and whatever the type."""
    text = str(error).split(": ", 1)[-1].split("; run: ")[0].removeprefix("failed to initialize the context: ")
    return re.sub(r" \(64, [\d, ]+ values\)", "", text).replace(kv_type, "turbo" if kv_type.startswith("turbo") else kv_type)


def outcome(model: Model, kv_type: str, exact) -> str:
    """A cell of the table: yes, nothing to store, K alone, or refused with the reason. Raises AssertionError for wrong logits."""
    def checked(pair) -> bool:
        found = errors(model, pair, exact)
        assert max(found) < TOLERANCE[kv_type], f"{model.header.name} {pair}: {found}"
        return max(found) > 0
    try:
        return "yes" if checked(kv_type) else "nothing to store"
    except ValueError as error:
        reason = _reason(error, kv_type)
    try:
        checked((kv_type, "f16"))
        return f"K, with f16 for V: {reason}"
    except ValueError:
        return f"refused: {reason}"


def row(folder: Path, name: str) -> str:
    """The line of docs/models.md for a family, from running it."""
    quiet_log()
    path = write(folder / "family.gguf", name)
    with Model(path) as model:
        exact = _logits(model, "f16")
        turbo = {outcome(model, t, exact) for t in ("turbo2", "turbo3", "turbo4")}
        assert len(turbo) == 1, turbo
        with Context(model, 128, "f16") as context:
            layers = {layer.layer: (layer.n_head_kv, layer.head_dim_k) for layer in context.info()}
    arrays = {}
    for i, (heads, d) in layers.items():
        arrays |= calibrated.random_layers([i], heads, d, spread=1.0)
    calibrated.write_sidecar(path, calibrated.metadata(path, arrays))
    with Model(path) as model:
        oscar = outcome(model, "oscar2", exact)
    return f"| {FAMILIES[name][0]} | {name} | {turbo.pop()} | {oscar} |"
