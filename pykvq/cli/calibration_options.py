"""Options that pykvq calibrate and pykvq embed-rotations share, and the run behind them."""
from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import click

from pykvq.cli.model import check_input
from pykvq.cli.output import Output

PATH = click.Path(path_type=Path)


def run_options(command: Callable) -> Callable:
    """--text, --tokens, --gpu-layers, --threads, --seed, --restart, gathered into one argument `run`."""
    @click.option("--text", "texts", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True,
                  help="Text file to calibrate on; may be given several times. Default: the model's own samples.")
    @click.option("--tokens", type=click.IntRange(512), default=16384, show_default=True, help="Tokens to run, in chunks of 512.")
    @click.option("--gpu-layers", "-ngl", type=click.IntRange(0), default=0, show_default=True, help="Layers on the GPU.")
    @click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: all cores.")
    @click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the samples and of the chunks' positions.")
    @click.option("--restart", is_flag=True, help="Begin anew instead of resuming an interrupted run.")
    @wraps(command)
    def wrapped(*args, texts, tokens, gpu_layers, threads, seed, restart, **kwargs):
        run = {"text": texts, "tokens": tokens, "gpu_layers": gpu_layers, "threads": threads, "seed": seed, "restart": restart}
        return command(*args, run=run, **kwargs)
    return wrapped


def statistics(out: Output, model: Path, state: Path | None, run: dict):
    """Run or resume the calibration with a progress bar; returns the Statistics and the file that holds them."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")       # numpy's threads would spin beside llama.cpp's; set before numpy is loaded
    from pykvq.calibration.run import calibrate, state_path
    from pykvq.engine import quiet_log
    quiet_log()
    check_input(out, model, [("f16", "f16")], 512, run["gpu_layers"])
    state = state or state_path(model, run["text"], run["tokens"], run["seed"])
    try:
        with out.amount("tokens") as begin:
            return calibrate(model, state, begin=begin, **run), state
    except KeyboardInterrupt:
        if state.exists():
            out.note(f"interrupted; the sums are in {state}; the same command goes on from there")
        raise
