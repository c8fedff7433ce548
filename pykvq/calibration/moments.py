"""Sums over tokens, per layer and KV head, in float64: all that calibration keeps of the tokens."""
from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from pykvq.calibration.observer import Keys, Queries
from pykvq.calibration.rope import Rope

SINKS = 4                                # the first tokens of a chunk are attention sinks, not typical ones
_ARRAYS = ("k", "kk", "v", "vv", "qq", "kt", "t", "tt")


@dataclass
class LayerSums:
    """Sums of one layer. t is the row of cosines and sines of the token's position (rope.table), r values long.

    k [h, d], kk [h, d, d], v [h, d_v], vv [h, d_v, d_v], kt [h, d, r] (key times t), t [r], tt [r, r] over n tokens;
    qq [h, d, d] over n_q queries of the head's group. kt, t and tt let a bias that turns with the position be removed
    from the sums afterwards.
    """
    heads: int
    n: int = 0
    n_q: int = 0
    rope: Rope | None = None
    k: np.ndarray | float = 0.0
    kk: np.ndarray | float = 0.0
    v: np.ndarray | float = 0.0
    vv: np.ndarray | float = 0.0
    qq: np.ndarray | float = 0.0
    kt: np.ndarray | float = 0.0
    t: np.ndarray | float = 0.0
    tt: np.ndarray | float = 0.0


@dataclass
class Moments:
    """Sums of all layers. Positions of the chunk's tokens must be set before each chunk."""
    layers: dict[int, LayerSums] = field(default_factory=dict)
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, int))

    def add(self, seen: Keys | Queries) -> None:
        """Add what the observer saw of one layer in one chunk; its first SINKS tokens are left out.

        Keys and values in float64, because a key bias may be 1,000 times larger than what varies; queries in float32
        products. Raises ValueError when a layer's queries are no multiple of its KV heads.
        """
        if isinstance(seen, Keys):
            self._add_keys(seen)
        else:
            self._add_queries(seen)

    def _add_keys(self, seen: Keys) -> None:
        s = self.layers.setdefault(seen.layer, LayerSums(seen.k.shape[1], rope=seen.rope))
        k, v = (np.moveaxis(x[SINKS:].astype(np.float64), 1, 0) for x in (seen.k, seen.v))        # [h, n, d]
        s.n += k.shape[1]
        s.k, s.kk = s.k + k.sum(1), s.kk + _outer(k)
        s.v, s.vv = s.v + v.sum(1), s.vv + _outer(v)
        if s.rope is not None:
            t = s.rope.table(self.positions[SINKS:])
            s.kt, s.t, s.tt = s.kt + k.swapaxes(1, 2) @ t, s.t + t.sum(0), s.tt + t.T @ t

    def _add_queries(self, seen: Queries) -> None:
        s = self.layers[seen.layer]
        n, heads, d = seen.q[SINKS:].shape
        if heads % s.heads:
            raise ValueError(f"layer {seen.layer} has {heads} query heads for {s.heads} KV heads; such a model is not calibrated")
        grouped = seen.q[SINKS:].reshape(n, s.heads, -1, d).swapaxes(0, 1).reshape(s.heads, -1, d)
        s.n_q += grouped.shape[1]
        s.qq = s.qq + _outer(grouped)

    def copy(self) -> "Moments":
        """The same sums; adding to either leaves the other alone."""
        return Moments({i: replace(s) for i, s in self.layers.items()}, self.positions)      # sums are replaced, never changed in place

    def state(self) -> dict[str, np.ndarray]:
        """Arrays that restore() takes; float64 but for the counts."""
        out = {}
        for i, s in self.layers.items():
            out |= {f"{name}.{i}": np.asarray(getattr(s, name)) for name in _ARRAYS}
            out[f"counts.{i}"] = np.array([s.heads, s.n, s.n_q])
            out[f"rope.{i}"] = np.array(json.dumps(asdict(s.rope) if s.rope else None))
        return out

    @classmethod
    def restore(cls, arrays: dict[str, np.ndarray]) -> "Moments":
        """The Moments whose state() is `arrays`; further entries are ignored. Raises KeyError for an incomplete one."""
        layers = {}
        for i in sorted(int(key.split(".")[1]) for key in arrays if key.startswith("counts.")):
            rope = json.loads(str(arrays[f"rope.{i}"]))
            if rope:
                rope = Rope(**rope | {"factors": tuple(rope["factors"]) if rope["factors"] else None})
            heads, n, n_q = map(int, arrays[f"counts.{i}"])
            layers[i] = LayerSums(heads, n, n_q, rope, **{name: arrays[f"{name}.{i}"] for name in _ARRAYS})
        return cls(layers)


def _outer(x: np.ndarray) -> np.ndarray:
    """Sum over tokens of x x^T in the dtype of x: [h, n, d] to float64 [h, d, d]."""
    return np.stack([head.T @ head for head in np.ascontiguousarray(x)]).astype(np.float64)


def write_atomically(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Save an .npz under `path`; whoever reads it sees the old file or the new one, never a part."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(buffer.getbuffer())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
