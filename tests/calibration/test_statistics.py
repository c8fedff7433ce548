"""Sums against a direct computation of the model in numpy, resuming, interruption, and what a run records."""
import ctypes
import os
import signal

import numpy as np
import pytest

from pykvq.calibration import run as run_module
from pykvq.calibration.moments import SINKS, Moments
from pykvq.calibration.observer import Keys, Observer, Queries
from pykvq.calibration.rope import Rope
from pykvq.calibration.run import Statistics, calibrate
from pykvq.engine import Context, Model, quiet_log
from pykvq.gguf_file import GgufFile

quiet_log()


def rms_norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def rotate(x, positions, base=10000.0):
    """Interleaved RoPE in float64; x [n, heads, d]."""
    d = x.shape[-1]
    angle = positions[:, None] * base ** (-np.arange(0, d, 2) / d)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = x[..., 0::2] * c - x[..., 1::2] * s, x[..., 0::2] * s + x[..., 1::2] * c
    return out


def first_layer(path, tokens, positions, d, heads, heads_kv):
    """q, k, v of layer 0 of a tiny model, float64, from its weights."""
    f = GgufFile(path)
    weight = lambda name: np.frombuffer(f.tensor_data(name), "<f4").reshape(f.tensors[name].ne[::-1]).astype(np.float64)
    x = rms_norm(weight("token_embd.weight")[tokens])
    q, k, v = (x @ weight(f"blk.0.attn_{name}.weight").T for name in "qkv")
    return (rotate(q.reshape(-1, heads, d), positions) / np.sqrt(d), rotate(k.reshape(-1, heads_kv, d), positions), v.reshape(-1, heads_kv, d))


@pytest.mark.parametrize("d, heads, heads_kv", [(64, 4, 2), (64, 2, 2), (80, 4, 1), (128, 6, 2)])
def test_sums_are_those_of_the_weights(tiny_model, tmp_path, d, heads, heads_kv):
    path = tiny_model(d, heads=heads, heads_kv=heads_kv)
    stats = calibrate(path, tmp_path / "s.npz", tokens=1024, threads=1)
    assert stats.complete and sorted(stats.moments.layers) == [0, 1] and stats.positions.max() > 256
    parts = [first_layer(path, t, p + np.arange(len(t)), d, heads, heads_kv) for t, p in zip(stats.tokens, stats.positions)]
    q, k, v = (np.concatenate([part[i][SINKS:] for part in parts]) for i in range(3))
    s = stats.moments.layers[0]
    assert (s.n, s.n_q, s.heads) == (len(k), len(k) * heads // heads_kv, heads_kv)
    grouped = q.reshape(len(q), heads_kv, -1, d)
    for ours, direct in [(s.k, k.sum(0)), (s.kk, np.einsum("nhi,nhj->hij", k, k)), (s.v, v.sum(0)), (s.vv, np.einsum("nhi,nhj->hij", v, v)),
                         (s.qq, np.einsum("nhgi,nhgj->hij", grouped, grouped))]:
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, direct, rtol=0, atol=2e-4 * np.abs(direct).max())


def test_cosines_and_sines_are_those_of_the_positions(tiny_model):
    stats = calibrate(tiny_model(64), tokens=1024, threads=1)
    s = stats.moments.layers[0]
    t = np.concatenate([s.rope.table(p + np.arange(SINKS, 512)) for p in stats.positions])
    np.testing.assert_allclose(s.tt, t.T @ t, atol=1e-9 * len(t))
    assert s.rope == Rope(64, 0, 2048, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0, 0, None)


