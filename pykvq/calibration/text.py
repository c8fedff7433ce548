"""The tokens that calibration runs on: the model's own samples, or text files."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np

from pykvq.engine import Context, Model

PARALLEL = 32                            # sequences sampled side by side
SPAN = 512                               # probabilities that are summed at once


def start_token(model: Model) -> int:
    """What a document begins with: BOS, else the end-of-text token, else token 0."""
    return next((t for t in (native.llama_vocab_bos(model.vocab), native.llama_vocab_eos(model.vocab)) if t >= 0), 0)


def own_samples(model: Model, tokens: np.ndarray, *, seed: int = 0, threads: int | None = None,
                advance: Callable[[int], None] = lambda n: None) -> None:
    """Fill int32 [chunks, length] in place: every row a document of the model's own, sampled at temperature 1.

    Columns that are not negative are there already: an interrupted call goes on from them. advance(n) is called after every n tokens.
    The same model, seed and shape give the same tokens on one machine, as long as nothing interrupts.
    """
    length = tokens.shape[1]
    for first in range(0, len(tokens), PARALLEL):
        group = tokens[first:first + PARALLEL]
        n, done = len(group), int((group >= 0).all(0).sum())
        if done == length:
            continue
        if not done:
            group[:, 0], done = start_token(model), 1
            advance(n)
        with Context(model, n * length, n_seq=n, threads=threads, kvq="off") as context:
            for s in range(n):
                context.decode(group[s, :done - 1].tolist(), 0, seq=s, logits="none")
            for i in range(done, length):
                logits = context.decode_batch([(int(group[s, i - 1]), i - 1, s, True) for s in range(n)])
                group[:, i] = _draw(logits, np.random.default_rng([seed, first, i]).random(n))
                advance(n)


def _draw(logits: np.ndarray, u: np.ndarray) -> np.ndarray:
    """One token per row of logits [n, vocabulary], by inverting the cumulative distribution at u [n]."""
    return np.array([_invert(np.exp(row - row.max()), x) for row, x in zip(logits, u)])


def _invert(p: np.ndarray, x: float) -> int:
    """The first index at which the running sum of p exceeds the share x of all. Sums of spans come first: one over a whole
    vocabulary takes longer than the model's step on a GPU."""
    ends = np.add.reduceat(p, np.arange(0, len(p), SPAN), dtype=np.float64).cumsum()
    goal = x * ends[-1]
    span = min(int(np.searchsorted(ends, goal, "right")), len(ends) - 1)
    inside = p[span * SPAN:(span + 1) * SPAN].cumsum(dtype=np.float64) + (ends[span - 1] if span else 0)
    return span * SPAN + min(int(np.searchsorted(inside, goal, "right")), len(inside) - 1)


def text_chunks(model: Model, paths: Sequence[Path], chunks: int, length: int) -> np.ndarray:
    """Chunks at even distances through the files, read one after the other; int32 [chunks, length], each with the start token.

    Raises ValueError when the files hold fewer tokens than that.
    """
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    step, n = len(text) // chunks, length - 1
    parts = [model.tokenize(text[i * step:(i + 1) * step][:32 * length], bos=False)[:n] for i in range(chunks)]
    if min(map(len, parts)) < n:             # too short, or sparse in places: cut by tokens
        tokens = model.tokenize(text, bos=False)
        if len(tokens) < chunks * n:
            hint = f"use --tokens {len(tokens) // n * length} or more text" if len(tokens) >= n else "use more text"
            raise ValueError(f"the text has {len(tokens)} tokens, {chunks * length} are asked for; {hint}")
        parts = [tokens[i * n:(i + 1) * n] for i in range(chunks)]
    return np.array([[start_token(model), *part] for part in parts], np.int32)


def text_hash(tokens: np.ndarray) -> str:
    """SHA-256 of the token ids as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()
