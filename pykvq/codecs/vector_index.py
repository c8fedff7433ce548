"""A flat compressed index for nearest-neighbour search: every query meets every vector, each of b bits a value."""
from __future__ import annotations

import json
import sys
from os import PathLike

import numpy as np

from pykvq.codecs.checks import integer, vectors
from pykvq.codecs.packing import pack, packed_bytes, unpack
from pykvq.codecs.rotation import HaarRotation, HadamardRotation
from pykvq.codecs.turboquant import MSECodes, ProdCodes, TurboQuantMSE, TurboQuantProd

VERSION = 1
METRICS = ("inner", "cosine", "l2")
METHODS = ("unbiased", "norm", "prod")
ROWS, QUERIES = 4096, 1024                               # vectors that are unpacked, and queries that meet them, at a time


class VectorIndex:
    """Online index: vectors can be added at any time, nothing is trained.

    d: values per vector, 2 or more. bits: per value, 1..8. metric: "inner" (largest inner product), "cosine" or "l2" (smallest
    Euclidean distance). method: "unbiased" is TurboQuant-MSE with a factor that takes the shrinkage out of inner products,
    "norm" the paper's TurboQuant-MSE (with "cosine" it stores nothing but codes), "prod" the paper's TurboQuant-Prod.
    rotation: "hadamard" (fast) or "haar". Raises ValueError for values outside these.
    """

    def __init__(self, d: int, bits: int = 4, *, metric: str = "inner", method: str = "unbiased", rotation: str = "hadamard", seed: int = 0):
        if metric not in METRICS or method not in METHODS:
            raise ValueError(f"metric is one of {', '.join(METRICS)} and method one of {', '.join(METHODS)}")
        self.metric, self.method = metric, method
        self.codec = (TurboQuantProd(d, bits, rotation=rotation, seed=seed) if method == "prod"
                      else TurboQuantMSE(d, bits, rotation=rotation, scale=method, seed=seed))
        self.d, self.bits, self._length = self.codec.d, self.codec.bits, 0
        self._factor_type = np.dtype(np.float16 if metric == "cosine" else np.float32)     # without the norm, factors are near one
        self._added = [(np.empty((0, packed_bytes(self.d, self.bits)), np.uint8), np.empty((0, self._factor_count()), self._factor_type))]

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of the stored vectors: packed codes and factors."""
        return sum(codes.nbytes + factors.nbytes for codes, factors in self._added)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, factors and padding counted."""
        return 8 * (packed_bytes(self.d, self.bits) + self._factor_type.itemsize * self._factor_count()) / self.d

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes uint8 [n, bytes] and factors [n, factors], joined when first needed after an add."""
        if len(self._added) > 1:
            self._added = [tuple(np.concatenate(parts) for parts in zip(*self._added))]
        return self._added[0]

    def add(self, x: np.ndarray) -> np.ndarray:
        """Adds vectors, float [n, d] (or one, [d]), and returns their ids, int64 [n]: consecutive from the present length.

        Raises ValueError for another shape, values that are not finite, norms beyond float32 (with "l2" their squares) or, with "cosine",
        a zero vector; the index is then unchanged.
        """
        x = self._rows(x)
        if self.metric == "cosine":
            x = _unit_rows(x)
        q = self.codec.quantise(x)
        if self.method == "prod":
            packed, factors = np.concatenate([pack(q.codes, self.bits - 1), pack(q.signs, 1)], -1), [q.residual, q.norm]
        else:
            packed, factors = pack(q.codes, self.bits), [q.scale]
        if self.metric == "cosine" and self.method != "unbiased":
            factors.pop()                                # the norm of a unit vector
        if self.metric == "l2":
            factors.append(_squares(x))
        first = len(self)
        self._added.append((packed, np.array(factors, self._factor_type).T.reshape(len(x), self._factor_count())))
        self._length += len(x)
        return np.arange(first, len(self))

    def _rows(self, x: np.ndarray) -> np.ndarray:
        """float [n, d] or [d] as finite float32 [n, d]."""
        x = np.atleast_2d(vectors(x, self.d))
        if x.ndim != 2:
            raise ValueError(f"vectors must have shape [n, {self.d}], not {x.shape}")
        return x

    def _factor_count(self) -> int:
        """Stored factors per vector: of float32, or float16 with "cosine"."""
        norms = {"unbiased": 1, "norm": 1, "prod": 2}[self.method]
        return norms + {"inner": 0, "l2": 1, "cosine": 0 if self.method == "unbiased" else -1}[self.metric]

    def search(self, queries: np.ndarray, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """The k best vectors for each query, best first: scores float32 [n, k] and ids int64 [n, k], k cut to the index's length.

        queries: float [n, d] (or one, [d]). Scores are estimates of the inner product, the cosine or the squared distance.
        Raises ValueError for another shape, values that are not finite, k < 1, scores beyond float32 or, with "cosine", a zero vector.
        """
        y, k = self._rows(queries), integer("k", k, 1, sys.maxsize)
        if self.metric == "cosine":
            y = _unit_rows(y)
        k = min(k, len(self))
        with np.errstate(over="ignore", invalid="ignore"):       # told below
            parts = [self._search(y[i:i + QUERIES], k) for i in range(0, max(len(y), 1), QUERIES)]
        scores, ids = (np.concatenate(p) for p in zip(*parts))
        if not np.isfinite(scores).all():
            raise ValueError("a score exceeds the range of float32: scale the vectors down")
        return scores, ids

    def _search(self, y: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """search for one block of checked queries."""
        best, ids = np.empty((len(y), 0), np.float32), np.empty((len(y), 0), np.int64)
        for i in range(0, len(self), ROWS):
            score = self._gains(y, slice(i, i + ROWS))
            best = np.concatenate([best, score], -1)
            ids = np.concatenate([ids, np.broadcast_to(np.arange(i, i + score.shape[1]), score.shape)], -1)
            if best.shape[1] > k:
                keep = np.argpartition(-best, k - 1, axis=-1)[:, :k]
                best, ids = np.take_along_axis(best, keep, -1), np.take_along_axis(ids, keep, -1)
        order = np.argsort(-best, axis=-1, kind="stable")
        best, ids = np.take_along_axis(best, order, -1), np.take_along_axis(ids, order, -1)
        if self.metric == "l2":
            best = np.maximum(np.square(y).sum(-1, keepdims=True) - best, 0)
        return best, ids

    def _gains(self, y: np.ndarray, rows: slice) -> np.ndarray:
        """What search maximises for stored rows, float32 [queries, rows]: with l2 it is 2 <y, x> - |x|^2."""
        data, factors = (a[rows] for a in self._arrays())
        factors = factors.astype(np.float32)
        unit = np.ones(len(data), np.float32)
        if self.method == "prod":
            split = packed_bytes(self.d, self.bits - 1)
            norm = unit if self.metric == "cosine" else factors[:, 1]
            q = ProdCodes(unpack(data[:, :split], self.d, self.bits - 1), unpack(data[:, split:], self.d, 1), norm, factors[:, 0])
        else:
            q = MSECodes(unpack(data, self.d, self.bits), factors[:, 0] if factors.shape[1] else unit)
        inner = self.codec.inner(y, q)
        return 2 * inner - factors[:, -1] if self.metric == "l2" else inner

    def save(self, path: str | PathLike) -> None:
        """Writes one .npz file under exactly this name: parameters, rotation, codes and factors."""
        header = {"version": VERSION, "d": self.d, "bits": self.bits, "metric": self.metric, "method": self.method,
                  "rotation": "haar" if isinstance(self.codec.rotation, HaarRotation) else "hadamard"}
        codes, factors = self._arrays()
        arrays = {"codes": codes, "factors": factors, "rotation": self.codec.rotation.state(), "centroids": self.codec.centroids}
        if self.method == "prod":
            arrays["projection"] = self.codec.projection
        with open(path, "wb") as file:
            np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)

    @classmethod
    def load(cls, path: str | PathLike) -> VectorIndex:
        """Reads what save wrote. Raises ValueError for a file of another kind or version, OSError when it cannot be read."""
        with open(path, "rb") as file:
            try:
                with np.load(file, allow_pickle=False) as archive:
                    arrays = {name: archive[name] for name in archive.files}
                header = json.loads(arrays["header"].tobytes())
                version = header["version"]
            except Exception as error:                   # zipfile and numpy raise a dozen kinds for what is no archive of ours
                raise ValueError(f"{path} is no index of pykvq, or damaged") from error
        if version != VERSION:
            raise ValueError(f"{path} has format version {version}, this release reads {VERSION}")
        try:
            return cls._restored(header, arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    @classmethod
    def _restored(cls, header: dict, arrays: dict[str, np.ndarray]) -> VectorIndex:
        """An index of what save wrote. Raises KeyError, TypeError or ValueError for parts that are absent or do not fit together."""
        index = cls(header["d"], header["bits"], metric=header["metric"], method=header["method"], rotation=header["rotation"])
        codes, factors = index._added[0]
        rows = len(arrays["codes"])
        expected = {"codes": codes, "factors": factors, "rotation": index.codec.rotation.state(), "centroids": index.codec.centroids}
        if header["method"] == "prod":
            expected["projection"] = index.codec.projection
        for name, like in expected.items():
            shape = (rows, like.shape[1]) if name in ("codes", "factors") else like.shape
            if arrays[name].shape != shape or arrays[name].dtype != like.dtype:
                raise ValueError(f"its {name} are {arrays[name].dtype} {arrays[name].shape}, not {like.dtype} {shape}")
        index.codec.rotation = (HaarRotation.from_state(arrays["rotation"]) if header["rotation"] == "haar"
                                else HadamardRotation.from_state(arrays["rotation"], index.d))
        index.codec.centroids = arrays["centroids"]
        if header["method"] == "prod":
            index.codec.projection = arrays["projection"]
        index._added, index._length = [(arrays["codes"], arrays["factors"])], rows
        return index


def _squares(x: np.ndarray) -> np.ndarray:
    """|x|^2 of float32 [n, d]. Raises ValueError beyond float32."""
    with np.errstate(over="ignore"):                     # told below
        squares = np.square(x).sum(-1)
    if not np.isfinite(squares).all():
        raise ValueError("a squared norm exceeds the range of float32: scale the vectors down")
    return squares


def _unit_rows(x: np.ndarray) -> np.ndarray:
    """x / |x|. Raises ValueError for a zero vector, which has no direction."""
    peak = np.abs(x).max(-1, keepdims=True)
    if not (peak > 0).all():
        raise ValueError("the cosine of a zero vector is not defined")
    x = x / peak
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
