"""docs/turboquant.md from the measurements in docs/turboquant.json."""
from __future__ import annotations

from decimal import Decimal

PAPER_MSE = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}
PAPER_PROD = {1: 1.57, 2: 0.56, 3: 0.18, 4: 0.047}
PAPER_SECONDS = {"200": (37.04, 0.0007), "1536": (239.75, 0.0013), "3072": (494.42, 0.0021)}


def table(head: list[str], rows: list[list]) -> str:
    line = lambda cells: "| " + " | ".join(str(c) for c in cells) + " |"
    return "\n".join([line(head), line(["---"] * len(head)), *(line(r) for r in rows)])


def number(x: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent; a dash for what was not measured."""
    if x is None:
        return "-"
    return f"{Decimal(f'{x:.{digits}g}'):f}"


def spread(mean: float, error: float, digits: int = 4) -> str:
    return f"{number(mean, digits)} ± {number(error, 1)}"


def sampled(values: list[float], digits: int = 3) -> str:
    """Mean and its standard error of independent measurements."""
    mean = sum(values) / len(values)
    error = (sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)) ** 0.5 if len(values) > 1 else None
    return number(mean, digits) if error is None else spread(mean, error, digits)


def conditions(c: dict) -> str:
    return f"{c['processor']}, one thread, Python {c['python']}, numpy {c['numpy']}" + (f", faiss {c['faiss']}" if c.get("faiss") else "")


def distortion(rows: list[dict]) -> str:
    measured = lambda r, *names: [spread(r[n], r[f"{n}_error"]) for n in names]
    mse = [[r["d"], r["bits"], PAPER_MSE[r["bits"]], number(r["exact_mse"], 4), *measured(r, "mse_haar", "mse_hadamard", "mse_single"),
            number(r["mse_bounds"][0]), number(r["mse_bounds"][1]), number(r["mse_haar"] / r["mse_bounds"][0])] for r in rows]
    prod = [[r["d"], r["bits"], PAPER_PROD[r["bits"]], number(r["exact_prod"], 4), *measured(r, "prod_haar", "prod_hadamard"),
             number(r["prod_bounds"][0]), number(r["prod_bounds"][1])] for r in rows]
    runs = " and ".join(f"{count} of them for d = {d}" for d, count in {r["d"]: r["runs"] for r in rows}.items())
    return f"""## Distortion

Runs with a rotation, a projection, {rows[0]['vectors']} unit vectors and {rows[0]['queries']} queries of their own: {runs}; ± is the standard error of their
mean. "One channel" is the worst case for a codec without a rotation: the whole norm in one value. "Exact" is the integral over the density of a
coordinate in that dimension; the paper's figures are for many dimensions. Bounds: theorems 1 to 3.

Squared error of TurboQuant-MSE, per unit of squared norm:

{table(["d", "bits", "paper", "exact", "Haar", "Hadamard", "one channel", "lower bound", "upper bound", "Haar / lower bound"], mse)}

The paper's 0.03 and 0.009 are cut off, not rounded: Lloyd-Max for a Gaussian gives 0.0345 and 0.0095 (0.1175 and 0.3634 at 2 and 1 bits). The
ratio to the lower bound is 1.45 at one bit, as the paper says, and grows to {max(r['mse_haar'] / r['mse_bounds'][0] for r in rows):.2f} at four; 2.72 is its limit.

Squared inner-product error of TurboQuant-Prod for unit vectors, times d (exact: pi/2 - 1/d times the MSE at one bit less; pi/2 times it bounds every pair):

{table(["d", "bits", "paper", "exact", "Haar", "Hadamard", "lower bound", "upper bound"], prod)}

The paper's 0.047 at four bits is pi/2 times its 0.03; with 0.0345 it is 0.054. No measured mean is further than {worst(rows):.1f} standard errors from the exact value."""


def worst(rows: list[dict]) -> float:
    names = ("mse_haar", "mse_hadamard", "mse_single", "prod_haar", "prod_hadamard")
    return max(abs(r[n] - r["exact_" + n.split("_")[0]]) / r[f"{n}_error"] for r in rows for n in names)


def unbiasedness(rows: list[dict]) -> str:
    body = [[r["bits"], f"{number(r['mse_mean'], 4)} ± {number(r['mse_error_of_mean'], 2)}", number(r["truth"] * r["mse_factor"], 4),
             f"{number(r['prod_mean'], 4)} ± {number(r['prod_error_of_mean'], 2)}", number(r["mse_variance"]), number(r["prod_variance"]), number(r["prod_bound"])] for r in rows]
    return f"""## Bias and variance of inner products

One pair of unit vectors with inner product {number(rows[0]['truth'], 3)}, d = {rows[0]['d']}, {rows[0]['runs']} independent rotations and projections. Variances are
multiplied by d and good to {100 * (2 / rows[0]['runs']) ** 0.5:.0f} %; ± is the standard error of the mean.

{table(["bits", "MSE mean", "MSE predicted", "Prod mean", "MSE variance", "Prod variance", "bound (theorem 2)"], body)}

Prod is unbiased, within its bound. MSE shrinks every inner product by 1 - MSE, but its variance is several times smaller. The factor can be had
for nothing: `TurboQuantMSE(scale="unbiased")` stores it in place of the norm."""


def storage(entropy: list[dict], polar: list[dict]) -> str:
    bits = [[d, *(f"{b + n / d:.3f}" for b in (2, 3, 4) for n in (16, 32, 64))] for d in (64, 128, 256, 1536)]
    coded = [[r["bits"], number(r["entropy"], 4), number(r["coded"], 4), f"{100 * (1 - r['coded'] / r['bits']):.1f} %"] for r in entropy]
    polar_rows = [[r["name"], number(r["bits"], 5), number(r["mse"])] for r in polar]
    return f"""## Bits, with the norm counted

The paper's bit widths leave out the norm. Stored bits per value with an fp16 norm (16), a float32 norm (32: the classes here) and two of these (64:
TurboQuant-Prod). The cache types store one fp16 scale per block: 16.

{table(["d"] + [f"{b} bits + {n}" for b in (2, 3, 4) for n in (16, 32, 64)], bits)}

Entropy of the indices, and what the range coder spends on {entropy[0]['vectors']} vectors, d = {entropy[0]['d']} (the paper: 3.8 at 4 bits, a saving of 5 %):

{table(["bits", "entropy", "coded", "saved"], coded)}

PolarQuant (arXiv 2502.02617; bits of the angles of each level, one fp16 radius per 16 values) beside TurboQuant-MSE with an fp16 norm, d = {polar[0]['d']}:

{table(["codec", "bits per value", "squared error"], polar_rows)}"""


def times(data: dict) -> str:
    n, rows = data["vectors"], data["rows"]
    body = [[d, number(r["haar"]), number(r["hadamard"]), number(r.get("c_turbo4")), number(r["pq"]), number(r["pq"] / r["hadamard"], 2), r["runs"], *PAPER_SECONDS[d]]
            for d, r in sorted(rows.items(), key=lambda item: int(item[0]))]
    rates = {name: f"{float(number(n / rows['1536'][name], 2)):,.0f}" for name in ("haar", "hadamard", "online", "c_turbo4") if name in rows["1536"]}
    return f"""## Indexing time

Processor seconds for {n} vectors at 4 bits, one thread, the least of so many runs, on a machine that was busy with other work
({conditions(data['conditions'])}). Nothing is trained, so a vector is indexed when it arrives. turbo4 in C is the scalar reference of the cache type;
it needs a multiple of 128 values. Product quantisation is faiss.IndexPQ (256 centroids, training and adding); "ratio" is its time over that of
numpy with a Hadamard rotation. The last two columns are the paper's table 2 (one A100 GPU; its product quantisation with tables for AVX2, so on a
processor): only columns of one machine can be compared, which is why the paper's ratio is so much larger. The paper's timing of RaBitQ is publicly
contested (arXiv 2604.19528) and is not repeated here.

{table(["d", "numpy, Haar", "numpy, Hadamard", "C, turbo4", "product quantisation", "ratio", "runs", "paper: product quantisation", "paper: TurboQuant"], body)}

Encoding rates at d = 1536, vectors a second: {rates['haar']} with a Haar rotation, {rates['hadamard']} with Hadamard{c_rate(rates)}; one
vector a call, as they come in, {rates['online']} with Hadamard. A d that is no order of a Hadamard matrix, such as 200, takes four passes.{c_beside_numpy(rows['1536'])}"""


def c_rate(rates: dict) -> str:
    return f", {rates['c_turbo4']} in C" if "c_turbo4" in rates else ""


def c_beside_numpy(row: dict) -> str:
    """Whether C would pay."""
    return f" Scalar C is {row['hadamard'] / row['c_turbo4']:.1f} times as fast as numpy, so the codecs stay in numpy." if "c_turbo4" in row else ""


def search(data: dict) -> str:
    parts = []
    for s in data["sets"]:
        ks = list(s["rows"][0]["recall"])
        rows = [[r["bits"], r["name"], number(r["stored_bits"]), *(f"{r['recall'][k]:.3f}" for k in ks), number(r["seconds"])] for r in s["rows"]]
        parts.append(f"{s['title']}: {s['vectors']} vectors, {s['queries']} queries, d = {s['d']}; codebooks of 256 centroids "
                     f"would add {number(256 * 32 / s['vectors'], 2)} bits a value.\n\n"
                     + table(["bits", "index", "stored bits", *(f"1@{k}" for k in ks), "seconds"], rows))
    return f"""## Nearest-neighbour recall

Recall 1@k: how often the vector of largest inner product (unit vectors) is among the first k of the index. Product quantisation is faiss.IndexPQ
with bits x d bits a vector, trained on the very vectors it indexes, as in the paper (256 centroids a part; 16 for 2 bits at d = 50). "Stored bits" counts
everything kept per vector, padding to whole bytes included: at d = 50 the factor and the padding weigh half a bit, so the rows there are not at equal
storage. It leaves out product quantisation's codebooks, given below each title. "VectorIndex default" is TurboQuant-MSE with the unbiased factor and a Hadamard
rotation; the other two are the paper's codecs with a Haar rotation. Seconds are processor time for training and adding, one thread.

faiss trains slowest with 20000 to 40000 vectors (four to eight times as long per part as with 65000 or more, in this version), so its seconds
of one set say nothing about another.

The paper shows curves for GloVe (d = 200) and OpenAI embeddings (d = 1536 and 3072), no numbers, and reports TurboQuant above product
quantisation throughout. Those sets are not shipped by a package; these are, or are made from what a package ships.

{chr(10).join(p + chr(10) for p in parts)}
{reading(data["sets"])}"""


def reading(sets: list[dict]) -> str:
    """Who is above whom at 1@1, in words counted from the table; a difference below two standard errors is none."""
    rivals = [("TurboQuant-MSE", "product quantisation"), ("VectorIndex default", "product quantisation"),
              ("VectorIndex default", "TurboQuant-MSE"), ("TurboQuant-MSE", "TurboQuant-Prod")]
    said = []
    for a, b in rivals:
        found = [compared(*(next(r["recall"]["1"] for r in s["rows"] if (r["name"], r["bits"]) == (name, bits)) for name in (a, b)), s["queries"])
                 for s in sets for bits in sorted({r["bits"] for r in s["rows"]})]
        said.append(f"| {a} | {b} | {found.count(1)} | {found.count(0)} | {found.count(-1)} |")
    return ("Recall 1@1 at equal bits, in how many of these cases; alike means closer than two standard errors of the difference:\n\n"
            + "\n".join(["| index | against | above | alike | below |", "| --- | --- | --- | --- | --- |", *said]))


def compared(p: float, q: float, n: int) -> int:
    """1, 0 or -1: share p of n trials above, like or below share q of n others."""
    error = ((p * (1 - p) + q * (1 - q)) / n) ** 0.5
    return 0 if abs(p - q) <= 2 * error else 1 if p > q else -1


def attention(models: list[dict]) -> str:
    head, token = [], []
    for m in models:
        for r in sorted(m["head"], key=lambda r: (r["keys"] != "raw", r["bits"], r["codec"])):
            head.append([m["model"], r["keys"], number(r["bits"]), r["codec"], *(number(sum(r[key]) / len(r[key])) for key in ("key_error", "logit_rms", "attention_kl"))])
        for bits in (2, 3, 4):
            find = {(r["codec"], r["keys"]): r["kl"] for r in m["next_token"] if r["bits"] == bits}
            token.append([m["model"], m["d"], bits, *(sampled(find[key]) for key in
                          (("MSE", "raw"), ("Prod", "raw"), ("cache type", "raw"), ("MSE", "centred"), ("Prod", "centred")))])
    return f"""## MSE against Prod inside attention

Real keys after RoPE (WikiText-2 test), values exact, every key quantised, no tokens kept apart. The table gives the mean KL divergence of the
model's next-token distribution against the exact keys, over the second half of {models[0]['tokens']} tokens; mean ± standard error of {models[0]['chunks']} pieces of text, each with
rotations and projections of its own. "Centred" keys are quantised less their mean per head, which softmax does not see; it takes out most of a key
bias. "Cache type" is turbo2, turbo3 or turbo4.

{table(["model", "d", "bits", "MSE", "Prod", "cache type", "MSE, centred", "Prod, centred"], token)}

{verdict(models)}

Inside single heads (means over layers, heads, queries and pieces of text): squared key error relative to the squared norm, rms error of the logits, KL divergence
of the attention weights. "Mixed" gives half of the channels one bit more (2.5 = 3 and 2 bits), chosen on these very keys. The paper's own example,
32 of 128 channels at 3 bits and 96 at 2, is called 2.5 bits there but is 2.25.

{table(["model", "keys", "bits", "codec", "key error", "logit rms", "attention KL"], head)}"""


def verdict(models: list[dict]) -> str:
    ratios = {keys: [p / q for m in models for p, q in pairs([r for r in m["next_token"] if r["keys"] == keys], "kl")] for keys in ("raw", "centred")}
    said = [f"with {keys} keys in {sum(r > 1 for r in found)} of {len(found)} pieces, {min(found):.1f} to {max(found):.1f} times" for keys, found in ratios.items()]
    inside = {figure: [p / q for m in models for p, q in pairs([r for r in m["head"] if r["keys"] in kinds], figure)]
              for figure, kinds in (("logit_rms", ("centred",)), ("attention_kl", ("raw", "centred")))}
    span = lambda found: f"{min(found):.1f} to {max(found):.1f}"
    return (f"Prod's divergence is larger than that of MSE at equal bits {' and '.join(said)}. Inside single heads (below), the divergence of the attention weights is "
            f"{span(inside['attention_kl'])} times that of MSE in {'every piece' if min(inside['attention_kl']) > 1 else 'the pieces'}, and with centred keys the rms error of a logit is "
            f"{span(inside['logit_rms'])} times. Softmax turns the variance of a logit into error; the shrinkage of MSE, which Prod takes out instead, is nearly the same factor "
            "for all keys (0.88 at 2 bits, 0.97 at 3), so it does little even where it makes the larger logit error, as with the raw keys of qwen25coder-1.5b at 2 bits. "
            "The cache types therefore spend every bit on levels and none on QJL.\n\nWhere a divergence exceeds one, neither codec leaves the model usable: "
            "keys with a large bias (Qwen2.5) must at the least be centred first.")


def pairs(rows: list[dict], figure: str) -> list[tuple[float, float]]:
    """(Prod, MSE) of every piece of text, for each number of bits and kind of keys."""
    found = {(r["codec"], r["keys"], r["bits"]): r[figure] for r in rows}
    return [pair for (codec, *where), values in found.items() if codec == "Prod" for pair in zip(values, found["MSE", *where])]


def render(data: dict) -> str:
    """The page. data: docs/turboquant.json, whose sections tools/reproduce_turboquant.py writes; what is not measured is left out."""
    intro = ("The paper: Zandieh, Daliri, Hadian, Mirrokni, *TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate*, arXiv 2504.19874. "
             "The code: `pykvq.codecs`. The measurements: `python tools/reproduce_turboquant.py measure SECTION` (see `--help`), "
             "the page: `python tools/reproduce_turboquant.py render`.")
    sections = {"distortion": distortion, "unbiasedness": unbiasedness, "entropy": lambda _: storage(data["entropy"], data["polar"]),
                "times": times, "search": search, "attention": lambda models: attention(list(models.values()))}
    return "\n\n".join(["<!-- Generated by tools/reproduce_turboquant.py from docs/turboquant.json; do not edit. -->\n# TurboQuant's numbers, reproduced",
                        intro, *(write(data[name]) for name, write in sections.items() if name in data)]) + "\n"
