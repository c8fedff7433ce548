"""Fixtures shared by all tests. The native libraries must be installed (pip install .): a missing one is a failure, not a skip."""
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "models"))

# Spinning threads make a run on a busy machine many times slower; must be set before libgomp is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from fetch import fetch                          # noqa: E402


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M: head size 64, 3 KV heads."""
    return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3():
    """Gemma 3 270M: head size 256, one KV head, sliding window; only for tests marked slow."""
    return fetch("gemma3-270m")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """tiny_model(head_dim, ...) writes a random model once per set of arguments and returns its path."""
    from pykvq.tiny_model import write_tiny_model
    folder, made = tmp_path_factory.mktemp("tiny"), {}

    def make(head_dim, **options):
        key = (head_dim, *sorted(options.items()))
        if key not in made:
            made[key] = write_tiny_model(folder / f"{len(made)}.gguf", head_dim, **options)
        return made[key]
    return make


@pytest.fixture(scope="session")
def program():
    """program("llama-server") is its path in this environment."""
    def find(name):
        path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert path, f"{name} is not on PATH; install the project first"
        return path
    return find
