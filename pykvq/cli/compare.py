"""pykvq compare."""
from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pykvq.cli.model import KvType, check_input, model_argument, model_path, pair_name, window_options
from pykvq.cli.output import Output, common, mebibytes, table
from pykvq.kv_info import times

DEFAULT_TYPES = ("turbo4", "turbo3", "turbo2", "q4_0")
PROMPT = "Explain in three sentences why the sky is blue."


@click.command("compare")
@common
@model_argument
@click.option("--kv-type", "kv_types", type=KvType(), multiple=True,
              help=f"Cache type to compare with f16, or K,V; may be given several times. Default: {', '.join(DEFAULT_TYPES)}.")
@window_options
@click.option("--prompt", default=PROMPT, show_default=True, help="What the model is asked.")
@click.option("--ctx", type=click.IntRange(512), default=8192, show_default=True, help="Context size for which the cache bytes are given.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Length of the answer.")
@click.option("--depth", type=click.IntRange(0), default=2048, show_default=True, help="Cached tokens at which decode speed is measured.")
@click.option("--threads", type=click.IntRange(1, 512), help="CPU threads. Default: all cores.")
@click.option("--gpu-layers", type=click.IntRange(0), default=0, show_default=True, help="Layers on the GPU.")
def compare(out: Output, model: Path | None, kv_types: tuple, window: dict, prompt: str, ctx: int, max_tokens: int, depth: int, threads: int | None,
            gpu_layers: int) -> None:
    """Run the same prompt through an f16 cache and through other types, side by side.

    MODEL is a GGUF file; without it SmolLM2-135M from the extra [demo] is used. KL is the mean divergence of the next-token
    distribution from f16: along f16's answer, decoded token by token, and over a bundled text. Everything is measured.
    """
    path = model_path(model)
    from pykvq import comparison
    from pykvq.engine import Model, quiet_log
    quiet_log()
    pairs = list(dict.fromkeys(kv_types or [(name, name) for name in DEFAULT_TYPES]))
    pairs = [pair for pair in pairs if pair != ("f16", "f16")]
    check_input(out, path, [("f16", "f16"), *pairs], ctx, gpu_layers)
    with Model(path, gpu_layers) as loaded, out.progress(comparison.steps(pairs)) as step:
        out.note(f"{loaded.header.name}, context {ctx}, decode speed at depth {depth}")
        results = comparison.compare(loaded, loaded.chat_tokens(prompt), pairs, n_ctx=ctx, max_tokens=max_tokens, depth=depth, threads=threads,
                                     window=window, step=step)
    base = results[0]
    rows = [(pair_name(r.kv_type), mebibytes(r.bytes), times(r.bytes_f16 / r.bytes), f"{r.tokens_per_second:.1f}",
             f"{r.tokens_per_second / base.tokens_per_second:.2f}", "" if r.kl_answer is None else f"{r.kl_answer:.4f}", f"{r.kl_text:.4f}")
            for r in results]
    answers = [(pair_name(r.kv_type), " ".join(r.answer.split())) for r in results]
    out.data({"model": loaded.header.name, "context": ctx, "depth": depth, "prompt": prompt, "measured": True,
              "results": [asdict(r) | {"speed_to_f16": r.tokens_per_second / base.tokens_per_second} for r in results]},
             table(f"{loaded.header.name}: cache at {ctx} tokens, decode at depth {depth}",
                   ("type", ">KV cache", ">than f16", ">tokens/s", ">to f16", ">KL answer", ">KL text"), rows),
             table("\nanswers (greedy)", ("type", "answer"), answers))
