"""Figures of an evaluation with confidence intervals, and the verdict."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from scipy import stats

from pykvq.evaluation.generation import first_divergence, repetition
from pykvq.evaluation.run import F16, Evaluation, name
from pykvq.kv_info import times
from pykvq.support import WINDOW

LEVEL = 0.95                         # of every interval
BLOCK = 16                           # neighbouring positions resemble each other: intervals of means come from blocks
BINS = 8                             # of the position, for the drift
ABLE = 0.5                           # share of facts that f16 must find for retrieval to say anything
QUANTILES = (0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Figure:
    """A value and its 95 % interval; the interval is None where there is too little to tell."""
    value: float
    low: float | None = None
    high: float | None = None


@dataclass
class Result:
    """One pair of types against f16. kld in nats; drift: mean KLD by position; lost and gained: facts against f16."""
    kv_type: tuple[str, str]
    layers: list[str]
    bytes: int
    bytes_f16: int
    window: int                                  # at most so many tokens of the cache are kept in f16 too
    kld: Figure
    kld_late: Figure                             # over the last quarter of the positions
    kld_quantiles: dict[str, Figure]
    perplexity: float
    perplexity_ratio: Figure
    same_top: Figure
    drift: list[Figure]
    drift_per_doubling: Figure
    retrieval: dict[int, list[float]]            # length: share found at each depth
    found: int
    lost: int
    gained: int
    found_share: Figure
    first_divergence: list[int]
    repetition: Figure
    repetition_f16: float
    histogram: list[float] = field(default_factory=list)      # KLD below which 0, 2, 4, ... 100 % of the positions lie

    @property
    def judged(self) -> Figure:
        """The divergence that decides: with an f16 window that of the last quarter, because the first tokens never leave the window."""
        return self.kld_late if self.window else self.kld

    @property
    def loses(self) -> bool:
        """Fewer facts than f16 finds."""
        return self.lost > self.gained


def summary(evaluation: Evaluation, pair: tuple[str, str]) -> Result:
    """Of a pair that has been run, against F16, which must have been too."""
    setup, store = evaluation.setup, evaluation.store
    ours, base = (_scores(evaluation, p) for p in (pair, F16))
    cache = store.get(f"{name(pair)}-cache")
    kl = ours["kl"]
    excess = ours["surprise"] - base["surprise"]
    growth = _mean(excess)
    n, same = ours["same"].size, int(ours["same"].sum())
    share = stats.binomtest(same, n).proportion_ci(LEVEL, method="wilson")
    found, expected = (np.stack([store.get(f"{name(p)}-retrieval-{length}")["found"] for length in setup.lengths]) for p in (pair, F16))
    hits = stats.binomtest(int(found.sum()), found.size).proportion_ci(LEVEL, method="wilson")
    runs, their = ([store.get(f"{name(p)}-generation-{i}")["tokens"] for i in range(setup.chunks)] for p in (pair, F16))
    regression = stats.linregress(np.log2(np.tile(setup.positions + 1.0, len(kl))), kl.ravel())
    spread = regression.stderr * stats.t.ppf((1 + LEVEL) / 2, max(kl.size - 2, 1))
    return Result(
        pair, cache["types"].tolist(), int(cache["bytes"]), int(cache["bytes_f16"]),
        int(cache["window"]), _divergence(kl), _divergence(kl[:, -(kl.shape[1] // 4 or 1):]),
        {f"{100 * q:g}": _quantile(kl.ravel(), q) for q in QUANTILES}, float(np.exp(ours["surprise"].mean())),
        Figure(*(None if v is None else float(np.exp(v)) for v in (growth.value, growth.low, growth.high))),
        Figure(same / n, float(share.low), float(share.high)), [_divergence(part) for part in np.array_split(kl, BINS, axis=1)],
        Figure(float(regression.slope), float(regression.slope - spread), float(regression.slope + spread)),
        {length: found[i].mean(0).tolist() for i, length in enumerate(setup.lengths)}, int(found.sum()), int((expected & ~found).sum()),
        int((found & ~expected).sum()), Figure(float(found.mean()), float(hits.low), float(hits.high)),
        [first_divergence(a, b) for a, b in zip(their, runs)], _t([repetition(r) for r in runs]), float(np.mean([repetition(r) for r in their])),
        np.quantile(kl, np.linspace(0, 1, 51)).tolist())


def _scores(evaluation: Evaluation, pair: tuple[str, str]) -> dict[str, np.ndarray]:
    """The scored positions of all chunks; arrays [chunks, rows]."""
    pieces = [evaluation.store.get(f"{name(pair)}-score-{i}") for i in range(evaluation.setup.chunks)]
    return {key: np.stack([piece[key] for piece in pieces]) for key in pieces[0]}


def _divergence(values: np.ndarray) -> Figure:
    """_mean of what cannot be negative."""
    figure = _mean(values)
    return figure if figure.low is None else replace(figure, low=max(figure.low, 0.0))


def _mean(values: np.ndarray) -> Figure:
    """Mean of [chunks, positions] with a t interval over blocks of neighbouring positions."""
    blocks = [block.mean() for row in values for block in np.array_split(row, max(1, len(row) // BLOCK))]
    return Figure(float(values.mean()), *(_t(blocks).low, _t(blocks).high))


def _t(values: Sequence[float]) -> Figure:
    """Mean with a t interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Figure(mean)
    if np.ptp(values) == 0:
        return Figure(mean, mean, mean)
    interval = stats.ttest_1samp(values, 0).confidence_interval(LEVEL)
    return Figure(mean, float(interval.low), float(interval.high))


