#!/usr/bin/env python3
"""Generate docs/measured.md from the JSON of pykvq eval, plan and bench under docs/data.

    python tools/generate_measured.py            write it
    python tools/generate_measured.py --check    exit 1 if it is stale

docs/data/eval-MODEL.json, plan-smollm2-135m.json and bench-smollm2-135m.json are what those commands print with --json, plan-smollm2-135m-bare.json
with --kv-sink 0 --kv-recent 0 too;
agreement.json and plan-allocation.json come from tests/evaluation/agreement.py and tests/planning/allocation.py.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/data"
MAIN_TYPES = ("f16", "q8_0", "turbo4", "turbo3", "turbo2", "q4_0")


def load(name: str):
    """A file under docs/data."""
    return json.loads((DATA / f"{name}.json").read_text())


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table."""
    lines = [list(head), ["---"] * len(list(head)), *(map(str, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def type_name(pair: list[str]) -> str:
    """("turbo3", "f16") as "K turbo3, V f16"."""
    return pair[0] if pair[0] == pair[1] else f"K {pair[0]}, V {pair[1]}"


def interval(figure: dict, form: str = ".3g") -> str:
    """Value and 95 % interval."""
    text = format(figure["value"], form)
    return text if figure["low"] is None else f"{text} ({figure['low']:{form}} to {figure['high']:{form}})"


def evaluation(value: dict) -> str:
    """One model's section."""
    setup, facts = value["setup"], round(value["f16"]["found"] / max(value["f16"]["found_share"]["value"], 1e-9))
    rows = [(type_name(r["kv_type"]), f"{r['smaller']:.2f}x", interval(r["kld"]), f"{r['kld_late']['value']:.3g}",
             f"{r['kld_quantiles']['99']['value']:.3g}",
             f"{r['perplexity_ratio']['value']:.3f}", f"{100 * r['same_top']['value']:.1f} %", f"{r['drift_per_doubling']['value']:+.4f}",
             f"{r['found']}" if value["verdict"]["able"] else "-", f"{sum(r['first_divergence']) / len(r['first_divergence']):.0f}",
             f"{100 * r['repetition']['value']:.0f} %") for r in value["results"]]
    found = f"f16 finds {value['f16']['found']} of {facts} planted facts" if facts else "f16 finds none of the planted facts"
    return (f"## {value['model']}\n\n**{value['verdict']['sentence']}**\n\n"
            f"{setup['chunks']} texts of {setup['context']} tokens ({value['text']}), {setup['rows']} positions scored in each; f16 perplexity "
            f"{value['f16']['perplexity']:.2f}; {found}; f16 repeats {100 * value['f16']['repetition_f16']:.0f} %. "
            f"Measured in {_duration(value['seconds'])}, {_where(value)}.{_windows(value)}\n\n"
            + markdown(("cache type", "smaller", "mean KLD (95 %)", "last quarter", "99 %", "PPL to f16", "same top", "KLD per doubling", "facts", "equal tokens",
                        "repeats"), rows))


def _duration(seconds: float) -> str:
    """Minutes, or seconds where they are few."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _where(value: dict) -> str:
    """The machine: files without a device are of the first one."""
    return f"on {value['device']}" if "device" in value else "at low priority on two busy cores of an AMD EPYC with AVX-512"


def _windows(value: dict) -> str:
    """What to bear in mind of types with an f16 window."""
    kept: dict[int, list[str]] = {}
    for r in value["results"]:
        if r["window"] and r["kv_type"][0] == r["kv_type"][1]:
            kept.setdefault(r["window"], []).append(r["kv_type"][0])
    return "".join(f" Of the {value['setup']['context']} tokens up to {n} are in the f16 window of {', '.join(names)}." for n, names in kept.items())


def agreement() -> str:
    """Our KLD beside upstream's."""
    rows = [(r["type"], f"{r['llama_perplexity']:.6f}", f"{r['pykvq']:.6f}", f"{100 * (r['pykvq'] / r['llama_perplexity'] - 1):+.2f} %")
            for r in load("agreement")]
    return markdown(("type", "llama-perplexity --kl-divergence", "pykvq", "difference"), rows)


def allocation() -> str:
    """Plan against allocation, a row a shape: the largest errors over types and sequences."""
    shapes: dict[str, list[dict]] = {}
    for row in load("plan-allocation"):
        shapes.setdefault(row["shape"], []).append(row)

    def worst(rows: list[dict], key: str) -> str:
        return f"{max(100 * abs(r[f'planned_{key}'] - r[key]) / max(r[key], 1) for r in rows):.2f} %"
    return markdown(("shape", "architecture", "KV cache", "recurrent state", "compute"),
                    [(name, rows[0]["architecture"], *(worst(rows, key) for key in ("kv", "state", "compute"))) for name, rows in shapes.items()])


def bench() -> str:
    """Speed by depth."""
    value = load("bench-smollm2-135m")
    rows = [(r["depth"], r["type"], f"{r['kv_bytes'] / 2**20:.1f} MiB", f"{r['decode']:.1f} ({r['decode_to_f16']:.2f})",
             f"{r['prefill']:.1f} ({r['prefill_to_f16']:.2f})", "/".join(sorted({d for part in r["attention"].values() for d in part})))
            for r in value["rows"]]
    return markdown(("depth", "type", "KV cache", "decode, tokens/s (to f16)", f"prefill of {value['prefill_tokens']}", "attention ran on"), rows)


def main_table() -> str:
    """Cache size from the plan, quality from the evaluation, of SmolLM2-135M."""
    plan, bare, quality = load("plan-smollm2-135m"), load("plan-smollm2-135m-bare"), load("eval-smollm2-135m")
    by_type = {type_name(r["kv_type"]): r for r in quality["results"]}
    sizes = {row["type"]: row for row in bare["types"]} | {row["type"]: row for row in plan["types"] if by_type.get(row["type"], {"window": 1})["window"]}
    rows = [(t, "yes" if by_type.get(t, {"window": 0})["window"] else "none", f"{sizes[t]['kv'] / 2**20:.1f} MiB", f"{sizes[t]['kv_f16'] / sizes[t]['kv']:.2f}x", interval(by_type[t]["kld_late"]) if t in by_type else "0",
             f"{100 * by_type[t]['same_top']['value']:.0f} %" if t in by_type else "100 %") for t in MAIN_TYPES]
    return markdown(("type", "f16 window", f"KV cache at {plan['context']}", "smaller than f16", f"KL divergence, last quarter of {quality['setup']['context']} tokens (95 %)", "same top token"), rows)


def documents() -> dict[Path, str]:
    """The page as it should be."""
    evaluations = [load(path.stem) for path in sorted(DATA.glob("eval-*.json"))]
    plan = load("plan-allocation")
    page = "\n\n".join([
        "# Measured", "Generated by tools/generate_measured.py from docs/data; do not edit. [evaluate.md](evaluate.md) says how to measure a model and what "
        "the columns mean.", "## SmolLM2-135M in short", "Cache by `pykvq plan`, quality by `pykvq eval`.", "Evaluations here whose turbo4 and turbo3 have no f16 window are from before "
        "it was the default of every type: what `--kv-sink 0 --kv-recent 0` gives now.", main_table(),
        *map(evaluation, evaluations),
        "## Agreement with llama-perplexity", "Mean KL divergence of SmolLM2-135M over the second halves of four chunks of 512 tokens of the WikiText-2 test "
        "text, by both programs (`tests/evaluation/agreement.py`).", agreement(),
        "## Plan against allocation", f"Largest difference between what `pykvq plan` says and what a context then holds, over "
        f"{len({r['type'] for r in plan})} types, one sequence of 2048 cells and four in 4096 (`tests/planning/allocation.py`).", allocation(),
        "## Speed", "`pykvq bench` of SmolLM2-135M on two busy cores of an AMD EPYC with AVX-512: ratios of interleaved rounds; five rounds on a machine with other work, so read them coarsely.", bench()]) + "\n"
    return {ROOT / "docs/measured.md": page}


def write(pages: dict[Path, str], description: str) -> int:
    """The command line of a generator of these pages; its exit code."""
    ap = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    return update(pages, ap.parse_args().check)


def update(pages: dict[Path, str], check: bool) -> int:
    """Write the pages that are stale, or only say so; the exit code."""
    stale = False
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            stale = True
            print(f"{'stale' if check else 'wrote'} {path.relative_to(ROOT)}")
            if not check:
                path.write_text(text)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(write(documents(), __doc__))
