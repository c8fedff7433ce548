"""The CUDA sources compile for sm_90 where nvcc is present; no GPU needed."""
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "ggml_kernels/cuda"
NVCC = shutil.which("nvcc")

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH")

# ptxas runs on one kernel of each kind; the other instances are the same templates with other numbers
ASSEMBLED = ["instances/kvq-prefill-128.cu", "instances/kvq-decode-34.cu", "kvq-kernels.cu"]
WITH_GGML = ["kvq-rows.cu", "kvq-transform.cu", "kvq-cuda.cu"]
INSTANCES = sorted(f"instances/{p.name}" for p in (KERNELS / "instances").glob("*.cu"))


def cublas_include() -> Path:
    """Folder of cublas_v2.h: the toolkit's own, that of the wheel nvidia-cublas, or the declarations beside this test."""
    toolkit = Path(NVCC).resolve().parents[1] / "include"
    wheels = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include")
    return next(d for d in (toolkit, Path("/usr/local/cuda/include"), *wheels, Path(__file__).parent / "cublas") if (d / "cublas_v2.h").exists())


def compile_source(name: str, out: Path, *flags: str, target: str = "90") -> subprocess.CompletedProcess:
    command = [NVCC, "-std=c++17", "-use_fast_math", "-extended-lambda", "-gencode", f"arch=compute_{target},code=sm_{target}", "-I", KERNELS,
               "-I", ROOT / "ggml_kernels/include", *flags, KERNELS / name, "-o", out]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "warning" not in done.stderr, done.stderr[-4000:]
    return done


@pytest.mark.parametrize("name", ASSEMBLED)
def test_kernels_assemble(name, tmp_path):
    compile_source(name, tmp_path / "out.o", "-c")


def test_warpgroup_kernels_assemble(tmp_path):
    """ptxas says so on the way when it must run the products of wgmma one after the other; that is no "warning" to it."""
    done = compile_source("hopper/kvq-hopper.cu", tmp_path / "out.o", "-c", target="90a")
    assert "serialized" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in INSTANCES if n not in ASSEMBLED])
def test_instances_compile(name, tmp_path):
    compile_source(name, tmp_path / "out.ptx", "-ptx")


@pytest.mark.parametrize("name", WITH_GGML)
def test_entry_points_compile(name, tmp_path):
    tree = subprocess.run([sys.executable, ROOT / "tools/vendor.py"], capture_output=True, text=True, check=True).stdout.strip()
    ggml = Path(tree) / "vendor/llama.cpp/ggml"
    compile_source(name, tmp_path / "out.ptx", "-ptx", "-I", str(ggml / "include"), "-I", str(ggml / "src"), "-I", str(ggml / "src/ggml-cuda"),
                   "-I", str(cublas_include()))


def test_an_instance_for_every_declared_kernel():
    """kvq-kernels.cu declares one look-up per instance file, so a missing file would fail only when linking."""
    text = (KERNELS / "kvq-kernels.cu").read_text()
    pairs = text.split("KVQ_FOR_EACH_PAIR(X)", 1)[1].split("\n", 1)[0]
    heads = text.split("KVQ_FOR_EACH_HEAD(X)", 1)[1].split("\n", 1)[0]
    declared = {f"instances/kvq-decode-{p.replace(', ', '').strip('X() ')}.cu" for p in pairs.replace(") X(", ")|X(").split("|")}
    declared |= {f"instances/kvq-prefill-{h.strip('X() ')}.cu" for h in heads.split()}
    assert declared == set(INSTANCES)
