"""pykvq doctor: is this installation whole, and does attention over every cache type really run?"""
from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from pykvq.cli.output import Output, common, table
from pykvq.devices import devices
from pykvq.formats import FAMILIES, TYPES
from pykvq.support import OURS
from pykvq.native import REINSTALL, NativeError, bindings_are_patched, library, library_dir, llama_commit
from pykvq.support import KERNELS, VALID_NAMES, supports

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
BINDINGS = "0.3.36"                          # the llama-cpp-python whose bindings match the libraries
PROGRAMS = ("llama-server", "llama-cli", "llama-bench", "llama-batched-bench", "llama-perplexity", "llama-quantize")
ATTENTION_ERROR = {"turbo2": 0.6, "turbo3": 0.35, "turbo4": 0.2}    # relative logit error on random weights, twice the usual


@dataclass(frozen=True)
class Check:
    """One line of the report."""
    status: str
    name: str
    detail: str
    fix: str = ""


def check_packages() -> Iterator[Check]:
    """pykvq and llama_cpp as Python packages."""
    import pykvq
    yield Check(PASS, "pykvq", f"{pykvq.__version__}, Python {platform.python_version()}, {platform.machine()}")
    patched = bindings_are_patched()
    if patched is None:
        yield Check(FAIL, "llama_cpp", "not installed", REINSTALL)
        return
    if not patched:
        yield Check(FAIL, "llama_cpp", "overwritten by another llama-cpp-python", REINSTALL)
        return
    import llama_cpp
    if llama_cpp.__version__ == BINDINGS:
        yield Check(PASS, "llama_cpp", f"{llama_cpp.__version__}, patched")
    else:
        yield Check(FAIL, "llama_cpp", f"{llama_cpp.__version__}, but the libraries belong to {BINDINGS}", REINSTALL)


def check_libraries() -> Iterator[Check]:
    """The shared libraries and that C and Python mean the same types."""
    try:
        base, commit = library("ggml-base"), llama_commit()
    except NativeError as error:
        yield Check(FAIL, "libraries", str(error), REINSTALL)
        return
    yield Check(PASS, "libraries", f"llama.cpp {commit} in {library_dir()}")
    base.ggml_type_name.argtypes, base.ggml_type_name.restype = [ctypes.c_int], ctypes.c_char_p
    base.ggml_row_size.argtypes, base.ggml_row_size.restype = [ctypes.c_int, ctypes.c_int64], ctypes.c_size_t
    wrong = [t.name for t in TYPES.values()
             if base.ggml_type_name(t.id) != t.name.encode() or base.ggml_row_size(t.id, t.block) != t.bytes]
    yield (Check(FAIL, "cache types", f"library and package disagree on {', '.join(wrong)}", REINSTALL) if wrong
           else Check(PASS, "cache types", f"{', '.join(OURS)}; {len(TYPES)} block layouts agree"))


def check_codec() -> Iterator[Check]:
    """The C reference against numpy, bit for bit."""
    import numpy as np

    from pykvq.codecs import oscar2, turbo
    base = library("ggml-base")
    base.kvq_quantize_row_ref.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    base.kvq_quantize_row_ref.restype = None
    wrong = []
    for t in TYPES.values():
        x = np.random.default_rng(0).standard_normal(8 * t.block).astype(np.float32)
        out = np.empty(8 * t.bytes, np.uint8)
        base.kvq_quantize_row_ref(t.id, x.ctypes.data, out.ctypes.data, len(x))
        codec = turbo if t.family in FAMILIES else oscar2
        if not np.array_equal(out, codec.quantise(x, t.name)):
            wrong.append(t.name)
    yield (Check(FAIL, "codec", f"{', '.join(wrong)}: the library's bytes differ from the reference", REINSTALL) if wrong
           else Check(PASS, "codec", "library and reference agree bit for bit"))


