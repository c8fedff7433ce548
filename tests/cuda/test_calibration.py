"""Calibration with all layers on the GPU gives the sums of the CPU, on an installation with CUDA: pytest -m cuda."""
import shutil

import numpy as np
import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA driver on this machine")]


def test_sums_match_the_cpu(smollm2, tmp_path):
    import llama_cpp.llama_cpp as native

    from pykvq.calibration.run import calibrate
    if not native.llama_supports_gpu_offload():
        pytest.skip("the installation has no GPU backend")
    text = tmp_path / "t.txt"
    text.write_text(" ".join(f"Sentence {i} tells that {i * 37 % 101} is a number." for i in range(400)))
    cpu, gpu = (calibrate(smollm2, text=[text], tokens=2048, gpu_layers=layers).moments.layers for layers in (0, 99))
    for i in cpu:
        assert gpu[i].n == cpu[i].n == 2032
        for name in ("kk", "vv", "qq"):
            a, b = getattr(cpu[i], name), getattr(gpu[i], name)
            assert np.abs(a - b).max() < 0.03 * np.abs(a).max(), (i, name)      # the GPU multiplies in half precision
