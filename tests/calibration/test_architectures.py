"""What enters the cache is found whatever the architecture; what has no standard cache is refused before it is loaded."""
import dataclasses

import architectures
import numpy as np
import pytest

from pykvq import ggml_tensor
from pykvq.calibration.build import best_key_bias, build
from pykvq.calibration.key_bias import key_moments, measured_bias
from pykvq.calibration.moments import SINKS
from pykvq.calibration.refusal import check_architecture
from pykvq.calibration.rope import NEOX
from pykvq.calibration.run import calibrate
from pykvq.calibration.transform import key_transform
from pykvq.devices import Device
from pykvq.engine import quiet_log
from pykvq.gguf_file import GgufFile
from pykvq.gguf_header import Header

quiet_log()


def header(architecture, mla=False, heads_kv=(1,)):
    return Header("x.gguf", architecture, "some model", 512, heads_kv, 64, 64, 0, mla, False)


def test_sliding_windows(tmp_path):
    """Gemma 3: two caches, query and key norms before the RoPE, NEOX pairs."""
    stats = calibrate(architectures.sliding_window(tmp_path / "m.gguf"), tokens=512, threads=1)
    layers = stats.moments.layers
    assert sorted(layers) == list(range(6)) and all(s.n == 512 - SINKS and s.n_q == 2 * s.n for s in layers.values())
    assert {s.rope.mode for s in layers.values()} == {NEOX}
    for s in layers.values():            # the norm fixes the length of every key: 1.5 sqrt(d), which RoPE keeps
        assert np.trace(s.kk[0]) / s.n == pytest.approx(1.5 ** 2 * 64, rel=1e-3)


def small(path, architecture, heads=4, heads_kv=2, fused=False, bias=0.0):
    """Two layers with heads of 64; with fused weights queries, keys and values are views of one product."""
    w = architectures._Writer(path, architecture, layers=2, heads=heads, heads_kv=heads_kv)
    rows = {"qkv": heads + 2 * heads_kv} if fused else {"q": heads, "k": heads_kv, "v": heads_kv}
    w.gguf.add_rope_dimension_count(64)
    w.gguf.add_key_length(64)
    w.gguf.add_value_length(64)
    w.norm("output_norm")
    for i in range(2):
        w.norm(f"blk.{i}.attn_norm")
        for name, n in rows.items():
            w.weight(f"blk.{i}.attn_{name}", n * 64, architectures.WIDTH)
            if bias:
                w.gguf.add_tensor(f"blk.{i}.attn_{name}.bias", (bias * w.rng.standard_normal(n * 64)).astype(np.float32))
        w.weight(f"blk.{i}.attn_output", architectures.WIDTH, heads * 64)
        w.feed_forward(f"blk.{i}")
    return w.close()


def normed_input(file, tokens):
    """What the projections of layer 0 see, float64 [n, width], and a reader of weights."""
    weight = lambda name: np.frombuffer(file.tensor_data(name), "<f4").reshape(file.tensors[name].ne[::-1]).astype(np.float64)
    x = weight("token_embd.weight")[tokens]
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5), weight


def test_views_of_a_fused_product(tmp_path):
    """Values of layer 0 from the weights; queries and keys keep their length under RoPE."""
    path = small(tmp_path / "m.gguf", "llama", fused=True)
    stats = calibrate(path, tokens=512, threads=1)
    s = stats.moments.layers[0]
    x, weight = normed_input(GgufFile(path), stats.tokens[0][SINKS:])
    q, k, v = np.split(x @ weight("blk.0.attn_qkv.weight").T, [256, 384], 1)
    v = v.reshape(-1, 2, 64)
    np.testing.assert_allclose(s.vv, np.einsum("nhi,nhj->hij", v, v), atol=2e-4 * np.abs(s.vv).max())
    assert np.trace(s.kk, axis1=1, axis2=2) == pytest.approx((k.reshape(-1, 2, 64) ** 2).sum((0, 2)), rel=2e-4)
    assert np.trace(s.qq, axis1=1, axis2=2) == pytest.approx((q.reshape(-1, 2, 2, 64) ** 2).sum((0, 2, 3)) / 64, rel=2e-4)


