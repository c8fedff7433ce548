#!/usr/bin/env python3
"""Mutations of a sidecar and of a model's header, through the Python readers: only the errors that they promise may come out.

    python tests/fuzz/sidecar_reader.py [--seconds 1200] [--seed 0]
    python tests/fuzz/sidecar_reader.py --atheris CORPUS [-- -max_total_time=1200 ...]     guided by coverage; needs atheris
    python tests/fuzz/sidecar_reader.py --replay CORPUS                                    what those inputs reach

Coverage is counted in lines of the functions that read (sys.settrace, in every 64th execution of the first form).
"""
from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]

import calibrated                                # noqa: E402

from pykvq import gguf_file, gguf_header         # noqa: E402
from pykvq.calibration import metadata           # noqa: E402
from pykvq.calibration.metadata import decode    # noqa: E402
from pykvq.gguf_file import GgufFile             # noqa: E402
from pykvq.gguf_header import ModelFileError, read_header    # noqa: E402
from pykvq.tiny_model import write_tiny_model    # noqa: E402

READERS = (GgufFile._index, GgufFile.get, *(f for _, f in inspect.getmembers(gguf_file._Cursor, inspect.isfunction)), read_header,
           *(f for _, f in inspect.getmembers(gguf_header._Gguf, inspect.isfunction)), gguf_header.Header.cache_bytes,
           metadata.decode, metadata._layer, metadata._checked, metadata.checksum)
INTERESTING = [0, 1, 2, 4, 8, 9, 127, 128, 255, 256, 65535, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1, 2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1]


def seeds(folder: Path) -> list[bytes]:
    """A sidecar as libllama reads it, two that say all that the format has, with a checksum and without, and a model's header, cut and without tensors."""
    model = write_tiny_model(folder / "m.gguf", 64, layers=1)
    sidecar = calibrated.write_sidecar(model, calibrated.metadata(model, calibrated.random_layers([0], 2, 64)) | {"kvq.calibration.tokens": 8})
    small = calibrated.metadata(model, calibrated.random_layers([0, 3], 1, 4)) | {"kvq.layers": [0, 3], "kvq.key_bias": "measured"}
    small |= {f"kvq.blk.{i}.k.bias": small[f"kvq.blk.{i}.k.mean"] for i in (0, 3)}
    own = {"general.architecture": "kvq", "general.alignment": 32}

    geometry = {f"llama.{name}": value for name, value in (
        ("block_count", 3), ("embedding_length", 256), ("context_length", 2048), ("attention.head_count", 4), ("attention.head_count_kv", [2, 0, 1]),
        ("attention.key_length", 64), ("attention.value_length", 64), ("attention.sliding_window", 32), ("attention.key_length_mla", 0))}

    def written(values):
        values = own | values
        return gguf_file.header(3, 0, len(values)) + gguf_file.encode(values)
    return [sidecar.read_bytes(), written(small), written(calibrated.sealed(small)), model.read_bytes()[:4096],
            written(geometry | {"general.architecture": "llama"}), written(geometry | {"general.architecture": "llama", "llama.attention.head_count_kv": 2})]


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """A few changes: bits, bytes, numbers at the edge of their type, blocks moved, a cut."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        # the front holds what is parsed, the rest is one long text
        at = int(rng.integers(0, min(len(out), 1024) if rng.random() < 0.8 else len(out)))
        kind = rng.integers(0, 5)
        if kind == 0:
            out[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            out[at] = int(rng.integers(0, 256))
        elif kind == 2:
            size = int(rng.choice([1, 2, 4, 8]))
            out[at:at + size] = (INTERESTING[rng.integers(0, len(INTERESTING))] % 256 ** size).to_bytes(size, "little")
        elif kind == 3:
            n = int(rng.integers(1, 64))
            source = int(rng.integers(0, len(out)))
            out[at:at + n] = out[source:source + n]
        else:
            del out[max(8, at):]
    return bytes(out)


def execute(path: Path, data: bytes) -> str:
    """Name of the outcome. Any exception that the readers do not promise passes through."""
    path.write_bytes(data)
    try:
        read_header(path).cache_bytes("turbo3", "turbo3", 1024)
    except ValueError:                           # ModelFileError, and a head size that no block divides
        pass
    try:
        return "accepted" if decode(GgufFile(path)) else "no data"
    except (ModelFileError, ValueError) as error:
        return type(error).__name__


class Coverage:
    """Lines of READERS that were reached while it traced."""

    def __init__(self):
        self.reached, self.wanted = set(), set()
        for function in READERS:
            todo = [inspect.unwrap(function).__code__]
            while todo:
                code = todo.pop()
                todo += [c for c in code.co_consts if inspect.iscode(c)]
                self.wanted |= {(code.co_filename, line) for _, _, line in code.co_lines() if line and line != code.co_firstlineno}

    def trace(self, frame, event, _):
        if event == "line":
            self.reached.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace if frame.f_code.co_filename in FILES else None

    def __str__(self) -> str:
        out = []
        for file in sorted(FILES):
            wanted = {line for name, line in self.wanted if name == file}
            missed = sorted(wanted - {line for name, line in self.reached if name == file})
            out.append(f"{Path(file).name}: {len(wanted) - len(missed)} of {len(wanted)} lines" + (f", not {missed}" if missed else ""))
        return "\n".join(out)


FILES = {function.__code__.co_filename for function in READERS}


def guided(corpus: Path, folder: Path, options: list[str]) -> None:
    """libFuzzer's loop; does not return."""
    import atheris
    for function in READERS:
        atheris.instrument_func(inspect.unwrap(function))        # by hand, because an editable install loads modules its own way
    corpus.mkdir(exist_ok=True)
    for i, data in enumerate(seeds(folder)):
        (corpus / f"seed-{i}").write_bytes(data)
    path = folder / "x.gguf"
    atheris.Setup([sys.argv[0], str(corpus), "-max_len=4096", *options], lambda data: execute(path, data) and None)
    atheris.Fuzz()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--seconds", type=float, default=1200, help="of processor time")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--atheris", type=Path, metavar="CORPUS")
    ap.add_argument("--replay", type=Path, metavar="CORPUS")
    ap.add_argument("options", nargs="*", help="of libFuzzer, with --atheris")
    a = ap.parse_args()
    rng, coverage, outcomes, n = np.random.default_rng(a.seed), Coverage(), {}, 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        if a.atheris:
            guided(a.atheris, Path(folder), a.options)
        pool = seeds(Path(folder))
        inputs = [file.read_bytes() for file in sorted(a.replay.iterdir())] if a.replay else None
        path, failure = Path(folder) / "x.gguf", Path("sidecar-failure.gguf")
        while n < len(inputs) if inputs else time.process_time() < a.seconds:
            data = inputs[n] if inputs else mutated(pool[n % len(pool)], rng)
            sys.settrace(coverage.trace if inputs or n % 64 == 0 else None)
            try:
                outcome = execute(path, data)
            except BaseException:
                sys.settrace(None)
                failure.write_bytes(data)
                print(f"execution {n}: {failure} is what did it", file=sys.stderr)
                raise
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            n += 1
        sys.settrace(None)
    print(f"{n} executions, outcomes {outcomes}")
    print(coverage)


if __name__ == "__main__":
    main()
