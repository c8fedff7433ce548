#!/usr/bin/env python3
"""KL divergence of calibrated and published codecs, in numpy, on the same keys and values inside an f16 model.

    python tools/measure_codecs.py model.gguf text.txt --stats a.npz [b.npz ...] [--ctx 512] [--chunks 2] [--skip 40000] [--offset 0]

llama.cpp keeps an f16 cache; its eval callback rewrites each layer's new rows, once written, with what the codec would give back.
Statistics come from `pykvq calibrate MODEL -o FILE`; several files are compared, e.g. of samples and of text. Scored is the second
half of each chunk against the f16 cache. --keep leaves the first tokens of a chunk in f16; --key-bias removes a pre-RoPE bias, the
model's own attn_k.bias or the measured mean, in the pairs that carry it, before the codec and returns it exactly.
"""
from __future__ import annotations

import argparse
import ctypes
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure_kld import Score                                        # noqa: E402
from pykvq.calibration import KEY_BIAS                               # noqa: E402
from pykvq.calibration.build import build                            # noqa: E402
from pykvq.calibration.bias_pairs import only                        # noqa: E402
from pykvq.calibration.key_bias import measured_bias, turned         # noqa: E402
from pykvq.calibration.loss import TIERS                             # noqa: E402
from pykvq.calibration.model_files import files_of, tensor           # noqa: E402
from pykvq.calibration.run import Statistics                         # noqa: E402
from pykvq.codecs import oscar_published, turbo                      # noqa: E402
from pykvq.codecs.hadamard import sylvester                          # noqa: E402
from pykvq.codecs.lloyd_max import lloyd_max                         # noqa: E402
from pykvq.engine import Context, Model, quiet_log                   # noqa: E402
from pykvq.ggml_tensor import OP_OFFSET, Tensor, op_number, read, root   # noqa: E402
from pykvq.support import effective_type                             # noqa: E402

CACHE = re.compile(rb"cache_([kv])_l(\d+)")


def plain(bits):
    """turbo of this many bits, no calibration; x [n, heads, d]."""
    def f(x, layer):
        member = effective_type(f"turbo{bits}", x.shape[-1])
        return turbo.dequantise(turbo.quantise(x, member), member)
    return f


def tier(y, bits):
    """Lloyd-Max codes of signed-Hadamard-mixed coordinates, one least-squares fp16 scale per head; y [n, heads, k], k a power of two."""
    signs = np.sign(np.random.default_rng(3).standard_normal(y.shape[-1]))
    H = sylvester(y.shape[-1]) / np.sqrt(y.shape[-1]) * signs
    z, c = y @ H.T, lloyd_max(bits)
    s = np.sqrt((z * z).mean(-1, keepdims=True)) + 1e-30
    code = c[np.searchsorted((c[1:] + c[:-1]) / 2, z / s)]
    gain = (z * code).sum(-1, keepdims=True) / (code * code).sum(-1, keepdims=True)
    return code * gain.astype(np.float16) @ H


def calibrated(layers, codec, tiers=((16, None),)):
    """Keys in calibrated coordinates, weighted by lambda^1/4 inside each tier; `codec` for the tier without a number of bits."""
    def f(x, layer):
        t = layers[layer]
        y, F = x - t.mean, np.linalg.inv(t.basis)
        y, start, out = np.einsum("nhi,hij->nhj", y, F), 0, []
        for share, bits in tiers:
            stop = start + x.shape[-1] * share // 16
            w = t.lam[:, start:stop] ** .25
            w /= np.sqrt((w * w).mean(-1, keepdims=True))
            stored = y[..., start:stop] * w
            out.append((tier(stored, bits) if bits else codec(stored, layer)) / w)
            start = stop
        return np.einsum("nhi,hij->nhj", np.concatenate(out, -1), t.basis) + t.mean
    return f


def centred(moments, codec):
    """Values with their mean over the calibration text taken out."""
    means = {i: s.v / s.n for i, s in moments.layers.items()}
    return lambda x, layer: codec(x - means[layer], layer) + means[layer]


def published(moments, kind):
    """OSCAR; the values' rotation from their plain second moment, for the sums hold no tokens to weight."""
    R = {i: oscar_published.rotation(s.qq / s.n_q if kind == "k" else s.vv / s.n) for i, s in moments.layers.items()}
    clip = oscar_published.CLIP_KEYS if kind == "k" else oscar_published.CLIP_VALUES
    return lambda x, layer: np.stack([oscar_published.round_trip(x[:, h], R[layer][h], clip) for h in range(x.shape[1])], 1)


def bias_of(model, layer, sums, kind):
    """Pre-RoPE bias [h, d] of a layer."""
    if kind == "measured":
        return measured_bias(sums)
    return np.frombuffer(tensor(files_of(model), f"blk.{layer}.attn_k.bias"), "<f4").reshape(sums.heads, -1).astype(np.float64)


def debiased(codec, biases, moments, positions):
    """`codec` around keys without R(j) b, which is added back."""
    def f(x, layer):
        L, c = turned(biases[layer], moments.layers[layer].rope)
        shift = np.einsum("hdr,nr->nhd", L, moments.layers[layer].rope.table(positions)) + c
        return codec(x - shift, layer) + shift
    return f


