#!/usr/bin/env python3
"""What a bit is worth in each layer's keys and values, and whether a plan of bits by layer beats one type for all at the same average.

    python tools/measure_layer_bits.py model.gguf choose.txt other.txt [...] [--window 64,256] [--rest turbo4] [--gpu-layers 99] --json FILE

On the first text, token by token through the real cache: KL divergence from an f16 cache when only one layer's keys, or values, are of
a type and all else is --rest. A window needs a quantised --rest: a layer of f16 has none. From KL = noise + worth x (error of the type),
fitted over the types, a plan is made for each --average: the bit that gains most goes next. Other chunks of the first text, and the other
texts, then compare the plan with the pairs of one K and one V type that have the same average, on the same tokens. --measured FILE
takes the first half from the --json of an earlier run.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure_kld import last_logits                  # noqa: E402
from pykvq.calibration.loss import mse               # noqa: E402
from pykvq.engine import Context, Model, quiet_log   # noqa: E402
from pykvq.formats import FAMILIES                   # noqa: E402

BITS = {"turbo2": 2, "turbo3": 3, "turbo4": 4}
BLOCK = 32                                           # neighbouring tokens whose mean counts as one observation
Part = tuple[int, str]                               # a layer and "k" or "v"


class Exact:
    """Logits of an f16 cache, against which others are measured. logits [chunks, n, vocabulary] float32."""

    def __init__(self, logits: np.ndarray):
        self.logits = logits
        self.p = np.exp(logits - logits.max(-1, keepdims=True))
        self.mass = self.p.sum(-1, dtype=np.float64)

    def divergence(self, logits: np.ndarray) -> np.ndarray:
        """KL of every token, [chunks, n] float64: log E exp(x) - E x of the difference x of logits, less its rough mean, so that nothing
        large cancels and float32 is enough."""
        def of_chunk(c: int) -> np.ndarray:
            mean = lambda values: (self.p[c] * values).sum(-1, dtype=np.float64) / self.mass[c]
            x = logits[c] - self.logits[c]
            x -= mean(x)[:, None].astype(np.float32)
            return np.log(mean(np.exp(x))) - mean(x)
        with ThreadPoolExecutor(4) as pool:
            return np.stack(list(pool.map(of_chunk, range(len(logits)))))


def estimate(kl: np.ndarray) -> tuple[float, float]:
    """Mean and standard error of [chunks, n] from blocks of neighbouring tokens."""
    blocks = np.concatenate([row[i:i + BLOCK].mean(keepdims=True) for row in kl for i in range(0, kl.shape[1], BLOCK)])
    return float(kl.mean()), float(blocks.std(ddof=1) / len(blocks) ** .5) if len(blocks) > 1 else float("nan")


def worth(measured: Mapping[tuple[Part, str], float], rest: str = "f16", alone: float | None = None) -> dict[Part, float]:
    """KL of each part per squared error of its type: the slope of kl = noise + worth x (error - error of the rest); none below zero.

    Noise is what any change of a layer does, through rounding in quantised weights: less the later the layer. A part measured with one type has
    `alone`, the kl where all is of the rest's type, or the least that any part has.
    """
    error = lambda name: mse(BITS[name]) if name in BITS else 0.0
    least = min(measured.values()) if alone is None else alone
    out = {}
    for part in dict.fromkeys(part for part, _ in measured):
        points = [(error(name), kl) for (p, name), kl in measured.items() if p == part]
        points += [(error(rest), least)] if len(points) == 1 else []
        out[part] = max(float(np.polyfit(*zip(*points), 1)[0]), 0.0)
    return out


def plan(value: Mapping[Part, float], size: Mapping[Part, int], average: float) -> dict[Part, int]:
    """Bits of each part, at most `average` a value: the error is convex in the bits, so the step that gains most for its size goes next."""
    bits = dict.fromkeys(value, min(BITS.values()))
    room = (average - min(BITS.values())) * sum(size.values())
    gain = lambda part: value[part] * (mse(bits[part]) - mse(bits[part] + 1)) / size[part]
    while True:
        open_ = [part for part in bits if bits[part] < max(BITS.values()) and size[part] <= room + 1e-9]
        if not open_:
            return bits
        best = max(open_, key=lambda part: (gain(part), -part[0]))
        bits[best] += 1
        room -= size[best]


def typed(bits: Mapping[Part, int]) -> dict[int, tuple[str, str]]:
    """Layer types of a plan."""
    name = {b: n for n, b in BITS.items()}
    return {layer: (name[bits[layer, "k"]], name[bits[layer, "v"]]) for layer, kind in bits if kind == "k"}


class Bench:
    """A model and one text's chunks, [chunks, ctx] tokens from `skip` on, the last n of each scored."""

    def __init__(self, model: Model, text: Path, a: argparse.Namespace, skip: int, chunks: int):
        tokens = model.tokenize(text.read_text())
        self.chunks = [tokens[:1] + tokens[skip + i * a.ctx:skip + i * a.ctx + a.ctx - 1] for i in range(chunks)]
        if len(self.chunks[-1]) < a.ctx:
            raise SystemExit(f"{text} has {len(tokens)} tokens, too few for {chunks} chunks of {a.ctx} from {skip} on")
        self.model, self.a, self.window = model, a, tuple(map(int, a.window.split(",")))
        self.exact = Exact(self.logits("f16", (0, 0)))

    def logits(self, kv_type, window, layers=None) -> np.ndarray:
        """[chunks, n, vocabulary]; all chunks in the cache at once."""
        with Context(self.model, self.a.ctx * len(self.chunks), kv_type, n_seq=len(self.chunks), n_batch=min(self.a.ctx, 512), kvq=self.a.kvq,
                     kv_sink=window[0], kv_recent=window[1], layer_types=layers) as context:
            if layers:
                got = {layer.layer: (layer.type_k.split("_")[0], layer.type_v.split("_")[0]) for layer in context.info()}
                assert all(got[i] == pair for i, pair in layers.items()), got
            return last_logits(context, self.chunks, self.a.score, True, 0)

    def divergence(self, kv_type, layers=None) -> np.ndarray:
        """KL [chunks, n] of a cache."""
        return self.exact.divergence(self.logits(kv_type, self.window, layers))


