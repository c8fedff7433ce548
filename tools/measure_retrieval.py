#!/usr/bin/env python3
"""Retrieval of planted facts from a long text, for cache types and f16 windows, against the f16 cache.

    python tools/measure_retrieval.py model.gguf [--contexts 4096 16384] [--types turbo2 turbo3] [--windows 0,0 64,256] [--texts 4] [--gpu-layers 99] [--json]

A text of made-up sentences hides a code of four digits at 10, 30, 50, 70 and 90 % of its length (pykvq.evaluation.retrieval); each is asked for
at the end, and counts when a greedy answer is the whole code. `lost` are those that f16 finds and the cache does not, `gained` the others.
All texts are the same for every cache. oscar2 needs a calibrated model (pykvq embed-rotations).
"""
from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.engine import Context, Model, quiet_log                  # noqa: E402
from pykvq.evaluation import retrieval                              # noqa: E402


def found(model: Model, a: argparse.Namespace, length: int, kv_type: tuple[str, str], window: tuple[int, int]) -> np.ndarray:
    """Which facts are found; bool [texts, depths]."""
    with Context(model, retrieval.room(length), kv_type, n_seq=2, unified=True, n_batch=a.batch, n_outputs=16, threads=a.threads, kv_sink=window[0],
                 kv_recent=window[1]) as context:
        return np.stack([retrieval.answer(context, retrieval.task(model, length, seed)) for seed in range(a.texts)])


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=Path)
    ap.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384], help="tokens of a text")
    ap.add_argument("--types", nargs="+", default=["turbo2", "turbo3"], help="TYPE or K,V")
    ap.add_argument("--windows", nargs="+", metavar="SINK,RECENT", default=["0,0", "64,256"], help="f16 windows")
    ap.add_argument("--texts", type=int, default=4, help="texts of each length, five facts in each")
    ap.add_argument("--batch", type=int, default=512, help="tokens a batch")
    ap.add_argument("--threads", type=int)
    ap.add_argument("--gpu-layers", type=int, default=0)
    ap.add_argument("--json", action="store_true", help="print JSON, rows as they come on stderr")
    a = ap.parse_args()
    quiet_log()
    rows, exact, log = [], None, sys.stderr if a.json else sys.stdout
    configurations = [("f16", (0, 0)), *itertools.product(a.types, (tuple(map(int, w.split(","))) for w in a.windows))]
    with Model(a.model, a.gpu_layers) as model:
        trained = model.header.context_train
        print(f"{model.header.name}, {a.texts} texts of each length, {len(retrieval.DEPTHS)} facts in each\n\n| tokens | cache | sink, recent | found | 95 % | lost | gained | "
              + " | ".join(f"{depth:.0%}" for depth in retrieval.DEPTHS) + " |\n|" + "---|" * (7 + len(retrieval.DEPTHS)), file=log, flush=True)
        for length in a.contexts:
            if trained and retrieval.room(length) > trained:
                print(f"{length} tokens and the questions are more than the {trained} that {model.header.name} is trained for; its answers may fail with any cache",
                      file=sys.stderr)
            for name, window in configurations:
                try:
                    hits = found(model, a, length, (name.split(",")[0], name.split(",")[-1]), window)
                except ValueError as error:                      # a type that this model does not take; the others go on
                    print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
                    continue
                exact = hits if name == "f16" else exact
                interval = stats.binomtest(int(hits.sum()), hits.size).proportion_ci(method="wilson")
                rows.append({"tokens": length, "cache": name, "sink": window[0], "recent": window[1], "facts": hits.size, "found": int(hits.sum()),
                             "low": float(interval.low), "high": float(interval.high), "lost": int((exact & ~hits).sum()),
                             "gained": int((hits & ~exact).sum()), "by_depth": hits.mean(0).tolist()})
                r = rows[-1]
                shown = "" if name == "f16" else f"{window[0]}, {window[1]}"
                print(f"| {length} | {name} | {shown} | {r['found']} of {r['facts']} | {r['low']:.2f}..{r['high']:.2f} | {r['lost']} | {r['gained']} | "
                      + " | ".join(f"{share:.2f}" for share in r["by_depth"]) + " |", file=log, flush=True)
    if a.json:
        print(json.dumps({"model": model.header.name, "texts": a.texts, "batch": a.batch, "gpu_layers": a.gpu_layers, "rows": rows}, indent=2))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, MemoryError, OSError, RuntimeError) as error:
        raise SystemExit(f"error: {' '.join(str(error).split())}")
