"""The evaluation itself: one f16 pass, then every type against it, piece by piece into a Store."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np

import pykvq
from pykvq.calibration.text import own_samples, text_chunks, text_hash
from pykvq.evaluation import generation, retrieval
from pykvq.evaluation.logits import Distributions, surprise
from pykvq.evaluation.store import Store, model_identity
from pykvq.engine import Context, Model
from pykvq.formats import CODEBOOK
from pykvq.native import llama_commit

F16 = ("f16", "f16")
WINDOW_BATCH = 32
DECODE_WEIGHT = 4                    # a token decoded alone takes about as long as this many of a batch
_SEED = 1                            # of the samples; calibration uses 0, and nobody should be examined on what he has learnt from


@dataclass(frozen=True)
class Setup:
    """Sizes, in tokens. `rows` positions of each of `chunks` texts of `context` tokens are scored; retrieval reads `texts` texts of
    each of `lengths`; generation makes `generated` tokens after the first half of every chunk."""
    context: int = 2048
    chunks: int = 2
    rows: int = 256
    lengths: tuple[int, ...] = (512, 1024, 2048)
    texts: int = 1
    generated: int = 96

    @property
    def positions(self) -> np.ndarray:
        """Scored positions of a chunk, evenly spaced; the last token has no successor to score."""
        return np.linspace(0, self.context - 2, min(self.rows + 1, self.context - 1)).astype(int)[1:]

    @property
    def prompt(self) -> int:
        """Tokens that a greedy run begins with: more than an f16 window holds, unless the context is short."""
        return self.context // 2

    def work(self) -> int:
        """Weighted tokens of one type."""
        return (self.chunks * self.context + self.texts * sum(self.lengths)
                + self.chunks * (self.prompt + DECODE_WEIGHT * self.generated))


QUICK = Setup(context=1024, chunks=2, rows=128, lengths=(512, 1024), texts=1, generated=48)     # 1024: three times the default f16 window


def configurations(kv_types: Sequence[tuple[str, str]], parts: bool) -> list[tuple[str, str]]:
    """f16, then of every pair both together, K alone and V alone."""
    out = [F16]
    for k, v in kv_types:
        out += [(k, v), *([(k, "f16"), ("f16", v)] if parts else [])]
    return list(dict.fromkeys(out))


class Evaluation:
    """Pieces of one model, text and setup; window: kv_sink and kv_recent of Context, where they are not the default. Raises ValueError for a model without a cache, a tokenizer or a decoder of its own, and, when
    run, for texts that are too short."""

    def __init__(self, model: Model, setup: Setup, *, text: Path | None = None, threads: int | None = None, window: dict[str, int | None] | None = None,
                 folder: Path | None = None):
        if not model.header.heads_kv:
            raise ValueError(f"{model.header.name} keeps no KV cache, so there is nothing to compare")
        if native.llama_model_has_encoder(model.handle):
            raise ValueError(f"{model.header.name} has an encoder; pykvq eval judges models that continue a text")
        model.tokenize("")                       # retrieval needs a tokenizer: said now, not after the other pieces
        self.model, self.setup, self.text, self.threads, self.window = model, setup, text, threads, window or {}
        self.source = f"text {text.name}" if text else f"own samples, temperature 1, seed {_SEED}"
        content = text_hash(np.frombuffer(text.read_bytes(), np.uint8)) if text else self.source
        self.store = Store({"model": model_identity(model.header.path), "text": content, "setup": asdict(setup), "version": pykvq.__version__,
                            "llama.cpp": llama_commit(), "codebook": CODEBOOK, "window": self.window, "gpu_layers": model.gpu_layers}, folder)

    def run(self, pairs: Sequence[tuple[str, str]], begin: Callable[[int], Callable[[str, int], None]] = lambda total: lambda label, done: None) -> None:
        """Measure every pair, F16 first; what is in the store is not run again. begin(total) is told the work and returns advance(label, done).

        Raises ValueError and MemoryError as Context does.
        """
        missing = [pair for pair in pairs if not self.store.has(f"{name(pair)}-done")]
        texts = not self.store.has("text")
        advance = begin(len(missing) * self.setup.work() + texts * self.setup.chunks * self.setup.context * (1 if self.text else DECODE_WEIGHT))
        chunks = self.chunks(lambda n: advance("text", n))
        for pair in missing:
            label, start = ",".join(pair), time.monotonic()
            self._scores(pair, chunks, lambda n: advance(f"{label}: divergence", n))
            self._retrieval(pair, lambda n: advance(f"{label}: retrieval", n))
            self._generation(pair, chunks, lambda n: advance(f"{label}: generation", n))
            self.store.put(f"{name(pair)}-done", seconds=time.monotonic() - start)

    def seconds(self, pairs: Sequence[tuple[str, str]]) -> float:
        """What the text and these pairs took when they were measured, which may have been in an earlier run."""
        return float(sum(self.store.get(piece)["seconds"] for piece in ("text", *(f"{name(pair)}-done" for pair in pairs))))

    def chunks(self, advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
        """The texts; int32 [chunks, context]."""
        if not self.store.has("text"):
            shape, start = (self.setup.chunks, self.setup.context), time.monotonic()
            if self.text:
                tokens = text_chunks(self.model, [self.text], *shape)
                advance(tokens.size)
            else:
                tokens = self.store.get("text-part")["tokens"] if self.store.has("text-part") else np.full(shape, -1, np.int32)
                advance(DECODE_WEIGHT * int((tokens >= 0).sum()))
                try:
                    own_samples(self.model, tokens, seed=_SEED, threads=self.threads, advance=lambda n: advance(DECODE_WEIGHT * n))
                except BaseException:
                    self.store.put("text-part", tokens=tokens)
                    raise
            self.store.put("text", tokens=tokens, seconds=time.monotonic() - start)
        return self.store.get("text")["tokens"]

    def _context(self, n_ctx: int, pair: tuple[str, str], **options) -> Context:
        """A context for the pair. All of a micro-batch counts as recent in an f16 window, so there it is kept small: a token must meet the
        cache that it would meet when decoded alone."""
        context = Context(self.model, n_ctx, pair, **self.window, threads=self.threads, **options)
        if not context.info().bytes_window:
            return context
        context.close()
        return Context(self.model, n_ctx, pair, **self.window, threads=self.threads, n_batch=WINDOW_BATCH, **options)

    def _scores(self, pair: tuple[str, str], chunks: np.ndarray, advance: Callable[[int], None]) -> None:
        """Divergence, surprise and agreement at the scored positions of every chunk."""
        setup, positions = self.setup, self.setup.positions
        todo = [i for i in range(len(chunks)) if not self.store.has(f"{name(pair)}-score-{i}")]
        advance((len(chunks) - len(todo)) * setup.context)
        if not todo:
            return
        with self._context(setup.context, pair) as context:
            self.store.put(f"{name(pair)}-cache", bytes=context.info().bytes, bytes_f16=context.info().bytes_f16,
                           window=max(layer.sink + layer.recent for layer in context.info()),
                           types=[f"{n} x K {k} V {v}" for (k, v), n in context.info().types.items()])
            for i in todo:
                logits, next_tokens = score(context, chunks[i], positions, advance), chunks[i][positions + 1]
                if pair == F16:
                    reference = Distributions.of(logits)
                    self.store.put(f"reference-{i}", codes=reference.codes, best=reference.best)
                else:
                    reference = Distributions(**self.store.get(f"reference-{i}"))
                self.store.put(f"{name(pair)}-score-{i}", kl=reference.divergence(logits), surprise=surprise(logits, next_tokens),
                               same=logits.argmax(1) == reference.best)

    def _retrieval(self, pair: tuple[str, str], advance: Callable[[int], None]) -> None:
        """Which planted facts are found, per length and text."""
        for length in self.setup.lengths:
            piece = f"{name(pair)}-retrieval-{length}"
            if self.store.has(piece):
                advance(self.setup.texts * length)
                continue
            with self._context(retrieval.room(length), pair, n_seq=2, unified=True) as context:
                found = [retrieval.answer(context, retrieval.task(self.model, length, seed), advance) for seed in range(self.setup.texts)]
            self.store.put(piece, found=found)

    def _generation(self, pair: tuple[str, str], chunks: np.ndarray, advance: Callable[[int], None]) -> None:
        """Greedy runs from the starts of the chunks."""
        setup = self.setup
        with self._context((setup.prompt + setup.generated + 255) // 256 * 256, pair) as context:
            for i in range(setup.chunks):
                piece = f"{name(pair)}-generation-{i}"
                if not self.store.has(piece):
                    self.store.put(piece, tokens=generation.greedy(context, chunks[i][:setup.prompt].tolist(), setup.generated))
                advance(setup.prompt + DECODE_WEIGHT * setup.generated)


def score(context: Context, tokens: np.ndarray, positions: np.ndarray, advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
    """Logits after the tokens at `positions` of a text that begins a fresh cache; float32 [len(positions), n_vocab]."""
    wanted, rows = set(positions.tolist()), []
    context.clear()
    for first in range(0, len(tokens), context.n_batch):
        part = tokens[first:first + context.n_batch].tolist()
        rows.append(context.decode_batch([(token, first + i, 0, first + i in wanted) for i, token in enumerate(part)]))
        advance(len(part))
    return np.concatenate(rows)


def name(pair: tuple[str, str]) -> str:
    """The pair in a file name."""
    return f"{pair[0]}-{pair[1]}"
