"""Long greedy runs, one token at a time: where a cache first says something else than f16, and whether it falls into repetition."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from pykvq.engine import Context

GRAM = 4                                 # tokens that count as a repetition when they have occurred before


def most_likely(context: Context, prompt: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Without end: the most likely next token, and the logits [n_vocab] that chose it."""
    context.clear()
    logits, position = context.decode(prompt, 0)[-1], len(prompt)
    while True:
        token = int(logits.argmax())
        yield token, logits
        logits = context.decode_batch([(token, position, 0, True)])[-1]
        position += 1


def greedy(context: Context, prompt: Sequence[int], count: int) -> np.ndarray:
    """The `count` most likely next tokens, past the end of a document too; int32 [count]."""
    return np.array([token for token, _ in islice(most_likely(context, prompt), count)], np.int32)


def first_divergence(reference: np.ndarray, other: np.ndarray) -> int:
    """Number of leading tokens that agree."""
    return next((i for i, (a, b) in enumerate(zip(reference, other)) if a != b), min(len(reference), len(other)))


def repetition(tokens: np.ndarray) -> float:
    """Share of the GRAM-token windows that have occurred before in the run."""
    windows = [tuple(tokens[i:i + GRAM].tolist()) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0
