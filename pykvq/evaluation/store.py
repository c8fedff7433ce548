"""Finished pieces of an evaluation on disk, so that an interrupted one goes on and new types reuse the f16 pass."""
from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import platformdirs

from pykvq.calibration.model_files import splits
from pykvq.calibration.moments import write_atomically
from pykvq.gguf_file import GgufFile
from pykvq.gguf_header import sidecar_path

_SAMPLE = 1 << 20                    # bytes of weights at the start and at the end that tell quantisations of a model apart


class Store:
    """Named sets of arrays in one folder; the folder's name is a hash of everything that the pieces depend on."""

    def __init__(self, identity: dict, folder: Path | None = None):
        self.key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = (folder or cache_folder()) / self.key

    def has(self, name: str) -> bool:
        """Whether the piece is finished."""
        return self._path(name).is_file()

    def get(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of a piece. Raises ValueError for a damaged file."""
        try:
            with np.load(self._path(name), allow_pickle=False) as f:
                return dict(f)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self._path(name)} is damaged; run again with --restart") from error

    def put(self, name: str, **arrays: np.ndarray) -> None:
        """Save a piece, whole or not at all. Raises OSError."""
        write_atomically(self._path(name), {key: np.asarray(value) for key, value in arrays.items()})

    def clear(self) -> None:
        """Drop every piece."""
        for path in self.folder.glob("*.npz"):
            path.unlink()

    def bytes(self) -> int:
        """What the pieces take on disk."""
        return sum(path.stat().st_size for path in self.folder.glob("*.npz"))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npz"


def cache_folder() -> Path:
    """Where evaluations are kept: the user's cache folder, or under PYKVQ_CACHE_DIR."""
    return Path(os.environ.get("PYKVQ_CACHE_DIR") or platformdirs.user_cache_dir("pykvq", appauthor=False)) / "evaluation"


def model_identity(path: Path) -> str:
    """SHA-256 over the headers, samples of the weights and the sizes of a model's files, and over its calibrated sidecar."""
    digest = hashlib.sha256()
    for part in splits(path):
        start, size = GgufFile(part).data_start, part.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with part.open("rb") as f:
            digest.update(f.read(start + _SAMPLE))
            f.seek(max(size - _SAMPLE, 0))
            digest.update(f.read())
    if sidecar_path(path).is_file():
        digest.update(sidecar_path(path).read_bytes())
    return digest.hexdigest()
