#!/usr/bin/env python3
"""Writes the slot file that later versions must read or refuse by its version (test_states.py).

    python tests/models/write_slot_file.py       tests/models/slot_files/layout<N>.bin, when the layout or the tables have changed

An older file stays as it is: it is what users of that version have.
"""
from __future__ import annotations

import re
import tempfile
from pathlib import Path

import llama_cpp.llama_cpp as native

from pykvq.engine import Context, Model, quiet_log
from pykvq.tiny_model import write_tiny_model

FOLDER = Path(__file__).parent / "slot_files"
TOKENS = [(7 * i * i + 3) % 256 for i in range(12)]
CONTEXT = {"n_ctx": 64, "kv_type": "turbo3", "threads": 2, "kv_sink": 2, "kv_recent": 4}


def version(data: bytes) -> str:
    """Layout and tables, as the header of a slot file says them; empty without a header."""
    found = re.search(rb"KVQS.{20}(layout [^\n]*)\n", data, re.DOTALL)
    return found.group(1).decode() if found else ""


def main() -> None:
    quiet_log()
    with tempfile.TemporaryDirectory() as folder, Model(write_tiny_model(Path(folder) / "tiny.gguf")) as model, Context(model, **CONTEXT) as context:
        context.decode(TOKENS, 0, 0, logits="none")
        written = Path(folder) / "slot.bin"
        native.llama_state_seq_save_file(context.handle, str(written).encode(), 0, (native.llama_token * len(TOKENS))(*TOKENS), len(TOKENS))
        data = written.read_bytes()
    number = re.match(r"layout (\d+)", version(data)).group(1)
    (FOLDER / f"layout{number}.bin").write_bytes(data)


if __name__ == "__main__":
    main()
