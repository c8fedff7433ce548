"""Long greedy runs, one token at a time: where a cache first says something else than f16, and whether it falls into repetition."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvq.engine import Context

GRAM = 4                                 # tokens that count as a repetition when they have occurred before


def greedy(context: Context, prompt: Sequence[int], count: int) -> np.ndarray:
    """The `count` most likely next tokens, past the end of a document too; int32 [count]."""
    context.clear()
    logits, out = context.decode(prompt, 0), []
    for i in range(count):
        out.append(int(logits[-1].argmax()))
        logits = context.decode_batch([(out[-1], len(prompt) + i, 0, True)])
    return np.array(out, np.int32)


def first_divergence(reference: np.ndarray, other: np.ndarray) -> int:
    """Number of leading tokens that agree."""
    return next((i for i, (a, b) in enumerate(zip(reference, other)) if a != b), min(len(reference), len(other)))


def repetition(tokens: np.ndarray) -> float:
    """Share of the GRAM-token windows that have occurred before in the run."""
    windows = [tuple(tokens[i:i + GRAM].tolist()) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0
