#!/usr/bin/env python3
"""Decode speed at depth and cache bytes per type, in one run with interleaved repeats.

    python tools/bench_decode.py model.gguf [--depth 8192] [--types turbo2 turbo3 turbo4 f16 q8_0 q4_0] [--repeats 7]

Prints a Markdown table: tokens per second (median), ratios to f16 and q4_0, KV bytes at the depth. Times single-token
decodes with a full cache, all types in turn within every repeat, so that other load on the machine hits all alike.
"""
from __future__ import annotations

import argparse
import os
import platform
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.comparison import passage             # noqa: E402
from pykvq.engine import Context, Model, quiet_log   # noqa: E402
from pykvq.speed import decode_speeds            # noqa: E402


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--depth", type=int, default=8192)
    ap.add_argument("--types", nargs="+", default=["f16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2"], help="TYPE or K,V")
    ap.add_argument("--tokens", type=int, default=16, help="tokens decoded per repeat")
    ap.add_argument("--repeats", type=int, default=7)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    a = ap.parse_args()
    quiet_log()
    with ExitStack() as stack:
        model = stack.enter_context(Model(a.model))
        room = (a.depth + a.tokens + 255) // 256 * 256
        contexts = {t: stack.enter_context(Context(model, room, tuple(t.split(",")) if "," in t else t, threads=a.threads)) for t in a.types}
        speeds = decode_speeds(contexts, model.tokenize(passage()), a.depth, a.tokens, a.repeats, lambda text: print(text, file=sys.stderr))
        cells = {t: c.info() for t, c in contexts.items()}
    print(f"{model.header.name}, decode at depth {a.depth}, {a.threads} threads, {platform.machine()}, "
          f"median of {a.repeats} interleaved repeats of {a.tokens} tokens\n")
    print("| cache | tokens/s | to f16 | to q4_0 | KV bytes | smaller than f16 |\n|---|---|---|---|---|---|")
    for t, speed in speeds.items():
        ratios = [f"{speed / speeds[base]:.2f}" if base in speeds else "" for base in ("f16", "q4_0")]
        size = cells[t].bytes * a.depth // room
        print(f"| {t} | {speed:.1f} | {ratios[0]} | {ratios[1]} | {size:,} | {cells[t].ratio:.2f}x |")


if __name__ == "__main__":
    main()