def rewriting(keys, values, heads, keep):
    """Eval callback that passes rows just written to the f16 cache through a codec; None leaves them."""
    set_rows = op_number("SET_ROWS")

    def callback(pointer, ask, _):
        if ctypes.c_int.from_address(pointer + OP_OFFSET).value != set_rows:
            return not ask
        if ask:
            return True
        t = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
        cache = root(t)
        found = CACHE.fullmatch(cache.name)
        codec = found and (keys if found[1] == b"k" else values)
        if codec:
            layer, source = int(found[2]), t.src[0].contents
            rows = np.ctypeslib.as_array(ctypes.cast(t.src[1].contents.data, ctypes.POINTER(ctypes.c_int64)), shape=(source.ne[1],))
            memory = np.ctypeslib.as_array(ctypes.cast(cache.data, ctypes.POINTER(ctypes.c_uint16)), shape=(cache.ne[1] * cache.ne[2], cache.ne[0]))
            x = read(source).reshape(source.ne[1], heads[layer], -1).astype(np.float64)
            x[keep:] = codec(x, layer)[keep:]
            memory.view(np.float16)[rows] = x.reshape(len(x), -1)
        return True
    return callback


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=Path)
    ap.add_argument("text", type=Path)
    ap.add_argument("--stats", nargs="+", type=Path, required=True)
    ap.add_argument("--ctx", type=int, default=512)
    ap.add_argument("--chunks", type=int, default=2)
    ap.add_argument("--skip", type=int, default=40000, help="tokens at the start of the text that are not scored")
    ap.add_argument("--offset", type=int, default=0, help="position of the first token of a chunk")
    ap.add_argument("--keep", type=int, default=4)
    ap.add_argument("--key-bias", choices=KEY_BIAS, default="none")
    ap.add_argument("--only", default="", help="regular expression that a codec's name must match")
    ap.add_argument("--threads", type=int)
    a = ap.parse_args()
    quiet_log()
    runs = {path.stem: Statistics.load(path) for path in a.stats}
    first = next(iter(runs.values())).moments
    codecs = {"turbo4": (plain(4), plain(4)), "turbo3": (plain(3), plain(3)), "turbo2": (plain(2), plain(2))}
    positions = a.offset + np.arange(a.ctx)
    for name, run in runs.items():
        t = build(run, a.model, a.key_bias).layers
        cal = {"turbo4 calibrated": (calibrated(t, plain(4)), centred(run.moments, plain(4))), "turbo3 calibrated": (calibrated(t, plain(3)), centred(run.moments, plain(3))),
               "turbo2 calibrated": (calibrated(t, plain(2)), centred(run.moments, plain(2))),
               "K 4/2/1, V turbo3": (calibrated(t, None, TIERS), centred(run.moments, plain(3))),
               "K 4/2/1, V f16": (calibrated(t, None, TIERS), None), "K turbo2 calibrated, V f16": (calibrated(t, plain(2)), None)}
        if a.key_bias != "none":
            biases = {i: only(bias_of(a.model, i, s, a.key_bias), s.rope, t[i].pairs) for i, s in run.moments.layers.items()}
            cal["turbo3 not calibrated"] = plain(3), plain(3)
            cal = {f"{n}, bias returned": (debiased(k, biases, run.moments, positions), v) for n, (k, v) in cal.items()}
        codecs |= {f"{n} ({name})": pair for n, pair in cal.items()}
        codecs[f"OSCAR as published ({name})"] = published(run.moments, "k"), published(run.moments, "v")
    heads = {i: s.heads for i, s in first.layers.items()}
    with Model(a.model) as model:
        tokens = model.tokenize(a.text.read_text())
        chunks = [tokens[:1] + tokens[a.skip + i * a.ctx:a.skip + i * a.ctx + a.ctx - 1] for i in range(a.chunks)]
        if any(len(c) < a.ctx for c in chunks):
            raise SystemExit(f"{a.text} has {len(tokens)} tokens, too few for --skip {a.skip} and {a.chunks} chunks of {a.ctx}")

        def run_all(callback):
            with Context(model, a.ctx, "f16", n_batch=a.ctx, on_tensor=callback, threads=a.threads, kvq="off") as context:
                for c in chunks:
                    context.clear()
                    yield context.decode_batch([(token, a.offset + i, 0, i >= a.ctx // 2) for i, token in enumerate(c)])
        exact = list(run_all(None))
        base = Score()
        for e, c in zip(exact, chunks):
            base.add(e, e, c)
        print(f"{model.header.name}, {a.text.name}, context {a.ctx} at position {a.offset}, {a.chunks} chunks, first {a.keep} tokens f16; "
              f"f16 perplexity {base.row()[2]:.3f}\n\n| codec | KL | p99 | perplexity | same top |\n|---|---|---|---|---|", flush=True)
        for name, (keys, values) in codecs.items():
            if not re.search(a.only, name):
                continue
            score = Score()
            for e, x, c in zip(exact, run_all(rewriting(keys, values, heads, a.keep)), chunks):
                score.add(e, x, c)
            kl, p99, perplexity, same = score.row()
            print(f"| {name} | {kl:.5f} | {p99:.4f} | {perplexity:.3f} | {same * 100:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
