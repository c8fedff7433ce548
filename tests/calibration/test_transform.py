"""Basis and cost of each coordinate, the removal of a turning bias, and the predicted errors against simulated ones."""
import ctypes

import numpy as np
import pytest

from pykvq.calibration import loss
from pykvq.calibration.key_bias import key_moments, measured_bias, turned
from pykvq.calibration.moments import SINKS, Moments
from pykvq.calibration.observer import Keys, Queries
from pykvq.calibration.rope import IMROPE, MROPE, NEOX, NORMAL, Rope
from pykvq.calibration.transform import RIDGE, Transform, key_transform, layer_transform
from pykvq.codecs import turbo
from pykvq.native import library

RNG = np.random.default_rng(0)


def covariance(d, decay=4.0, rng=RNG):
    a = rng.standard_normal((d, d)) * np.exp(-decay * np.arange(d) / d)
    return a @ a.T


def some_rope(mode=NEOX, n_dims=32, **changes):
    return Rope(**{"n_dims": n_dims, "mode": mode, "n_ctx_orig": 4096, "base": 10000.0, "scale": 1.0, "ext_factor": 0.0, "attn_factor": 1.0,
                   "beta_fast": 32.0, "beta_slow": 1.0, "first": 0, "factors": None} | changes)


def apply(rope, x, positions):
    """R(j) x in float64 from the table; x [n, h, d]."""
    t = rope.table(positions)
    half = t.shape[1] // 2
    c, s, (a, b) = t[:, None, :half], t[:, None, half:], rope.pairs
    out = np.array(x, np.float64)
    out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return out


def test_the_basis_whitens_keys_and_orders_costs():
    d = 48
    S, Q = covariance(d), covariance(d)
    B, lam = key_transform(S, Q, ridge=0)
    F = np.linalg.inv(B)
    np.testing.assert_allclose(F.T @ S @ F, np.eye(d), atol=1e-8)                 # y = k F has unit variance
    np.testing.assert_allclose(B @ Q @ B.T, np.diag(lam), atol=1e-8 * lam[0])      # an error of y_i costs lam_i, no cross terms
    assert (np.diff(lam) <= 0).all()


def test_the_ridge_bounds_the_condition():
    S = np.diag([1.0, 0, 0, 0])
    B, lam = key_transform(S, S)
    assert np.linalg.cond(B) == pytest.approx(np.sqrt((1 + RIDGE / 4) / (RIDGE / 4)), rel=1e-6) and (lam > 0).all()


def ggml_rope(rope, x, positions):
    """What ggml's CPU backend makes of x [n, h, d] float32."""
    base, cpu = library("ggml-base"), library("ggml-cpu")

    class Params(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]
    p, i, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    for name, lib, arguments, result in [
            ("ggml_init", base, [Params], p), ("ggml_free", base, [p], None), ("ggml_get_data", base, [p], p),
            ("ggml_new_tensor_1d", base, [p, i, ctypes.c_int64], p), ("ggml_new_tensor_3d", base, [p, i] + 3 * [ctypes.c_int64], p),
            ("ggml_rope_ext", base, [p, p, p, p, i, i, i] + 6 * [f], p), ("ggml_rope_multi", base, [p, p, p, p, i, ctypes.c_int * 4, i, i] + 6 * [f], p),
            ("ggml_new_graph", base, [p], p), ("ggml_build_forward_expand", base, [p, p], None),
            ("ggml_graph_compute_with_ctx", cpu, [p, p, i], i)]:
        getattr(lib, name).argtypes, getattr(lib, name).restype = arguments, result
    n, h, d = x.shape
    multi = rope.mode in (MROPE, IMROPE)
    ctx = base.ggml_init(Params(1 << 24, None, False))

    def tensor(a, kind, *shape):
        t = (base.ggml_new_tensor_1d if len(shape) == 1 else base.ggml_new_tensor_3d)(ctx, kind, *shape)
        ctypes.memmove(base.ggml_get_data(t), np.ascontiguousarray(a).ctypes.data, a.nbytes)
        return t
    a = tensor(x.astype(np.float32), 0, d, h, n)
    where = tensor(np.tile(positions, 4 if multi else 1).astype(np.int32), 26, n * (4 if multi else 1))
    factors = tensor(np.array(rope.factors, np.float32), 0, len(rope.factors)) if rope.factors else None
    numbers = rope.base, rope.scale, rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow
    if multi:
        quarter = rope.n_dims // 8
        out = base.ggml_rope_multi(ctx, a, where, factors, rope.n_dims, (ctypes.c_int * 4)(2 * quarter, quarter, quarter, 0), rope.mode,
                                   rope.n_ctx_orig, *numbers)
    else:
        out = base.ggml_rope_ext(ctx, a, where, factors, rope.n_dims, rope.mode, rope.n_ctx_orig, *numbers)
    graph = base.ggml_new_graph(ctx)
    base.ggml_build_forward_expand(graph, out)
    assert cpu.ggml_graph_compute_with_ctx(ctx, graph, 1) == 0
    result = np.ctypeslib.as_array(ctypes.cast(base.ggml_get_data(out), ctypes.POINTER(f)), shape=(n, h, d)).copy()
    base.ggml_free(ctx)
    return result


