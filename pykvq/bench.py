"""Decode and prefill speed of cache types at depths, as ratios to f16 in one run, and where attention really ran."""
from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from pykvq.attention_devices import AttentionDevices
from pykvq.deep_state import fill_from_prefix
from pykvq.engine import Context, Model
from pykvq.kv_info import CacheInfo
from pykvq.speed import fill

F16 = ("f16", "f16")


@dataclass(frozen=True)
class Setup:
    """How much is measured. prefix: tokens computed to fill a cache, whose rows are then repeated up to the depth."""
    tokens: int = 16                 # decoded per repeat
    prefill: int = 512               # tokens of the prefill at the depth
    repeats: int = 5
    prefix: int = 512
    threads: int | None = None
    kv_sink: int | None = None
    kv_recent: int | None = None


@dataclass(frozen=True)
class Row:
    """One type at one depth. Seconds are per token, one entry a repeat; attention: layers per backend, as observed."""
    kv_type: tuple[str, str]
    depth: int
    info: CacheInfo
    filled: str                      # "repeated prefix", or "prefill" where the cache is of another kind
    decode_seconds: tuple[float, ...]
    prefill_seconds: tuple[float, ...]
    attention: dict[str, dict[str, int]]
    fallback: tuple[int, ...]        # layers whose cache is on a device and whose attention ran on the CPU

    @property
    def decode(self) -> float:
        """Tokens per second, median."""
        return 1 / statistics.median(self.decode_seconds)

    @property
    def prefill(self) -> float:
        """Tokens per second, median."""
        return 1 / statistics.median(self.prefill_seconds)

    def ratios(self, base: "Row") -> dict[str, float]:
        """Speed relative to `base`, the median over rounds in which both ran within seconds of each other."""
        return {name: statistics.median(b / o for o, b in zip(getattr(self, f"{name}_seconds"), getattr(base, f"{name}_seconds")))
                for name in ("decode", "prefill")}


def steps(pairs: Sequence[tuple[str, str]], depths: Sequence[int], setup: Setup) -> int:
    """How often bench() calls its step function."""
    return len(depths) * (len(pairs) + setup.repeats)


def bench(model: Model, pairs: Sequence[tuple[str, str]], depths: Sequence[int], setup: Setup, step: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Rows for every depth and pair, in this order; pairs should hold F16 for the ratios.

    Rounds are interleaved (A B C, A B C, ...), so that a slow minute of the machine hits all types alike.
    Raises ValueError and MemoryError as Context does.
    """
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, max(setup.prefix, setup.prefill, setup.tokens)).tolist()
    rows = []
    for depth in depths:
        with ExitStack() as stack:
            ready = []
            for pair in pairs:
                step(f"{','.join(pair)}: {depth} tokens into the cache")
                devices, fallback = observe(model, pair, setup, tokens)
                context = stack.enter_context(_context(model, _room(depth, setup), pair, setup))
                ready.append((pair, context, _filled(context, tokens, depth, setup), devices, fallback, [], []))
                _decode(context, tokens, depth, 2)                       # warm-up
            for i in range(setup.repeats):
                step(f"depth {depth}, round {i + 1} of {setup.repeats}")
                for _, context, _, _, _, decoded, prefilled in ready:
                    decoded.append(_decode(context, tokens, depth, setup.tokens))
                    prefilled.append(_prefill(context, tokens[:setup.prefill], depth))
            rows += [Row(pair, depth, context.info(), how, tuple(decoded), tuple(prefilled), devices, fallback)
                     for pair, context, how, devices, fallback, decoded, prefilled in ready]
    return rows


def observe(model: Model, pair: tuple[str, str], setup: Setup, tokens: Sequence[int]) -> tuple[dict[str, dict[str, int]], tuple[int, ...]]:
    """Layers per backend that ran the attention of a prefill and of a decode; and the layers that fell back to the CPU."""
    watcher, found, fallback = AttentionDevices(), {}, set()
    with _context(model, 256, pair, setup, on_tensor=watcher) as context:
        on_device = {layer.layer for layer in context.info() if not layer.device.startswith("CPU")}
        for name, part, start in (("prefill", tokens[:128], 0), ("decode", tokens[:1], len(tokens[:128]))):
            watcher.by_layer.clear()
            context.decode(part, start)
            found[name] = dict(Counter(watcher.by_layer.values()))
            fallback |= {layer for layer, device in watcher.by_layer.items() if device == "CPU" and layer in on_device}
    return found, tuple(sorted(fallback))


def _room(depth: int, setup: Setup) -> int:
    return (depth + max(setup.tokens, setup.prefill) + 255) // 256 * 256


def _context(model: Model, n_ctx: int, pair: tuple[str, str], setup: Setup, **options) -> Context:
    return Context(model, n_ctx, pair, n_seq=2, unified=True, threads=setup.threads, n_outputs=2,      # 2: fill_from_prefix needs one more
                   kv_sink=setup.kv_sink, kv_recent=setup.kv_recent, **options)


def _filled(context: Context, tokens: Sequence[int], depth: int, setup: Setup) -> str:
    """Fill the cache up to `depth`; returns how."""
    if depth > setup.prefix:
        try:
            fill_from_prefix(context, tokens[:setup.prefix], depth)
            return "repeated prefix"
        except ValueError:
            pass                         # sliding windows, recurrent layers: their state is not rows alone
    fill(context, tokens, depth)
    return "prefill"


def _decode(context: Context, tokens: Sequence[int], depth: int, count: int) -> float:
    start = time.perf_counter()
    for i in range(count):
        context.run([(tokens[i], depth + i, 0, True)])
        context.wait()
    return _undone(context, depth, (time.perf_counter() - start) / count)


def _prefill(context: Context, tokens: Sequence[int], depth: int) -> float:
    start = time.perf_counter()
    for first in range(0, len(tokens), context.n_batch):
        part = tokens[first:first + context.n_batch]
        context.run([(token, depth + first + i, 0, first + i == len(tokens) - 1) for i, token in enumerate(part)])
    context.wait()
    seconds = _undone(context, depth, (time.perf_counter() - start) / len(tokens))
    recent = min(depth, max((layer.recent for layer in context.info()), default=0))
    if recent and context.remove(0, depth - recent):     # a batch takes the f16 rows of the tokens before it
        context.decode([tokens[i % len(tokens)] for i in range(recent)], depth - recent, logits="none")
    return seconds


def _undone(context: Context, depth: int, seconds: float) -> float:
    """Take the measured tokens out again; returns `seconds`."""
    if not context.remove(0, depth):
        context.clear()                  # a recurrent state cannot go back; its speed does not depend on the depth
    return seconds
