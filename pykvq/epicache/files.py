"""A memory as files: one of what was clustered, one per episode, each with a sidecar that says what it belongs to."""
from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pykvq.epicache.build import Compressed
from pykvq.epicache.identity import mismatch
from pykvq.epicache.memory import Episode, Memory
from pykvq.epicache.segment import Segment
from pykvq.epicache.state import SequenceState


class Unusable(ValueError):
    """A saved cache that does not serve; the message is the reason."""


@dataclass(frozen=True)
class Saved:
    """One file: name in the conversation's folder, size and SHA-256."""
    name: str
    bytes: int
    sha256: str


def write(folder: Path, name: str, arrays: dict[str, np.ndarray], identity: dict) -> Saved:
    """Write NAME and NAME.json, each whole or not at all, and flushed to disk. Raises OSError."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    data = buffer.getvalue()
    saved = Saved(name, len(data), hashlib.sha256(data).hexdigest())
    _replace(folder / name, data)
    _replace(folder / f"{name}.json", json.dumps({"identity": identity, "bytes": saved.bytes, "sha256": saved.sha256}).encode())
    return saved


def read(folder: Path, saved: Saved, identity: dict | None) -> dict[str, np.ndarray]:
    """The arrays of a file. Raises Unusable when sidecar, identity, size or hash do not fit; identity None skips that one."""
    try:
        sidecar = json.loads((folder / f"{saved.name}.json").read_bytes())
        reason = mismatch(sidecar["identity"], identity) if identity is not None else None
        if reason:
            raise Unusable(reason)
        data = (folder / saved.name).read_bytes()
        if hashlib.sha256(data).hexdigest() != saved.sha256 or sidecar["sha256"] != saved.sha256:
            raise Unusable(f"{saved.name} is damaged")
        with np.load(io.BytesIO(data), allow_pickle=False) as f:
            return dict(f)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, zipfile.BadZipFile) as error:
        raise Unusable(f"{saved.name} cannot be read ({error})") from error


def memory_arrays(memory: Memory) -> dict[str, np.ndarray]:
    """All of a memory but the caches."""
    meta = {"prefix": memory.prefix, "segments": [[s.first, s.last, s.text] for s in memory.segments], "built": memory.built,
            "clustered": memory.clustered, "version": memory.version,
            "versions": [e.version for e in memory.episodes]}
    return {"meta": np.array(json.dumps(meta)), "vectors": memory.vectors, "label": memory.label,
            "centroids": np.stack([e.centroid for e in memory.episodes])}


def episode_arrays(episode: Episode) -> dict[str, np.ndarray]:
    """The cache of an episode; layers of one number of KV heads, or of several, as lists of arrays."""
    c = episode.cache
    return {"state": np.frombuffer(c.state.to_bytes(), np.uint8), "at": np.array([c.end, c.pinned]),
            **{f"tokens.{i}": t.astype(np.int32) for i, t in enumerate(c.tokens)}, **{f"scores.{i}": s for i, s in enumerate(c.scores)}}


def restored(arrays: dict[str, np.ndarray], episodes: list[dict[str, np.ndarray]]) -> Memory:
    """The memory of memory_arrays() and episode_arrays()."""
    meta = json.loads(str(arrays["meta"]))

    def cache(e: dict[str, np.ndarray]) -> Compressed:
        layers = range(sum(name.startswith("tokens.") for name in e))
        return Compressed(SequenceState.parse(e["state"].tobytes()), tuple(e[f"tokens.{i}"] for i in layers),
                          tuple(e[f"scores.{i}"] for i in layers), *map(int, e["at"]))
    return Memory(meta["prefix"], [Segment(*s) for s in meta["segments"]], arrays["vectors"], arrays["label"],
                  [Episode(c, cache(e), v) for c, e, v in zip(arrays["centroids"], episodes, meta["versions"])], meta["built"], meta["clustered"],
                  meta["version"])


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def flush(folder: Path) -> None:
    """Make the names of new files last, where folders can be flushed."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
