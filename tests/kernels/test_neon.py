"""NEON kernels: cross-compiled and run under qemu-user, with and without the dot product instructions."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = [tool for tool in ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "qemu-aarch64", "cmake", "ninja") if not shutil.which(tool)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}")


@pytest.mark.parametrize("arch", [pytest.param("armv8-a", marks=pytest.mark.slow), "armv8.2-a+dotprod"])
def test_kernels_under_qemu(arch, tmp_path):
    """The kernel test program finds no mismatch; codes are byte-exact with the reference, integer sums exact."""
    tree = subprocess.run([sys.executable, ROOT / "tools/vendor.py", "--print-dir"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(["cmake", "-S", Path(__file__).parent / "cross", "-B", tmp_path, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                    "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
                    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++", f"-DUPSTREAM={tree}/vendor/llama.cpp", f"-DGGML_CPU_ARM_ARCH={arch}",
                    "-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF", "-DGGML_LLAMAFILE=OFF"], check=True, capture_output=True)
    subprocess.run(["ninja", "-C", tmp_path, "test-kvq-cpu"], check=True)
    run = subprocess.run(["qemu-aarch64", tmp_path / "test-kvq-cpu", "--quick", "--cases", "20", "--threads", "1"],
                         capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-2000:]
