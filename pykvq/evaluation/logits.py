"""Next-token distributions of one cache held on disk in 16 bits, and the divergence of another cache from them."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RANGE = 24.0                         # nats below the most likely token that are told apart; what lies lower has a probability below 4e-11
_STEP = RANGE / 65535
_ROWS = 32                           # at a time, so that a vocabulary of 262,144 needs tens of MB


@dataclass(frozen=True)
class Distributions:
    """codes uint16 [n, n_vocab]: steps of RANGE / 65535 nats below the most likely token; best int32 [n] is that token.

    The idea of the base file of llama-perplexity --kl-divergence, with 24 nats instead of 16. Probabilities are made to sum to one
    again, which takes away what the rounding of codes adds to a divergence in first order.
    """
    codes: np.ndarray
    best: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray) -> "Distributions":
        """From float32 logits [n, n_vocab]."""
        codes = np.empty(logits.shape, np.uint16)
        for rows in _slices(len(logits)):
            below = logits[rows].max(1, keepdims=True) - logits[rows]
            codes[rows] = np.rint(np.minimum(below, RANGE) / np.float32(_STEP))
        return cls(codes, logits.argmax(1).astype(np.int32))

    def divergence(self, logits: np.ndarray) -> np.ndarray:
        """KL(self || softmax(logits)) in nats per row; float64 [n]."""
        out = np.empty(len(logits))
        for rows in _slices(len(logits)):
            log_p, log_q = _log_softmax(self.codes[rows] * np.float32(-_STEP)), _log_softmax(logits[rows])
            out[rows] = (np.exp(log_p) * (log_p - log_q)).sum(1, dtype=np.float64)
        return out


def surprise(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Negative log-likelihood, in nats, of the token that followed each row; float64 [n]."""
    return np.concatenate([-_log_softmax(logits[rows])[np.arange(rows.stop - rows.start), tokens[rows]] for rows in _slices(len(logits))]).astype(float)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis; float32, its sum in float64."""
    x = logits - logits.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True, dtype=np.float64)).astype(np.float32)


def _slices(n: int) -> list[slice]:
    return [slice(i, min(i + _ROWS, n)) for i in range(0, n, _ROWS)]
