"""The same prompt and text through several cache types of one model: answers, bytes, divergence, speed."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice

import numpy as np

from pykvq.engine import Context, Model, kl_divergence
from pykvq.evaluation.generation import first_divergence, most_likely
from pykvq.speed import decode_speeds

CONTEXT_TOKENS, SCORED_TOKENS = 640, 192         # of the bundled text: read first, or what fits, then scored; beyond the default window
SCORED_BATCH = 32                                # a batch counts as recent as a whole, so a small one meets nearly the cache that a token alone would


@dataclass(frozen=True)
class Result:
    """What one cache type did. Divergences are mean KL from f16 in nats per token; None where there is nothing to compare."""
    kv_type: tuple[str, str]
    effective: tuple[str, str]
    answer: str
    same_tokens: int                 # leading tokens of the answer that equal f16's
    bytes: int
    bytes_f16: int
    kl_answer: float | None
    kl_text: float
    tokens_per_second: float


@dataclass
class _Reference:
    """f16's answer and logits."""
    answer: list[int]
    answer_logits: np.ndarray
    text_logits: np.ndarray


def passage() -> str:
    """The bundled text, about 750 words."""
    return (files("pykvq") / "data/passage.txt").read_text()


def steps(kv_types: Sequence[tuple[str, str]], repeats: int = 3) -> int:
    """How often compare() calls its step function."""
    return 2 * (len(kv_types) + 1) + repeats


def greedy(context: Context, prompt: Sequence[int], limit: int) -> tuple[list[int], np.ndarray]:
    """The most likely continuation, and the logits that chose each token: [n] and float32 [n, n_vocab]."""
    tokens, rows = [], []
    for token, logits in islice(most_likely(context, prompt), limit):
        if context.model.ends(token):
            break
        tokens.append(token)
        rows.append(logits)
    return tokens, np.array(rows).reshape(len(rows), context.model.n_vocab)


def forced(context: Context, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Logits before each token of a given answer, decoded token by token; float32 [len(answer), n_vocab]."""
    context.clear()
    rows = [context.decode(prompt, 0)]
    rows += [context.decode_batch([(token, len(prompt) + i, 0, True)]) for i, token in enumerate(answer[:-1])]
    return np.concatenate(rows)[:len(answer)]


def text_logits(context: Context, tokens: Sequence[int], n_ctx: int) -> np.ndarray:
    """Logits over the scored part of the bundled text."""
    context.clear()
    read = min(CONTEXT_TOKENS, n_ctx - SCORED_TOKENS)
    context.decode(tokens[:read], 0, logits="none")
    return np.concatenate([context.decode(tokens[i:i + SCORED_BATCH], i, logits="all") for i in range(read, read + SCORED_TOKENS, SCORED_BATCH)])


def compare(model: Model, prompt: Sequence[int], kv_types: Sequence[tuple[str, str]], *, n_ctx: int, max_tokens: int, depth: int,
            threads: int | None = None, repeats: int = 3, window: dict[str, int | None] | None = None, step: Callable[[str], None] = lambda _: None) -> list[Result]:
    """Results for f16 and then for each of kv_types. window: kv_sink and kv_recent of Context, where they are not the default.

    Raises ValueError when prompt and answer, or the depth, do not fit n_ctx, and what Context raises.
    """
    if len(prompt) + max_tokens > n_ctx or depth + 32 > n_ctx or 2 * SCORED_TOKENS > n_ctx:
        raise ValueError(f"a context of {n_ctx} is too small for this prompt ({len(prompt)} tokens), answer ({max_tokens}), depth ({depth}) "
                         f"and text ({2 * SCORED_TOKENS}); raise --ctx")
    text, pairs = model.tokenize(passage()), [("f16", "f16"), *kv_types]
    window = window or {}
    reference, partial = None, {}
    for pair in pairs:
        step(f"{'/'.join(pair)}: answer and text")
        with Context(model, n_ctx, pair, threads=threads, **window) as context:
            answer, logits = greedy(context, prompt, max_tokens)
            scored = text_logits(context, text, n_ctx)
            if reference is None:
                reference = _Reference(answer, logits, scored)
            ours = logits if pair == pairs[0] else forced(context, prompt, reference.answer)
            partial[pair] = (context.info(), answer, ours, scored)
    with ExitStack() as stack:
        contexts = {"/".join(pair): stack.enter_context(Context(model, depth + 32, pair, threads=threads, **window)) for pair in pairs}
        speeds = decode_speeds(contexts, text, depth, repeats=repeats, step=step)
    results = []
    for pair, (info, answer, ours, scored) in partial.items():
        same = first_divergence(reference.answer, answer)
        layer = info[0]
        results.append(Result(pair, (layer.type_k, layer.type_v), model.text(answer), same, info.bytes, info.bytes_f16,
                              float(kl_divergence(reference.answer_logits, ours).mean()) if reference.answer else None,
                              float(kl_divergence(reference.text_logits, scored).mean()), speeds["/".join(pair)]))
    return results
