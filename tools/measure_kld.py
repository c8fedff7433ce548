#!/usr/bin/env python3
"""KL divergence of every cache type, through the real cache and through the numpy codec inside an f16 model.

    python tools/measure_kld.py model.gguf text.txt [--ctx 512] [--chunks 2] [--skip 40000] [--types turbo2 turbo3 turbo4] [--windows 0,0 64,256] [--decode] [--kvq off] [--kernel-only]

"kernel" runs the type as the cache. "reference" keeps an f16 cache and lets the eval callback of llama.cpp rewrite the
post-RoPE keys and the values with dequantise(quantise(x)) of pykvq.codecs.turbo: what the codec alone costs. Their ratio
shows what the kernels add. Chunks start with BOS at tokens skip, skip + ctx, ...; the second half of each is scored, or its last
--score tokens. --decode scores them token by token instead of in one batch. --kvq off stores keys as they are, also where the model
carries calibrated transforms or a key bias; --kernel-only leaves the reference out, which knows neither. --windows gives sinks and
recent tokens that the cache also keeps in f16 (docs/windows.md), a row for each; without it the type's own with --kernel-only, and none
beside the reference, which has none.
"""
from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.codecs import turbo                   # noqa: E402
from pykvq.engine import Context, Model, kl_divergence, log_softmax, quiet_log   # noqa: E402
from pykvq.formats import FAMILIES               # noqa: E402
from pykvq.ggml_tensor import Tensor, op_number  # noqa: E402
from pykvq.support import effective_type         # noqa: E402


def codec_callback(pair: tuple[str, str]):
    """Eval callback that sends keys and values through the numpy codec; f16 leaves them alone."""
    rope, shapes = op_number("ROPE"), (op_number("RESHAPE"), op_number("VIEW"))

    def rewrite(pointer, ask, _):
        t = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
        key = t.name.startswith(b"Kcur-") and t.op == rope
        value = t.name.startswith(b"Vcur-") and t.op in shapes and b"(" not in t.name and t.ne[1] >= 1 and t.ne[2] >= 1
        name = pair[0] if key else pair[1] if value else "f16"
        if name not in FAMILIES:
            return False if ask else True
        if not ask:
            ne, nb = t.ne, t.nb
            size = (nb[0] * (ne[0] - 1) + nb[1] * (ne[1] - 1) + nb[2] * (ne[2] - 1) + 4) // 4
            flat = np.ctypeslib.as_array(ctypes.cast(t.data, ctypes.POINTER(ctypes.c_float)), shape=(size,))
            a = np.lib.stride_tricks.as_strided(flat, (ne[2], ne[1], ne[0]), (nb[2], nb[1], nb[0]))      # [token, head, d]
            member = effective_type(name, ne[0])
            a[...] = turbo.dequantise(turbo.quantise(a, member), member)
        return True
    return rewrite


def last_logits(context: Context, chunk: list[int], n: int, decode: bool, offset: int) -> np.ndarray:
    """Logits of the last n tokens of a chunk, whose first stands at position offset; float32 [n, n_vocab]."""
    half = len(chunk) - n
    context.clear()
    if not decode:
        entries = [(token, offset + i, 0, i >= half) for i, token in enumerate(chunk)]
        return np.concatenate([context.decode_batch(entries[i:i + context.n_batch]) for i in range(0, len(entries), context.n_batch)])
    context.decode(chunk[:half], offset, logits="none")
    return np.concatenate([context.decode_batch([(token, offset + half + i, 0, True)]) for i, token in enumerate(chunk[half:])])


