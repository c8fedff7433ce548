#!/usr/bin/env python3
"""Mean KLD of llama-perplexity --kl-divergence and ours over the same tokens, without f16 windows.

    python tests/evaluation/agreement.py MODEL.gguf TEXT OUT.json [TYPE ...]      context 512, four chunks
"""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pykvq.engine import Context, Model, quiet_log
from pykvq.evaluation.logits import Distributions
from pykvq.evaluation.run import score


def theirs(program: str, model: Path, text: Path, folder: Path, kv_type: str, context: int, chunks: int) -> float:
    """What llama-perplexity prints. It scores the second half of every chunk."""
    def run(*arguments: str) -> str:
        command = [program, "-m", str(model), "-f", str(text), "-c", str(context), "-b", str(context), "--chunks", str(chunks), "-fa", "on",
                   "-t", str(os.cpu_count()), "--kv-sink", "0", "--kv-recent", "0", "--kl-divergence-base", str(folder / "base"), *arguments]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-2000:]
        return result.stdout + result.stderr
    if not (folder / "base").exists():
        run()
    return float(re.search(r"Mean\s+KLD:\s+([\d.]+)", run("--kl-divergence", "-ctk", kv_type, "-ctv", kv_type))[1])


def ours(path: Path, text: Path, kv_type: str, context: int, chunks: int) -> float:
    """By the same rule: chunk i begins at token i * context, which BOS replaces where the model has one."""
    with Model(path) as model:
        tokens = np.array(model.tokenize(text.read_bytes().decode()))        # as upstream reads it: \r\n stays
        bos = model.tokenize("")
        positions, divergence, reference = np.arange(context // 2, context - 1), [], []
        for name in ("f16", kv_type):
            with Context(model, context, name, n_batch=context, kv_sink=0, kv_recent=0) as session:
                for i in range(chunks):
                    chunk = tokens[i * context:(i + 1) * context].copy()
                    chunk[:len(bos)] = bos
                    logits = score(session, chunk, positions)
                    if name == "f16":
                        reference.append(Distributions.of(logits))
                    else:
                        divergence.append(reference[i].divergence(logits))
    return float(np.mean(divergence))


if __name__ == "__main__":
    quiet_log()
    model, text, out = map(Path, sys.argv[1:4])
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for wanted in sys.argv[4:] or ["turbo4", "turbo3", "turbo2", "q8_0", "q4_0"]:
            pair = theirs(shutil.which("llama-perplexity"), model, text, Path(temporary), wanted, 512, 4), ours(model, text, wanted, 512, 4)
            rows.append({"model": model.stem, "text": text.name, "type": wanted, "llama_perplexity": pair[0], "pykvq": pair[1]})
    out.write_text(json.dumps(rows, indent=1) + "\n")
