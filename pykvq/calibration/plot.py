"""pykvq inspect --plot: spectra and predicted errors of all layers."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from pykvq.calibration.loss import summary
from pykvq.calibration.metadata import Embedded


def plot(data: Embedded, title: str, path: Path) -> None:
    """Draw to `path`; the suffix chooses the format. Raises ImportError without matplotlib, ValueError for an unknown suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib; run: pip install 'pykvq[plot]'") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for n, (i, t) in enumerate(sorted(data.layers.items())):
        lam = t.lam.mean(0)
        left.semilogy(np.arange(1, len(lam) + 1), lam, color=(n / max(len(data.layers) - 1, 1), .3, .6), lw=.9)
    left.set(xlabel="coordinate", ylabel="squared logit per unit variance", title=f"{title}: spectra, first layer blue, last red")
    figures = {i: summary(t) for i, t in sorted(data.layers.items())}
    for name, label in (("error_turbo3_uncalibrated", "turbo3, not calibrated"), ("error_turbo2", "turbo2"), ("error_oscar2", "oscar2"),
                        ("error_turbo3", "turbo3"), ("error_turbo4", "turbo4")):
        right.semilogy(list(figures), [f[name] for f in figures.values()], label=label)
    right.set(xlabel="layer", ylabel="predicted RMS error of a logit", title="keys")
    right.legend()
    figure.savefig(path, dpi=120)
