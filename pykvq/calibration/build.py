"""From the sums of a run to what is embedded."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import pykvq
from pykvq.calibration import CACHE_KEY_BIAS, KEY_BIAS
from pykvq.calibration.bias_pairs import MAX_PAIRS, Biased, choose, only
from pykvq.calibration.key_bias import measured_bias
from pykvq.calibration.metadata import Embedded
from pykvq.calibration.model_files import files_of, tensor
from pykvq.calibration.moments import LayerSums
from pykvq.calibration.rope import NEOX, NORMAL
from pykvq.calibration.run import Statistics
from pykvq.calibration.text import text_hash
from pykvq.calibration.transform import Transform, layer_transform
from pykvq.devices import devices
from pykvq.formats import CODEBOOK
from pykvq.gguf_file import GgufFile
from pykvq.native import llama_commit
from pykvq.support import KEY_BIAS_BACKENDS

# Returning a bias costs a GPU speed (docs/calibration.md), which is worth it for a model with attn_k.bias, of little use in a low-bit cache without it.
MEASURED_ON_GPU = False


def cache_returns(kind: str, statistics: Statistics, model: Path) -> bool:
    """Whether the cache, on a device whose kernels can, stores keys of this model without that bias and returns it to the logit."""
    layers, files = statistics.moments.layers, files_of(model)
    architecture = files[0].get("general.architecture")
    if kind == "attn_k.bias":
        names = {name for f in files for name in f.tensors}
        return architecture in CACHE_KEY_BIAS[kind] and all(s.rope and f"blk.{i}.attn_k.bias" in names for i, s in layers.items())
    # measured: one RoPE in all layers, and a plain cache, which has every layer and no window
    ropes = [s.rope for s in layers.values()]
    plain = len(layers) == files[0].get(f"{architecture}.block_count") and not files[0].get(f"{architecture}.attention.sliding_window")
    return kind == "none" or plain and ropes[0] is not None and ropes[0].mode in (NORMAL, NEOX) and ropes[0].first == 0 and ropes[0].n_dims <= 2 * MAX_PAIRS and len(set(ropes)) == 1


def best_key_bias(statistics: Statistics, model: Path) -> str:
    """The most of "measured", "attn_k.bias" and "none" that the caches of this installation can return on each of its devices.

    MEASURED_ON_GPU says whether that includes "measured" where there is a GPU.
    """
    backends = {device.backend for device in devices()}
    if not backends <= KEY_BIAS_BACKENDS:
        return "none"
    kinds = [kind for kind in ("measured", "attn_k.bias", "none") if kind != "measured" or MEASURED_ON_GPU or "cuda" not in backends]
    return next(kind for kind in kinds if cache_returns(kind, statistics, model))


def _keeps_mean(files: Sequence[GgufFile], layer: int) -> bool:
    """Whether the cache must store keys with their mean: a soft cap or an attention sink sees a shift of all logits."""
    architecture = files[0].get("general.architecture")
    return architecture in ("gemma2", "grok") or any(f"blk.{layer}.attn_sinks.weight" in f.tensors for f in files)


def build(statistics: Statistics, model: Path, key_bias: str | None = None) -> Embedded:
    """Transforms of every layer, with provenance.

    key_bias: which pre-RoPE bias is removed from the keys first: "none", "attn_k.bias" (the model's own) or "measured" (the mean);
    None: best_key_bias. Raises ValueError for an unknown one, for a model without attn_k.bias, and for statistics of an incomplete run.
    """
    key_bias = key_bias or best_key_bias(statistics, model)
    if key_bias not in KEY_BIAS:
        raise ValueError(f"key_bias is one of {', '.join(KEY_BIAS)}, not {key_bias!r}")
    if not statistics.complete:
        raise ValueError(f"the calibration has run {statistics.done} of {len(statistics.tokens)} chunks; run pykvq calibrate again to finish it")
    last = int(statistics.positions.max()) + statistics.tokens.shape[1] - 1
    provenance = {"text_hash": text_hash(statistics.tokens), "tokens": int(statistics.tokens.size), "source": statistics.source,
                  "pykvq_version": pykvq.__version__, "llama_cpp_commit": llama_commit(), "positions": last}
    sums = {i: s for i, s in sorted(statistics.moments.layers.items())}
    files = files_of(model)
    if key_bias == "none":
        layers = {i: layer_transform(s, keep_mean=_keeps_mean(files, i)) for i, s in sums.items()}
    else:
        biased = {i: Biased(s, _bias(s, files, i, key_bias), _keeps_mean(files, i)) for i, s in sums.items()}
        pairs = choose(biased)
        layers = {i: _without(biased[i], pairs[i], key_bias == "measured") for i in sums}
    return Embedded(statistics.fingerprint, CODEBOOK, key_bias, layers, provenance)


def _bias(sums: LayerSums, files: Sequence[GgufFile], i: int, key_bias: str) -> np.ndarray:
    """The bias [h, d] of a layer's keys before RoPE."""
    if key_bias == "measured":
        return measured_bias(sums).astype("<f2").astype(np.float64)        # as the cache will read it, so that its rounding is in the statistics
    raw = tensor(files, f"blk.{i}.attn_k.bias")
    if raw is None:
        raise ValueError(f"{files[0].path.name} has no blk.{i}.attn_k.bias; use key_bias none or measured")
    return np.frombuffer(raw, "<f4").reshape(sums.heads, -1).astype(np.float64)


def _without(layer: Biased, pairs: np.ndarray, stored: bool) -> Transform:
    """The transform of keys without those pairs of their bias."""
    bias = only(layer.bias, layer.sums.rope, pairs)
    return layer_transform(layer.sums, bias, keep_bias=stored, keep_mean=layer.keep_mean)._replace(pairs=pairs)
