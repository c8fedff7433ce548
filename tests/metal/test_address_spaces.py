"""The project's Metal sources read as C++ for OpenCL by clang, whose rules for address spaces are those of Metal's compiler, a
clang too: no pointer changes its space, and none is left without one. The host machine drops the spaces and cannot see that."""
import re
import subprocess

import pytest

from metal_host import HOST, KERNELS, MISSING
from translate import CONSTANT, expand_macros

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}")

SPACES = {"device": "__global", "constant": "__constant", "threadgroup": "__local", "thread": "__private", "kernel": ""}


def as_opencl(name: str) -> str:
    """The source with OpenCL's words: no attributes or pragmas, vectors made by casts, function constants of some value."""
    text = expand_macros(KERNELS / f"kvq-{name}.metal", [str(KERNELS)], [])
    text = CONSTANT.sub(lambda m: f"__constant {m.group(1)} {m.group(2)} = 2;", text)
    text = re.sub(r"\[\[[^\]]*\]\]", "", text)
    for word, other in SPACES.items():
        text = re.sub(rf"\b{word}\b", other, text)
    text = re.sub(r"\b((?:float|half)[234])\(", r"(\1)(", text)
    text = re.sub(r"(?m)^\s*#pragma (METAL|clang).*$", "", text)
    return f'#include "{HOST / "address_spaces.h"}"\nusing namespace metal;\n{text}'


def check(text: str, folder) -> list[str]:
    """Errors, and named variables and parameters that point to no particular space."""
    source = folder / "kernel.clcpp"
    source.write_text(text)
    command = ["clang++", "-x", "cl", "-cl-std=clc++", "-Xclang", "-finclude-default-header", "-Wno-everything", "-fsyntax-only", "-Xclang", "-ast-dump", source]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    errors = re.findall(r"error: .*", done.stderr)
    generic = re.findall(r"(?:Parm)?VarDecl 0x\w+ .*?(?:used|referenced) (\w+ '[^']*__generic[^']*')", done.stdout)
    return errors + sorted(set(generic))


@pytest.mark.parametrize("name", ["rows", "decode", "prefill"])
def test_pointers_keep_their_space(name, tmp_path):
    assert check(as_opencl(name), tmp_path) == []


@pytest.mark.parametrize("old, new, said", [("__local const float * table, kvq_tiers", "__global const float * table, kvq_tiers", "kvq_pair"),
                                            ("__local const float * table, kvq_tiers", "const float * table, kvq_tiers", "table")])
def test_a_wrong_space_is_found(old, new, said, tmp_path):
    text = as_opencl("decode")
    assert old in text
    assert any(said in message for message in check(text.replace(old, new), tmp_path))
