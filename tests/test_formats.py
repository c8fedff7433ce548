"""The one declaration: generated files are fresh, ids are frozen, and every place that names cache types agrees."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykvq.fingerprint import fnv1a64
from pykvq.formats import ACTIVATION_IDS, CODEBOOK, FAMILIES, SIGNS, TIERED, TYPE_COUNT, TYPES, WINDOW_IDS
from pykvq.launch import executable
from pykvq.support import UPSTREAM, VALID_NAMES

ROOT = Path(__file__).resolve().parent.parent

# Saved sequence states carry these numbers: this table may grow but never change.
FROZEN = {"turbo2_64": 220, "turbo2_80": 221, "turbo2_96": 222, "turbo2_112": 223, "turbo2": 224,
          "turbo3_64": 225, "turbo3_80": 226, "turbo3_96": 227, "turbo3_112": 228, "turbo3": 229,
          "turbo4_64": 230, "turbo4_80": 231, "turbo4_96": 232, "turbo4_112": 233, "turbo4": 234,
          "oscar2_64": 235, "oscar2_80": 236, "oscar2_96": 237, "oscar2_112": 238, "oscar2": 239}
FROZEN_BYTES = {64: (18, 26, 34, 18), 80: (22, 32, 42, 22), 96: (26, 38, 50, 26), 112: (30, 44, 58, 30), 128: (34, 50, 66, 34)}


def test_ids_are_frozen():
    assert {name: t.id for name, t in TYPES.items()} == FROZEN
    assert WINDOW_IDS == {"turbo_f16_64": 240, "turbo_f16_80": 241, "turbo_f16_96": 242, "turbo_f16_112": 243, "turbo_f16_128": 244}
    assert ACTIVATION_IDS == {"kvq_q8_64": 245, "kvq_q8_80": 246, "kvq_q8_96": 247, "kvq_q8_112": 248, "kvq_q8_128": 249}
    assert TYPE_COUNT == 250


def test_block_sizes_are_frozen():
    assert {n: tuple(t.bytes for t in TYPES.values() if t.block == n) for n in FROZEN_BYTES} == FROZEN_BYTES


@pytest.mark.parametrize("text, value", [("", "cbf29ce484222325"), ("a", "af63dc4c8601ec8c"), ("foobar", "85944171f73967e8")])
def test_fnv1a64_published_vectors(text, value):
    assert fnv1a64(text.encode()) == f"fnv1a64:{value}"


def test_codebook_is_the_fingerprint_of_the_tables_in_python_and_c():
    signs = f"{int(''.join('1' if s < 0 else '0' for s in SIGNS), 2):032x}"
    lines = [f"{f.name} {f.bits} {','.join(map(str, f.levels))}" for _, f in sorted(FAMILIES.items())]
    lines += [f"{f.name} 1/{t.part} {t.bits} {','.join(str(c) for row in t.levels for c in row)}" for _, f in sorted(TIERED.items()) for t in f.tiers]
    assert CODEBOOK == fnv1a64("\n".join([*lines, f"signs {signs}"]).encode())
    assert f'#define KVQ_CODEBOOK "{CODEBOOK}"' in (ROOT / "ggml_kernels/include/kvq-types.h").read_text()


def test_generated_files_are_not_stale():
    result = subprocess.run([sys.executable, ROOT / "tools/generate_tables.py", "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_stale_files_are_named(tmp_path):
    for path in ("tools/generate_tables.py", "ggml_kernels/formats/formats.toml", "pykvq/__init__.py", "pykvq/native.py", "pykvq/support.py",
                 "pykvq/formats.py", "pykvq/fingerprint.py", "pykvq/codecs/__init__.py", "pykvq/codecs/hadamard.py", "pykvq/codecs/lloyd_max.py",
                 "ggml_kernels/include/kvq-types.h", "ggml_kernels/include/kvq-tables.h", "ggml_kernels/metal/kvq-metal-tables.h"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    header = tmp_path / "ggml_kernels/include/kvq-types.h"
    header.write_text(header.read_text().replace("= 225", "= 43"))
    result = subprocess.run([sys.executable, tmp_path / "tools/generate_tables.py", "--check"], capture_output=True, text=True)
    assert result.returncode == 1 and result.stdout.split() == ["stale", "ggml_kernels/include/kvq-types.h"]


@pytest.mark.parametrize("option", ["--cache-type-k", "--cache-type-v", "--cache-type-k-draft", "--cache-type-v-draft"])
def test_help_of_llama_server_names_the_same_types(program, option):
    text = subprocess.run([program("llama-server"), "--help"], capture_output=True, text=True).stdout
    section = re.search(re.escape(option) + r"[, ].*?allowed values: (.*?)\n\s*\(", text, re.S).group(1)
    assert sorted(re.findall(r"\w+", section)) == sorted(VALID_NAMES)


@pytest.mark.parametrize("name", [*FAMILIES, *TIERED, "q8_0", "f16", "iq4_nl"])
def test_llama_bench_parses_every_family(name):
    """The program behind the console script: an unknown type is an invalid parameter; a known one gets as far as the missing model."""
    run = lambda t: subprocess.run([executable("llama-bench"), "-m", "/nonexistent.gguf", "-ctk", t, "-ctv", t], capture_output=True, text=True)
    assert "invalid parameter" not in run(name).stderr
    assert "invalid parameter" in run("turbo5").stderr


def test_ids_of_llama_cpp_bindings_agree():
    import llama_cpp.llama_cpp as bindings
    theirs = {name[10:].lower(): i for name, i in vars(bindings).items() if name.startswith("GGML_TYPE_") and name != "GGML_TYPE_COUNT"}
    shared = theirs.keys() & UPSTREAM.keys()         # the bindings do not list bf16
    assert len(shared) >= 8 and all(theirs[name] == UPSTREAM[name][0] for name in shared)
    assert not set(theirs.values()) & set(FROZEN.values())


def test_gguf_package_agrees():
    """gguf-py has no turbo entry (cache types are never stored in a GGUF); upstream's ids are the same, ours are free there."""
    from gguf import GGMLQuantizationType
    assert all(GGMLQuantizationType[name.upper()] == row[0] for name, row in UPSTREAM.items())
    assert not {int(t) for t in GGMLQuantizationType} & (set(FROZEN.values()) | set(WINDOW_IDS.values()) | set(ACTIVATION_IDS.values()))