@pytest.mark.parametrize("changes", [
    {}, {"mode": NORMAL}, {"n_dims": 64}, {"mode": NORMAL, "n_dims": 16}, {"mode": MROPE}, {"mode": IMROPE}, {"scale": 0.25},
    {"scale": 0.25, "ext_factor": 1.0}, {"scale": 0.125, "ext_factor": 1.0, "attn_factor": 1.2, "mode": NORMAL},
    {"factors": tuple(np.linspace(1, 8, 16))}, {"base": 1e6}])
def test_the_table_turns_as_ggml_does(changes):
    rope = some_rope(**changes)
    x, positions = RNG.standard_normal((5, 2, 64)), np.array([0, 1, 77, 4001, 30011])
    np.testing.assert_allclose(apply(rope, x, positions), ggml_rope(rope, x, positions), atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"mode": NORMAL}, {"n_dims": 16}, {"mode": NORMAL, "n_dims": 16, "first": 8},
                                     {"scale": 0.25, "ext_factor": 1.0}])
def test_a_turning_bias_is_removed_from_the_sums(changes):
    """Keys R(j)(x + b): the moments after removal are those of R(j) x, though the bias is 100 times larger."""
    rope, d, heads, n = some_rope(**changes), 32, 2, 3000
    bias = 100 * RNG.standard_normal((heads, d))
    x = RNG.standard_normal((n, heads, d)) * np.linspace(.2, 2, d)
    positions = RNG.integers(0, 20000, n)
    keys, clean = apply(rope, x + bias, positions), apply(rope, x, positions)
    m = Moments(positions=positions)
    m.add(Keys(0, keys, keys, rope))
    clean = clean[SINKS:]
    mean, cov = key_moments(m.layers[0], bias)
    L, c = turned(bias, rope)
    np.testing.assert_allclose(apply(rope, np.broadcast_to(bias, x.shape), positions), np.einsum("hdr,nr->nhd", L, rope.table(positions)) + c, atol=1e-9)
    np.testing.assert_allclose(mean, clean.mean(0), atol=1e-6)
    direct = np.stack([np.cov(clean[:, h].T, bias=True) for h in range(heads)])
    np.testing.assert_allclose(cov, direct, atol=1e-6)
    # measured: the mean of the keys turned back
    back = (x + bias)[SINKS:].mean(0)
    np.testing.assert_allclose(measured_bias(m.layers[0]), back, atol=1e-6)


