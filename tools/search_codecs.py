#!/usr/bin/env python3
"""What other choices of calibration and codec would do to attention: the tables of docs/codec-search.md.

    python tools/search_codecs.py model.gguf text.txt --stats own.npz [--layers 6] [--ctx 2048] [--queries 48] [--only REGEX] [--key-bias measured]
    python tools/search_codecs.py --gaussian

Keys, values and queries of the calibration's own chunks and of one chunk of the text are caught once; codecs then run in numpy on those
of a few layers. The first 64 tokens and the 256 before each query are exact. Keys: variance of the logit error, KL divergence of the
attention weights and error of the attention output; values: error of the output. All relative to the first row, as geometric means
over heads. --gaussian: squared error of 2-bit and 1-bit codes on N(0, 1).
"""
from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure_codecs import bias_of                                   # noqa: E402
from pykvq.calibration import KEY_BIAS                               # noqa: E402
from pykvq.calibration.key_bias import turned                        # noqa: E402
from pykvq.calibration.observer import Keys, Observer                # noqa: E402
from pykvq.calibration.run import CHUNK, Statistics                  # noqa: E402
from pykvq.calibration.transform import key_transform                # noqa: E402
from pykvq.codecs.hadamard import sylvester                          # noqa: E402
from pykvq.codecs.lloyd_max import lloyd_max                         # noqa: E402
from pykvq.engine import Context, Model, quiet_log                   # noqa: E402

SINKS, RECENT, FIRST = 64, 256, 4            # tokens in f16; tokens of a calibration chunk that are left out
T421 = ((4, 4), (4, 2), (8, 1))              # sixteenths of a block and their bits
# 4-state trellis of 2 bits: the level of code c after code p is at p + 4 c. Lloyd's iteration over Viterbi paths of Gaussian rows.
TRELLIS = np.array([-0.341, -1.229, 0.336, 1.387, -1.107, -0.230, 1.092, 0.362, 0.313, 1.216, -0.547, -1.378, 2.099, 0.534, -2.097, -0.463])


def lloyd(z, bits):
    """Nearest Lloyd-Max level; any shape."""
    c = lloyd_max(bits)
    return c[np.searchsorted((c[1:] + c[:-1]) / 2, z)]


def trellis(z, bits=2):
    """Levels of the path of least squared error through TRELLIS, from state 0; z [..., n]."""
    x = z.reshape(-1, z.shape[-1])
    cost, back = np.where(np.arange(4) == 0, 0.0, np.inf) + np.zeros((len(x), 1)), []
    for t in range(x.shape[1]):
        total = cost[:, :, None] + (x[:, t, None, None] - TRELLIS.reshape(4, 4).T) ** 2       # [rows, p, c]
        back.append(total.argmin(1))
        cost = total.min(1)
    c, rows, out = cost.argmin(1), np.arange(len(x)), np.empty(x.shape)
    for t in reversed(range(x.shape[1])):
        p = back[t][rows, c]
        out[:, t], c = TRELLIS[p + 4 * c], p
    return out.reshape(z.shape)


def half(scale):
    """The scale as the cache types store it."""
    return scale.astype(np.float16)


def sixteenths_of_octaves(scale):
    """A scale of 8 bits: 16 octaves in steps of 4.4 %."""
    return np.exp2(np.round(16 * np.log2(np.maximum(scale, 1e-30))) / 16)


def block(y, bits, gain=0.0, code=lloyd, seed=3, scale=half):
    """One block coded: signed Hadamard, codes, a scale between the least-squares one (gain 0), that which keeps the length (0.5) and the
    unbiased one (1), stored by `scale`; y [..., k], k a power of two."""
    H = sylvester(y.shape[-1]) / np.sqrt(y.shape[-1]) * np.sign(np.random.default_rng(seed).standard_normal(y.shape[-1]))
    z = y @ H.T
    c = code(z / (np.sqrt((z * z).mean(-1, keepdims=True)) + 1e-30), bits) if bits else np.zeros_like(z)
    zz, zc, cc = ((a * b).sum(-1, keepdims=True) + 1e-30 for a, b in ((z, z), (z, c), (c, c)))
    return c * scale((zc / cc) ** (1 - gain) * (zz / zc) ** gain) @ H


