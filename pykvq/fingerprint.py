"""FNV-1a, 64 bits: the fingerprint of codebooks and models, short enough to repeat in C++."""
from __future__ import annotations

from functools import reduce

_OFFSET, _PRIME, _MASK = 0xcbf29ce484222325, 0x100000001b3, (1 << 64) - 1


def fnv1a64(data: bytes) -> str:
    """"fnv1a64:" and 16 hexadecimal digits of the FNV-1a hash of `data`."""
    return f"fnv1a64:{reduce(lambda h, byte: (h ^ byte) * _PRIME & _MASK, data, _OFFSET):016x}"
