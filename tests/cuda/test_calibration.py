"""Calibration with all layers on the GPU gives the sums of the CPU, on an installation with CUDA: pytest -m cuda."""
import shutil

import numpy as np
import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA driver on this machine")]


def test_sums_match_the_cpu(tiny_model, tmp_path, monkeypatch):
    from pykvq.calibration import text
    from pykvq.calibration.run import calibrate
    from pykvq.devices import has_gpu
    if not has_gpu():
        pytest.skip("the installation has no GPU backend")
    # the model has no tokenizer, and samples of the GPU would soon be other ones than those of the CPU
    tokens = np.random.default_rng(2).integers(0, 256, (4, 512), dtype=np.int32)
    monkeypatch.setattr(text, "text_chunks", lambda *_: tokens.copy())
    named = tmp_path / "t.txt"
    named.write_text("stands for the tokens above")
    cpu, gpu = (calibrate(tiny_model(128, heads=32, heads_kv=8), text=[named], tokens=2048, gpu_layers=layers).moments.layers for layers in (0, 99))
    assert sorted(cpu) == sorted(gpu) == [0, 1]
    for i in cpu:
        assert gpu[i].n == cpu[i].n == 2032
        for name in ("kk", "vv", "qq"):
            a, b = getattr(cpu[i], name), getattr(gpu[i], name)
            assert np.abs(a - b).max() < 0.03 * np.abs(a).max(), (i, name)      # the GPU multiplies in half precision
