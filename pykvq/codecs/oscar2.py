"""numpy reference of oscar2's block: tiers of 4, 2 and 1 bits; bit-exact with ggml_kernels/base/kvq-tiered.c.

The type knows no rotation: its coordinates come out of a calibrated transform that has put them in order of importance
(eigenbasis of S_K^1/2 S_Q S_K^1/2, reverse water-filling over OSCAR's query covariance, arXiv 2605.17757) and mixed each
tier by itself. One 16-bit word serves the block: the least-squares scale of the first tier with five mantissa bits, and the
spread of the other two beside it, of four and eight choices; so all levels are int8 in one unit. All arithmetic is float32
in a fixed order, so that C can repeat it bit for bit.
"""
from __future__ import annotations

import numpy as np

from pykvq.codecs.turbo import FP16_MAX, blocks, lane_sum
from pykvq.formats import TIERED, TYPES, CacheType


def quantise(y: np.ndarray, type_name: str) -> np.ndarray:
    """Blocks of the member `type_name` ("oscar2_64"; "oscar2" is the block of 128).

    y: float [..., k] in the calibrated basis, k a multiple of the block. Returns uint8 [..., k / block * bytes per block].
    Raises ValueError for a name that is no tiered type or a k that the block does not divide.
    """
    t = _member(type_name)
    b = blocks(np.asarray(y, np.float32), t.block, t.name)
    codes, choice, sigma, scale = np.zeros(b.shape, np.uint8), np.zeros(b.shape[:-1], np.uint16), None, None
    for tier, part in _tiers(t):
        v = b[..., part]
        own = np.sqrt(lane_sum(v * v) / np.float32(v.shape[-1]))
        if sigma is None:                        # the first tier sets the scale, the others their spread beside it
            sigma = spread = own
        else:
            at = sum((own > np.float32(edge) * sigma for edge in tier.edges), np.zeros(own.shape, np.uint16))
            choice = choice << np.uint16(len(tier.ratios).bit_length() - 1) | at
            spread = np.array(tier.ratios, np.float32)[at] * sigma
        for threshold in np.array(tier.thresholds, np.float32):
            codes[..., part] += v > threshold * spread[..., None]
        if scale is None:
            c = np.array(tier.levels[0], np.float32)[codes[..., part]]
            d = lane_sum(v * c) / (c * c).sum(-1) * np.float32(TIERED[t.family].scale)       # the sum of squares is exact
            scale = _coarse(np.minimum(d, FP16_MAX).astype("<f2").view("<u2"))
    last = (scale | choice).astype("<u2")[..., None].view(np.uint8)
    return np.concatenate([_pack(codes, t), last], -1).reshape(*np.shape(y)[:-1], -1)


def dequantise(data: np.ndarray, type_name: str) -> np.ndarray:
    """Values of quantised blocks in the calibrated basis: uint8 [..., blocks * bytes per block] to float32 [..., blocks * block].

    Raises ValueError as quantise does.
    """
    t = _member(type_name)
    b = blocks(np.asarray(data, np.uint8), t.bytes, t.name)
    last = np.ascontiguousarray(b[..., -2:]).view("<u2")[..., 0]
    codes, shift, levels = _unpack(b[..., :-2], t), 5, []
    for tier, part in _tiers(t):
        width = len(tier.ratios).bit_length() - 1
        shift -= width
        at = last >> np.uint16(shift) & np.uint16((1 << width) - 1)
        levels.append(np.array(tier.levels, np.float32)[at[..., None], codes[..., part]])
    d = (last & np.uint16(0xFFE0)).view("<f2").astype(np.float32)[..., None]
    unit = np.float32(1) / np.float32(TIERED[t.family].scale)
    return (np.concatenate(levels, -1) * (d * unit)).reshape(*np.shape(data)[:-1], -1)


def _coarse(fp16: np.ndarray) -> np.ndarray:
    """fp16 bits rounded to five mantissa bits; the largest finite one where that overflows."""
    h = (fp16.astype(np.uint32) + 16) & 0xFFE0
    return np.where(h >= 0x7C00, 0x7BE0, h).astype(np.uint16)


def _member(name: str) -> CacheType:
    if name not in TYPES or TYPES[name].family not in TIERED:
        raise ValueError(f"{name!r} is no tiered cache type; members are {', '.join(n for n, t in TYPES.items() if t.family in TIERED)}")
    return TYPES[name]


def _tiers(t: CacheType):
    """(tier, slice of its coordinates), most important first."""
    start = 0
    for tier in TIERED[t.family].tiers:
        stop = start + t.block // tier.part
        yield tier, slice(start, stop)
        start = stop


def _pack(codes: np.ndarray, t: CacheType) -> np.ndarray:
    """One plane a tier: byte b holds its coordinates b, b + w, b + 2w, ..., lowest bits first; w bytes a plane."""
    planes = []
    for tier, part in _tiers(t):
        per_byte = 8 // tier.bits
        pieces = np.split(codes[..., part], per_byte, -1)
        planes.append(sum(piece << np.uint8(tier.bits * k) for k, piece in enumerate(pieces)).astype(np.uint8))
    return np.concatenate(planes, -1)


def _unpack(data: np.ndarray, t: CacheType) -> np.ndarray:
    """Inverse of _pack: uint8 [..., block]."""
    codes, start = [], 0
    for tier, part in _tiers(t):
        width = (part.stop - part.start) * tier.bits // 8
        plane = data[..., start:start + width]
        codes += [plane >> np.uint8(tier.bits * k) & np.uint8((1 << tier.bits) - 1) for k in range(8 // tier.bits)]
        start += width
    return np.concatenate(codes, -1)