def tiers(mean, basis, lam, layout=T421, **how):
    """Codec of the keys [n, d] of one head: tiers in blocks of up to 128, ranks dealt to them in turn, one scale a tier."""
    d, F = len(lam), np.linalg.inv(basis)
    count = max(1, d // 128)

    def codec(x):
        y = (x - mean) @ F
        z = np.zeros_like(y)
        for b in range(count):
            ranks, start = np.arange(b, d, count), 0
            for share, bits in layout:
                i = ranks[start:start + len(ranks) * share // 16]
                start += len(i)
                w = lam[i] ** .25 / np.sqrt(np.sqrt(lam[i]).mean())
                z[:, i] = block(y[:, i] * w, bits, **how) / w
        return z @ basis + mean
    return codec


class Layer:
    """One layer. k, v, q [chunks, n, heads, d] of the calibration without key bias, tk, tv, tq [n, heads, d] of the text."""

    def __init__(self, sums, seen, positions, bias):
        k, self.v, self.q = (np.stack(seen[kind][:-1]).astype(np.float64) for kind in "kvq")
        self.tk, self.tv, self.tq = (seen[kind][-1].astype(np.float64) for kind in "kvq")
        if bias is None:
            shift, self.shift = np.zeros(()), np.zeros(())
        else:
            L, c = turned(bias, sums.rope)
            at = lambda p: np.einsum("hdr,nr->nhd", L, sums.rope.table(p)) + c
            shift, self.shift = np.stack([at(p + np.arange(k.shape[1])) for p in positions]), at(np.arange(len(self.tk)))
        self.raw, self.k, self.tk = k, k - shift, self.tk - self.shift
        self.group = self.q.shape[2] // k.shape[2]

    def moments(self, chunks=None, token_weight=0.0):
        """Mean, covariance, query moment of every head. token_weight: the share that follows the attention a token receives."""
        k = self.k[:chunks, FIRST:]
        w = np.ones(k.shape[:3])
        if token_weight:
            w = (1 - token_weight) * w + token_weight * self.received()[:chunks, FIRST:]
        for h in range(k.shape[2]):
            x, wh = k[:, :, h].reshape(-1, k.shape[3]), w[:, :, h].reshape(-1, 1)
            mean = x.mean(0)
            q = self.q[:chunks, FIRST:, h * self.group:(h + 1) * self.group].reshape(-1, k.shape[3])
            yield mean, (wh * (x - mean)).T @ (x - mean) / wh.sum(), q.T @ q / len(q)

    def received(self):
        """Attention that each token of the calibration received, relative to the mean; [chunks, n, heads]."""
        out, future = np.zeros(self.k.shape[:3]), np.triu(np.ones((self.k.shape[1],) * 2, bool), 1)
        for c in range(len(out)):
            for h in range(self.q.shape[2]):
                s = self.q[c, :, h] @ self.raw[c, :, h // self.group].T
                s[future] = -np.inf
                out[c, :, h // self.group] += softmax(s).sum(0)
        return out / out[:, FIRST:].mean((0, 1))


def softmax(s):
    """Over the last axis; -inf is allowed."""
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


class Attention:
    """Attention of a sample of the text's queries, exact and with coded keys or values."""

    def __init__(self, layer, queries, window):
        self.layer, n = layer, len(layer.tk)
        i = np.linspace(n // 3, n - 1, queries).astype(int)[:, None]
        self.seen = (np.arange(n) <= i) & (np.arange(n) > i - window)
        self.coded = self.seen & (np.arange(n) >= SINKS) & (np.arange(n) <= i - RECENT)
        self.q = layer.tq[i[:, 0]]
        self.s = [np.where(self.seen, self.q[:, h] @ (layer.tk + layer.shift)[:, h // layer.group].T, -np.inf) for h in range(self.q.shape[1])]

    def keys(self, coded):
        """[heads, 3]: variance of the logit error, KL of the weights, squared error of the output relative to the output."""
        out = []
        for h, s in enumerate(self.s):
            v, g = self.layer.tv[:, h // self.layer.group], h // self.layer.group
            e = np.where(self.coded, self.q[:, h] @ (coded[:, g] - self.layer.tk[:, g]).T, 0)
            p, p2 = softmax(s), softmax(s + e)
            kl = np.where(p > 0, p * np.log(np.maximum(p, 1e-300) / np.maximum(p2, 1e-300)), 0).sum(1).mean()
            out.append((np.mean([x[m].var() for x, m in zip(e, self.coded) if m.any()]), kl, (((p2 - p) @ v) ** 2).sum() / ((p @ v) ** 2).sum()))
        return np.array(out)

    def values(self, coded):
        """[heads, 1]: squared error of the output relative to the output."""
        out = []
        for h, s in enumerate(self.s):
            p, g = softmax(s), h // self.layer.group
            out.append((((np.where(self.coded, p, 0) @ (coded[:, g] - self.layer.tv[:, g])) ** 2).sum() / ((p @ self.layer.tv[:, g]) ** 2).sum(),))
        return np.array(out)


def catch(path, text, run, layers, ctx):
    """{layer: {kind: arrays, one a calibration chunk, the text's last}} of the layers asked for."""
    seen = {i: {"k": [], "v": [], "q": []} for i in layers}

    def sink(s):
        if s.layer in seen:
            for kind, x in (("k", s.k), ("v", s.v)) if isinstance(s, Keys) else (("q", s.q),):
                seen[s.layer][kind].append(x.astype(np.float32))
    observer = Observer(sink)
    with Model(path) as model:
        tokens = model.tokenize(text.read_text())
        chunks = [(list(c), int(p)) for c, p in zip(run.tokens, run.positions)] + [(tokens[:1] + tokens[40000:40000 + ctx - 1], 0)]
        for chunk, position in chunks:
            with Context(model, max(len(chunk), CHUNK), n_batch=len(chunk), kvq="off", on_tensor=observer) as context:
                context.decode(chunk, position, logits="none")
                observer.check()
        return seen, model.header


def variants(layer):
    """(name, coded keys) and (name, coded values) of one layer."""
    heads = range(layer.k.shape[2])

    def keys(moments, ridge=.01, layout=T421, **how):
        def coded():                             # not before it is asked for
            t = [(m, *key_transform(S, Q, ridge)) for m, S, Q in (moments() if callable(moments) else moments)]
            return np.stack([tiers(*t[h], layout, **how)(layer.tk[:, h]) for h in heads], 1)
        return coded
    base = list(layer.moments())
    yield "K 4/2/1", keys(base)
    yield from ((f"K ridge {r}", keys(base, r)) for r in (.001, .003, .03, .1))
    yield "K not centred", keys([(m * 0, S + np.outer(m, m), Q) for m, S, Q in base])
    yield from ((f"K {n * CHUNK} tokens", keys(partial(layer.moments, n))) for n in (2, 4, 8) if n < len(layer.k))
    yield from ((f"K tokens by attention, share {a}", keys(partial(layer.moments, token_weight=a))) for a in (.1, .25, 1))
    for name, layout in (("5/3/2/1", ((2, 5), (2, 3), (4, 2), (8, 1))), ("4/2/1/0", ((4, 4), (6, 2), (4, 1), (2, 0))), ("2", ((16, 2),)), ("3", ((16, 3),))):
        yield f"K {name}", keys(base, layout=layout)
    for bits in (2, 3, 4):
        for name, scale in (("fp16", half), ("8-bit", sixteenths_of_octaves)):
            yield f"K {bits} bits, {name} scale", keys(base, layout=((16, bits),), gain=.5, scale=scale)
    yield "K 4/2/1, 8-bit scales", keys(base, scale=sixteenths_of_octaves)
    yield from ((f"K gain {g}", keys(base, gain=g)) for g in (.25, .5, 1))
    yield "K 4/2/1, trellis for 2", keys(base, code=lambda z, bits: trellis(z) if bits == 2 else lloyd(z, bits))
    n = min(layer.tv.shape[-1], 128)
    blocks = layer.tv.reshape(*layer.tv.shape[:2], -1, n)
    for name, how in {"V least squares": {}, "V gain 0.5": {"gain": .5}, "V gain 1": {"gain": 1}, "V trellis": {"code": trellis},
                      "V trellis, gain 0.5": {"code": trellis, "gain": .5}, "V 3 bits": {"bits": 3},
                      **{f"V {bits} bits, {name} scale": {"bits": bits, "gain": .5, "scale": scale}
                         for bits in (2, 3, 4) for name, scale in (("fp16", half), ("8-bit", sixteenths_of_octaves))}}.items():
        yield name, lambda how=how: block(blocks, **{"bits": 2} | how).reshape(layer.tv.shape)


def gaussian():
    """Squared error a value, one least-squares scale a block of 64 or 128."""
    rng = np.random.default_rng(0)
    print("| code | n = 64 | n = 128 |\n|---|---|---|")
    for name, bits, code in (("Lloyd-Max, 1 bit", 1, lloyd), ("Lloyd-Max, 2 bits", 2, lloyd), ("trellis of 4 states, 2 bits", 2, trellis)):
        errors = [((block(x, bits, code=code) - x) ** 2).mean() for x in (rng.standard_normal((2000, n)) for n in (64, 128))]
        print(f"| {name} | " + " | ".join(f"{e:.4f}" for e in errors) + " |")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model", type=Path, nargs="?")
    ap.add_argument("text", type=Path, nargs="?")
    ap.add_argument("--stats", type=Path, help="of pykvq calibrate")
    ap.add_argument("--layers", type=int, default=6, help="how many, at even distances")
    ap.add_argument("--ctx", type=int, default=2048)
    ap.add_argument("--queries", type=int, default=48)
    ap.add_argument("--only", default="", help="regular expression that a row's name must match; the reference rows always run")
    ap.add_argument("--key-bias", choices=KEY_BIAS, default="measured", help="removed from the keys first; none where the cache cannot return it")
    ap.add_argument("--gaussian", action="store_true")
    a = ap.parse_args()
    if a.gaussian:
        return gaussian()
    if not (a.model and a.text and a.stats):
        ap.error("name a model, a text and --stats, or --gaussian")
    quiet_log()
    run = Statistics.load(a.stats)
    layers = sorted(run.moments.layers)[1::max(1, len(run.moments.layers) // a.layers)]
    seen, header = catch(a.model, a.text, run, layers, a.ctx)
    rows: dict[str, list[np.ndarray]] = {}
    for i in layers:
        sums = run.moments.layers[i]
        layer = Layer(sums, seen.pop(i), run.positions, None if a.key_bias == "none" else bias_of(a.model, i, sums, a.key_bias))
        attention = Attention(layer, a.queries, a.ctx)
        for name, coded in variants(layer):
            if name in ("K 4/2/1", "V least squares") or re.search(a.only, name):
                rows.setdefault(name, []).append((attention.keys if name[0] == "K" else attention.values)(coded()))
    print(f"{header.name}, {a.text.name}, {a.ctx} tokens, layers {', '.join(map(str, layers))}\n\n| | logit error | KL of the weights | output error |\n|---|---|---|---|")
    reference = {"K": np.concatenate(rows["K 4/2/1"]), "V": np.concatenate(rows["V least squares"])}
    for name, parts in rows.items():
        ratio = np.exp(np.log(np.concatenate(parts) / reference[name[0]]).mean(0))
        print(f"| {name} | " + " | ".join([""] * (3 - len(ratio)) + [f"{r:.3f}" for r in ratio]) + " |")


if __name__ == "__main__":
    main()