def _quantile(values: np.ndarray, q: float) -> Figure:
    """A quantile with a bootstrap interval."""
    if np.ptp(values) == 0:
        return Figure(float(values[0]), float(values[0]), float(values[0]))
    interval = stats.bootstrap((values,), lambda x, axis: np.quantile(x, q, axis=axis), n_resamples=500, confidence_level=LEVEL,
                               method="percentile", rng=np.random.default_rng(0)).confidence_interval
    return Figure(float(np.quantile(values, q)), float(interval.low), float(interval.high))


@dataclass(frozen=True)
class Verdict:
    """kv_type None: no measured type is within the tolerance. able: f16 itself finds the planted facts."""
    kv_type: tuple[str, str] | None
    sentence: str
    able: bool


def unjudged(result: Result, context: int) -> bool:
    """The text is too short for this type: more than a third of it lies in the f16 window."""
    return 3 * result.window > context


def verdict(model_name: str, base: Result, results: Sequence[Result], tolerance: float, context: int, window: dict[str, int | None] | None = None) -> Verdict:
    """The smallest cache whose mean KLD is within the tolerance and which finds as many facts as f16.

    Types for which texts of `context` tokens are too short are not chosen. A model that does not find them with f16 is not asked to find them with less.
    """
    facts = round(base.found / base.found_share.value) if base.found else 0
    able = base.found_share.value >= ABLE
    known = [r for r in results if not unjudged(r, context)]
    fits = [r for r in sorted(known, key=lambda r: r.bytes) if r.judged.value <= tolerance and not (able and r.loses)]
    unable = "" if able else f" {model_name} finds too few of the planted facts with f16 itself ({base.found_share.value:.0%}) to say anything about retrieval."
    short = [_names(r) for r in results if unjudged(r, context)]
    unable += f" Not judged, because the texts are little longer than the f16 window: {', '.join(short)}." if short else ""
    if not known:
        return Verdict(None, f"Nothing can be said of {model_name}.{unable}", able)
    if not fits:
        best = min(known, key=lambda r: r.judged.value)
        return Verdict(None, f"No measured type keeps {model_name} within a KLD of {tolerance:g}"
                       f"{' and all its facts' if able else ''}; the nearest is {_names(best)} with {_interval(best.judged)}. Stay with f16.{unable}", able)
    r = fits[0]
    retrieval = f" and finds {r.found} of {facts} planted facts, f16 {base.found}" if able else ""
    unsure = f" The interval reaches beyond {tolerance:g}: measure more (--chunks)." if r.judged.high and r.judged.high > tolerance else ""
    repeats = (f" Its long answers repeat themselves more than f16's ({r.repetition.value:.0%}, f16 {r.repetition_f16:.0%})."
               if r.repetition.value > r.repetition_f16 + 0.2 else "")
    return Verdict(r.kv_type, f"{_names(r)} is the smallest measured type that keeps {model_name} within a KLD of {tolerance:g} "
                   f"({_interval(r.judged)}{' over the last quarter of the text' if r.window else ''}){retrieval}: {flags(r.kv_type, window)} ({times(r.bytes_f16 / r.bytes)} than f16).{unsure}{repeats}{unable}", able)


def flags(kv_type: tuple[str, str], window: dict[str, int | None] | None = None) -> str:
    """What to give llama-server and its like; window: kv_sink and kv_recent where they are not the default."""
    default = dict(zip(("kv_sink", "kv_recent"), WINDOW))
    given = "".join(f" --{key.replace('_', '-')} {n}" for key, n in (window or {}).items() if n not in (None, default[key]))
    return f"--cache-type-k {kv_type[0]} --cache-type-v {kv_type[1]}{given}"


def _names(r: Result) -> str:
    k, v = r.kv_type
    return k if k == v else f"K {k}, V {v}"


def _interval(f: Figure) -> str:
    return f"{f.value:.3g}" + (f", 95 % {f.low:.3g} to {f.high:.3g}" if f.low is not None else "")


def plain(result: Result) -> dict:
    """For JSON."""
    return asdict(result) | {"retrieval": {str(k): v for k, v in result.retrieval.items()}, "loses": result.loses,
                             "smaller": result.bytes_f16 / result.bytes}
