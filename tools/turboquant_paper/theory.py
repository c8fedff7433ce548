"""Distortion, unbiasedness, bits and encoding time on vectors whose distribution the theorems are about."""
from __future__ import annotations

import ctypes
import time
from typing import Callable

import numpy as np

from pykvq.codecs import (PolarQuant, RangeCoder, TurboQuantMSE, TurboQuantProd, index_entropy, mse_bounds, prod_bounds, sphere_codebook,
                          sphere_mse)
from pykvq.codecs.density import cell_probabilities
from pykvq.formats import TYPES
from pykvq.native import NativeError, library

BITS = (1, 2, 3, 4)


def unit_vectors(n: int, d: int, seed: int | list[int]) -> np.ndarray:
    """Uniform points on the sphere, float32 [n, d]."""
    x = np.random.default_rng(seed).standard_normal((n, d), np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def distortion(runs: dict[int, int] = {128: 64, 1536: 16}, n: int = 1000, queries: int = 100) -> list[dict]:
    """E|x - x'|^2 of the MSE codec and d E(<y, x> - <y, x'>)^2 of the Prod codec, at 1 to 4 bits, over runs[d] rotations for each d.

    Every run has vectors, queries, a rotation and a projection of its own, so that its mean is one independent sample.
    "single" puts the whole norm into one channel, the worst case for a codec without a rotation.
    """
    rows = []
    for d, count in runs.items():
        single = np.eye(d, dtype=np.float32)
        for bits in BITS:
            rest = sphere_mse(d, bits - 1) if bits > 1 else 1.0
            row = {"d": d, "bits": bits, "vectors": n, "queries": queries, "runs": count, "exact_mse": sphere_mse(d, bits),
                   "exact_prod": (np.pi / 2 - 1 / d) * rest, "mse_bounds": mse_bounds(bits), "prod_bounds": prod_bounds(bits)}
            samples = {}
            for run in range(count):
                x, y = unit_vectors(n, d, [11, run]), unit_vectors(queries, d, [12, run])
                for rotation in ("haar", "hadamard"):
                    m, p = TurboQuantMSE(d, bits, rotation=rotation, seed=run), TurboQuantProd(d, bits, rotation=rotation, seed=run)
                    samples.setdefault(f"mse_{rotation}", []).append(squared_error(m, x))
                    samples.setdefault(f"prod_{rotation}", []).append(d * np.square(y @ x.T - p.inner(y, p.quantise(x))).mean())
                    if rotation == "haar":
                        samples.setdefault("mse_single", []).append(squared_error(m, single))
            for name, values in samples.items():
                row |= {name: np.mean(values), f"{name}_error": np.std(values, ddof=1) / np.sqrt(count)}
            rows.append(row)
    return rows


def squared_error(codec: TurboQuantMSE, x: np.ndarray) -> float:
    """Mean over rows of |x - x'|^2."""
    return np.square(x - codec.dequantise(codec.quantise(x))).sum(1).mean()


def unbiasedness(d: int = 128, runs: int = 1000, cosine: float = 0.5) -> list[dict]:
    """Mean and variance of both estimates of <y, x> = cosine for one pair of unit vectors, over rotations and projections."""
    x, z = unit_vectors(2, d, 21)
    z = z - (z @ x) * x
    y = cosine * x + np.sqrt(1 - cosine ** 2) * z / np.linalg.norm(z)
    rows = []
    for bits in BITS:
        estimates = {"mse": np.empty(runs), "prod": np.empty(runs)}
        for seed in range(runs):
            for name, codec in (("mse", TurboQuantMSE(d, bits, seed=seed)), ("prod", TurboQuantProd(d, bits, seed=seed))):
                estimates[name][seed] = codec.inner(y[None], codec.quantise(x[None]))[0, 0]
        row = {"d": d, "bits": bits, "runs": runs, "truth": float(y @ x), "mse_factor": 1 - sphere_mse(d, bits), "prod_bound": prod_bounds(bits)[1]}
        for name, values in estimates.items():
            row |= {f"{name}_mean": values.mean(), f"{name}_error_of_mean": values.std() / np.sqrt(runs), f"{name}_variance": d * values.var()}
        rows.append(row)
    return rows


def entropy_sizes(d: int = 128, n: int = 20_000) -> list[dict]:
    """Entropy of an index and the bits that the range coder really spends on n vectors."""
    x, rows = unit_vectors(n, d, 31), []
    for bits in BITS:
        codes = TurboQuantMSE(d, bits).quantise(x).codes
        stream = RangeCoder(cell_probabilities(sphere_codebook(d, bits), d)).encode(codes)
        rows.append({"d": d, "bits": bits, "vectors": n, "entropy": index_entropy(sphere_codebook(d, bits), d), "coded": 8 * len(stream) / codes.size})
    return rows


def polar(d: int = 128, n: int = 4000) -> list[dict]:
    """PolarQuant beside TurboQuant-MSE: bits with fp16 radii or norm, and relative squared error."""
    x, rows = unit_vectors(n, d, 41), []
    for levels in ((3, 2, 2, 2), (4, 2, 2, 2), (4, 3, 3, 3)):
        p = PolarQuant(d, levels)
        rows.append({"name": f"PolarQuant {levels}", "d": d, "bits": p.bits_per_value(), "mse": np.square(x - p.dequantise(p.quantise(x))).sum(1).mean()})
    for bits in (3, 4):
        m = TurboQuantMSE(d, bits)
        rows.append({"name": f"TurboQuant-MSE {bits} bits", "d": d, "bits": m.bits_per_value(16), "mse": np.square(x - m.dequantise(m.quantise(x))).sum(1).mean()})
    return rows


def seconds(work: Callable) -> float:
    """Processor seconds of this process: what other programs on the machine do does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


def encoding_seconds(d: int, n: int, bits: int = 4, block: int = 10_000) -> dict[str, float]:
    """Processor seconds for n vectors: TurboQuant-MSE in numpy with either rotation, and the cache type turbo4 in C where d fits it.

    "online" is the Hadamard rotation with one call for each vector, measured on a hundredth of n.
    """
    x = np.random.default_rng(51).standard_normal((block, d), np.float32)          # blocks: the working set stays small
    blocks = range(n // block)
    found = {}
    for rotation in ("haar", "hadamard"):
        m = TurboQuantMSE(d, bits, rotation=rotation)
        found[rotation] = seconds(lambda: [m.quantise(x) for _ in blocks])
    found["online"] = 100 * seconds(lambda: [m.quantise(v) for v in x[:n // 100]])
    native = c_encoder(x) if d % TYPES["turbo4"].block == 0 else None
    return found | ({"c_turbo4": seconds(lambda: [native() for _ in blocks])} if native else {})


def c_encoder(x: np.ndarray) -> Callable | None:
    """A function that encodes x by the scalar C reference of turbo4, None without the native library."""
    try:
        quantise = library("ggml-base").kvq_quantize_row_ref
    except (NativeError, AttributeError):
        return None
    quantise.argtypes, quantise.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    t = TYPES["turbo4"]
    out = np.empty(x.size // t.block * t.bytes, np.uint8)
    return lambda: quantise(t.id, x.ctypes.data, out.ctypes.data, x.size)
