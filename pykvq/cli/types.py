"""pykvq types."""
from __future__ import annotations

import sys

import click

from pykvq.cli.output import Output, common, table
from pykvq.formats import TYPES
from pykvq.kv_info import times
from pykvq.support import KERNELS, OURS, UPSTREAM, VALID_NAMES, effective_type, row_bytes, supports


def describe(name: str, head_dim: int, backend: str) -> dict:
    """One row: what the type is, and what it becomes at this head size on this backend."""
    ok, reason, fix = supports(name, head_dim, backend)
    row = {"type": name, "supported": ok, "reason": reason, "fix": fix, "effective": None, "bits_per_value": None, "smaller_than_f16": None}
    if ok:
        bits = row_bytes(name, head_dim) * 8 / head_dim
        row |= {"effective": effective_type(name, head_dim), "bits_per_value": bits, "smaller_than_f16": round(16 / bits, 3)}
    row["blocks"] = sorted(t.block for t in TYPES.values() if t.family == name) or [UPSTREAM[name][1]]
    return row


@click.command("types")
@common
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True, help="Values per head of the model.")
@click.option("--backend", type=click.Choice(list(KERNELS)), default="cpu", show_default=True, help="Where the cache is to lie.")
def types(out: Output, head_dim: int, backend: str) -> None:
    """List the cache types and their size at a head size.

    Exits with 1 when none of turbo2, turbo3, turbo4 and oscar2 works for this head size and backend.
    """
    rows = [describe(name, head_dim, backend) for name in VALID_NAMES]
    cells = [(r["type"], f"{r['bits_per_value']:.3f}", times(r["smaller_than_f16"]), r["effective"], "yes") if r["supported"]
             else (r["type"], "", "", "", f"no: {r['reason']}; {r['fix']}") for r in rows]
    out.data({"head_dim": head_dim, "backend": backend, "types": rows},
             table(f"cache types, head size {head_dim}, {backend}", ("type", ">bits/value", ">than f16", "effective type", "works"), cells))
    sys.exit(0 if any(r["supported"] for r in rows if r["type"] in OURS) else 1)
