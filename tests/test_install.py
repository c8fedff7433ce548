"""The installation: commands on PATH, one file per library, and another llama-cpp-python over ours is noticed."""
import importlib
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

import pytest

import pykvq
from pykvq import launch, native

try:
    import tomllib
except ModuleNotFoundError:                      # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PIN = tomllib.loads((ROOT / "patches/UPSTREAM").read_text())
COMMANDS = ("llama-server", "llama-cli", "llama-bench", "llama-batched-bench", "llama-perplexity", "llama-quantize", "ggml-rpc-server")
NO_VERSION = ("llama-quantize", "ggml-rpc-server")


def test_every_command_is_declared():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"pykvq", *COMMANDS}
    for name in COMMANDS:
        assert callable(getattr(launch, scripts[name].removeprefix("pykvq.launch:")))


@pytest.mark.parametrize("name", [c for c in COMMANDS if c not in NO_VERSION])
def test_command_tells_the_pinned_commit(program, name):
    result = subprocess.run([program(name), "--version"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert PIN["llama_cpp_commit"] in result.stdout + result.stderr


def test_quantize_runs(program):
    # It has no --version; its usage text ends with exit code 1.
    result = subprocess.run([program("llama-quantize"), "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stdout.startswith("usage: llama-quantize")


def test_rpc_server_runs(program):
    result = subprocess.run([program("ggml-rpc-server"), "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stderr.startswith("Usage: ggml-rpc-server")


def test_exit_code_and_arguments_pass_through(program):
    result = subprocess.run([program("llama-bench"), "--no-such-option", "a b"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "--no-such-option" in result.stdout + result.stderr


def test_bindings_carry_the_pinned_version():
    import llama_cpp
    assert llama_cpp.__version__ == PIN["version"]


def test_llama_cpp_python_counts_as_installed():
    """So that packages which require it leave ours alone."""
    assert importlib.metadata.version("llama-cpp-python") == f"{PIN['version']}+pykvq"


def test_libraries_are_plain_files_under_one_name():
    files = list(native.library_dir().iterdir())
    assert not [f.name for f in files if f.is_symlink()]
    assert not [f.name for f in files if re.search(r"\.so\.\d", f.name)]


def test_overwritten_bindings_are_noticed(tmp_path, monkeypatch):
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "llama.py").write_text("class Llama: pass\n")
    monkeypatch.setattr(native, "bindings_dir", lambda: package)
    with pytest.warns(UserWarning, match="another llama-cpp-python has overwritten.*mend it with: pip install"):
        importlib.reload(pykvq)


def test_missing_executable_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "bindings_dir", lambda: tmp_path / "llama_cpp")
    assert launch.run("llama-server") == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "llama-server" in error and os.strerror(2) in error and "pip install" in error
