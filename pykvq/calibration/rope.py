"""The rotary embedding that a ROPE node applies, as ggml computes it: a table of cosines and sines per position."""
from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from pykvq.ggml_tensor import Tensor, op_number, read

NORMAL, NEOX, MROPE, IMROPE = 0, 2, 8, 40        # modes of ggml_rope; M-RoPE pairs as NEOX, and a text has one position in all sections
_THROUGH = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT")


@dataclass(frozen=True)
class Rope:
    """Parameters of one ROPE node. n_dims values from `first` on turn; factors: optional divisor per frequency."""
    n_dims: int
    mode: int
    n_ctx_orig: int
    base: float
    scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    first: int
    factors: tuple[float, ...] | None

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Coordinates x and y of every frequency pair; both int64 [n_dims / 2]."""
        i = np.arange(self.n_dims // 2)
        return (self.first + 2 * i, self.first + 2 * i + 1) if self.mode == NORMAL else (self.first + i, self.first + i + self.n_dims // 2)

    def table(self, positions: np.ndarray) -> np.ndarray:
        """cos and sin of every frequency, times the magnitude that YaRN gives: float64 [positions, n_dims].

        The angles are float32 products in ggml's order: at position 30,000 they are off by 0.002, and so are the model's keys.
        Columns: n_dims / 2 cosines, then n_dims / 2 sines.
        """
        half = self.n_dims // 2
        theta = np.empty((len(positions), half), np.float32)
        theta[:, 0] = positions
        step = np.float32(self.base) ** np.float32(-2.0 / self.n_dims)
        for i in range(1, half):
            theta[:, i] = theta[:, i - 1] * step
        if self.factors is not None:
            theta /= np.array(self.factors[:half], np.float32)
        inner, magnitude = np.float32(self.scale) * theta, self.attn_factor
        if self.ext_factor:
            low, high = self._correction()
            ramp = 1 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1)
            mix = (ramp * self.ext_factor).astype(np.float32)
            inner = inner * (1 - mix) + theta * mix
            magnitude *= 1 + 0.1 * math.log(1 / self.scale)
        angle = inner.astype(np.float64)
        return np.concatenate([np.cos(angle), np.sin(angle)], 1) * magnitude

    def _correction(self) -> tuple[float, float]:
        """Where YaRN's ramp between interpolation and extrapolation starts and ends, in frequency pairs."""
        def dim(turns: float) -> float:
            return self.n_dims * math.log(self.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(self.base))
        return max(0, math.floor(dim(self.beta_fast))), min(self.n_dims - 1, math.ceil(dim(self.beta_slow)))


def rope_of(t: Tensor) -> Rope | None:
    """The rotation that `t` shows the result of; None when another operation made it, or one that turns in more than one section."""
    through = [op_number(name) for name in _THROUGH]
    while t.op in through:
        t = t.src[0].contents
    if t.op != op_number("ROPE"):
        return None
    p = list(t.op_params)
    if p[2] not in (NORMAL, NEOX, MROPE, IMROPE):
        return None
    base, scale, ext, attn, fast, slow = struct.unpack("<6f", struct.pack("<6i", *p[5:11]))
    factors = tuple(read(t.src[2].contents).ravel().tolist()) if t.src[2] else None
    return Rope(p[1], p[2], p[4], base, scale, ext, attn, fast, slow, p[15], factors)