def measure(bench: Bench, size: Mapping[Part, int], a: argparse.Namespace, result: dict, keep: Callable[[], None]) -> None:
    """Put into `result` what every part alone costs in each type; keep() after each type."""
    start = time.monotonic()
    result["alone"] = None if a.rest == "f16" else estimate(bench.divergence((a.rest, a.rest)))      # f16 beside f16 has not even noise
    for name in (name for name in a.types if name != a.rest):
        for layer, kind in size:
            pair = tuple(name if k == kind else a.rest for k in "kv")
            result["kl"].append({"layer": layer, "kind": kind, "type": name, "kl": estimate(bench.divergence((a.rest, a.rest), {layer: pair}))})
        row = lambda kind: " ".join(f"{r['kl'][0]:.4f}" for r in result["kl"] if (r["type"], r["kind"]) == (name, kind))
        print(f"{result['model']}, window {a.window}: one part in {name}, the rest {a.rest}: k {row('k')}; v {row('v')} ({time.monotonic() - start:.0f} s)", flush=True)
        keep()


def pairs_of(average: float) -> list[tuple[str, str]]:
    """Pairs of one type for all keys and one for all values with that average."""
    return [(k, v) for k in BITS for v in BITS if BITS[k] + BITS[v] == 2 * average]


def compare(bench: Bench, plans: Mapping[str, dict[int, tuple[str, str]]], pairs: Sequence[tuple[str, str]]) -> list[dict]:
    """Plans beside the pairs: mean and error of each, and of each plan's difference from the best pair on the same tokens."""
    uniform = {pair: bench.divergence(pair) for pair in pairs}
    best = min(uniform, key=lambda pair: uniform[pair].mean())
    rows = [{"types": ",".join(pair), "kl": estimate(kl), "difference": None if pair == best else estimate(kl - uniform[best])} for pair, kl in uniform.items()]
    for name, layers in plans.items():
        kl = bench.divergence(best, layers)
        rows.append({"types": name, "kl": estimate(kl), "difference": estimate(kl - uniform[best])})
    return rows


