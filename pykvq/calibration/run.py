"""The calibration run: chunks of tokens at many positions through the model, sums to a file that an interrupted run resumes from."""
from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs

from pykvq.calibration.model_files import fingerprint
from pykvq.calibration.moments import Moments, write_atomically
from pykvq.calibration.observer import Observer
from pykvq.calibration.positions import chunk_positions
from pykvq.calibration.refusal import check_architecture
from pykvq.gguf_file import GgufFile
from pykvq.gguf_header import Header, read_header

CHUNK = 512                              # tokens that attend to each other
SAVE_SECONDS = 30                        # between two saves of the sums
FORMAT = 1                               # of the statistics file


@dataclass
class Statistics:
    """Sums over `done` of the chunks in tokens [chunks, length], which stood at positions [chunks] on; and where they come from.

    Tokens that are still to be sampled are -1.
    """
    fingerprint: str
    source: str
    tokens: np.ndarray
    positions: np.ndarray
    moments: Moments
    done: int = 0

    @property
    def complete(self) -> bool:
        """True when every chunk has been run."""
        return self.done == len(self.tokens)

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        meta = {"format": FORMAT, "fingerprint": self.fingerprint, "source": self.source, "done": self.done}
        write_atomically(path, {"meta": np.array(json.dumps(meta)), "tokens": self.tokens, "positions": self.positions, **self.moments.state()})

    @classmethod
    def load(cls, path: Path) -> "Statistics":
        """Read a file of save(). Raises ValueError when it is none or of another format."""
        try:
            with np.load(path, allow_pickle=False) as f:
                arrays = dict(f)
            meta = json.loads(str(arrays["meta"]))
            run = cls(meta["fingerprint"], meta["source"], arrays["tokens"], arrays["positions"], Moments.restore(arrays), meta["done"])
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no statistics file of pykvq calibrate; delete it or name another") from error
        if meta.get("format") != FORMAT:
            raise ValueError(f"{path} holds statistics of format {meta.get('format')}, this pykvq reads {FORMAT}; calibrate again")
        return run


def calibrate(path: Path, state: Path | None = None, *, text: Sequence[Path] = (), tokens: int = 16384, gpu_layers: int = 0, threads: int | None = None,
              seed: int = 0, restart: bool = False,
              begin: Callable[[int], Callable[[str, int], None]] = lambda total: lambda label, done: None) -> Statistics:
    """Run the model over `tokens` tokens and return the sums.

    text: files to read; without one the model's own samples are used. state: file that the sums are saved to, every SAVE_SECONDS and
    when the run is interrupted; a complete or half-done one of the same model and text is taken up again, unless `restart`.
    begin(total) is told how many tokens will be sampled and read, and returns a function that is called with a label and
    the number of tokens just done.
    Raises ModelFileError, ValueError for a model or a text that cannot be calibrated on.
    """
    from pykvq.calibration.text import own_samples, text_chunks
    from pykvq.engine import Context, Model
    header = read_header(path)
    check_architecture(header)
    length = min(CHUNK, header.context_train or CHUNK)
    chunks = max(1, round(tokens / length))
    print_, source = fingerprint(path), _source(text, seed)
    run = _resumable(state, print_, source, chunks, length) if state and not restart else None
    if run and run.complete:
        return run
    with Model(path, gpu_layers) as model:
        if run is None:
            drawn = text_chunks(model, text, chunks, length) if text else np.full((chunks, length), -1, np.int32)
            places = chunk_positions(chunks, length, header.context_train if _shifts(header) else 0, seed)
            run = Statistics(print_, source, drawn, places, Moments())
        advance = begin(int((run.tokens < 0).sum()) + (chunks - run.done) * length)
        with _saved(run, state) as tick:
            def sampled(n: int) -> None:
                advance("sampling", n)
                tick()
            own_samples(model, run.tokens, seed=seed, threads=threads, advance=sampled)
            observer = Observer(run.moments.add)
            with Context(model, length, n_batch=length, threads=threads, kvq="off", on_tensor=observer) as context, _interrupting(observer):
                while not run.complete:
                    _one_chunk(run, context, observer)
                    advance("calibrating", length)
                    tick()
    return run


@contextmanager
def _saved(run: Statistics, state: Path | None):
    """Save to `state` at the end, whatever ends it; yields tick(), which saves when SAVE_SECONDS have passed."""
    last = time.monotonic()

    def tick() -> None:
        nonlocal last
        if state and time.monotonic() - last > SAVE_SECONDS:
            run.save(state)
            last = time.monotonic()
    try:
        yield tick
    finally:
        if state:
            run.save(state)


def _one_chunk(run: Statistics, context, observer: Observer) -> None:
    """Add the next chunk to the sums; an interruption inside it leaves them as they were before it."""
    before = run.moments.copy()
    start = int(run.positions[run.done])
    run.moments.positions = start + np.arange(run.tokens.shape[1])
    try:
        context.clear()
        context.decode(run.tokens[run.done].tolist(), start, logits="none")
        observer.check()
        if not run.moments.layers:
            raise ValueError("no attention layer was seen; this model has no standard K/V cache to calibrate")
    except BaseException:
        run.moments.layers = before.layers
        raise
    run.done += 1


@contextmanager
def _interrupting(observer: Observer):
    """Ctrl-C breaks off the running chunk: an exception raised inside a callback of C would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: observer.stop(KeyboardInterrupt()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def state_path(path: Path, text: Sequence[Path], tokens: int, seed: int = 0) -> Path:
    """Where the sums of a run lie when no file is named: the user's cache folder, a name for model, text and length."""
    folder = Path(os.environ.get("PYKVQ_CACHE_DIR") or platformdirs.user_cache_dir("pykvq", appauthor=False)) / "calibration"
    key = hashlib.sha256(f"{_source(text, seed)} {tokens}".encode()).hexdigest()[:12]
    return folder / f"{fingerprint(path).removeprefix('fnv1a64:')}-{key}.npz"


def _source(text: Sequence[Path], seed: int) -> str:
    """How the text is named in the provenance: file names and a hash of what is in them, or the seed of the samples."""
    if not text:
        return f"own samples, temperature 1, seed {seed}"
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in text)).hexdigest()[:12]
    return f"text {', '.join(p.name for p in text)} ({digest})"


def _shifts(header: Header) -> bool:
    """False for learned absolute positions: only RoPE and ALiBi models do not mind where a chunk stands."""
    return "position_embd.weight" not in GgufFile(header.path).tensors


def _resumable(state: Path, print_: str, source: str, chunks: int, length: int) -> Statistics | None:
    """The saved run when it is the same one. Raises ValueError when the file holds another: nothing is overwritten unasked."""
    if not state.exists():
        return None
    run = Statistics.load(state)
    if run.fingerprint != print_ or run.source != source or run.tokens.shape != (chunks, length):
        raise ValueError(f"{state} holds statistics of another run ({run.tokens.size} tokens, {run.source}); use --restart or another -o")
    return run
