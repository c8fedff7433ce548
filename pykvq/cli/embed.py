"""pykvq embed-rotations."""
from __future__ import annotations

from pathlib import Path

import click

from pykvq.calibration import KEY_BIAS
from pykvq.cli.calibration_options import PATH, run_options, statistics
from pykvq.cli.errors import InputError
from pykvq.cli.output import Output, common


@click.command("embed-rotations")
@common
@click.argument("model", type=PATH)
@click.option("--output", "-o", type=PATH, help="Write a copy of the model with the transforms in it.")
@click.option("--in-place", is_flag=True, help="Put them into MODEL itself; the file is replaced at the end, whole or not at all.")
@click.option("--sidecar", is_flag=True, help="Write them alone as MODEL.kvq.gguf, which is read beside MODEL. The default.")
@click.option("--stats", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Statistics of pykvq calibrate -o; nothing is run.")
@click.option("--key-bias", type=click.Choice(KEY_BIAS), help="Bias of the keys before RoPE that is stored apart. Default: the most that the cache supports.")
@click.option("--force", is_flag=True, help="Replace transforms, or a file, that are there already.")
@run_options
def embed_rotations(out: Output, model: Path, output: Path | None, in_place: bool, sidecar: bool, stats: Path | None, key_bias: str | None, force: bool,
                    run: dict) -> None:
    """Write calibrated transforms into a model's GGUF metadata, or beside it.

    Calibrates first unless statistics of this model are there. Other llama.cpp programs ignore the metadata.
    """
    if bool(output) + in_place + sidecar > 1:
        raise click.UsageError("-o, --in-place and --sidecar exclude each other")
    from pykvq.gguf_header import read_header
    header = read_header(model)
    from pykvq.calibration.embed import check_free_of_keys, embed_in, write_sidecar
    from pykvq.calibration.model_files import fingerprint, splits
    from pykvq.gguf_header import sidecar_path
    from pykvq.gguf_file import GgufFile
    target = model if in_place else output or sidecar_path(model)
    splits(model)                                # a later split, or one that is missing, is told now
    if in_place or output:
        check_free_of_keys(GgufFile(model), force)
    if not in_place and target.exists() and not force:
        raise InputError(f"{target} exists; use --force to replace it")
    if stats:
        from pykvq.calibration.run import Statistics
        measured = Statistics.load(stats)
        if measured.fingerprint != fingerprint(model):
            raise InputError(f"{stats} holds statistics of another model; run: pykvq calibrate {model} -o {stats} --restart")
    else:
        measured, _ = statistics(out, model, None, run)
    from pykvq.calibration.build import build, cache_returns
    from pykvq.calibration.metadata import encode
    if key_bias and not cache_returns(key_bias, measured, model):
        out.warn(f"the cache of this version does not return that bias for {header.architecture}: it will not use data of --key-bias {key_bias}")
    data = build(measured, model, key_bias)
    values = encode(data)
    if in_place or output:
        with out.amount("MiB") as begin:
            bar, done = None, 0

            def progress(now: int, total: int) -> None:
                nonlocal bar, done
                bar = bar or begin(total >> 20)
                bar("writing", (now >> 20) - done)
                done = now >> 20
            written = embed_in(model, values, target, force=force, progress=progress)
    else:
        written = write_sidecar(model, values, force=force)
    size = sum(len(v) for v in values.values() if isinstance(v, str))
    layers = values["kvq.layers"]
    if out.as_json:
        out.data({"model": str(model), "written": str(written), "layers": layers, "bytes": size, "fingerprint": measured.fingerprint,
                  "source": measured.source, "key_bias": data.key_bias})
    else:
        out.out.print(f"transforms of {len(layers)} layers ({size / 2**20:.1f} MiB) in {written}", markup=False)
