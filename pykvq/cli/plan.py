"""pykvq plan."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from pykvq.cli.errors import InputError
from pykvq.cli.model import KvType, model_argument, model_path, pair_name, window_options
from pykvq.cli.output import Output, common, mebibytes, table
from pykvq.kv_info import times

DEFAULT_TYPES = ("f16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2")


class Size(click.ParamType):
    """"24G" or "512M" as bytes, in powers of 1024."""
    name = "SIZE"

    def convert(self, value, param, ctx) -> int:
        """Bytes; anything without a unit is a usage error."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT])(?:i?B)?", value, re.I)
        if not match or not float(match[1]):
            self.fail(f"{value!r} is no size such as 24G or 512M", param, ctx)
        return int(float(match[1]) * 1024 ** (" KMGT".index(match[2].upper())))


def budget_of(vram: int | None, gpus: list) -> tuple[int, str]:
    """Bytes to stay within and where they are: given, free on all GPUs, or free in the host."""
    from pykvq.llama_glue import available_memory
    if vram is not None:
        return vram, "given"
    if gpus:
        return sum(d.free for d in gpus), f"free on {', '.join(f'{d.name} ({d.description})' for d in gpus)}"
    return available_memory(), "free in this machine, no GPU seen"


@click.command("plan")
@common
@model_argument
@click.option("--kv-type", "kv_types", type=KvType(), multiple=True,
              help=f"Cache type, or K,V; may be given several times. Default: {', '.join(DEFAULT_TYPES)}, and oscar2 for a calibrated model.")