def test_resuming_gives_identical_sums(tiny_model, tmp_path, monkeypatch):
    path, state = tiny_model(64), tmp_path / "s.npz"
    whole = calibrate(path, tokens=2048, threads=1)
    stop, one_chunk = [], run_module._one_chunk

    def interrupted(run, *rest):
        if run.done == 2 and not stop:
            stop.append(True)
            raise KeyboardInterrupt
        one_chunk(run, *rest)
    monkeypatch.setattr(run_module, "_one_chunk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(path, state, tokens=2048, threads=1)
    assert Statistics.load(state).done == 2
    resumed, told = [], []
    again = calibrate(path, state, tokens=2048, threads=1, begin=lambda total: told.append(total) or (lambda label, n: resumed.append(n)))
    assert told == [1024] and resumed == [512, 512]                  # nothing was sampled or read twice
    for (name, a), b in zip(whole.moments.state().items(), again.moments.state().values()):
        assert np.array_equal(a, b), name
    assert Statistics.load(state).complete


def test_a_signal_breaks_off_the_running_chunk_and_loses_nothing(tiny_model, tmp_path):
    path, state = tiny_model(64), tmp_path / "s.npz"

    def begin(total):
        def advance(label, n):
            if label == "calibrating":
                os.kill(os.getpid(), signal.SIGINT)
        return advance
    with pytest.raises(KeyboardInterrupt):
        calibrate(path, state, tokens=2048, threads=1, begin=begin)
    half = Statistics.load(state)
    assert half.done == 1 and half.moments.layers[0].n == 512 - SINKS
    whole, again = calibrate(path, tokens=2048, threads=1), calibrate(path, state, tokens=2048, threads=1)
    assert np.array_equal(whole.moments.layers[1].kk, again.moments.layers[1].kk)


def test_samples_survive_an_interruption(tiny_model, tmp_path):
    state, count = tmp_path / "s.npz", []

    def begin(total):
        def advance(label, n):
            count.append(n)
            if label == "sampling" and len(count) == 100:
                raise KeyboardInterrupt
        return advance
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_model(64), state, tokens=1024, threads=1, begin=begin)
    kept = Statistics.load(state)
    assert (kept.tokens >= 0).sum() == 200 and kept.done == 0
    totals = []
    run = calibrate(tiny_model(64), state, tokens=1024, threads=1, begin=lambda total: totals.append(total) or (lambda label, n: None))
    assert totals == [2 * 1024 - 200] and run.complete and np.array_equal(run.tokens[:, :100], kept.tokens[:, :100]) and run.tokens.min() >= 0


def test_a_state_of_another_run_is_not_overwritten(tiny_model, tmp_path, monkeypatch):
    state = tmp_path / "s.npz"
    calibrate(tiny_model(64), state, tokens=512, threads=1)
    with pytest.raises(ValueError, match="--restart"):
        calibrate(tiny_model(64), state, tokens=1024, threads=1)
    with monkeypatch.context() as m:
        m.setattr(run_module, "fingerprint", lambda path: "fnv1a64:another")
        with pytest.raises(ValueError, match="--restart"):
            calibrate(tiny_model(64), state, tokens=512, threads=1)
    assert calibrate(tiny_model(64), state, tokens=1024, threads=1, restart=True).complete


def test_a_file_that_is_no_statistics_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="no statistics file"):
        Statistics.load(tmp_path / "x.npz")


def test_what_the_sink_raises_reaches_the_caller(tiny_model):
    def sink(seen):
        raise ValueError("from the sink")
    observer = Observer(sink)
    with Model(tiny_model(64)) as model, Context(model, 512, threads=1, on_tensor=observer) as context:
        context.decode([1, 2, 3], 0, logits="none")
        with pytest.raises(ValueError, match="from the sink"):
            observer.check()
        observer.check()                                              # told once


def test_the_observer_sees_every_layer_once_per_chunk(tiny_model):
    seen = []
    observer = Observer(seen.append)
    with Model(tiny_model(64, layers=3)) as model, Context(model, 512, threads=1, on_tensor=observer) as context:
        context.decode(list(range(40)), 100, logits="none")
        observer.check()
    assert [(type(s), s.layer) for s in seen] == [(kind, i) for i in range(3) for kind in (Keys, Queries)]
    assert seen[0].k.shape == (40, 2, 64) and seen[1].q.shape == (40, 4, 64)


def test_copies_of_moments_do_not_share_sums():
    m = Moments(positions=np.arange(8))
    rng = np.random.default_rng(0)
    seen = Keys(0, rng.standard_normal((8, 2, 16)).astype(np.float32), rng.standard_normal((8, 2, 16)).astype(np.float32), None)
    m.add(seen)
    copy = m.copy()
    m.add(seen)
    assert copy.layers[0].n == 4 and m.layers[0].n == 8 and np.array_equal(2 * copy.layers[0].kk, m.layers[0].kk)


def test_the_tensor_struct_is_ggml_s():
    from pykvq.ggml_tensor import Tensor, op_number
    assert ctypes.sizeof(Tensor) + ctypes.sizeof(ctypes.c_void_p) + 8 == 352     # extra and padding follow; GGML_TENSOR_SIZE
    with pytest.raises(ValueError, match="no operation"):
        op_number("NO_SUCH_OP")
