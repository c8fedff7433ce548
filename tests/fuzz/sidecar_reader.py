#!/usr/bin/env python3
"""Mutations of a sidecar and of a model's header, through the Python readers: only the errors that they promise may come out.

    python tests/fuzz/sidecar_reader.py [--seconds 1200] [--seed 0]

Coverage is counted in lines of the reader modules (sys.settrace in every 64th execution).
"""
from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]

import calibrated                                # noqa: E402

from pykvq.calibration.metadata import decode    # noqa: E402
from pykvq.gguf_file import GgufFile             # noqa: E402
from pykvq.gguf_header import ModelFileError, read_header    # noqa: E402
from pykvq.tiny_model import write_tiny_model    # noqa: E402

MODULES = ("gguf_file.py", "gguf_header.py", "metadata.py")
INTERESTING = [0, 1, 2, 4, 8, 9, 127, 128, 255, 256, 65535, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1, 2 ** 63 - 1, 2 ** 63, 2 ** 64 - 1]


def seeds(folder: Path) -> list[bytes]:
    """A sidecar as it is written, one that says all that the format has, and a model's header."""
    model = write_tiny_model(folder / "m.gguf", 64, layers=1)
    keys = calibrated.metadata(model, calibrated.random_layers([0], 2, 64))
    sidecar = calibrated.write_sidecar(model, keys | {"kvq.calibration.tokens": 8})
    from gguf import GGUFWriter
    writer = GGUFWriter(str(folder / "full.gguf"), "kvq")
    writer.add_array("kvq.layers", [0])
    for name, value in keys.items():
        writer.add_uint32(name, value) if isinstance(value, int) else writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return [sidecar.read_bytes(), (folder / "full.gguf").read_bytes(), model.read_bytes()[:4096]]


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
        read_header(path)
    except ModelFileError:
        pass
    try:
        return "accepted" if decode(GgufFile(path)) else "no data"
    except (ModelFileError, ValueError) as error:
        return type(error).__name__


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--seconds", type=float, default=1200, help="of processor time")
    ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()
    rng, lines, outcomes, n = np.random.default_rng(a.seed), set(), {}, 0

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(MODULES):
            return None
        lines.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        return trace
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        pool = seeds(Path(folder))
        path, failure = Path(folder) / "x.gguf", Path("sidecar-failure.gguf")
        while time.process_time() < a.seconds:
            data = mutated(pool[n % len(pool)], rng)
            sys.settrace(trace if n % 64 == 0 else None)
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
    print(f"{n} executions, {len(lines)} lines of {', '.join(MODULES)} reached, outcomes {outcomes}")


if __name__ == "__main__":
    main()
