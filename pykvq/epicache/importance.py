"""How much the prompt of an episode attends to each cached token, per layer and KV head."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pykvq.epicache.queries import LayerQueries
from pykvq.epicache.rows import values
from pykvq.sequence_state import Rows, SequenceState

_WEIGHTS = 1 << 22                        # held at a time by each thread


def attention_scores(queries: LayerQueries, keys: np.ndarray, positions: np.ndarray, by: str = "max") -> np.ndarray:
    """Float32 [heads_kv, cells]: the largest softmax weight that any query head of the group gives to the cell at any prompt token.

    by: "mean" for the mean weight instead; the published score is the maximum (arXiv 2509.17396, section 3). keys: float32 [cells, heads_kv, d]; the
    softmax runs over the cells alone.
    positions: int [cells], read only where the keys lack a bias.
    """
    cells, heads_kv, d = keys.shape
    tokens, heads, _ = queries.q.shape
    turned = queries.bias.turn(positions) if queries.bias else None
    out, step = np.zeros((heads_kv, cells), np.float32), max(1, _WEIGHTS // cells)
    for h, group in enumerate(np.split(np.arange(heads), heads_kv)):
        q, k = queries.q[:, group].reshape(-1, d), keys[:, h].T
        z = queries.bias.z[:, group].reshape(-1, turned.shape[1]) if queries.bias else None
        for rows in (slice(i, i + step) for i in range(0, len(q), step)):
            weights = q[rows] @ k
            if z is not None:
                weights += z[rows] @ turned.T
            weights -= weights.max(1, keepdims=True)
            np.exp(weights, out=weights)
            share = 1 / weights.sum(1)
            out[h] = np.maximum(out[h], (weights * share[:, None]).max(0)) if by == "max" else out[h] + share @ weights / len(q)
    return out


def state_scores(queries: dict[int, LayerQueries], layers: list[int], heads_kv: list[int], state: SequenceState,
                 by: str = "max") -> list[np.ndarray]:
    """attention_scores of every cached layer, on the keys as the cache holds them. Raises ValueError for a layer nothing attended to."""
    def scores(layer: int, heads: int, rows: Rows) -> np.ndarray:
        if layer not in queries:
            raise ValueError(f"no attention read the cache of layer {layer}")
        return attention_scores(queries[layer], values(rows.heads(heads), rows.ggml_type), state.positions, by)
    with ThreadPoolExecutor() as pool:                   # a question waits for it, and numpy leaves the lock alone
        return list(pool.map(scores, layers, heads_kv, state.keys))
