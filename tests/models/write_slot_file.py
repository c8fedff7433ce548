#!/usr/bin/env python3
"""Writes the slot file that later versions must read or refuse by its version (test_states.py).

    python tests/models/write_slot_file.py       tests/models/slot_files/version<N>-layout<N>.bin: llama.cpp's version of slot files, ours of the rows

An older file stays as it is: it is what users of that version have.
"""
from __future__ import annotations

import re
import struct
import tempfile
from pathlib import Path

import llama_cpp.llama_cpp as native

from pykvq.engine import Context, Model, quiet_log
from pykvq.tiny_model import write_tiny_model

FOLDER = Path(__file__).parent / "slot_files"
TOKENS = [(7 * i * i + 3) % 256 for i in range(12)]
CONTEXT = {"n_ctx": 64, "kv_type": "turbo3", "threads": 2, "kv_sink": 2, "kv_recent": 4}


def version(data: bytes) -> str:
    """Of a slot file: llama.cpp's version, our layout and tables."""
    layout = re.search(rb"KVQS.{20}(layout [^\n]*)\n", data, re.DOTALL).group(1).decode()
    return f"version {struct.unpack_from('<I', data, 4)[0]}, {layout}"


def write(context: Context, path: Path) -> bytes:
    """The slot file of TOKENS; returns its bytes."""
    context.clear()
    context.decode(TOKENS, 0, 0, logits="none")
    native.llama_state_seq_save_file(context.handle, str(path).encode(), 0, (native.llama_token * len(TOKENS))(*TOKENS), len(TOKENS))
    return path.read_bytes()


def main() -> None:
    quiet_log()
    with tempfile.TemporaryDirectory() as folder, Model(write_tiny_model(Path(folder) / "tiny.gguf")) as model, Context(model, **CONTEXT) as context:
        data = write(context, Path(folder) / "slot.bin")
    (FOLDER / "version{}-layout{}.bin".format(*re.match(r"version (\d+), layout (\d+)", version(data)).groups())).write_bytes(data)


if __name__ == "__main__":
    main()
