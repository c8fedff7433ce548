"""Recall of the nearest neighbour, and indexing time, beside product quantisation (faiss) at equal bits."""
from __future__ import annotations

import numpy as np

from pykvq.codecs import VectorIndex

from .theory import seconds

KS = (1, 2, 4, 8, 16, 32, 64)
METHODS = {"norm": "TurboQuant-MSE", "prod": "TurboQuant-Prod", "unbiased": "VectorIndex default"}


def recall(x: np.ndarray, queries: np.ndarray, bits: tuple[int, ...] = (2, 4)) -> list[dict]:
    """Recall 1@k: how often the vector of largest inner product is among the k first of the index. Unit vectors, float32 [n, d]."""
    best = np.concatenate([(queries[i:i + 100] @ x.T).argmax(1) for i in range(0, len(queries), 100)])
    rows = []
    for b in bits:
        for method, name in METHODS.items():
            index = VectorIndex(x.shape[1], b, metric="cosine", method=method, rotation="haar" if method != "unbiased" else "hadamard")
            time = seconds(lambda: index.add(x))
            rows.append(row(name, b, index.bits_per_value, time, index.search(queries, max(KS))[1], best))
        pq = product_quantiser(x.shape[1], b)
        time = seconds(lambda: (pq.train(x), pq.add(x)))
        rows.append(row("product quantisation", b, pq.code_size * 8 / x.shape[1], time, pq.search(queries, max(KS))[1], best))
    return rows


def row(name: str, bits: int, stored: float, time: float, ids: np.ndarray, best: np.ndarray) -> dict:
    hit = ids == best[:, None]
    return {"name": name, "bits": bits, "stored_bits": stored, "seconds": time, "recall": {str(k): hit[:, :k].any(1).mean() for k in KS}}


def product_quantiser(d: int, bits: int):
    """faiss.IndexPQ of d * bits bits a vector: 256 centroids a part, 16 where d has no fitting divisor. One thread."""
    import faiss
    faiss.omp_set_num_threads(1)
    parts, code_bits = (d * bits // 8, 8) if d * bits % 8 == 0 and d % (d * bits // 8) == 0 else (d * bits // 4, 4)
    index = faiss.IndexPQ(d, parts, code_bits, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.seed = 1234
    return index


def product_quantiser_seconds(d: int, n: int, bits: int = 4) -> float:
    """Processor seconds to train on n Gaussian vectors and add them."""
    x = np.random.default_rng(51).standard_normal((n, d), np.float32)
    index = product_quantiser(d, bits)
    return seconds(lambda: (index.train(x), index.add(x)))
