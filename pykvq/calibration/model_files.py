"""The files of one model: splits, and the fingerprint that ties calibrated data to the model."""
from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gguf import GGMLQuantizationType

from pykvq.fingerprint import fnv1a64
from pykvq.gguf_file import GgufFile
from pykvq.gguf_header import ModelFileError

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def splits(path: Path) -> list[Path]:
    """All files of the model, the named one first. Raises ModelFileError for a split that is not the first, or a missing one."""
    match = _SPLIT.fullmatch(path.name)
    if not match or int(match[3]) < 2:
        return [path]
    names = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1)]
    if int(match[2]) != 1:
        raise ModelFileError(f"{path.name} is split {int(match[2])} of a model; name the first one, {names[0]}")
    for name in names:
        if not name.is_file():
            raise ModelFileError(f"{path} is split and {name.name} is missing; put all {len(names)} files into one folder")
    return names


def files_of(path: Path) -> list[GgufFile]:
    """The index of each of splits(path), which takes tenths of a second: read once, then ask."""
    return [GgufFile(p) for p in splits(path)]


def fingerprint(path: Path) -> str:
    """Hash of architecture and norm weights, the same for every quantisation of a model, because norms stay float32.

    FNV-1a over the architecture's name, the float32 bytes of blk.N.attn_norm.weight for every layer that has one, and of
    output_norm.weight. The libraries compute the same when they load a model.
    """
    files = files_of(path)
    arch = files[0].get("general.architecture", "")
    layers = files[0].get(f"{arch}.block_count", 0) - files[0].get(f"{arch}.nextn_predict_layers", 0)      # draft layers come last
    names = [f"blk.{i}.attn_norm.weight" for i in range(layers)] + ["output_norm.weight"]
    norms = [f.tensor_data(name) for name in names for f in files if name in f.tensors and f.tensors[name].type == GGMLQuantizationType.F32]
    return fnv1a64(arch.encode() + b"".join(norms))


def tensor(files: Sequence[GgufFile], name: str) -> bytes | None:
    """Raw bytes of a tensor of a model whose files these are, None when it has no such tensor."""
    return next((f.tensor_data(name) for f in files if name in f.tensors), None)
