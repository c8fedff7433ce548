"""What a saved cache belongs to: whatever differs makes its bytes mean something else."""
from __future__ import annotations

import hashlib
from pathlib import Path

import pykvq
from pykvq.calibration.model_files import fingerprint
from pykvq.engine import Context
from pykvq.gguf_file import GgufFile
from pykvq.native import llama_commit

FORMAT = 3                                # of the saved files
_WORDS = {"format": "another file format", "model": "another model file", "fingerprint": "another model", "types": "another cache type",
          "transforms": "other calibrated transforms", "window": "another f16 window", "key_bias": "another treatment of the key bias", "llama_cpp": "another llama.cpp",
          "pykvq": "another version of pykvq", "encoder": "another encoder",
          "budget": "another budget", "recall": "another kind of recall"}


def identity(context: Context, encoder: str, budget: list[int], recall: str) -> dict[str, object]:
    """Of what a context saves. model: hash of the GGUF's metadata, tokenizer included, and of its list of tensors and their types."""
    path = Path(context.model.header.path)
    file = GgufFile(path)
    with path.open("rb") as f:
        head = hashlib.sha256(f.read(file.data_start)).hexdigest()
    layers = list(context.info())
    return {"format": FORMAT, "model": f"{head}:{file.size}", "fingerprint": fingerprint(path), "types": [[x.type_k, x.type_v] for x in layers],
            "transforms": [x.transform for x in layers], "window": [x.n_window for x in layers], "key_bias": sorted({x.key_bias for x in layers}), "llama_cpp": llama_commit(),
            "pykvq": pykvq.__version__, "encoder": encoder, "budget": budget, "recall": recall}


def mismatch(saved: dict[str, object], now: dict[str, object]) -> str | None:
    """Why a cache of `saved` does not serve now, in a few words; None when it does."""
    for key in now:
        if saved.get(key) != now[key]:
            return f"{_WORDS[key]}: saved with {_short(saved.get(key))}, now {_short(now[key])}"
    return None


def _short(value: object) -> str:
    text = str(value[0] if isinstance(value, list) and value else value)
    return text if len(text) <= 40 else f"{text[:37]}..."
