"""How many tokens each layer keeps: both published formulas, and the sensitivity they start from."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvq.epicache.rows import values
from pykvq.sequence_state import SequenceState


def layer_budgets(similarity: np.ndarray, budget: int, formula: str = "code", alpha: float | None = None) -> np.ndarray:
    """Tokens per layer, int64 [layers], `budget` on average; similarity: [layers], see key_similarity, 1 is a layer that minds nothing.

    "code" (github.com/apple/ml-epicache): n = similarity scaled to 0..1, w = (1 - n)^alpha, alpha 1.1, at least budget / 4 a layer.
    "paper" (arXiv 2509.17396 v4): w = (1 - similarity)^alpha, alpha 2, no floor. Both: L * budget * w / sum w, cut to whole tokens; the floor of
    "code" can push the sum above L * budget, as it does there. Raises ValueError for another formula.
    """
    s = np.asarray(similarity, np.float64)
    if formula == "code":
        spread = np.ptp(s)
        weight = (1 - (s - s.min()) / spread) ** (alpha or 1.1) if spread else np.ones_like(s)
        floor = budget // 4
    elif formula == "paper":
        weight, floor = (1 - s).clip(0) ** (alpha or 2.0), 1
        weight = weight if weight.any() else np.ones_like(s)
    else:
        raise ValueError(f'the formula of a layer budget is "code" or "paper", not {formula!r}')
    return np.maximum((len(s) * budget * weight / weight.sum()).astype(np.int64), floor)


def key_similarity(context, layers: Sequence[int], tokens: Sequence[int], block: int = 4096, sinks: int = 128, window: int = 100) -> np.ndarray:
    """Mean cosine per layer, float64 [layers], between keys under full attention and under a block mask, over heads and windows.

    Block mask: a token sees the first `sinks` tokens, half of the block before its own, and its own (arXiv 2509.17396, section 3.3). layers: KV heads
    per layer. context: an engine.Context with an f16 cache and room for the text, which is cleared.
    """
    def keys(first: int) -> list[np.ndarray]:
        state = SequenceState.parse(context.save(0, bare=True))
        rows = state.positions >= first
        return [values(k.heads(n)[rows], k.ggml_type) for n, k in zip(layers, state.keys)]
    context.clear()
    context.decode(tokens, 0, logits="none")
    full = keys(0)
    context.clear()
    parts = []
    for start in range(0, len(tokens), block):
        if start:
            context.remove(0, sinks, max(sinks, start - block // 2))
        context.decode(tokens[start:start + block], start, logits="none")
        parts.append(keys(start))
    context.clear()
    blocked = [np.concatenate(layer) for layer in zip(*parts)]
    return np.array([_cosine(a, b, window) for a, b in zip(full, blocked)])


def _cosine(a: np.ndarray, b: np.ndarray, window: int) -> float:
    """Mean over heads and whole windows of the cosine of flattened keys [tokens, heads, d]."""
    n = max(1, len(a) // window)
    pairs = [(x, y) for u, v in zip(np.array_split(a, n), np.array_split(b, n)) for x, y in zip(np.moveaxis(u, 1, 0), np.moveaxis(v, 1, 0))]
    return float(np.mean([(x * y).sum() / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in pairs]))
