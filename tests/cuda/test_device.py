"""Every CUDA operation against the CPU backend, on a machine with a GPU: pytest -m cuda."""
import os
import shutil
import subprocess

import pytest

PROGRAM = os.environ.get("PYKVQ_CUDA_TEST") or shutil.which("test-kvq-cuda")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA driver on this machine"),
    pytest.mark.skipif(PROGRAM is None, reason="build with -DGGML_CUDA=ON -DPYKVQ_BUILD_TESTS=ON and set PYKVQ_CUDA_TEST to test-kvq-cuda"),
]


@pytest.mark.parametrize("mode", ["quick", pytest.param("", marks=pytest.mark.slow)])
def test_operations_match_the_cpu(mode):
    done = subprocess.run([PROGRAM, *([mode] if mode else [])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
