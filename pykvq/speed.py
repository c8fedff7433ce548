"""Decode speed at depth, measured so that cache types can be compared on a busy machine."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from pykvq.engine import Context


def fill(context: Context, tokens: Sequence[int], depth: int) -> None:
    """Put `depth` tokens into sequence 0, repeating the text as often as needed."""
    text = (list(tokens) * (depth // len(tokens) + 1))[:depth]
    context.clear()
    context.decode(text, 0)


def decode_seconds(context: Context, tokens: Sequence[int], depth: int, count: int) -> float:
    """Seconds per token of `count` single-token decodes after `depth` cached tokens; leaves the cache as it was."""
    start = time.perf_counter()
    for i in range(count):
        context.decode_batch([(tokens[i % len(tokens)], depth + i, 0, True)])
    seconds = time.perf_counter() - start
    context.remove(0, depth)
    return seconds / count


def decode_speeds(contexts: Mapping[str, Context], tokens: Sequence[int], depth: int, count: int = 16, repeats: int = 5,
                  step: Callable[[str], None] = lambda _: None) -> dict[str, float]:
    """Median tokens per second of every context at `depth`.

    Repeats are interleaved (A B C, A B C, ...), so that a slow minute of the machine hits all types alike.
    Calls step(description) len(contexts) + repeats times.
    """
    for name, context in contexts.items():
        step(f"{name}: {depth} tokens into the cache")
        fill(context, tokens, depth)
        decode_seconds(context, tokens, depth, 2)            # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    for i in range(repeats):
        step(f"decode at depth {depth}, round {i + 1} of {repeats}")
        for name, context in contexts.items():
            seconds[name].append(decode_seconds(context, tokens, depth, count))
    return {name: 1 / statistics.median(values) for name, values in seconds.items()}
