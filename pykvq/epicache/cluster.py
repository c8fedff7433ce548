"""Segments into episodes."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykvq.epicache.extra import needed

MOST = 8                                  # episodes; each one costs a prefill of the history


@dataclass(frozen=True)
class Clusters:
    """centroids: float32 [E, d], not normalised again; label: int [segments]."""
    centroids: np.ndarray
    label: np.ndarray


def cluster(vectors: np.ndarray, n: int, seed: int = 42) -> Clusters:
    """K-means of unit vectors [segments, d] into n episodes: k-means++, 10 starts (arXiv 2509.17396, its code)."""
    with needed("scikit-learn"):
        from sklearn.cluster import KMeans
    fit = KMeans(n, n_init=10, random_state=seed).fit(vectors)
    return Clusters(fit.cluster_centers_.astype(np.float32), fit.labels_.astype(int))


def episodes(vectors: np.ndarray, history: int, budget: int, seed: int = 42) -> Clusters:
    """Clusters in a number that nobody has to choose: at least history / budget, so that an episode of average length fits the
    budget of tokens, at most twice that and MOST; of these the one with the best silhouette.
    """
    with needed("scikit-learn"):
        from sklearn.metrics import silhouette_score
    distinct = len(np.unique(vectors, axis=0))
    least = min(max(2, -(-history // budget)), MOST, distinct)
    best, best_score = None, -np.inf
    for n in range(least, min(2 * least, MOST, distinct) + 1):
        found = cluster(vectors, n, seed)
        proper = 1 < n < len(vectors)
        score = silhouette_score(vectors, found.label, metric="cosine") if proper else -1
        if score > best_score:
            best, best_score = found, score
    return best


def representatives(vectors: np.ndarray, centroid: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Indices of an episode's segments, the nearest to its centroid first, by cosine."""
    return members[np.argsort(-(vectors[members] @ (centroid / np.linalg.norm(centroid))), kind="stable")]
