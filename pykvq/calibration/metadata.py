"""The kvq.* keys: transforms as GGUF metadata, and back. The layout is in docs/gguf-metadata.md.

llama.cpp ignores metadata that it does not know but refuses unknown tensors, and readers build an object per array
element: so every tensor is one base64 string.
"""
from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pykvq.calibration.bias_pairs import MAX_PAIRS
from pykvq.calibration.transform import Transform
from pykvq.formats import CODEBOOK
from pykvq.gguf_file import GgufFile

VERSION = 1
PREFIX = "kvq."
CHECKSUM = "kvq.checksum"
F16_MAX = 65504


@dataclass(frozen=True)
class Embedded:
    """What a model file or a sidecar carries. provenance: the values under kvq.calibration., by their last name."""
    fingerprint: str
    codebook: str
    key_bias: str
    layers: Mapping[int, Transform]
    provenance: Mapping[str, object]
    checked: bool = True                 # False: read from a file without kvq.checksum


def checksum(values: Mapping[str, object]) -> str:
    """CRC-32 over all keys that are no arrays, by name, as "name=value" and a line feed; kvq.checksum itself is left out."""
    crc = 0
    for name in sorted(values, key=str.encode):
        if name != CHECKSUM and not isinstance(values[name], list):
            crc = zlib.crc32(f"{name}={values[name]}\n".encode(), crc)
    return f"crc32:{crc:08x}"


def encode(data: Embedded) -> dict[str, object]:
    """Keys and values to write. Raises ValueError for a transform that float16 cannot hold or that is not finite."""
    out: dict[str, object] = {"kvq.version": VERSION, "kvq.fingerprint": data.fingerprint, "kvq.codebook": data.codebook,
                              "kvq.key_bias": data.key_bias, "kvq.layers": sorted(data.layers)}
    for i in sorted(data.layers):
        t = data.layers[i]
        out |= {f"kvq.blk.{i}.k.mean": _text(t.mean, "<f2", i), f"kvq.blk.{i}.k.basis": _text(t.basis, "<f2", i),
                f"kvq.blk.{i}.k.lambda": _text(t.lam, "<f4", i)}
        if t.bias is not None:
            out[f"kvq.blk.{i}.k.bias"] = _text(t.bias, "<f2", i)
        if t.pairs is not None:
            out[f"kvq.blk.{i}.k.pairs"] = base64.b64encode(_pair_bits(t.pairs)).decode()
    out |= {f"kvq.calibration.{name}": value for name, value in data.provenance.items()}
    return out | {CHECKSUM: checksum(out)}


def decode(file: GgufFile) -> Embedded | None:
    """What the file carries, None when it has no kvq keys. Raises ValueError for keys that are incomplete or inconsistent."""
    if "kvq.version" not in file.keys:
        return None
    if file.get("kvq.version") != VERSION:
        raise ValueError(f"{file.path} carries kvq data of version {file.get('kvq.version')}, this pykvq reads {VERSION}; upgrade pykvq")
    try:
        layers = {i: _layer(file, i) for i in file.get("kvq.layers")}
        provenance = {name.removeprefix("kvq.calibration."): file.get(name) for name in file.keys if name.startswith("kvq.calibration.")}
        return Embedded(file.get("kvq.fingerprint"), file.get("kvq.codebook"), file.get("kvq.key_bias"), layers, provenance, _checked(file, layers))
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file.path} carries damaged kvq data ({error}); run: pykvq embed-rotations --force {file.path}") from error


def current(data: Embedded) -> bool:
    """True when the data belong to the codebook of this installation."""
    return data.codebook == CODEBOOK


def _checked(file: GgufFile, layers: Mapping[int, Transform]) -> bool:
    """Whether the file has a checksum. Raises ValueError when it does not match."""
    values = {name: file.get(name) for name in file.keys if name.startswith(PREFIX)}
    wanted = values.get(CHECKSUM)
    if wanted is None:
        return False
    if checksum(values) != wanted:
        raise ValueError("its checksum does not match")
    if sum(name.endswith(".k.mean") for name in values) != len(layers):      # an array, which the checksum leaves out
        raise ValueError("kvq.layers does not name the layers that have data")
    return True


def _layer(file: GgufFile, i: int) -> Transform:
    def array(name: str, dtype: str) -> np.ndarray | None:
        text = file.get(f"kvq.blk.{i}.{name}")
        return None if text is None else np.frombuffer(base64.b64decode(text, validate=True), dtype).astype(np.float64)

    mean, basis, lam, bias = array("k.mean", "<f2"), array("k.basis", "<f2"), array("k.lambda", "<f4"), array("k.bias", "<f2")
    if any(a is None for a in (mean, basis, lam)):
        raise ValueError(f"layer {i} is incomplete")
    d, rest = divmod(basis.size, mean.size)
    if rest or not d or mean.size % d or lam.size != mean.size or bias is not None and bias.size != mean.size:
        raise ValueError(f"the shapes of layer {i} do not agree")
    h = mean.size // d
    bits = array("k.pairs", "u1")
    pairs = None if bits is None else np.flatnonzero(np.unpackbits(bits.astype(np.uint8), bitorder="little"))
    return Transform(mean.reshape(h, d), basis.reshape(h, d, d), lam.reshape(h, d), None if bias is None else bias.reshape(h, d), pairs)


def _pair_bits(pairs: np.ndarray) -> bytes:
    """A bit a frequency pair, lowest first."""
    bits = np.zeros(MAX_PAIRS, np.uint8)
    bits[pairs] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _text(a: np.ndarray, dtype: str, layer: int) -> str:
    if not np.isfinite(a).all() or dtype == "<f2" and np.abs(a).max(initial=0) > F16_MAX:
        raise ValueError(f"the statistics of layer {layer} are not finite or exceed float16; calibrate on other text (--text)")
    return base64.b64encode(np.ascontiguousarray(a, dtype).tobytes()).decode()
