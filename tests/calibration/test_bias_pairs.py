"""Which frequency pairs of a key bias leave the keys: those that carry it to the logits, as few as do nearly as well as all."""
import base64

import numpy as np
import pytest

from pykvq.calibration.bias_pairs import STEP, Biased, by_energy, choose, only
from pykvq.calibration.key_bias import key_moments, measured_bias
from pykvq.calibration.metadata import decode, encode
from pykvq.calibration.moments import Moments
from pykvq.calibration.observer import Keys, Queries
from pykvq.calibration.rope import NEOX, NORMAL, Rope
from pykvq.calibration.build import build
from pykvq.calibration.run import calibrate
from pykvq.calibration.transform import layer_transform
from pykvq.gguf_file import GgufFile
from pykvq.tiny_model import write_tiny_model

D, HALF = 64, 32
LARGE = [2, 9, 17, 25, 31]


def rope(mode=NEOX):
    return Rope(n_dims=D, mode=mode, n_ctx_orig=4096, base=10000.0, scale=1.0, ext_factor=0.0, attn_factor=1.0, beta_fast=32.0, beta_slow=1.0,
                first=0, factors=None)


def layer(large, small=0.05, mode=NEOX, unread=(), seed=0):
    """A layer whose bias is 20 in the pairs `large` and `small` in the others; no query reads the pairs `unread`."""
    rng, r, n = np.random.default_rng(seed), rope(mode), 3000
    x, y = r.pairs
    bias = small * rng.choice([-1.0, 1.0], (2, D))
    for i in large:
        bias[:, [x[i], y[i]]] = 20 * rng.choice([-1.0, 1.0], (2, 2))
    positions = rng.integers(0, 20000, n)
    t, k = r.table(positions), rng.standard_normal((n, 2, D)) + bias
    c, s = t[:, None, :HALF], t[:, None, HALF:]
    keys = np.empty_like(k)
    keys[..., x], keys[..., y] = k[..., x] * c - k[..., y] * s, k[..., x] * s + k[..., y] * c
    queries = rng.standard_normal((n, 4, D))
    for i in unread:
        queries[..., [x[i], y[i]]] = 0
    m = Moments(positions=positions)
    m.add(Keys(0, keys, keys, r))
    m.add(Queries(0, queries))
    return Biased(m.layers[0], measured_bias(m.layers[0]), False)


@pytest.mark.parametrize("mode", [NEOX, NORMAL])
def test_the_pairs_that_carry_it_are_chosen_and_a_layer_without_any_gets_none(mode):
    chosen = choose({0: layer(LARGE, mode=mode), 1: layer([], mode=mode, seed=1), 2: layer(range(0, 30), mode=mode, seed=2)})
    assert len(chosen[0]) == STEP and set(LARGE) <= set(chosen[0]) and (np.diff(chosen[0]) > 0).all()
    assert len(chosen[1]) == 0
    assert len(chosen[2]) == HALF


def test_what_no_query_reads_stays():
    biased = layer(LARGE, unread=LARGE[:2])
    order = list(by_energy(biased))
    assert set(order[:3]) == set(LARGE[2:]) and set(order[-2:]) == set(LARGE[:2])


def test_only_keeps_both_coordinates_of_a_pair():
    bias = np.arange(1.0, 2 * D + 1).reshape(2, D)
    out = only(bias, rope(NORMAL), np.array([3]))
    assert np.flatnonzero(out[0]).tolist() == [6, 7] and (out[:, 6:8] == bias[:, 6:8]).all()


def test_without_a_known_rotation_nothing_is_chosen():
    biased = layer(LARGE)
    biased.sums.rope = None
    with pytest.raises(ValueError, match="rotation"):
        choose({0: biased})


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A tiny Qwen2 whose bias is in six pairs, and its statistics."""
    size = [6.0 if i % HALF in (1, 4, 9, 20, 29, 31) else 0.01 for i in range(2 * D)]
    path = write_tiny_model(tmp_path_factory.mktemp("pairs") / "m.gguf", D, architecture="qwen2", key_bias=size)
    return path, calibrate(path, tokens=2048, threads=1)


@pytest.mark.parametrize("kind", ["attn_k.bias", "measured"])
def test_statistics_bias_and_pairs_agree(calibrated, kind, tmp_path):
    """The transform is of the keys that the cache stores: without the named pairs of the bias, with the rest of it."""
    path, stats = calibrated
    data = build(stats, path, kind)
    for i, t in data.layers.items():
        sums = stats.moments.layers[i]
        assert len(t.pairs) < HALF and {1, 4, 9, 20, 29, 31} <= set(t.pairs)
        raw = GgufFile(path).tensor_data(f"blk.{i}.attn_k.bias")
        bias = measured_bias(sums).astype(np.float16).astype(float) if kind == "measured" else np.frombuffer(raw, "<f4").reshape(2, D).astype(float)
        left = only(bias, sums.rope, t.pairs)
        np.testing.assert_allclose(t.lam, layer_transform(sums, left).lam)
        np.testing.assert_allclose(t.mean, key_moments(sums, left)[0])
        assert (t.bias is None) == (kind != "measured")
        if t.bias is not None:
            assert (t.bias == left).all() and set(np.flatnonzero(t.bias.any(0)) % HALF) == set(t.pairs)

    keys = encode(data)
    bits = np.unpackbits(np.frombuffer(base64.b64decode(keys["kvq.blk.0.k.pairs"]), np.uint8), bitorder="little")
    assert len(bits) == 128 and np.flatnonzero(bits).tolist() == data.layers[0].pairs.tolist()
