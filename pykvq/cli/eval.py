"""pykvq eval."""
from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click

from pykvq.cli.errors import InputError
from pykvq.cli.model import KvType, check_input, model_argument, model_path, pair_name, window_options
from pykvq.cli.output import Output, common, table
from pykvq.kv_info import times

DEFAULT_TYPES = ("turbo4", "turbo3", "turbo2", "q8_0", "q4_0")


@click.command("eval")
@common
@model_argument
@click.option("--kv-type", "kv_types", type=KvType(), multiple=True,
              help=f"Cache type, or K,V; may be given several times. Default: {', '.join(DEFAULT_TYPES)}, and oscar2 for a calibrated model.")
@window_options
@click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Text to score. Default: the model's own samples.")
@click.option("--ctx", type=click.IntRange(64), help="Tokens of each scored text.  [default: 2048]")
@click.option("--chunks", type=click.IntRange(1), help="Scored texts.  [default: 2]")
@click.option("--length", "lengths", type=click.IntRange(128), multiple=True,
              help="Tokens of a text with planted facts; may be given several times.  [default: 512, 1024, 2048]")
@click.option("--quick", is_flag=True, help="Less of everything: two texts of 1024 tokens, facts at 512 and 1024, two short greedy runs.")
@click.option("--parts/--no-parts", default=True, show_default=True, help="Measure K alone and V alone too.")
@click.option("--tolerance", type=click.FloatRange(0, min_open=True), default=0.05, show_default=True, help="Largest mean KLD, in nats.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with plots to this file (needs the extra [plot]).")
@click.option("--restart", is_flag=True, help="Forget what an earlier run of the same evaluation has measured.")
@click.option("--threads", type=click.IntRange(1, 512), help="CPU threads. Default: all cores.")
@click.option("--gpu-layers", "-ngl", type=click.IntRange(0), default=0, show_default=True, help="Layers on the GPU.")
def evaluate(out: Output, model: Path | None, kv_types: tuple, window: dict, text: Path | None, ctx: int | None, chunks: int | None, lengths: tuple, quick: bool,
             parts: bool, tolerance: float, html: Path | None, restart: bool, threads: int | None, gpu_layers: int) -> None:
    """Measure what cache types cost a model, against its own f16 cache, and name the smallest good one.

    MODEL is a GGUF file; without it SmolLM2-135M from the extra [demo] is used. KL divergence, perplexity and the most likely token over a
    text, planted facts at several depths and lengths, and long greedy runs, for K and V together, K alone and V alone. One f16 pass
    serves all types; an interrupted run goes on where it was. Exits with 1 when no type is within the tolerance.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    path = model_path(model)
    if html:
        from pykvq.evaluation.report import require_plots
        require_plots()
    from pykvq.engine import Model, quiet_log
    from pykvq.evaluation.run import F16, QUICK, Evaluation, Setup, configurations
    from pykvq.evaluation.summary import plain, summary, unjudged, verdict
    from pykvq.gguf_header import read_header
    quiet_log()
    header = read_header(path)
    names = [*DEFAULT_TYPES, *(["oscar2"] if header.calibrated else [])]
    pairs = configurations(kv_types or [(name, name) for name in names], parts and not header.mla)
    setup = _setup(QUICK if quick else Setup(), header.context_train, ctx, chunks, lengths)
    check_input(out, path, pairs, max(setup.context, *setup.lengths), gpu_layers)
    with Model(path, gpu_layers) as loaded:
        evaluation = Evaluation(loaded, setup, text=text, threads=threads, window={k: n for k, n in window.items() if n is not None})
        if restart:
            evaluation.store.clear()
        try:
            with out.amount("tokens") as begin:
                evaluation.run(pairs, begin)
        except KeyboardInterrupt:
            out.note("interrupted; the same command goes on from here")
            raise
        base, *results = (summary(evaluation, pair) for pair in pairs)
    for r in results:
        if unjudged(r, setup.context):
            out.warn(f"{pair_name(r.kv_type)}: of the {setup.context} tokens of a text {r.window} lie in its f16 window, so it is not judged; "
                     f"use --ctx {4 * r.window} or more")
    decision = verdict(header.name, base, results, tolerance, setup.context, window)
    value = {"model": header.name, "architecture": header.architecture, "text": evaluation.source, "setup": asdict(setup), "tolerance": tolerance, "window": window,
             "measured": True, "device": _device(gpu_layers), "seconds": evaluation.seconds(pairs), "f16": plain(base), "results": [plain(r) for r in results],
             "verdict": {"kv_type": decision.kv_type, "sentence": decision.sentence, "able": decision.able}}
    if html:
        from pykvq.evaluation.report import page
        html.write_text(page(value), encoding="utf-8")
        out.note(f"page written to {html}")
    out.note(f"the f16 pass is kept for other types: {evaluation.store.bytes() / 2**20:.0f} MiB in {evaluation.store.folder}")
    out.data(value, *tables(value))
    if not out.as_json:
        out.out.print(f"\n{decision.sentence}", markup=False)
    sys.exit(0 if decision.kv_type else 1)


def _device(gpu_layers: int) -> str:
    """What held the layers, in the words of its driver."""
    from pykvq.devices import devices
    return ", ".join(dict.fromkeys(d.description for d in devices() if d.gpu == bool(gpu_layers))) or "CPU"


def _setup(setup, trained: int, ctx: int | None, chunks: int | None, lengths: tuple):
    """The setup with what was asked for, within what the model is trained for. Raises InputError for a longer wish."""
    for asked in (ctx or 0, *lengths):
        if trained and asked > trained:
            raise InputError(f"{asked} tokens are more than the {trained} that the model is trained for; use {trained} or less")
    fitting = tuple(n for n in setup.lengths if not trained or n <= trained) or (trained,)
    return replace(setup, context=ctx or min(setup.context, trained or setup.context), chunks=chunks or setup.chunks,
                   lengths=tuple(dict.fromkeys(lengths)) or fitting)


def tables(value: dict):
    """The figures of an evaluation as tables."""
    def row(r: dict):
        kld, q = r["kld"], r["kld_quantiles"]
        spread = "" if kld["low"] is None else f"{kld['low']:.3g}..{kld['high']:.3g}"
        return (pair_name(tuple(r["kv_type"])), times(r['smaller']), f"{kld['value']:.4f}", spread, f"{q['99']['value']:.3f}",
                f"{r['perplexity_ratio']['value']:.3f}", f"{100 * r['same_top']['value']:.1f}")

    def behaviour(r: dict):
        ends = r["first_divergence"]
        return (pair_name(tuple(r["kv_type"])), f"{r['found']}", f"{r['lost']}", f"{r['gained']}", f"{r['drift_per_doubling']['value']:+.4f}",
                f"{sum(ends) / len(ends):.0f}", f"{100 * r['repetition']['value']:.0f}", f"{100 * r['repetition_f16']:.0f}")
    rows = value["results"]
    yield table(f"{value['model']} against its f16 cache, {value['text']}; f16 perplexity {value['f16']['perplexity']:.2f}",
                ("type", ">than f16", ">KLD", ">95 %", ">p99", ">PPL to f16", ">same top %"), map(row, rows))
    yield table(f"\nplanted facts (f16 finds {value['f16']['found']}) and greedy runs",
                ("type", ">found", ">lost", ">gained", ">KLD per doubling", ">equal tokens", ">repeats %", ">f16 repeats %"), map(behaviour, rows))
