"""What the builders of both host machines need."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object) -> str:
    """Output of a command; fails the test with its errors."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    return done.stdout


def upstream_ggml() -> Path:
    """Folder ggml of the patched upstream tree."""
    return Path(run(sys.executable, ROOT / "tools/vendor.py").strip().splitlines()[-1]) / "vendor/llama.cpp/ggml"
