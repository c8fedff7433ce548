"""Codes as bit planes: b bits a value, rows padded to whole bytes."""
from __future__ import annotations

import numpy as np


def packed_bytes(d: int, bits: int) -> int:
    """Bytes of one row of d codes: bits planes of ceil(d / 8) bytes."""
    return bits * -(-d // 8)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., d], entries below 2**bits, to uint8 [..., packed_bytes(d, bits)]; plane k holds bit k, first value in the high bit."""
    planes = [np.packbits(codes >> k & 1, axis=-1) for k in range(bits)]
    return np.concatenate(planes, -1) if planes else np.zeros((*codes.shape[:-1], 0), np.uint8)


def unpack(data: np.ndarray, d: int, bits: int) -> np.ndarray:
    """The inverse of pack: uint8 [..., packed_bytes(d, bits)] to uint8 [..., d]. Raises ValueError for rows of another length."""
    if data.shape[-1] != packed_bytes(d, bits):
        raise ValueError(f"rows have {data.shape[-1]} bytes, {d} codes of {bits} bits need {packed_bytes(d, bits)}")
    codes = np.zeros((*data.shape[:-1], d), np.uint8)
    for k in range(bits):
        plane = data[..., k * -(-d // 8):(k + 1) * -(-d // 8)]
        codes |= np.unpackbits(plane, axis=-1, count=d) << k
    return codes
