"""Where calibration chunks stand: post-RoPE statistics belong to the positions they were taken at."""
from __future__ import annotations

import numpy as np


def chunk_positions(chunks: int, length: int, trained: int, seed: int = 0) -> np.ndarray:
    """First position of every chunk, int64 [chunks]: one drawn at random from each of `chunks` equal parts of 0..trained-length,
    in random order, so that a calibration broken off half-way still covers the range. All 0 when a chunk fills the range."""
    rng = np.random.default_rng(seed)
    room = max(trained - length, 0)
    return ((rng.permutation(chunks) + rng.random(chunks)) / chunks * (room + 1)).astype(int).clip(0, room)
