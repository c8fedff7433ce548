"""Rotations: orthonormal, invertible, and mixing."""
import numpy as np
import pytest

from pykvq.codecs.rotation import HaarRotation, HadamardRotation, factors, largest_order, make_rotation

SIZES = [2, 3, 50, 64, 80, 128, 200, 384, 1000]


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
@pytest.mark.parametrize("d", SIZES)
def test_rotation_is_orthonormal_and_invertible(kind, d):
    r = make_rotation(kind, d, 3)
    matrix = r.apply(np.eye(d, dtype=np.float32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=2e-5)
    x = np.random.default_rng(d).standard_normal((2, 3, d)).astype(np.float32)
    np.testing.assert_allclose(r.invert(r.apply(x)), x, atol=2e-5)


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_seed_decides(kind):
    x = np.random.default_rng(0).standard_normal((4, 96)).astype(np.float32)
    np.testing.assert_array_equal(make_rotation(kind, 96, 7).apply(x), make_rotation(kind, 96, 7).apply(x))
    assert np.abs(make_rotation(kind, 96, 7).apply(x) - make_rotation(kind, 96, 8).apply(x)).max() > 0.1


def test_input_is_left_alone():
    x = np.ones((2, 200), np.float32)
    r = HadamardRotation(200)
    r.invert(r.apply(x))
    assert (x == 1).all()


def test_haar_is_not_the_matrix_of_the_caller_s_generator():
    """Data drawn with the same seed must be independent of the rotation, or the first d rows become triangular."""
    data = np.random.default_rng(0).standard_normal((64, 64))
    data /= np.linalg.norm(data, axis=1, keepdims=True)
    assert np.abs(HaarRotation(64, 0).apply(data.astype(np.float32))).max() < 0.75


def test_haar_is_uniform():
    """Mean of any entry is zero and of its square 1/d: without the sign correction of QR the diagonal is one-sided."""
    entries = np.array([HaarRotation(4, seed).matrix for seed in range(2000)])
    assert np.abs(entries.mean(0)).max() < 5 * 0.5 / np.sqrt(2000)
    np.testing.assert_allclose(np.square(entries).mean(0), 0.25, atol=0.03)


@pytest.mark.parametrize("d", [50, 64, 200, 384])
def test_hadamard_spreads_a_single_value(d):
    spread = HadamardRotation(d).apply(np.eye(d, dtype=np.float32))
    assert np.abs(spread).max() < 6 / np.sqrt(d)


@pytest.mark.parametrize("d, order", [(1, 1), (2, 2), (50, 48), (200, 192), (1536, 1536), (3072, 3072), (576, 512), (111, 96), (112, 112)])
def test_largest_order(d, order):
    assert largest_order(d) == order
    for h in factors(order):
        np.testing.assert_allclose(h @ h.T, np.eye(len(h)), atol=1e-5)


def test_states_rebuild_the_rotation():
    x = np.random.default_rng(1).standard_normal((3, 200)).astype(np.float32)
    haar, hadamard = HaarRotation(200, 5), HadamardRotation(200, 5)
    np.testing.assert_array_equal(HaarRotation.from_state(haar.state()).apply(x), haar.apply(x))
    np.testing.assert_array_equal(HadamardRotation.from_state(hadamard.state(), 200).apply(x), hadamard.apply(x))


def test_unknown_rotation_is_a_value_error():
    with pytest.raises(ValueError, match="haar, hadamard"):
        make_rotation("givens", 64, 0)
