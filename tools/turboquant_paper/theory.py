"""Distortion, unbiasedness, bits and encoding time on vectors whose distribution the theorems are about."""
from __future__ import annotations

import ctypes
import time

import numpy as np

from pykvq.codecs import (PolarQuant, RangeCoder, TurboQuantMSE, TurboQuantProd, index_entropy, mse_bounds, prod_bounds, sphere_codebook,
                          sphere_mse)
from pykvq.codecs.density import cell_probabilities
from pykvq.formats import TYPES
from pykvq.native import NativeError, library

BITS = (1, 2, 3, 4)


def unit_vectors(n: int, d: int, seed: int) -> np.ndarray:
    """Uniform points on the sphere, float32 [n, d]."""
    x = np.random.default_rng(seed).standard_normal((n, d), np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def distortion(dims: tuple[int, ...] = (128, 1536), n: int = 4000, queries: int = 200) -> list[dict]:
    """E|x - x'|^2 of the MSE codec and d E(<y, x> - <y, x'>)^2 of the Prod codec, at 1 to 4 bits.

    "single" puts the whole norm into one channel, the worst case for a codec without a rotation.
    """
    rows = []
    for d in dims:
        x, y, single = unit_vectors(n, d, 11), unit_vectors(queries, d, 12), np.eye(d, dtype=np.float32)
        parts = np.array_split(x, max(1, 1024 // d))     # a rotation and a projection of its own for each part
        for bits in BITS:
            row = {"d": d, "bits": bits, "vectors": n, "queries": queries, "exact_mse": sphere_mse(d, bits),
                   "exact_prod": np.pi / 2 * sphere_mse(d, bits - 1) if bits > 1 else np.pi / 2,
                   "mse_bounds": mse_bounds(bits), "prod_bounds": prod_bounds(bits)}
            for rotation in ("haar", "hadamard"):
                mse, prod = [], []
                for seed, part in enumerate(parts):
                    m, p = TurboQuantMSE(d, bits, rotation=rotation, seed=seed), TurboQuantProd(d, bits, rotation=rotation, seed=seed)
                    mse.append(np.square(part - m.dequantise(m.quantise(part))).sum(1).mean())
                    prod.append(d * np.square(y @ part.T - p.inner(y, p.quantise(part))).mean())
                row[f"mse_{rotation}"], row[f"prod_{rotation}"] = np.mean(mse), np.mean(prod)
            m = TurboQuantMSE(d, bits)
            row["mse_single"] = np.square(single - m.dequantise(m.quantise(single))).sum(1).mean()
            rows.append(row)
    return rows


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


def seconds(work) -> float:
    """Processor seconds of this process: what other programs on the machine do does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


def encoding_times(dims: tuple[int, ...] = (200, 1536, 3072), n: int = 100_000, bits: int = 4, block: int = 10_000) -> list[dict]:
    """Processor seconds for n vectors at 4 bits: TurboQuant-MSE in numpy with either rotation, and the cache type turbo4 in C."""
    rows = []
    for d in dims:
        row = {"d": d, "bits": bits, "vectors": n}
        x = np.random.default_rng(51).standard_normal((block, d), np.float32)      # blocks: the working set stays small
        for rotation in ("haar", "hadamard"):
            m = TurboQuantMSE(d, bits, rotation=rotation)
            row[rotation] = seconds(lambda: [m.quantise(x) for _ in range(n // block)])
        row["c_turbo4"] = c_encoding_time(x, n // block) if d % TYPES["turbo4"].block == 0 else None
        rows.append(row)
    return rows


def c_encoding_time(x: np.ndarray, times: int) -> float | None:
    """Processor seconds of `times` passes of the scalar C reference of turbo4 over x, None without the native library."""
    try:
        quantise = library("ggml-base").kvq_quantize_row_ref
    except (NativeError, AttributeError):
        return None
    quantise.argtypes, quantise.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    t = TYPES["turbo4"]
    out = np.empty(x.size // t.block * t.bytes, np.uint8)
    return seconds(lambda: [quantise(t.id, x.ctypes.data, out.ctypes.data, x.size) for _ in range(times)])