@click.option("--vram", type=Size(), help="Memory to fit into, such as 24G.")
@click.option("--auto", is_flag=True, help="Fit into what this machine has free: its GPUs, else its RAM. The default.")
@click.option("--ctx", type=click.IntRange(256, 1 << 24), help="Tokens of all sequences together, as llama-server's -c. Default: the trained context.")
@click.option("--parallel", type=click.IntRange(1, 256), default=1, show_default=True, help="Sequences, as llama-server's -np.")
@click.option("--unified", is_flag=True, help="One cache that all sequences share, as llama-server's --kv-unified.")
@click.option("--ubatch", type=click.IntRange(1, 1 << 16), default=512, show_default=True, help="Micro-batch, as llama-server's -ub.")
@click.option("--swa-full", is_flag=True, help="Full cache for layers with a sliding window, as llama-server's --swa-full.")
@window_options
@click.option("--bandwidth", type=click.FloatRange(0, min_open=True), help="Of the memory, in GB/s. Default: measured, for a model in RAM.")
def plan(out: Output, model: Path | None, kv_types: tuple, vram: int | None, auto: bool, ctx: int | None, parallel: int, unified: bool, ubatch: int,
         swa_full: bool, window: dict, bandwidth: float | None) -> None:
    """Tell what memory a model needs before it is loaded, and the longest context that fits.

    Weights, KV cache and compute buffer for every type. Reads the header of MODEL alone (without it SmolLM2-135M from the extra [demo]) and lets llama.cpp lay everything out without
    allocating it. Speed is an upper bound from the bytes that a token reads with a full cache; pykvq bench measures it. Exits with 1
    when no type fits.
    """
    if auto and vram is not None:
        raise click.UsageError("--vram and --auto exclude each other")
    path = model_path(model)
    from pykvq.devices import devices
    from pykvq.engine import Model, quiet_log
    from pykvq.planning.plan import Setup, longest, memory
    from pykvq.planning.traffic import host_bandwidth, weight_bytes_per_token
    quiet_log()
    gpus = [d for d in devices() if d.gpu]
    budget, where = budget_of(vram, gpus)
    foreign = vram is not None and not gpus
    with Model(path, gpu_layers=999 if gpus else 0, no_alloc=True) as header_only:
        header = header_only.header
        limit = header.context_train or ctx or 4096
        setup = Setup(ctx or limit // (256 * parallel) * 256 * parallel or 256 * parallel, parallel, ubatch, unified, swa_full, **window, foreign=foreign)
        names = [*DEFAULT_TYPES, *(["oscar2"] if header.calibrated else [])]
        pairs = list(dict.fromkeys(kv_types or [(name, name) for name in names]))
        speed = bandwidth and bandwidth * 1e9 or (host_bandwidth() if not gpus and not foreign else None)
        weights, rows = weight_bytes_per_token(path), []

        def traffic(m) -> int:
            return weights + (m.kv + 2 * m.state) // (1 if unified else parallel)
        base = traffic(memory(header_only, ("f16", "f16"), setup))
        with out.progress(len(pairs)) as step:
            for pair in pairs:
                step(pair_name(pair))
                try:
                    m = memory(header_only, pair, setup)
                except ValueError as error:
                    rows.append({"type": pair_name(pair), "works": False, "reason": " ".join(str(error).split())})
                    continue
                fits = m.device <= budget
                rows.append({"type": pair_name(pair), "works": True, "effective": [[k, v, n] for (k, v), n in m.info.types.items()],
                             "weights": m.weights, "kv": m.kv, "window": m.info.bytes_window, "state": m.state, "compute": m.compute, "cuda_copies": m.scratch, "total": m.total,
                             "on_host": m.host, "kv_f16": m.info.bytes_f16, "fits": fits,
                             "longest_context": longest(header_only, pair, setup, budget, max(limit, setup.context)),
                             "bytes_per_token": traffic(m), "bytes_to_f16": traffic(m) / base,
                             "tokens_per_second_at_most": speed / traffic(m) if speed else None})
    if not any(row["works"] for row in rows):
        raise InputError(rows[0]["reason"])
    value = {"model": header.name, "architecture": header.architecture, "context": setup.context, "context_train": header.context_train,
             "parallel": parallel, "unified": unified, "ubatch": ubatch, "swa_full": swa_full, "budget": budget, "budget_is": where,
             "bandwidth": speed, "bandwidth_is": "given" if bandwidth else "measured" if speed else None, "estimated": True, "types": rows}
    title = (f"{header.name} ({header.architecture}), context {setup.context}" + (f" for {parallel} sequences" if parallel > 1 else "")
             + f", {budget / 2**30:.1f} GiB {where}")
    out.data(value, table(title, ("type", "", ">size", ""), (line for row in rows for line in _lines(row, limit, speed))))
    if speed:
        out.note(f"tokens/s: the bytes that a token reads with a full cache over {speed / 1e9:.1f} GB/s ({value['bandwidth_is']}); pykvq bench measures")
    if foreign and any(row.get("cuda_copies") for row in rows):
        out.note("compute of q4_0 and its like includes the f16 copies of a layer that CUDA makes, estimated: this build has no GPU backend")
    if any(row.get("fits") for row in rows):
        sys.exit(0)
    out.warn(f"no type fits into {budget / 2**30:.1f} GiB; use a smaller --ctx, --kv-type or model")
    sys.exit(1)


def _lines(row: dict, trained: int, speed: float | None):
    """Three lines of the table for one type."""
    if not row["works"]:
        yield row["type"], "", "", f"no: {row['reason']}"
        return
    context = row["longest_context"]
    reach = f"up to {context} tokens" + (" (trained)" if context >= trained else "") if context else "no context fits"
    window = f" with {mebibytes(row['window'])} of f16 window" if row["window"] else ""
    state = f" and {mebibytes(row['state'])} of state" if row["state"] else ""
    yield row["type"], "weights", mebibytes(row["weights"]), f"total {mebibytes(row['total'])}, {'fits' if row['fits'] else 'does not fit'}"
    yield "", "KV cache", mebibytes(row["kv"]), (times(row["kv_f16"] / row["kv"]) if row["kv"] else "none") + f"{window}{state}; {reach}"
    yield "", "compute", mebibytes(row["compute"]), (f"at most {row['tokens_per_second_at_most']:.0f} tokens/s" if speed
                                                     else f"{row['bytes_to_f16']:.2f} of f16's bytes a token")
