"""Calibrated data with random numbers, for tests of what the runtime does with them: right algebra, not good statistics.

    python tests/models/calibrated.py MODEL.gguf       writes MODEL.kvq.gguf beside it
"""
from __future__ import annotations

import base64
import sys
from pathlib import Path

import numpy as np

from pykvq.calibration.metadata import CHECKSUM, checksum
from pykvq.fingerprint import fnv1a64
from pykvq.formats import CODEBOOK


def random_layers(layers, heads_kv: int, d: int, spread: float = 3.0, seed: int = 5) -> dict[str, np.ndarray]:
    """kvq.blk.* arrays for those layers: bases and weights of condition spread**2, means as large as a value is."""
    rng = np.random.default_rng(seed)

    def orthogonal():
        return np.linalg.qr(rng.standard_normal((d, d)))[0]

    out = {}
    for i in layers:
        basis = [orthogonal() @ np.diag(np.geomspace(spread, 1 / spread, d)) @ orthogonal() for _ in range(heads_kv)]
        out[f"kvq.blk.{i}.k.mean"] = rng.standard_normal((heads_kv, d)).astype(np.float16)
        out[f"kvq.blk.{i}.k.basis"] = np.array(basis).astype(np.float16)
        out[f"kvq.blk.{i}.k.lambda"] = np.sort(spread ** rng.uniform(-4, 4, (heads_kv, d)))[:, ::-1].astype(np.float32)
    return out


def model_fingerprint(model: Path) -> str:
    """As the runtime computes it from the loaded model."""
    from gguf import GGUFReader
    reader = GGUFReader(model)
    arch = reader.get_field("general.architecture").contents()
    tensors = {t.name: t.data for t in reader.tensors}
    names = [f"blk.{i}.attn_norm.weight" for i in range(reader.get_field(f"{arch}.block_count").contents())]
    return fnv1a64(arch.encode() + b"".join(np.ascontiguousarray(tensors[n]).tobytes() for n in (*names, "output_norm.weight") if n in tensors))


def metadata(model: Path, arrays: dict[str, np.ndarray]) -> dict[str, str | int]:
    """All kvq.* keys."""
    keys = {"kvq.version": 1, "kvq.codebook": CODEBOOK, "kvq.fingerprint": model_fingerprint(model), "kvq.key_bias": "none"}
    return {**keys, **{name: base64.b64encode(x.tobytes()).decode() for name, x in arrays.items()}}


def sealed(keys: dict[str, str | int]) -> dict[str, str | int]:
    """With the checksum that the runtime demands where there is one."""
    return {**keys, CHECKSUM: checksum(keys)}


def write_sidecar(model: Path, keys: dict[str, str | int]) -> Path:
    """MODEL.kvq.gguf with these keys."""
    from gguf import GGUFWriter
    path = model.with_name(f"{model.name.removesuffix('.gguf')}.kvq.gguf")
    writer = GGUFWriter(str(path), "kvq")
    for name, value in keys.items():
        writer.add_uint32(name, value) if isinstance(value, int) else writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    from pykvq.gguf_header import read_header
    wanted = Path(sys.argv[1])
    header = read_header(wanted)
    print(write_sidecar(wanted, metadata(wanted, random_layers(range(len(header.heads_kv)), header.heads_kv[0], header.head_dim_k, 1.3))))