def test_a_key_bias_of_the_model_is_removed(tmp_path):
    """Qwen 2 with a bias 50 times the keys: what is left are the moments of R(j) W x, and the measured bias is the model's."""
    path = small(tmp_path / "m.gguf", "qwen2", heads=2, heads_kv=1, bias=50.0)
    stats = calibrate(path, tokens=1024, threads=1)
    s, file = stats.moments.layers[0], GgufFile(path)
    clean = []
    for tokens, start in zip(stats.tokens, stats.positions):
        x, weight = normed_input(file, tokens[SINKS:])
        y = (x @ weight("blk.0.attn_k.weight").T).reshape(-1, 1, 64)
        angle = (start + np.arange(SINKS, 512))[:, None] * 10000.0 ** (-np.arange(0, 64, 2) / 64)
        c, sn = np.cos(angle)[:, None], np.sin(angle)[:, None]
        clean.append(np.concatenate([y[..., :32] * c - y[..., 32:] * sn, y[..., :32] * sn + y[..., 32:] * c], -1))
    clean = np.concatenate(clean)
    bias = weight("blk.0.attn_k.bias").reshape(1, 64)
    mean, cov = key_moments(s, bias)
    np.testing.assert_allclose(mean, clean.mean(0), atol=2e-2)                   # float32 angles and keys of 50: good to 1e-4 of the bias
    np.testing.assert_allclose(cov, np.cov(clean[:, 0].T, bias=True)[None], atol=2e-2)
    assert np.abs(measured_bias(s) - bias).max() < 0.02 * np.abs(bias).max()
    with_bias = build(stats, path, "attn_k.bias").layers[0]
    assert (with_bias.lam.sum() < .2 * build(stats, path, "none").layers[0].lam.sum()) and with_bias.bias is None
    assert build(stats, path, "measured").layers[0].bias.shape == (1, 64)


@pytest.fixture
def installed(monkeypatch):
    """installed("CPU", "CUDA0"): an installation whose libraries know these devices."""
    return lambda *names: monkeypatch.setattr("pykvq.calibration.build.devices", lambda: [Device(name, "", name != "CPU", 0, 0) for name in names])


@pytest.mark.parametrize("architecture, bias", [("qwen2", 1.0), ("llama", 0.0)])
def test_the_default_is_the_most_that_the_caches_of_the_installation_can_return(tmp_path, installed, architecture, bias):
    path = small(tmp_path / "m.gguf", architecture, heads=2, heads_kv=1, bias=bias)
    stats = calibrate(path, tokens=512, threads=1)
    for devices, chosen in ((["CPU", "CUDA0", "CUDA1"], "attn_k.bias" if bias else "none"), (["CPU", "Vulkan0"], "none"), (["CPU", "SYCL0"], "none"), (["CPU"], "measured")):
        installed(*devices)
        assert build(stats, path).key_bias == chosen
    layer = stats.moments.layers[1]
    for rope in (dataclasses.replace(layer.rope, base=5.0), dataclasses.replace(layer.rope, first=2)):     # one RoPE a cache, from the first value on
        layer.rope = rope
        assert best_key_bias(stats, path) == ("attn_k.bias" if bias else "none")


@pytest.mark.parametrize("kind", ["none", "attn_k.bias"])
def test_a_header_is_read_once_and_not_for_every_layer(tmp_path, monkeypatch, kind):
    """The vocabulary in it makes that seconds."""
    path = small(tmp_path / "m.gguf", "qwen2", heads=2, heads_kv=1, bias=1.0)
    stats, read = calibrate(path, tokens=512, threads=1), []
    index = GgufFile._index
    monkeypatch.setattr(GgufFile, "_index", lambda self, cursor: (read.append(self.path), index(self, cursor)))
    build(stats, path, kind)
    assert read == [path]


@pytest.mark.parametrize("make", [architectures.sliding_window, architectures.hybrid])
def test_caches_that_know_no_positions_get_no_measured_bias(tmp_path, installed, make):
    path = make(tmp_path / "m.gguf")
    installed("CPU")
    assert build(calibrate(path, tokens=512, threads=1), path).key_bias == "none"


def test_tensors_on_a_device_are_fetched(tmp_path, monkeypatch):
    """The same sums when no buffer counts as memory of the host and all goes through ggml_backend_tensor_get."""
    path = small(tmp_path / "m.gguf", "llama", fused=True)
    host = calibrate(path, tokens=512, threads=1)
    lib, asked = ggml_tensor._backend(), []

    class Device:
        ggml_backend_tensor_get = lib.ggml_backend_tensor_get

        @staticmethod
        def ggml_backend_buffer_is_host(buffer):
            asked.append(buffer)
            return False
    monkeypatch.setattr(ggml_tensor, "_backend", lambda: Device)
    device = calibrate(path, tokens=512, threads=1)
    assert asked and all(np.array_equal(a, b) for a, b in zip(host.moments.state().values(), device.moments.state().values(), strict=True))


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


def test_a_soft_cap_keeps_the_mean_in_the_keys(tmp_path):
    """Gemma 2 sees a shift of all logits, so the basis is that of keys with their mean, which a Gemma 3 of the same shape has not."""
    for path, kept in ((architectures.soft_capped(tmp_path / "a.gguf"), True), (architectures.sliding_window(tmp_path / "b.gguf"), False)):
        stats = calibrate(path, tokens=512, threads=1)
        for i, t in build(stats, path, "none").layers.items():
            s = stats.moments.layers[i]
            expected = key_transform(s.kk[0] / s.n if kept else key_moments(s)[1][0], s.qq[0] / s.n_q)
            assert t.mean.any() == (not kept)
            np.testing.assert_allclose(t.lam[0], expected[1])
