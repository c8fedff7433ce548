#!/usr/bin/env python3
"""How a calibration on one text serves another: predicted error of keys, from statistics files alone.

    pykvq calibrate MODEL --text prose.txt -o prose.npz; pykvq calibrate MODEL --text code.txt -o code.npz; ...
    python tools/transfer_table.py prose.npz code.npz [...] [--bits 3] [--key-bias measured]

Rows: calibrated on; columns: met by. Root mean square error of an attention logit over all layers and heads.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.calibration.key_bias import key_moments, measured_bias    # noqa: E402
from pykvq.calibration.loss import met_loss                          # noqa: E402
from pykvq.calibration.run import Statistics                         # noqa: E402
from pykvq.calibration.transform import layer_transform              # noqa: E402


def error(ours: Statistics, theirs: Statistics, bits: int, measured: bool) -> float:
    """RMS logit error of keys of `theirs` in the transforms of `ours`."""
    out = []
    for i, s in ours.moments.layers.items():
        bias, other = measured_bias(s) if measured else None, theirs.moments.layers[i]
        out.append(met_loss(layer_transform(s, bias), *key_moments(other, bias), other.qq / other.n_q, bits))
    return float(np.sqrt(np.mean(out)))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("stats", nargs="+", type=Path)
    ap.add_argument("--bits", type=int, default=3)
    ap.add_argument("--key-bias", choices=["none", "measured"], default="none")
    a = ap.parse_args()
    runs = {path.stem: Statistics.load(path) for path in a.stats}
    if len({run.fingerprint for run in runs.values()}) > 1:
        raise SystemExit("the statistics are of different models")
    measured = a.key_bias == "measured"
    print(f"| calibrated on | {' | '.join(runs)} |\n|{'---|' * (len(runs) + 1)}")
    for name, run in runs.items():
        print(f"| {name} | {' | '.join(f'{error(run, other, a.bits, measured):.3f}' for other in runs.values())} |")


if __name__ == "__main__":
    main()
