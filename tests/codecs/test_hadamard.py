"""Rotations: orthogonality, the published construction's properties, and that the fast transform is the matrix."""
import numpy as np
import pytest

from pykvq.codecs.hadamard import paley, sylvester
from pykvq.codecs.turbo import rotate, unrotate
from pykvq.formats import BLOCKS, PALEY, SIGNS


@pytest.mark.parametrize("m", [1, 12, 20, 28])
def test_paley_is_a_hadamard_matrix(m):
    p = paley(m)
    assert set(np.unique(p)) <= {-1, 1}
    np.testing.assert_array_equal(p @ p.T, m * np.eye(m))


def test_paley_refuses_undeclared_orders():
    with pytest.raises(ValueError, match="order 16"):
        paley(16)


@pytest.mark.parametrize("n", [1, 2, 4, 64, 128])
def test_sylvester_is_a_symmetric_hadamard_matrix(n):
    h = sylvester(n)
    np.testing.assert_array_equal(h, h.T)
    np.testing.assert_array_equal(h @ h, n * np.eye(n))


@pytest.mark.parametrize("n", BLOCKS)
def test_fast_rotation_is_the_signed_hadamard_matrix(n):
    matrix = np.kron(paley(PALEY[n]), sylvester(n // PALEY[n])) * np.array(SIGNS[:n])
    eye = np.eye(n, dtype=np.float32)
    np.testing.assert_array_equal(rotate(eye).T, matrix)            # exact: every sum has one non-zero term
    np.testing.assert_array_equal(unrotate(eye).T, matrix.T)


@pytest.mark.parametrize("n", BLOCKS)
def test_rotation_is_orthonormal_up_to_sqrt_n(n):
    x = np.random.default_rng(0).standard_normal((7, 3, n)).astype(np.float32)
    y = rotate(x)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.sqrt(n) * np.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(unrotate(y) / n, x, atol=1e-5)


def test_rotation_spreads_a_spike_evenly():
    spike = np.zeros(96, np.float32)
    spike[5] = 3
    np.testing.assert_array_equal(np.abs(rotate(spike)), 3)


def test_rotation_refuses_undeclared_sizes():
    with pytest.raises(ValueError, match="72"):
        rotate(np.zeros(72, np.float32))
