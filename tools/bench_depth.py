#!/usr/bin/env python3
"""Decode and prefill speed at a depth whose prefill would take half an hour: the cache is filled from a short prefix.

    python tools/bench_depth.py model.gguf [--types f16 turbo2 turbo3] [--depths 0 32768 1000000] [--gpu-layers 99]
        [--streams 8] [--json FILE]

Prints one row per type and depth: tokens per second of single-token decode (all streams together) and of a prefill of 512
tokens at the depth, medians of repeats; KV bytes and compute buffers as allocated; ratios to f16 of the same run. A cache that
cannot be allocated is a row too. Random tokens; pykvq/deep_state.py says how the cache is filled.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.deep_state import fill_from_prefix        # noqa: E402
from pykvq.engine import Context, Model, quiet_log   # noqa: E402


def median_seconds(context: Context, work: Callable[[], None], depth: int, repeats: int) -> float:
    """Median seconds of work(), which adds tokens from `depth` on; they are taken out again. One run before is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        context.wait()
        seconds.append(time.perf_counter() - start)
        for seq in range(context.n_seq):
            context.remove(seq, depth)
    return statistics.median(seconds[1:])


def measure(model: Model, kv_type: str, depth: int, a: argparse.Namespace) -> dict:
    """One row; with the key `refused` alone when the context cannot be had."""
    row = {"type": kv_type, "depth": depth, "streams": a.streams}
    room = (depth + max(a.tokens, a.prefill) + 255) // 256 * 256
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, max(a.prefix, a.prefill, a.tokens * a.streams)).tolist()
    try:
        context = Context(model, room * a.streams, tuple(kv_type.split(",")) if "," in kv_type else kv_type, n_seq=max(2, a.streams),
                          unified=a.streams == 1, n_batch=a.batch, n_ubatch=a.ubatch, threads=a.threads, kvq=a.kvq, kv_sink=a.window[0],
                          kv_recent=a.window[1])
    except (MemoryError, ValueError) as error:
        return row | {"refused": str(error)}
    with context:
        row |= {"kv_bytes": context.info().bytes, "types": [list(pair) for pair in context.info().types],
                "compute_mib": {b.device: b.compute / 2**20 for b in context.memory_info() if b.compute}}
        start = time.perf_counter()
        fill_from_prefix(context, tokens[:a.prefix], depth, a.streams)
        context.wait()
        row["fill_seconds"] = time.perf_counter() - start

        def decode() -> None:
            for i in range(a.tokens):
                context.run([(tokens[i * a.streams + seq], depth + i, seq, True) for seq in range(a.streams)])
                context.wait()

        def prefill() -> None:
            for first in range(0, a.prefill, a.batch):
                context.run([(tokens[i], depth + i, 0, i == a.prefill - 1) for i in range(first, min(first + a.batch, a.prefill))])

        row["decode"] = a.tokens * a.streams / median_seconds(context, decode, depth, a.repeats)
        if a.prefill and a.streams == 1:
            row["prefill"] = a.prefill / median_seconds(context, prefill, depth, a.repeats)
    return row


def line(row: dict, base: dict) -> str:
    """A row of the Markdown table; base: the row of f16 at the same depth, or nothing."""
    if "refused" in row:
        return f"| {row['type']} | {row['depth']:,} | cannot be had: {row['refused']} | | | |"

    def speed(key: str) -> str:
        if key not in row:
            return ""
        return f"{row[key]:.1f}" + (f" ({row[key] / base[key]:.2f})" if key in base else "")
    buffers = ", ".join(f"{name} {size:.0f}" for name, size in row["compute_mib"].items())
    return f"| {row['type']} | {row['depth']:,} | {row['kv_bytes'] / 2**20:,.0f} | {buffers} | {speed('decode')} | {speed('prefill')} |"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--types", nargs="+", default=["f16", "turbo2", "turbo3", "turbo4"], help="TYPE or K,V; f16 first, for the ratios")
    ap.add_argument("--depths", nargs="+", type=int, default=[0, 8192])
    ap.add_argument("--streams", type=int, default=1, help="sequences of that depth each; their tokens decode together")
    ap.add_argument("--tokens", type=int, default=32, help="tokens decoded per repeat")
    ap.add_argument("--prefill", type=int, default=512, help="tokens of the prefill at the depth; 0 leaves it out")
    ap.add_argument("--prefix", type=int, default=4096, help="tokens that are computed to fill the cache")
    ap.add_argument("--repeats", type=int, default=5)
    ap.add_argument("--batch", type=int, default=2048)
    ap.add_argument("--ubatch", type=int, default=512)
    ap.add_argument("--gpu-layers", type=int, default=0)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--kvq", default="auto", choices=["auto", "off"])
    ap.add_argument("--window", type=lambda text: tuple(map(int, text.split(","))), default=(None, None), metavar="SINK,RECENT",
                    help="f16 window (docs/windows.md); default: 64,256")
    ap.add_argument("--json", help="file for the rows, with what was not rounded")
    a = ap.parse_args()
    quiet_log()
    rows: list[dict] = []
    with Model(a.model, a.gpu_layers) as model:
        print(f"{model.header.name}, {platform.machine()}, {a.gpu_layers} layers on the GPU, {a.streams} stream(s), "
              f"median of {a.repeats} repeats of {a.tokens} tokens, ratio to f16\n")
        print(f"| cache | depth | KV MiB | compute MiB | decode t/s | prefill of {a.prefill} t/s |\n|---|---|---|---|---|---|")
        for depth in a.depths:
            for kv_type in a.types:
                rows.append(measure(model, kv_type, depth, a))
                base = next((r for r in rows if r["type"] == "f16" and r["depth"] == depth and "refused" not in r), {})
                print(line(rows[-1], base), flush=True)
                if a.json:
                    Path(a.json).write_text(json.dumps({"model": model.header.name, "options": vars(a), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