def check_programs() -> Iterator[Check]:
    """The executables on PATH, and that the server knows the types."""
    search = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    found = {name: shutil.which(name, path=search) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        yield Check(WARN, "programs", f"not on PATH: {', '.join(missing)}", "activate the environment that pykvq is installed in")
    else:
        yield Check(PASS, "programs", ", ".join(PROGRAMS))
    if found["llama-server"]:
        text = subprocess.run([found["llama-server"], "--help"], capture_output=True, text=True, timeout=60).stdout
        absent = [name for name in VALID_NAMES if name not in text]
        yield (Check(FAIL, "llama-server", f"another llama-server comes first on PATH: it lacks {', '.join(absent)}",
                     f"call {Path(sys.executable).parent / 'llama-server'}") if absent
               else Check(PASS, "llama-server", f"--cache-type-k takes {', '.join(OURS)}"))


def check_backends() -> Iterator[Check]:
    """Flash attention over every family and block size, run on each device with a tiny random model."""
    for device, description, backend in ((d.name, d.description, d.backend) for d in devices()):
        if backend is None:
            yield Check(WARN, f"attention {device}", f"{description}: no kernels for {', '.join(FAMILIES)}", "keep the cache on the CPU")
            continue
        for family in FAMILIES:
            ok, reason, fix = supports(family, 128, backend)
            if not ok:
                yield Check(WARN, f"attention {device} {family}", reason, fix)
                continue
            errors = attention_errors(family, 0 if backend == "cpu" else 99)
            worst = max(errors, key=errors.get)
            status = PASS if errors[worst] < ATTENTION_ERROR[family] else FAIL
            yield Check(status, f"attention {device} {family}", f"ran at head sizes {', '.join(map(str, errors))}; "
                        f"largest logit error {errors[worst]:.2f} at {worst}", "" if status == PASS else "report this as a bug")


def attention_errors(family: str, gpu_layers: int) -> dict[int, float]:
    """Per head size, the relative error of the logits against an f16 cache: prompt in one batch, then token by token."""
    import numpy as np

    from pykvq.engine import Context, Model, quiet_log
    from pykvq.tiny_model import write_tiny_model
    quiet_log()
    errors, tokens = {}, [(7 * i * i + 3) % 256 for i in range(96)]

    def logits(model: Model, kv_type: str) -> np.ndarray:
        with Context(model, 256, kv_type, threads=2, kv_sink=0, kv_recent=0) as context:
            rows = [context.decode(tokens[:64], 0, logits="all")]
            rows += [context.decode(tokens[i:i + 1], i) for i in range(64, len(tokens))]
            return np.concatenate(rows)

    with tempfile.TemporaryDirectory() as folder:
        for head_dim in (64, 80, 96, 112, 128, 192, 256):
            with Model(write_tiny_model(Path(folder) / "tiny.gguf", head_dim), gpu_layers) as model:
                exact, ours = logits(model, "f16"), logits(model, family)
            errors[head_dim] = float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))
    return errors


@click.command("doctor")
@common
def doctor(out: Output) -> None:
    """Check the installation: packages, libraries, cache types, programs, attention on every device.

    Exits with 1 when a check fails. A warning is something that this machine lacks, not a fault.
    """
    groups = (check_packages, check_libraries, check_codec, check_programs, check_backends)
    checks: list[Check] = []
    with out.progress(len(groups)) as step:
        for group in groups:
            step(group.__name__.removeprefix("check_"))
            try:
                checks += group()
            except (NativeError, OSError, ImportError, RuntimeError, ValueError, AttributeError) as error:
                checks.append(Check(FAIL, group.__name__.removeprefix("check_"), str(error), REINSTALL))
    failed = any(c.status == FAIL for c in checks)
    rows = [(c.status, c.name, c.detail + (f"; {c.fix}" if c.fix else "")) for c in checks]
    out.data({"ok": not failed, "backends": {b: sorted(k) for b, k in KERNELS.items()}, "checks": [asdict(c) for c in checks]},
             table("pykvq doctor", ("", "check", "detail"), rows))
    sys.exit(1 if failed else 0)
