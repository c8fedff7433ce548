"""pykvq calibrate."""
from __future__ import annotations

from pathlib import Path

import click

from pykvq.cli.calibration_options import PATH, run_options, statistics
from pykvq.cli.output import Output, common


@click.command("calibrate")
@common
@click.argument("model", type=PATH)
@click.option("--output", "-o", type=PATH, help="Statistics file. Default: one in the user's cache folder, where embed-rotations finds it.")
@run_options
def calibrate(out: Output, model: Path, output: Path | None, run: dict) -> None:
    """Measure the keys, values and queries of a model: means and second moments per layer and KV head.

    The model runs on its own samples (or on --text), in chunks at positions over its whole trained range. Interrupted, the
    same command resumes. pykvq embed-rotations turns the statistics into transforms.
    """
    run_, state = statistics(out, model, output, run)
    out.note(f"next: pykvq embed-rotations {model}" + (f" --stats {state}" if output else ""))
    layers = run_.moments.layers
    from pykvq.calibration.text import text_hash
    value = {"model": str(model), "statistics": str(state), "fingerprint": run_.fingerprint, "source": run_.source, "tokens": int(run_.tokens.size),
             "text_hash": text_hash(run_.tokens), "layers": sorted(layers)}
    if out.as_json:
        out.data(value)
    else:
        out.out.print(f"{len(layers)} layers, {run_.tokens.size} tokens ({run_.source}): {state}", markup=False)