class Score:
    """Accumulates KL divergence, agreement and perplexity over chunks."""

    def __init__(self):
        self.kl, self.same, self.nll = [], [], []

    def add(self, exact: np.ndarray, ours: np.ndarray, chunk: list[int]) -> None:
        half = len(chunk) - len(ours)
        self.kl.append(kl_divergence(exact, ours))
        self.same.append(exact.argmax(1) == ours.argmax(1))
        self.nll.append(-log_softmax(ours)[np.arange(len(chunk) - half - 1), chunk[half + 1:]])

    def row(self) -> tuple[float, float, float, float]:
        """Mean KL, its 99th percentile, perplexity, share of equal top tokens."""
        kl = np.concatenate(self.kl)
        return float(kl.mean()), float(np.quantile(kl, .99)), float(np.exp(np.concatenate(self.nll).mean())), float(np.concatenate(self.same).mean())


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("text", type=Path)
    ap.add_argument("--ctx", type=int, default=512)
    ap.add_argument("--chunks", type=int, default=2)
    ap.add_argument("--skip", type=int, default=40000, help="tokens at the start of the text that are not scored")
    ap.add_argument("--types", nargs="+", default=["turbo4", "turbo3", "turbo2", "q8_0", "q4_0"], help="TYPE or K,V")
    ap.add_argument("--windows", nargs="+", metavar="SINK,RECENT", help="f16 windows")
    ap.add_argument("--score", type=int, help="tokens scored at the end of a chunk; default: half of it")
    ap.add_argument("--decode", action="store_true", help="score token by token")
    ap.add_argument("--kvq", choices=("auto", "off"), default="auto", help="what the cache does to keys before it stores them")
    ap.add_argument("--offset", type=int, default=0, help="position of the first token of a chunk")
    ap.add_argument("--gpu-layers", type=int, default=0)
    ap.add_argument("--batch", type=int, default=512, help="tokens a batch")
    ap.add_argument("--kernel-only", action="store_true", help="no reference")
    a = ap.parse_args()
    quiet_log()
    pairs = {t: (t.split(",")[0], t.split(",")[-1]) for t in a.types}
    with Model(a.model, a.gpu_layers) as model:
        tokens = model.tokenize(a.text.read_text())
        chunks = [tokens[:1] + tokens[a.skip + i * a.ctx:a.skip + i * a.ctx + a.ctx - 1] for i in range(a.chunks)]
        if any(len(c) < a.ctx for c in chunks):
            raise SystemExit(f"{a.text} has {len(tokens)} tokens, too few for --skip {a.skip} and {a.chunks} chunks of {a.ctx}")

        def run(kv_type, callback=None, window=(None, None)):
            with Context(model, a.ctx, kv_type, n_batch=min(a.ctx, a.batch), kvq="off" if callback else a.kvq, kv_sink=window[0],
                         kv_recent=window[1], on_tensor=callback) as context:
                return [last_logits(context, c, a.score or a.ctx - a.ctx // 2, a.decode, a.offset) for c in chunks]

        exact = run("f16")
        base = Score()
        for e, c in zip(exact, chunks):
            base.add(e, e, c)
        print(f"{model.header.name}, {a.text.name}, context {a.ctx} at position {a.offset}, {a.chunks} chunks, {'token by token' if a.decode else 'one batch'}; "
              f"f16 perplexity {base.row()[2]:.3f}\n")
        print("| cache | window | KL kernel | KL reference | ratio | p99 | perplexity | same top |\n|---|---|---|---|---|---|---|---|", flush=True)
        windows = [tuple(map(int, w.split(","))) for w in a.windows or []] or [(None, None) if a.kernel_only else (0, 0)]
        for (name, pair), window in itertools.product(pairs.items(), windows):
            kernel, reference = Score(), Score()
            for e, x, c in zip(exact, run(pair, window=window), chunks):
                kernel.add(e, x, c)
            k = kernel.row()
            cells = ("", "")
            if not a.kernel_only and window == (0, 0) and set(pair) & set(FAMILIES) and set(pair) <= {*FAMILIES, "f16"}:
                for e, x, c in zip(exact, run("f16", codec_callback(pair)), chunks):
                    reference.add(e, x, c)
                cells = (f"{reference.row()[0]:.5f}", f"{k[0] / reference.row()[0]:.3f}")
            shown = "default" if window[0] is None else f"{window[0]}, {window[1]}"
            print(f"| {name} | {shown} | {k[0]:.5f} | {cells[0]} | {cells[1]} | {k[1]:.4f} | {k[2]:.3f} | {k[3] * 100:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
