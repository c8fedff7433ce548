#!/usr/bin/env python3
"""What a real context holds, to compare a plan with.

    python tests/planning/allocation.py OUT.json      plan and allocation of every shape in tests/models/shapes.py and every type
"""
from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent.parent
    sys.path[:0] = [str(root), str(root / "tests/models")]

import shapes                                    # noqa: E402

from pykvq.engine import Context, Model          # noqa: E402
from pykvq.planning.plan import Setup, memory    # noqa: E402

TYPES = ("f16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2")


def allocated(model, kv_type, setup, run=False):
    """Bytes of cache, state and compute that a real context holds; `run`: after a full micro-batch and a few single tokens."""
    n = setup.parallel
    with Context(model, setup.context, kv_type, n_seq=n, n_batch=setup.ubatch, swa_full=setup.swa_full, n_outputs=n, threads=2) as context:
        if run:
            context.decode_batch([(i % 256, i // n, i % n, i >= setup.ubatch - n) for i in range(setup.ubatch)])
            context.decode_batch([(0, setup.ubatch // n, s, True) for s in range(n)])
        kv = context.info().bytes
        return kv, sum(b.context for b in context.memory_info()) - kv, sum(b.compute for b in context.memory_info())


def compare(setups: tuple[Setup, ...]) -> list[dict]:
    """Planned and allocated bytes of every shape, type and setup."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in shapes.ARCHITECTURES.items():
            path = shapes.write(Path(folder) / "m.gguf", *shape)
            with Model(path, no_alloc=True) as header, Model(path) as real:
                for setup in setups:
                    for kv_type in TYPES:
                        planned, (kv, state, compute) = memory(header, (kv_type, kv_type), setup), allocated(real, kv_type, setup)
                        rows.append({"shape": name, "architecture": shape[0], "type": kv_type, "parallel": setup.parallel, "planned_kv": planned.kv,
                                     "kv": kv, "planned_state": planned.state, "state": state, "planned_compute": planned.compute, "compute": compute})
            path.unlink()
    return rows


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compare((Setup(2048), Setup(4096, parallel=4))), separators=(",", ":")).replace("},", "},\n") + "\n")
