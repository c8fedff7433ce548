"""The next token of logits."""
from __future__ import annotations

import numpy as np


class Sampler:
    """Greedy at temperature 0; else softmax at that temperature over the smallest set of tokens of probability top_p."""

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None):
        self.temperature, self.top_p, self.rng = temperature, top_p, np.random.default_rng(seed)

    def __call__(self, logits: np.ndarray) -> int:
        """A token of float32 [n_vocab]."""
        if not self.temperature:
            return int(logits.argmax())
        x = logits.astype(np.float64) / self.temperature
        p = np.exp(x - x.max())
        p /= p.sum()
        order = np.argsort(-p)
        kept = order[:int((np.cumsum(p[order]) < self.top_p).sum()) + 1]
        return int(self.rng.choice(kept, p=p[kept] / p[kept].sum()))
