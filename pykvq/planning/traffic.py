"""Bytes that one decoded token reads, and how fast memory gives them: an upper bound of decode speed."""
from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pykvq.calibration.model_files import splits
from pykvq.gguf_file import GgufFile

_ROWS = re.compile(r"(per_layer_)?token_embd|position_embd|token_types|enc\.")       # looked up by rows, or read by the encoder alone


def weight_bytes_per_token(path: Path) -> int:
    """Bytes of weights that one token reads: of stacked experts the share that is used, of embeddings nothing.

    Tied embeddings count, because they are the output matrix. Draft layers (nextn) do not.
    """
    files = [GgufFile(p) for p in splits(path)]
    arch = files[0].get("general.architecture", "")
    layers = files[0].get(f"{arch}.block_count", 0) - files[0].get(f"{arch}.nextn_predict_layers", 0)
    used = files[0].get(f"{arch}.expert_used_count", 0) / max(files[0].get(f"{arch}.expert_count", 0), 1)
    tied = not any("output.weight" in f.tensors for f in files)
    total = 0.0
    for tensor in (t for f in files for t in f.tensors.values()):
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if layer and int(layer[1]) >= layers or _ROWS.match(tensor.name) and not (tied and tensor.name == "token_embd.weight"):
            continue
        total += tensor.bytes * (used if "_exps." in tensor.name else 1)
    return round(total)


def host_bandwidth(seconds: float = 0.3) -> float:
    """Bytes per second that all cores together read from memory, measured."""
    cores = os.cpu_count() or 1
    blocks = [np.ones(1 << 24, np.float32) for _ in range(cores)]        # 64 MiB each: no cache holds them

    def passes(block: np.ndarray) -> int:
        n, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            block.max()
            n += 1
        return n
    start = time.perf_counter()
    with ThreadPoolExecutor(cores) as pool:
        n = sum(pool.map(passes, blocks))
    return n * blocks[0].nbytes / (time.perf_counter() - start)
