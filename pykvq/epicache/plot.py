"""pykvq epicache inspect --plot: when each episode was talked about, and which tokens are kept for it."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from pykvq.epicache.memory import Memory


def plot(memory: Memory, title: str, path: Path) -> None:
    """Draw to `path`; the suffix chooses the format. Raises ValueError without matplotlib or for an unknown suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib; run: pip install 'pykvq[plot]'") from error
    figure = Figure(figsize=(11, 1.5 + 0.9 * len(memory.episodes)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2])
    for segment, label in zip(memory.segments, memory.label):
        left.barh(label, segment.last - segment.first, left=segment.first, height=0.6, color=f"C{label}")
    left.set(xlabel="utterance", ylabel="episode", title=f"{title}: episodes", yticks=range(len(memory.episodes)))
    for e in range(len(memory.episodes)):
        share = _share(memory, e)
        right.fill_between(np.arange(len(share)), e, e + 0.9 * share, color=f"C{e}", lw=0, step="mid")
    right.set(xlabel="token of the history", title="share of the layers and heads that keep it", yticks=range(len(memory.episodes)))
    figure.savefig(path, dpi=120)


def _share(memory: Memory, e: int) -> np.ndarray:
    """Of each token of the history, how many of the layers and heads keep it for the episode; of an archive, all or none."""
    cache = memory.episodes[e].cache
    if cache is None:
        share = np.zeros(memory.archive.end)
        for (start, end), label in zip(memory.spans, memory.label):
            share[start:end] += label == e
        return share.clip(0, 1)
    at = np.concatenate([layer.ravel() for layer in cache.tokens])
    return np.bincount(at[at >= 0], minlength=cache.end) / sum(len(layer) for layer in cache.tokens)
