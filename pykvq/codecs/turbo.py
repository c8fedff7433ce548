"""numpy reference of turbo2, turbo3 and turbo4: rung 1 of the ladder, bit-exact with ggml_kernels/base/kvq-reference.c.

TurboQuant in its MSE form (arXiv 2504.19874, section 3.1): signed Hadamard rotation of a block, Lloyd-Max codes for
N(0, 1), one fp16 scale that keeps the length of the block. The rotation is part of the type: dequantise(quantise(x)) is close to x itself.

Every function takes any number of leading dimensions; the last one is cut into blocks. All arithmetic is float32 in a
fixed order, so that C can repeat it bit for bit.
"""
from __future__ import annotations

import numpy as np

from pykvq.codecs.hadamard import paley
from pykvq.formats import ACTIVATION_IDS, FAMILIES, PALEY, SIGNS, TYPES, WINDOW_IDS, CacheType

LANES = 16      # independent accumulators of a sum, so that SIMD code can keep the order
FP16_MAX = np.float32(65504)


def rotate(x: np.ndarray) -> np.ndarray:
    """y = H (signs * x), unnormalised; float32 [..., n] to float32 [..., n] with n a declared block size.

    Divide by sqrt(n) for the orthonormal rotation. Raises ValueError for another n.
    """
    n, m = _order(x)
    v = x.astype(np.float32) * _signs(n)
    return _paley(_sylvester(v.reshape(*x.shape[:-1], m, n // m)), paley(m)).reshape(x.shape)


def unrotate(y: np.ndarray) -> np.ndarray:
    """signs * (H^T y): the inverse of rotate up to the factor n; float32 [..., n] to float32 [..., n]."""
    n, m = _order(y)
    v = _paley(y.astype(np.float32).reshape(*y.shape[:-1], m, n // m), paley(m).T)
    return _sylvester(v).reshape(y.shape) * _signs(n)


def quantise(x: np.ndarray, type_name: str) -> np.ndarray:
    """Blocks of the member `type_name` ("turbo3_64"; "turbo3" is the block of 128).

    x: float [..., k], k a multiple of the block. Returns uint8 [..., k / block * bytes per block].
    Raises ValueError for a name that is no cache type or a k that the block does not divide.
    """
    t = _member(type_name)
    y = rotate(blocks(np.asarray(x, np.float32), t.block, t.name))
    codes, d = _code(y, t)
    d16 = d.astype("<f2")[..., None].view(np.uint8)
    return _joined(np.concatenate([_pack(codes, t.bits), d16], -1))


def dequantise(data: np.ndarray, type_name: str) -> np.ndarray:
    """Values of quantised blocks: uint8 [..., blocks * bytes per block] to float32 [..., blocks * block].

    Raises ValueError as quantise does.
    """
    t = _member(type_name)
    b = blocks(np.asarray(data, np.uint8), t.bytes, t.name)
    d = np.ascontiguousarray(b[..., -2:]).view("<f2").astype(np.float32)
    levels = np.array(FAMILIES[t.family].levels, np.float32)[_unpack(b[..., :-2], t)]
    g = np.float32(1) / (_scale(t) * np.sqrt(np.float32(t.block)))
    return _joined(unrotate(levels) * (d * g))


def quantise_activation(x: np.ndarray, n: int) -> np.ndarray:
    """Rotated int8 query {float32 d; int8 q[n]} per block of n values; absmax / 127, orthonormal rotation.

    x: float [..., k]. Returns uint8 [..., k / n * (n + 4)]. Raises ValueError for an undeclared n or a k that n does not divide.
    """
    if f"kvq_q8_{n}" not in ACTIVATION_IDS:
        raise ValueError(f"no activation type has blocks of {n} values")
    y = rotate(blocks(np.asarray(x, np.float32), n, f"kvq_q8_{n}")) * (np.float32(1) / np.sqrt(np.float32(n)))
    peak = np.abs(y).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    q = np.rint(y * inverse).astype(np.int8).view(np.uint8)
    d = (peak / np.float32(127)).astype("<f4").view(np.uint8)
    return _joined(np.concatenate([d, q], -1))


def quantise_window(x: np.ndarray, n: int) -> np.ndarray:
    """Rows of the f16 window turbo_f16_n: the orthonormal rotation of each block of n values; float [..., k] to float16 [..., k].

    Raises ValueError for an undeclared n or a k that n does not divide.
    """
    _window(n)
    y = rotate(blocks(np.asarray(x, np.float32), n, f"turbo_f16_{n}"))
    return _joined((y * (np.float32(1) / np.sqrt(np.float32(n)))).astype(np.float16))


def dequantise_window(y: np.ndarray, n: int) -> np.ndarray:
    """Inverse of quantise_window: float16 [..., k] to float32 [..., k]. Raises ValueError as it does."""
    _window(n)
    x = unrotate(blocks(np.asarray(y, np.float16), n, f"turbo_f16_{n}"))
    return _joined(x * (np.float32(1) / np.sqrt(np.float32(n))))


def _window(n: int) -> None:
    if f"turbo_f16_{n}" not in WINDOW_IDS:
        raise ValueError(f"no window type has blocks of {n} values")


def _member(name: str) -> CacheType:
    if name not in TYPES or TYPES[name].family not in FAMILIES:
        raise ValueError(f"unknown turbo type {name!r}; members are {', '.join(n for n, t in TYPES.items() if t.family in FAMILIES)}")
    return TYPES[name]


def blocks(x: np.ndarray, size: int, name: str) -> np.ndarray:
    """Rows [..., k] cut into blocks [..., k / size, size]. Raises ValueError when size does not divide k."""
    if x.ndim == 0 or x.shape[-1] % size:
        raise ValueError(f"{name}: rows of {x.shape[-1] if x.ndim else 0} are no multiple of the block's {size}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _joined(blocks: np.ndarray) -> np.ndarray:
    """[..., n, size] to [..., n * size], empty ones included."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])


def _order(x: np.ndarray) -> tuple[int, int]:
    n = x.shape[-1]
    if n not in PALEY:
        raise ValueError(f"no rotation of {n} values is declared; blocks are {sorted(PALEY)}")
    return n, PALEY[n]


def _signs(n: int) -> np.ndarray:
    return np.array(SIGNS[:n], np.float32)


def _scale(t: CacheType) -> np.float32:
    return np.float32(FAMILIES[t.family].scale)


def _sylvester(v: np.ndarray) -> np.ndarray:
    """Butterflies of stride 1, 2, 4, ... along the last axis, whose length is a power of two."""
    width, h = v.shape[-1], 1
    while h < width:
        pair = v.reshape(*v.shape[:-1], width // (2 * h), 2, h)
        a, b = pair[..., 0, :], pair[..., 1, :]
        v = np.stack([a + b, a - b], -2).reshape(v.shape)
        h *= 2
    return v


def _paley(v: np.ndarray, p: np.ndarray) -> np.ndarray:
    """out[..., i, b] = sum over a, ascending, of p[i, a] * v[..., a, b]."""
    p = p.astype(np.float32)
    out = p[:, :1] * v[..., :1, :]
    for a in range(1, len(p)):
        out = out + p[:, a:a + 1] * v[..., a:a + 1, :]
    return out


def lane_sum(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis in the order of LANES accumulators and a halving tree; float32 [...]."""
    acc = np.zeros((*x.shape[:-1], LANES), np.float32)
    for i in range(0, x.shape[-1], LANES):
        part = x[..., i:i + LANES]
        acc[..., :part.shape[-1]] += part
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    return acc[..., 0]


def _code(y: np.ndarray, t: CacheType) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [..., n] and scale float32 [...] in sigmas, before its rounding to fp16."""
    family = FAMILIES[t.family]
    s = np.sqrt(lane_sum(y * y) / np.float32(t.block))[..., None]
    codes = np.zeros(y.shape, np.uint8)
    for threshold in np.array(family.thresholds, np.float32):
        codes += y > threshold * s
    c = np.array(family.levels, np.float32)[codes]
    den = (c * c).sum(-1)                        # integers below 2**24: exact in any order
    # not the least-squares scale: it shortens every value by <y, c>^2 / (|y| |c|)^2, which a sum over many tokens does not average out
    return codes, np.minimum(s[..., 0] * _scale(t) / np.sqrt(den), FP16_MAX)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Code planes of one block: uint8 [..., n] to uint8 [..., n * bits / 8]; the layout is in docs/formats.md."""
    if bits == 4:
        low, high = np.split(codes, 2, -1)
        return low | high << 4
    q = np.split(codes & 3, 4, -1)
    plane = q[0] | q[1] << 2 | q[2] << 4 | q[3] << 6
    if bits == 2:
        return plane
    high = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint8)
    for k, quarter in enumerate(np.split(codes >> 2, 4, -1)):
        for s, eighth in enumerate(np.split(quarter, 2, -1)):
            high |= eighth << (2 * k + s)
    return np.concatenate([plane, high], -1)


def _unpack(planes: np.ndarray, t: CacheType) -> np.ndarray:
    """Inverse of _pack: uint8 [..., n]."""
    if t.bits == 4:
        return np.concatenate([planes & 15, planes >> 4], -1)
    low = planes[..., :t.block // 4]
    codes = np.concatenate([low >> 2 * k & 3 for k in range(4)], -1)
    if t.bits == 2:
        return codes
    high = planes[..., t.block // 4:]
    return codes | np.concatenate([high >> b & 1 for b in range(8)], -1) << 2
