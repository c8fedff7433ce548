"""tools/random_gguf.py writes a model that llama.cpp's own reader accepts."""
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_shape_and_types(tmp_path):
    import gguf
    out = tmp_path / "tiny.gguf"
    subprocess.run([sys.executable, ROOT / "tools/random_gguf.py", out, "--shape", "qwen3-tiny", "--layers", "2"], check=True)
    reader = gguf.GGUFReader(out)
    tensors = {t.name: t for t in reader.tensors}
    assert int(reader.fields["qwen3.block_count"].contents()) == 2
    assert len(tensors) == 3 + 2 * 11
    assert tensors["blk.1.attn_k.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_0
    assert [int(n) for n in tensors["blk.0.ffn_down.weight"].shape] == [512, 256]
