"""OSCAR as published: rotation, quantiser and weights against its formulas, and what they cost on Gaussian keys."""
import numpy as np
import pytest

from pykvq.codecs import oscar_published as oscar
from pykvq.codecs.hadamard import sylvester

RNG = np.random.default_rng(0)


def moment(d, decay=3.0):
    a = RNG.standard_normal((d, d)) * np.exp(-decay * np.arange(d) / d)
    return a @ a.T


@pytest.mark.parametrize("d", [64, 128, 256])
def test_rotation_spreads_the_queries_evenly(d):
    """After U H every coordinate carries trace / d of the query energy."""
    S = np.stack([moment(d), moment(d)])
    R = oscar.rotation(S)
    np.testing.assert_allclose(np.swapaxes(R, 1, 2) @ R, np.broadcast_to(np.eye(d), R.shape), atol=1e-12)
    energy = np.einsum("hij,hik,hkj->hj", R, S, R)
    np.testing.assert_allclose(energy, np.trace(S, axis1=1, axis2=2)[:, None] / d * np.ones(d), rtol=1e-9)


def test_rotation_is_eigenvectors_hadamard_permutation():
    S = np.diag([1.0, 4.0, 2.0, 3.0])
    U = np.eye(4)[:, [0, 2, 3, 1]]                                   # ascending eigenvalues
    R = oscar.rotation(S)
    np.testing.assert_allclose(np.abs(R), 0.5)
    np.testing.assert_allclose(R @ R.T, np.eye(4), atol=1e-12)
    signs = np.sign((U.T @ R)[:, 0])                                 # eigenvectors come with either sign
    np.testing.assert_allclose(U * signs @ sylvester(4)[:, [0, 2, 1, 3]] / 2, R, atol=1e-12)


def test_bit_reversal():
    assert list(oscar.bit_reversal(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    for d in (0, 1, 80, 96):
        with pytest.raises(ValueError, match="power of two"):
            oscar.bit_reversal(d)


def test_quantiser_on_a_worked_example():
    """Eight values, clip 0.75: tau is the 7th smallest magnitude."""
    x = np.array([-3.0, -1, -.5, 0, .25, 1, 2, 10], np.float32)
    codes, scale, zero = oscar.quantise(x, 0.75)                     # clipped to [-3, 3]: scale 2, zero 1.5
    assert scale.item() == 2 and zero.item() == 1.5
    assert codes.ravel().tolist() == [0, 1, 1, 2, 2, 2, 3, 3]
    assert oscar.dequantise(codes, scale, zero).tolist() == [-3, -1, -1, 1, 1, 1, 3, 3]


@pytest.mark.parametrize("d, groups", [(64, 1), (128, 1), (256, 2)])
def test_groups_of_128_or_the_head(d, groups):
    codes, scale, zero = oscar.quantise(RNG.standard_normal((5, d)), oscar.CLIP_KEYS)
    assert codes.shape == (5, groups, d // groups) and scale.shape == zero.shape == (5, groups, 1) and codes.max() == 3
    assert oscar.pack(codes).shape == (5, groups, d // groups // 4)
    assert oscar.bits_per_value(128) == 2.5
    with pytest.raises(ValueError, match="divide"):
        oscar.quantise(np.ones(192), .9)


def test_packing_is_the_published_one():
    codes = RNG.integers(0, 4, 16).astype(np.uint8)
    assert [oscar.pack(codes)[1] >> 2 * k & 3 for k in range(4)] == [codes[1], codes[5], codes[9], codes[13]]


@pytest.mark.parametrize("clip, mse", [(.96, .156), (.92, .127), (.90, .122), (.88, .118)])
def test_error_on_gaussian_groups(clip, mse):
    """Mean squared errors per clip on N(0, 1) rows of 128, as computed independently."""
    x = RNG.standard_normal((20000, 128))
    assert ((oscar.dequantise(*oscar.quantise(x, clip)) - x) ** 2).mean() == pytest.approx(mse, abs=.0015)


def test_constant_vectors_survive():
    x = np.full((2, 64), 0.5)
    np.testing.assert_allclose(oscar.dequantise(*oscar.quantise(x, .96)), x, atol=1e-6)


def test_value_moment_weights_tokens_by_what_queries_read():
    k, v, Q = RNG.standard_normal((50, 8)), RNG.standard_normal((50, 6)), moment(8)
    w = [a @ Q @ a for a in k]
    direct = sum(x / np.mean(w) * np.outer(b, b) for x, b in zip(w, v)) / 50
    np.testing.assert_allclose(oscar.value_moment(k, v, Q), direct, rtol=1e-10)


def test_round_trip_in_the_rotated_basis():
    x, R = RNG.standard_normal((30, 64)), oscar.rotation(moment(64))
    np.testing.assert_allclose(oscar.round_trip(x, R, .96) @ R, oscar.dequantise(*oscar.quantise(x @ R, .96)), atol=1e-5)
