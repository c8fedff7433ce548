#!/usr/bin/env python3
"""Write the table of docs/models.md: every family of models with every cache type, run on random weights.

    python tools/generate_models_table.py
"""
from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]

import families                                  # noqa: E402

DOC = ROOT / "docs" / "models.md"


def main() -> None:
    head = DOC.read_text().split("\n| architecture")[0]
    lines = ["| architecture | what it has | turbo2, turbo3, turbo4 | oscar2 |", "|---|---|---|---|"]
    for name in sorted(families.FAMILIES, key=lambda n: (families.FAMILIES[n][0], n)):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(families.row(Path(folder), name))
    DOC.write_text(head + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
