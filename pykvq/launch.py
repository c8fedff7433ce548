"""The console scripts llama-server, llama-cli, ...: each becomes the executable in pykvq/bin.

The executables find their libraries relative to that folder, so they cannot lie in the
environment's bin folder themselves.
"""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pykvq.native import REINSTALL, bindings_dir
from pykvq.preflight import complaint


def executable(name: str) -> Path:
    """Where the executable lies, whether it is there or not: beside llama_cpp, also in an editable install."""
    bindings = bindings_dir()
    site = bindings.parent if bindings else Path(__file__).parents[1]
    return site / "pykvq" / "bin" / (name + (".exe" if os.name == "nt" else ""))


def run(name: str) -> int:
    """Run an executable with this process's arguments; returns only on Windows or with an error (exit code 2)."""
    problem = complaint(sys.argv[1:], name)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    path = executable(name)
    try:
        if os.name != "nt":
            os.execv(path, [name, *sys.argv[1:]])
        # Windows has no exec and no rpath: wait for a child that finds the libraries on PATH.
        libraries = path.parents[2] / "llama_cpp" / "lib"
        environment = {**os.environ, "PATH": f"{libraries}{os.pathsep}{os.environ.get('PATH', '')}"}
        return subprocess.call([str(path), *sys.argv[1:]], env=environment)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"{name}: cannot run {path}: {error.strerror}; mend the installation with: {REINSTALL}", file=sys.stderr)
        return 2


def llama_server() -> int:
    """Entry point of llama-server."""
    return run("llama-server")


def llama_cli() -> int:
    """Entry point of llama-cli."""
    return run("llama-cli")


def llama_bench() -> int:
    """Entry point of llama-bench."""
    return run("llama-bench")


def llama_batched_bench() -> int:
    """Entry point of llama-batched-bench."""
    return run("llama-batched-bench")


def llama_perplexity() -> int:
    """Entry point of llama-perplexity."""
    return run("llama-perplexity")


def llama_quantize() -> int:
    """Entry point of llama-quantize."""
    return run("llama-quantize")


def ggml_rpc_server() -> int:
    """Entry point of ggml-rpc-server."""
    return run("ggml-rpc-server")
