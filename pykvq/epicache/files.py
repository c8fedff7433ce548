"""A memory as files: one of what was clustered, one per chunk of rows or cache of an episode, each with a sidecar that says what it belongs to."""
from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pykvq.epicache.archive import Archive, Chunk
from pykvq.epicache.build import Compressed
from pykvq.epicache.identity import mismatch
from pykvq.epicache.memory import Episode, Memory
from pykvq.epicache.segment import Segment
from pykvq.sequence_state import SequenceState


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
    """All of a memory but the rows."""
    meta = {"prefix": memory.prefix, "segments": [[s.first, s.last, s.text] for s in memory.segments], "starts": memory.starts, "built": memory.built,
            "clustered": memory.clustered, "version": memory.version, "archive": bool(memory.archive.chunks),
            "versions": [part.version for part in parts(memory)]}
    return {"meta": np.array(json.dumps(meta)), "vectors": memory.vectors, "label": memory.label,
            "centroids": np.stack([e.centroid for e in memory.episodes])}


def parts(memory: Memory) -> Sequence[Chunk | Episode]:
    """What has a file of its own: the chunks of an archive, or the episodes."""
    return memory.archive.chunks or memory.episodes


def part_arrays(part: Chunk | Episode) -> dict[str, np.ndarray]:
    """Rows, and for the cache of an episode what each head keeps; layers of one number of KV heads, or of several, as lists of arrays."""
    if isinstance(part, Chunk):
        return {"state": np.frombuffer(part.state.to_bytes(), np.uint8)}
    c = part.cache
    return {"state": np.frombuffer(c.state.to_bytes(), np.uint8), "at": np.array([c.end, c.pinned]),
            **{f"tokens.{i}": t.astype(np.int32) for i, t in enumerate(c.tokens)}, **{f"scores.{i}": s for i, s in enumerate(c.scores)}}


def part_count(arrays: dict[str, np.ndarray]) -> int:
    """How many parts the memory of memory_arrays() has."""
    return len(json.loads(str(arrays["meta"]))["versions"])


def restored(arrays: dict[str, np.ndarray], saved: list[dict[str, np.ndarray]]) -> Memory:
    """The memory of memory_arrays() and part_arrays()."""
    meta = json.loads(str(arrays["meta"]))
    states = [SequenceState.parse(a["state"].tobytes()) for a in saved]

    def cache(state: SequenceState, e: dict[str, np.ndarray]) -> Compressed:
        layers = range(sum(name.startswith("tokens.") for name in e))
        return Compressed(state, tuple(e[f"tokens.{i}"] for i in layers), tuple(e[f"scores.{i}"] for i in layers), *map(int, e["at"]))
    if meta["archive"]:
        archive, episodes = Archive(tuple(map(Chunk, states, meta["versions"]))), [Episode(c, None, "") for c in arrays["centroids"]]
    else:
        archive, episodes = Archive(), [Episode(c, cache(*pair), v) for c, pair, v in zip(arrays["centroids"], zip(states, saved), meta["versions"])]
    return Memory(meta["prefix"], [Segment(*s) for s in meta["segments"]], arrays["vectors"], arrays["label"], episodes, meta["built"],
                  meta["clustered"], meta["version"], archive, meta["starts"])


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
