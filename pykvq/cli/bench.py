"""pykvq bench."""
from __future__ import annotations

from pathlib import Path

import click

from pykvq.cli.model import KvType, check_input, model_argument, model_path, pair_name, window_options
from pykvq.cli.output import Output, common, mebibytes, table

DEFAULT_TYPES, DEFAULT_DEPTHS = ("turbo4", "turbo3", "turbo2", "q8_0", "q4_0"), (0, 4096)


@click.command("bench")
@common
@model_argument
@click.option("--kv-type", "kv_types", type=KvType(), multiple=True,
              help=f"Cache type beside f16, or K,V; may be given several times. Default: {', '.join(DEFAULT_TYPES)}.")
@window_options
@click.option("--depth", "depths", type=click.IntRange(0), multiple=True,
              help=f"Cached tokens; may be given several times. Default: {', '.join(map(str, DEFAULT_DEPTHS))}.")
@click.option("--tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens decoded per repeat.")
@click.option("--prefill", type=click.IntRange(1), default=512, show_default=True, help="Tokens of the prefill at each depth.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Rounds over all types.")
@click.option("--threads", type=click.IntRange(1, 512), help="CPU threads. Default: all cores.")
@click.option("--gpu-layers", "-ngl", type=click.IntRange(0), default=0, show_default=True, help="Layers on the GPU.")
def bench(out: Output, model: Path | None, kv_types: tuple, window: dict, depths: tuple, tokens: int, prefill: int, repeats: int, threads: int | None,
          gpu_layers: int) -> None:
    """Measure decode and prefill speed by depth and type, as ratios to f16.

    MODEL is a GGUF file; without it SmolLM2-135M from the extra [demo] is used. All types run in turn within every round. A deep cache
    is filled by repeating the rows of a short prefix. The backend that ran the attention is observed in the graph: where the cache is
    on a device and its attention ran on the CPU, a warning says so and the exit code is 1.
    """
    path = model_path(model)
    from pykvq.bench import F16, Setup, steps
    from pykvq.bench import bench as measure
    from pykvq.engine import Model, quiet_log
    quiet_log()
    pairs = [F16, *(pair for pair in dict.fromkeys(kv_types or [(name, name) for name in DEFAULT_TYPES]) if pair != F16)]
    depths = list(dict.fromkeys(depths or DEFAULT_DEPTHS))
    setup = Setup(tokens, prefill, repeats, threads=threads, **window)
    check_input(out, path, pairs, max(depths) + max(tokens, prefill), gpu_layers)
    with Model(path, gpu_layers) as loaded, out.progress(steps(pairs, depths, setup)) as step:
        rows = measure(loaded, pairs, depths, setup, step)
    base = {row.depth: row for row in rows if row.kv_type == F16}
    for kv_type, layers in {row.kv_type: row.fallback for row in rows if row.fallback}.items():
        out.warn(f"{pair_name(kv_type)}: the attention of {len(layers)} layers whose cache is on a device ran on the CPU; "
                 f"use a type that pykvq types lists for that backend")
    values = [{"type": pair_name(r.kv_type), "depth": r.depth, "effective": [[k, v, n] for (k, v), n in r.info.types.items()], "kv_bytes": r.info.bytes,
               "kv_bytes_f16": r.info.bytes_f16, "filled": r.filled, "decode": r.decode, "prefill": r.prefill,
               **{f"{name}_to_f16": ratio for name, ratio in r.ratios(base[r.depth]).items()}, "decode_seconds": r.decode_seconds,
               "prefill_seconds": r.prefill_seconds, "attention": r.attention, "fallback_layers": r.fallback,
               "layers": [[layer.layer, layer.type_k, layer.type_v, layer.device] for layer in r.info]} for r in rows]
    cells = [(v["depth"], v["type"], mebibytes(v["kv_bytes"]), f"{v['decode']:.1f}", f"{v['decode_to_f16']:.2f}", f"{v['prefill']:.1f}",
              f"{v['prefill_to_f16']:.2f}") for v in values]
    ran = [(v["type"], ", ".join(f"{n} x K {k} V {w}" for k, w, n in v["effective"]), _where(v["attention"])) for v in values[:len(pairs)]]
    out.data({"model": loaded.header.name, "measured": True, "tokens": tokens, "prefill_tokens": prefill, "repeats": repeats, "gpu_layers": gpu_layers,
              "rows": values},
             table(f"{loaded.header.name}: median of {repeats} rounds, decode of {tokens} and prefill of {prefill} tokens",
                   (">depth", "type", ">KV cache", ">decode t/s", ">to f16", ">prefill t/s", ">to f16"), cells),
             table("\nin effect", ("type", "layers", "attention ran on"), ran))
    if any(row.fallback for row in rows):
        raise SystemExit(1)


def _where(attention: dict[str, dict[str, int]]) -> str:
    """"CPU", or the backends with their layers where they differ."""
    names = {name for layers in attention.values() for name in layers}
    if not names:
        return "no flash attention seen"
    return names.pop() if len(names) == 1 else "; ".join(f"{part}: " + ", ".join(f"{n} layers {name}" for name, n in layers.items())
                                                         for part, layers in attention.items())
