#!/usr/bin/env python3
"""KL divergence of every cache type, through the real cache and through the numpy codec inside an f16 model.

    python tools/measure_kld.py model.gguf text.txt [--ctx 512] [--chunks 2] [--skip 40000] [--types turbo2 turbo3 turbo4]
        [--windows 0,0 64,256] [--decode] [--streams 4] [--kvq off] [--kernel-only] [--json FILE]

"kernel" runs the type as the cache. "reference" keeps an f16 cache and lets the eval callback of llama.cpp rewrite the
post-RoPE keys and the values with dequantise(quantise(x)) of pykvq.codecs.turbo: what the codec alone costs. Their ratio
shows what the kernels add. Chunks start with BOS at tokens skip, skip + ctx, ...; the second half of each is scored, or its last
--score tokens. --decode scores them token by token instead of in one batch. --kvq off stores keys as they are, also where the model
carries calibrated transforms or a key bias; --kernel-only leaves the reference out, which knows neither. --windows gives sinks and
recent tokens that the cache also keeps in f16 (docs/windows.md), a row for each; without it the default with --kernel-only, and none
beside the reference, which has none.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.codecs import turbo                   # noqa: E402
from pykvq.engine import Context, Model, kl_divergence, quiet_log   # noqa: E402
from pykvq.evaluation.logits import surprise     # noqa: E402
from pykvq.formats import FAMILIES               # noqa: E402
from pykvq.ggml_tensor import Tensor, op_number  # noqa: E402
from pykvq.support import OURS, effective_type   # noqa: E402


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


def last_logits(context: Context, chunks: Sequence[Sequence[int]], n: int, decode: bool, offset: int) -> np.ndarray:
    """Logits of the last n tokens of chunks that begin at position offset, each in a sequence of its own; float32
    [chunks, n, n_vocab]. decode: token by token, all chunks in step."""
    context.clear()
    half = len(chunks[0]) - n
    if decode:
        for seq, chunk in enumerate(chunks):
            context.decode(chunk[:half], offset, seq, logits="none")
        steps = [context.decode_batch([(chunk[i], offset + i, seq, True) for seq, chunk in enumerate(chunks)]) for i in range(half, half + n)]
        return np.stack(steps, 1)
    rows = []
    for seq, chunk in enumerate(chunks):
        entries = [(token, offset + i, seq, i >= half) for i, token in enumerate(chunk)]
        rows.append(np.concatenate([context.decode_batch(entries[i:i + context.n_batch]) for i in range(0, len(entries), context.n_batch)]))
    return np.stack(rows)


class Score:
    """Accumulates KL divergence, agreement and perplexity over chunks."""

    def __init__(self):
        self.kl, self.same, self.nll = [], [], []

    def add(self, exact: np.ndarray, ours: np.ndarray, chunk: Sequence[int]) -> None:
        """Logits [n, n_vocab] of the last n tokens of a chunk."""
        half = len(chunk) - len(ours)
        blocks = range(0, len(ours), 32)         # in float64 a vocabulary of 152,000 takes 39 MB so; numpy lets threads run side by side
        with ThreadPoolExecutor(4) as pool:
            self.kl += pool.map(lambda i: kl_divergence(exact[i:i + 32], ours[i:i + 32]), blocks)
        self.same.append(exact.argmax(1) == ours.argmax(1))
        self.nll.append(surprise(ours[:-1], np.asarray(chunk[half + 1:])))

    def row(self) -> tuple[float, float, float, float]:
        """Mean KL, its 99th percentile, perplexity, share of equal top tokens."""
        kl = np.concatenate(self.kl)
        return float(kl.mean()), float(np.quantile(kl, .99)), float(np.exp(np.concatenate(self.nll).mean())), float(np.concatenate(self.same).mean())

    def error(self) -> float:
        """Standard error of the mean KL, from blocks of 32 neighbouring tokens."""
        blocks = [part.mean() for part in self.kl]
        return float(np.std(blocks, ddof=1) / len(blocks) ** 0.5) if len(blocks) > 1 else float("nan")


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
    ap.add_argument("--streams", type=int, default=1, help="chunks in the cache at once, a sequence each")
    ap.add_argument("--json", type=Path, help="file for the rows, with what was not rounded")
    ap.add_argument("--label", default="", help="a word for the JSON, e.g. what the model was calibrated on")
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

        groups = [chunks[i:i + a.streams] for i in range(0, len(chunks), a.streams)]

        def run(kv_type, callback=None, window=(None, None)):
            with Context(model, a.ctx * len(groups[0]), kv_type, n_seq=len(groups[0]), n_batch=min(a.ctx, a.batch), kvq="off" if callback else a.kvq,
                         kv_sink=window[0], kv_recent=window[1], on_tensor=callback) as context:
                return np.concatenate([last_logits(context, group, a.score or a.ctx - a.ctx // 2, a.decode, a.offset) for group in groups])

        exact = run("f16")
        base = Score()
        for e, c in zip(exact, chunks):
            base.add(e, e, c)
        print(f"{model.header.name}, {a.text.name}, context {a.ctx} at position {a.offset}, {a.chunks} chunks, {'token by token' if a.decode else 'one batch'}; "
              f"f16 perplexity {base.row()[2]:.3f}\n")
        print("| cache | window | KL kernel | KL reference | ratio | p99 | perplexity | same top |\n|---|---|---|---|---|---|---|---|", flush=True)
        windows = [tuple(map(int, w.split(","))) for w in a.windows or []] or [(None, None) if a.kernel_only else (0, 0)]
        results = []
        for name, pair, window in ((n, p, w) for n, p in pairs.items() for w in (windows if set(p) & set(OURS) else windows[:1])):
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
            results.append({"types": pair, "window": window, "kl": k[0], "kl_error": kernel.error(), "kl_p99": k[1], "perplexity": k[2], "same_top": k[3]})
            if a.json:
                a.json.write_text(json.dumps({"model": model.header.name, "label": a.label, "text": a.text.name, "ctx": a.ctx, "offset": a.offset, "chunks": a.chunks,
                                              "score": a.score or a.ctx - a.ctx // 2, "decode": a.decode, "kvq": a.kvq, "gpu_layers": a.gpu_layers,
                                              "perplexity_f16": base.row()[2], "rows": results}, indent=1) + "\n")
            print(f"| {name} | {shown} | {k[0]:.5f} | {cells[0]} | {cells[1]} | {k[1]:.4f} | {k[2]:.3f} | {k[3] * 100:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