def show(row: dict) -> str:
    """One line of the comparison."""
    difference = "{:+.5f} ± {:.5f}".format(*row["difference"]) if row["difference"] else "best pair"
    return f"| {row['types']} | {row['kl'][0]:.5f} ± {row['kl'][1]:.5f} | {difference} |"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=Path)
    ap.add_argument("texts", type=Path, nargs="+")
    ap.add_argument("--window", default="0,0", help="sinks and recent tokens in f16")
    ap.add_argument("--rest", default="f16", choices=("f16", *FAMILIES), help="type of all that is not measured")
    ap.add_argument("--measured", type=Path, metavar="FILE", help="json of an earlier run, whose plan is compared")
    ap.add_argument("--types", nargs="+", default=list(BITS), choices=BITS)
    ap.add_argument("--average", nargs="+", type=float, default=[3, 2.5], help="bits a value")
    ap.add_argument("--ctx", type=int, default=1024)
    ap.add_argument("--score", type=int, default=32, help="tokens at the end of a chunk")
    ap.add_argument("--chunks", type=int, nargs=2, default=(8, 16), help="to choose by, to compare on")
    ap.add_argument("--skip", type=int, default=80000, help="tokens at the start of the first text that are not used")
    ap.add_argument("--kvq", choices=("auto", "off"), default="auto")
    ap.add_argument("--gpu-layers", type=int, default=0)
    ap.add_argument("--json", type=Path)
    a = ap.parse_args()
    quiet_log()
    result: dict = {key: str(value) if isinstance(value, Path) else value for key, value in vars(a).items() if key not in ("texts", "json")}
    result |= {"texts": [t.name for t in a.texts], "alone": None, "chosen": a.skip + a.chunks[0] * a.ctx, "worth": {}, "kl": [], "comparisons": []}

    def keep() -> None:
        if a.json:
            a.json.write_text(json.dumps(result, indent=1) + "\n")
    with Model(a.model, a.gpu_layers) as model:
        result["model"], start = model.header.name, time.monotonic()
        with Context(model, 512, "turbo4", kvq=a.kvq) as context:
            layers = list(context.info())
        result["calibrated"] = all(layer.calibrated for layer in layers)
        size = {(layer.layer, kind): layer.n_head_kv * d for layer in layers for kind, d in (("k", layer.head_dim_k), ("v", layer.head_dim_v))}
        if a.measured:                               # and what it chose by must not be compared on
            result |= {key: value for key, value in json.loads(a.measured.read_text()).items() if key in ("kl", "rest", "alone", "types", "chosen")}
        else:
            measure(Bench(model, a.texts[0], a, a.skip, a.chunks[0]), size, a, result, keep)
        value = worth({((row["layer"], row["kind"]), row["type"]): row["kl"][0] for row in result["kl"]}, result["rest"], result["alone"] and result["alone"][0])
        result["worth"] = {f"{layer}.{kind}": w for (layer, kind), w in value.items()}
        for text in a.texts:
            other = Bench(model, text, a, result["chosen"] if text == a.texts[0] else 0, a.chunks[1])
            for average in a.average:
                bits = plan(value, size, average)
                rows = compare(other, {"plan": typed(bits)}, pairs_of(average))
                result["comparisons"].append({"text": text.name, "average": average, "bits": {f"{layer}.{kind}": b for (layer, kind), b in bits.items()}, "rows": rows})
                print(f"\n{text.name}, {average} bits a value ({time.monotonic() - start:.0f} s)\n\n| K, V | KL | difference from the best pair |\n|---|---|---|\n"
                      + "\n".join(map(show, rows)), flush=True)
                keep()


if __name__ == "__main__":
    main()
