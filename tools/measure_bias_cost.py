#!/usr/bin/env python3
"""What returning a key bias to the logit costs a decode on the CPU, by the pairs of frequencies that are returned.

    python tools/measure_bias_cost.py model.gguf --stats FILE [--kv-type turbo3] [--depth 2048] [--threads 1] [--rounds 12] [--tokens 8]

FILE is what pykvq calibrate wrote. One context for each way to store keys, all of one loaded model: as they are (--kvq off), without data, and
with data for each kind of bias, with the pairs that calibration would choose and with all. They decode in turn, a few tokens each,
and every round gives a ratio to keys as they are; printed are medians with the quartiles, of the processor's time, which other programs on the
machine disturb least, and of the clock's. Data cost their transforms too: all but the first two rows have those, and "none" has nothing
else unless the cache leaves attn_k.bias out all the same.
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.calibration import bias_pairs             # noqa: E402
from pykvq.calibration.build import build, cache_returns   # noqa: E402
from pykvq.calibration.embed import write_sidecar    # noqa: E402
from pykvq.calibration.metadata import encode        # noqa: E402
from pykvq.calibration.run import Statistics         # noqa: E402
from pykvq.deep_state import fill_from_prefix        # noqa: E402
from pykvq.engine import Context, Model, quiet_log   # noqa: E402
from pykvq.gguf_header import sidecar_path           # noqa: E402

BASE = "as they are"
PREFIX = 256                                         # tokens computed to fill the cache


def ways(statistics: Statistics, path: Path):
    """(name, data to embed or None, kvq) of every way to store the keys."""
    yield BASE, None, "off"
    yield "without data", None, "auto"
    share = bias_pairs.SHARE
    for kind in (kind for kind in ("none", "attn_k.bias", "measured") if cache_returns(kind, statistics, path)):
        yield kind, build(statistics, path, kind), "auto"
        if kind != "none":
            bias_pairs.SHARE = -np.inf               # nothing may be lost: all pairs
            yield f"{kind}, all pairs", build(statistics, path, kind), "auto"
            bias_pairs.SHARE = share


def seconds(context: Context, token: int, depth: int, n: int) -> tuple[float, float]:
    """(of the processor, of the clock) for n tokens from `depth` on, which are taken out again."""
    cpu, clock = time.process_time(), time.perf_counter()
    for i in range(n):
        context.run([(token, depth + i, 0, True)])
    context.wait()
    used = time.process_time() - cpu, time.perf_counter() - clock
    context.remove(0, depth)
    return used


def quartiles(ratios: np.ndarray) -> str:
    """Median and quartiles."""
    return "{1:.3f} ({0:.3f} to {2:.3f})".format(*np.quantile(ratios, (.25, .5, .75)))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=Path)
    ap.add_argument("--stats", type=Path, required=True)
    ap.add_argument("--kv-type", default="turbo3")
    ap.add_argument("--depth", type=int, default=2048)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--tokens", type=int, default=8, help="decoded by each in a round")
    a = ap.parse_args()
    quiet_log()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        link = Path(folder) / a.model.name           # sidecars come and go beside the link
        link.symlink_to(a.model.resolve())
        model = stack.enter_context(Model(link))
        statistics, contexts, pairs = Statistics.load(a.stats), {}, {}
        for name, data, kvq in ways(statistics, link):
            if data:
                write_sidecar(link, encode(data), force=True)
            context = contexts[name] = stack.enter_context(Context(model, a.depth + 256, a.kv_type, n_seq=2, unified=True, threads=a.threads, kvq=kvq))
            pairs[name] = float(np.mean([layer.bias_pairs for layer in context.info()]))
            sidecar_path(link).unlink(missing_ok=True)
            fill_from_prefix(context, [i % model.n_vocab for i in range(100, 100 + PREFIX)], a.depth)
            seconds(context, 1000, a.depth, 2)
        rounds = {name: [] for name in contexts}
        for i in range(a.rounds):
            for name, context in contexts.items():
                rounds[name].append(seconds(context, 1000 + i, a.depth, a.tokens))
        used = {name: np.array(rows) / a.tokens for name, rows in rounds.items()}
    print(f"{model.header.name}, {a.kv_type}, depth {a.depth}, {a.threads} threads, {a.rounds} rounds of {a.tokens} tokens; load of the machine "
          f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n\n| keys | pairs a layer | processor ms a token | of it to keys as they are | of the clock |\n|---|---|---|---|---|")
    for name, times in used.items():
        cpu, clock = (times / used[BASE]).T
        print(f"| {name} | {pairs[name]:.1f} | {1000 * np.median(times[:, 0]):.1f} | {quartiles(cpu)} | {quartiles(clock)} |")


if __name__ == "__main__":
    main()
