"""pykvq inspect."""
from __future__ import annotations

import sys
from pathlib import Path

import click

from pykvq.cli.calibration_options import PATH
from pykvq.cli.output import Output, common, table

COLUMNS = (("mean_share", ">mean"), ("effective_dims", ">dims"), ("error_turbo3_uncalibrated", ">turbo3 as is"), ("error_turbo4", ">turbo4"),
           ("error_turbo3", ">turbo3"), ("error_turbo2", ">turbo2"), ("error_oscar2", ">oscar2"))


@click.command("inspect")
@common
@click.argument("model", type=PATH)
@click.option("--plot", "picture", type=PATH, help="Draw spectra and predicted errors to this file (needs the extra [plot]).")
def inspect(out: Output, model: Path, picture: Path | None) -> None:
    """Show the calibrated transforms that a model or its sidecar carries.

    Per layer: the frequency pairs of a key bias that the cache leaves out of the keys, the share of the keys' energy that their mean holds,
    the effective number of coordinates that queries read, and the predicted root-mean-square error of an attention logit per type of K.
    Exits with 1 when there are none or they do not fit.
    """
    from pykvq.calibration.loss import summary
    from pykvq.calibration.metadata import current, decode
    from pykvq.calibration.model_files import fingerprint
    from pykvq.gguf_header import sidecar_path
    from pykvq.gguf_file import GgufFile
    file = GgufFile(sidecar_path(model) if sidecar_path(model).is_file() else model)         # the order in which a load looks
    data = decode(file)
    if data is None:
        if out.as_json:
            out.data({"model": str(model), "embedded": False})
        else:
            out.out.print(f"{model} carries no calibrated transforms; run: pykvq embed-rotations {model}", markup=False)
        sys.exit(1)
    fits = not GgufFile(model).tensors or fingerprint(model) == data.fingerprint        # a sidecar alone has no model to compare with
    for wrong, why in ((not fits, "another model"), (not current(data), "another codebook")):
        if wrong:
            out.warn(f"{file.path} was made for {why}; run: pykvq embed-rotations --force {model}")
    if picture:
        from pykvq.calibration.plot import plot
        plot(data, model.name, picture)
        out.note(f"drawn to {picture}")
    rows = {i: summary(t) for i, t in sorted(data.layers.items())}
    biased = data.key_bias != "none"
    returned = {i: "all" if t.pairs is None else len(t.pairs) for i, t in data.layers.items()}
    cells = [(i, len(data.layers[i].lam), data.layers[i].lam.shape[1], *([returned[i]] if biased else []), *(f"{row[name]:.3g}" for name, _ in COLUMNS)) for i, row in rows.items()]
    about = [("in", file.path.name), ("fingerprint", data.fingerprint + ("" if fits else ", not of this model")), ("key bias", data.key_bias),
             ("checksum", "right" if data.checked else "none, written by an older pykvq"), *sorted(data.provenance.items())]
    out.data({"model": str(model), "embedded": True, "in": str(file.path), "fits": fits, "current": current(data), "fingerprint": data.fingerprint,
              "codebook": data.codebook, "key_bias": data.key_bias, "checked": data.checked, "calibration": dict(data.provenance),
              "layers": [{"layer": i, "heads_kv": len(data.layers[i].lam), "head_dim": data.layers[i].lam.shape[1], **row,
                          "bias_pairs": None if data.layers[i].pairs is None else data.layers[i].pairs.tolist(),
                          "spectrum": data.layers[i].lam.tolist()} for i, row in rows.items()]},
             table("transforms", ("", ""), about),
             table("\npredicted error of a logit, by type of K", ("layer", ">KV heads", ">head size", *([">bias pairs"] if biased else []), *(c for _, c in COLUMNS)), cells))
    sys.exit(0 if fits and current(data) else 1)
