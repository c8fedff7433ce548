"""What enters the cache is found whatever the architecture; what has no standard cache is refused before it is loaded."""
import architectures
import numpy as np
import pytest

from pykvq.calibration.moments import SINKS
from pykvq.calibration.refusal import check_architecture
from pykvq.calibration.rope import NEOX
from pykvq.calibration.run import calibrate
from pykvq.engine import quiet_log
from pykvq.gguf_header import Header

quiet_log()


def header(architecture, mla=False, heads_kv=(1,)):
    return Header("x.gguf", architecture, "some model", 512, heads_kv, 64, 64, 0, mla)


def test_sliding_windows(tmp_path):
    """Gemma 3: two caches, query and key norms before the RoPE, NEOX pairs."""
    stats = calibrate(architectures.sliding_window(tmp_path / "m.gguf"), tokens=512, threads=1)
    layers = stats.moments.layers
    assert sorted(layers) == list(range(6)) and all(s.n == 512 - SINKS and s.n_q == 2 * s.n for s in layers.values())
    assert {s.rope.mode for s in layers.values()} == {NEOX}
    for s in layers.values():            # the norm fixes the length of every key: 1.5 sqrt(d), which RoPE keeps
        assert np.trace(s.kk[0]) / s.n == pytest.approx(1.5 ** 2 * 64, rel=1e-3)


@pytest.mark.parametrize("window", [0, 64])
def test_hybrid_models_have_statistics_for_their_attention_layers(tmp_path, window):
    stats = calibrate(architectures.hybrid(tmp_path / "m.gguf", window), tokens=512, threads=1)
    assert sorted(stats.moments.layers) == [1, 3] and stats.moments.layers[3].k.shape == (1, 64)


@pytest.mark.parametrize("make, words", [(architectures.latent, "MLA"), (architectures.encoder_decoder, "encoder-decoder")])
def test_models_without_a_standard_cache_are_refused(tmp_path, make, words):
    with pytest.raises(ValueError, match=words):
        calibrate(make(tmp_path / "m.gguf"), tokens=512, threads=1)


@pytest.mark.parametrize("architecture, words", [("mamba2", "recurrent"), ("bert", "without a KV cache"), ("llada", "without a KV cache"),
                                                 ("deepseek4", "of its own kind"), ("eagle3", "drafts"), ("grok", "flash attention")])
def test_refusals_give_the_reason(architecture, words):
    with pytest.raises(ValueError, match=words):
        check_architecture(header(architecture))


def test_refusals_by_geometry():
    check_architecture(header("llama"))
    with pytest.raises(ValueError, match="MLA"):
        check_architecture(header("plm", mla=True))
    with pytest.raises(ValueError, match="no layer"):
        check_architecture(header("lfm2", heads_kv=()))
