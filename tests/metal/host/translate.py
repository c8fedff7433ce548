"""Metal kernels to C++: address spaces dropped, entry points listed; everything else reaches the compiler as it is.

    python translate.py SOURCE.metal OUT.cpp [-I DIR ...] [--only REGEX]

The macros are expanded first (with an empty <metal_stdlib>), because upstream's instantiations use macros that it undefines.
`threadgroup` arrays become references to memory of the running threadgroup, function constants become look-ups.
"""
from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
CXX = "clang++"

ENTRY = re.compile(r"\bkernel\s+void\s+(\w+)\s*\(")
INSTANCE = re.compile(r'template\s*\[\[\s*host_name\(\s*"([^"]+)"\s*\)\s*\]\]\s*kernel\s+[\w:]+\s+(\w+)\s*(<[^;]*>)?\s*;')
CONSTANT = re.compile(r"\bconstant\s+([\w:]+)\s+(\w+)\s*\[\[\s*function_constant\(([^\]]*)\)\s*\]\]\s*;")
ARRAY = re.compile(r"\bthreadgroup\s+([\w:]+)\s+(\w+)\s*((?:\[[^\];=]*\])+)\s*;")
POSITIONS = {"threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_threadgroup", "thread_position_in_threadgroup",
             "thread_position_in_grid"}
INDICES = {"thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup",
           "threads_per_simdgroup"}


def expand_macros(source: Path, folders: list[str], defines: list[str]) -> str:
    """The source with macros and quoted includes expanded."""
    command = [CXX, "-E", "-x", "c++", "-std=c++17", "-Wno-everything", "-nostdinc", "-I", HERE / "words",
               *[f"-I{d}" for d in folders], *[f"-D{d}" for d in defines], source]
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def split_parameters(text: str) -> list[str]:
    """Parameters of a list, cut at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([<{") - (c in ")]>}")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p.strip() for p in [*parts, text[start:]] if p.strip()]


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError("unbalanced parameter list")


def argument(parameter: str, buffer: int) -> tuple[str, int]:
    """C++ expression that passes a parameter, and the number of buffers it takes."""
    attribute = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]\s*$", parameter)
    name = attribute.group(1) if attribute else "buffer"
    kind = re.sub(r"\[\[.*\]\]", "", parameter)
    kind = re.sub(r"\w+\s*$", "", kind).strip()
    if name in POSITIONS:
        return f"metal_host_as<{kind}>(t.{name})", 0
    if name in INDICES:
        return f"({kind}) t.{name}", 0
    if name == "threadgroup":
        return f"metal_host_any {{ t.threadgroup[{attribute.group(2)}] }}", 0
    if name != "buffer":
        raise ValueError(f"parameter attribute {name} is not known")
    index = int(attribute.group(2)) if attribute else buffer
    return (f"metal_host_any_object {{ t.buffer[{index}] }}" if "&" in kind else f"metal_host_any {{ t.buffer[{index}] }}"), 1


def strip_spaces(text: str) -> str:
    """Without the words for address spaces and functions."""
    text = re.sub(r"\[\[\s*threadgroup\s*\(\s*\d+\s*\)\s*\]\]", "", text)
    text = re.sub(r"\bconstant\b", "const", text)
    return re.sub(r"\b(device|threadgroup|thread|kernel)\b", "", text)


def translate(source: Path, folders: list[str] = (), defines: list[str] = (), only: str = "") -> str:
    """C++ text of one Metal source, with its table of entry points whose names match `only`."""
    text = expand_macros(source, list(folders), ["__METAL_VERSION__=300", *defines])
    calls, plain = {}, []
    for match in ENTRY.finditer(text):
        end = closing(text, match.end() - 1)
        calls[match.group(1)] = []
        buffers = 0
        for parameter in split_parameters(text[match.end():end]):
            expression, taken = argument(parameter, buffers)
            buffers += taken
            calls[match.group(1)].append(expression)
        if not text[:match.start()].rstrip().endswith(">"):
            plain.append((match.group(1), match.group(1), ""))
    entries = [*plain, *((m.group(1), m.group(2), m.group(3) or "") for m in INSTANCE.finditer(text))]
    entries = [e for e in entries if re.search(only, e[0])]

    text = re.sub(r"(?m)^\s*#pragma\s+unroll.*$", "", INSTANCE.sub("", text))
    text = CONSTANT.sub(lambda m: f"static const {m.group(1)} {m.group(2)} = ({m.group(1)}) metal_host_function_constant({m.group(3)});", text)
    arrays = iter(range(1000))
    text = ARRAY.sub(lambda m: f"{m.group(1)} (&{m.group(2)}){m.group(3)} = *({m.group(1)} (*){m.group(3)}) "
                               f"metal_host_threadgroup_array({next(arrays)}, sizeof({m.group(1)}{m.group(3)}));", text)
    table = [f'    {{ "{host}", [](const metal_host_thread & t) {{ {strip_spaces(name + targs)}({", ".join(calls[name])}); }} }},' for host, name, targs in entries]
    return "\n".join(["#include <metal_stdlib>", "#include \"any.h\"", strip_spaces(text),
                      'extern "C" const metal_host_entry metal_host_entries[] = {', *table, "    { nullptr, nullptr }", "};", ""])


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("source", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("-I", dest="folders", action="append", default=[])
    ap.add_argument("-D", dest="defines", action="append", default=[])
    ap.add_argument("--only", default="")
    args = ap.parse_args()
    args.out.write_text(translate(args.source, args.folders, args.defines, args.only))


if __name__ == "__main__":
    main()