def test_layers_without_a_rotation_have_no_key_bias():
    m = Moments(positions=np.arange(40))
    x = RNG.standard_normal((40, 1, 8))
    m.add(Keys(0, x, x, None))
    m.add(Queries(0, x))
    layer_transform(m.layers[0])
    for f in (lambda: key_moments(m.layers[0], np.ones((1, 8))), lambda: measured_bias(m.layers[0])):
        with pytest.raises(ValueError, match="rotation"):
            f()


def test_queries_of_a_group_are_pooled():
    m = Moments(positions=np.arange(20))
    k, q = RNG.standard_normal((20, 2, 8)), RNG.standard_normal((20, 6, 8)).astype(np.float32)
    m.add(Keys(0, k, k, None))
    m.add(Queries(0, q))
    s, seen = m.layers[0], q[SINKS:].astype(float)
    for h in range(2):
        group = seen[:, 3 * h:3 * h + 3].reshape(-1, 8)
        np.testing.assert_allclose(s.qq[h] / s.n_q, group.T @ group / len(group), atol=1e-6)
    m.add(Queries(0, q))                                             # a layer that reuses this cache
    assert s.n_q == 2 * 16 * 3
    with pytest.raises(ValueError, match="3 query heads"):
        m.add(Queries(0, q[:, :3]))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_predicted_errors_are_those_of_the_codec(bits):
    """Gaussian keys through the numpy codec: what queries see of the error, against uniform_loss and plain_loss."""
    d, n = 64, 6000
    S, Q = covariance(d, 1.0), covariance(d, 1.0)        # enough directions that the mixed coordinates are Gaussian
    mean = RNG.standard_normal(d)
    keys = RNG.multivariate_normal(np.zeros(d), S, n) + mean
    B, lam = key_transform(S, Q, ridge=0)
    t = Transform(mean[None], B[None], lam[None], np.zeros((1, d)))
    cost = lambda e: np.einsum("ni,ij,nj->n", e, Q, e).mean()
    codec = lambda x: turbo.dequantise(turbo.quantise(x, f"turbo{bits}_64"), f"turbo{bits}_64").astype(np.float64)
    w = lam ** .25
    w /= np.sqrt((w * w).mean())
    F = np.linalg.inv(B)
    calibrated = codec((keys - mean) @ F * w) / w @ B + mean
    assert cost(calibrated - keys) == pytest.approx(loss.uniform_loss(lam, bits), rel=.2)
    assert cost(codec(keys) - keys) == pytest.approx(loss.plain_loss(t, bits)[0], rel=.25)        # few directions dominate: less Gaussian
    assert loss.uniform_loss(lam, bits) < .7 * loss.plain_loss(t, bits)[0]


def test_loss_on_other_text():
    """Equal to the predicted loss on the same moments; a mean that moved costs what its square adds to the covariance."""
    d = 32
    S, Q, mean = covariance(d), covariance(d), RNG.standard_normal(d)
    B, lam = key_transform(S, Q, ridge=0)
    t = Transform(mean[None], B[None], lam[None], np.zeros((1, d)))
    assert loss.met_loss(t, mean[None], S[None], Q[None], 3)[0] == pytest.approx(loss.uniform_loss(lam, 3), rel=1e-3)
    assert loss.met_loss(t, mean[None], S[None], 2 * Q[None], 3)[0] == pytest.approx(2 * loss.uniform_loss(lam, 3), rel=1e-3)
    off = RNG.standard_normal(d)
    moved = loss.met_loss(t, mean + off[None], S[None], Q[None], 3)
    assert moved == pytest.approx(loss.met_loss(t, mean[None], S[None] + np.outer(off, off), Q[None], 3)) and moved > loss.uniform_loss(lam, 3)


def test_bits_by_importance_beat_equal_bits():
    lam = np.exp(-np.arange(64) / 4)
    assert loss.tiered_loss(lam) < .6 * loss.uniform_loss(lam, 2)
    assert loss.tiered_loss(lam, ((16, 2),)) == pytest.approx(loss.uniform_loss(lam, 2))
