"""Write kvq.* keys into a GGUF: a new file, the same file atomically, or a sidecar. Tensor data are streamed, never held."""
from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from pykvq import gguf_file
from pykvq.calibration.metadata import PREFIX
from pykvq.calibration.model_files import splits
from pykvq.gguf_file import GgufFile
from pykvq.gguf_header import ModelFileError, sidecar_path

BLOCK = 16 << 20                         # bytes copied at a time
Progress = Callable[[int, int], None]    # (bytes done, bytes in all)


def embed_in(model: Path, values: Mapping[str, object], target: Path, *, force: bool = False, progress: Progress = lambda done, total: None) -> Path:
    """Write `model` with the keys added as `target`; target == model replaces it atomically. Returns the file written.

    Everything else is copied byte for byte; a split model carries the keys in its first file. The old file survives any failure:
    the new one is written beside it, flushed to disk and renamed. Raises ValueError when keys are there already and not `force`,
    OSError when there is no room.
    """
    target = target.resolve()            # a link stays a link to the new file
    in_place = target.exists() and model.exists() and target.samefile(model)
    if len(splits(model)) > 1 and not in_place:
        raise ValueError(f"{model.name} is split and its parts must keep their names; use --in-place or --sidecar, "
                         "or merge it with: llama-gguf-split --merge")
    file = GgufFile(model)
    check_free_of_keys(file, force)
    if not in_place and target.exists() and not force:
        raise ValueError(f"{target} exists; use --force to replace it")
    kept = [key for key in file.keys.values() if not key.name.startswith(PREFIX)]
    added = gguf_file.encode(values)
    head = gguf_file.header(file.version, len(file.tensors), len(kept) + len(values))
    infos = file.infos_end - file.infos_start
    end = len(head) + sum(key.end - key.start for key in kept) + len(added) + infos
    padding = -end % file.alignment if file.tensors else 0
    total = end + padding + max(file.size - file.data_start, 0)

    def write(out) -> None:
        with model.open("rb") as source:
            out.write(head)
            for key in kept:
                _copy(source, key.start, key.end - key.start, out)
            out.write(added)
            _copy(source, file.infos_start, infos, out)
            out.write(bytes(padding))
            _copy(source, file.data_start, max(file.size - file.data_start, 0), out, lambda done: progress(end + padding + done, total))
    return _replace(target, total, write, like=model)


def write_sidecar(model: Path, values: Mapping[str, object], *, force: bool = False) -> Path:
    """Write the keys alone as MODEL.kvq.gguf beside the model. Returns the path. Raises ValueError when it exists and not `force`, OSError."""
    target = sidecar_path(model)
    if target.exists() and not force:
        raise ValueError(f"{target} exists; use --force to replace it")
    own = {"general.architecture": "kvq", "general.type": "kvq", "general.name": f"calibrated transforms for {model.name}"}
    data = gguf_file.header(3, 0, len(own) + len(values)) + gguf_file.encode(own) + gguf_file.encode(values)
    data += bytes(-len(data) % 32)
    return _replace(target, len(data), lambda out: out.write(data), like=model)


def check_free_of_keys(file: GgufFile, force: bool) -> None:
    """Raises ValueError when the file carries kvq data and they may not be replaced."""
    if not force and any(name.startswith(PREFIX) for name in file.keys):
        raise ValueError(f"{file.path} carries calibrated transforms already; use --force to replace them, pykvq inspect to see them")


def _copy(source, start: int, length: int, out, done: Callable[[int], None] = lambda n: None) -> None:
    source.seek(start)
    left = length
    while left:
        block = source.read(min(BLOCK, left))
        if not block:
            raise ModelFileError(f"{source.name} ended early; is another program writing to it?")
        out.write(block)
        left -= len(block)
        done(length - left)


def _replace(target: Path, size: int, write: Callable, like: Path) -> Path:
    """Write a file of `size` bytes beside `target` and rename it over it; nothing but the whole file ever has that name."""
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise OSError(f"{target.name} needs {size / 2**20:.0f} MiB in {target.parent}, {free / 2**20:.0f} MiB are free; "
                      "make room, use -o on another disk, or --sidecar")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        shutil.copymode(like, temporary)
        os.replace(temporary, target)
        _sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, where the system lets a folder be flushed."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
