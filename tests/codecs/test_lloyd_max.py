"""Codebooks against values found by another route: root finding on the stationarity conditions with quadrature integrals."""
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import root

from pykvq.codecs.lloyd_max import gain_of_levels, lloyd_max, mse_of_levels
from pykvq.formats import FAMILIES


def gaussian(x):
    return np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


NODES, WEIGHTS = np.polynomial.legendre.leggauss(80)


def stationary(half):
    """Max's conditions for the positive levels, by Gauss-Legendre: the integral of (x - c) p(x) over each cell is zero."""
    edges = np.concatenate([[0], (half[1:] + half[:-1]) / 2, [12]])
    width, middle = np.diff(edges)[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
    x = middle + width * NODES
    return (width * WEIGHTS * (x - half[:, None]) * gaussian(x)).sum(1)


def independent_codebook(bits):
    half = 1 << bits - 1
    found = root(stationary, (np.arange(half) + 0.5) * 2.8 / half, method="lm", tol=1e-15)
    return np.sort(found.x)


def mean_squared_error(levels, edges):
    """E|x - level(x)|^2 by quadrature; levels in sigmas."""
    ends = np.concatenate([[-12], edges, [12]])
    return sum(quad(lambda x, c=c: (x - c) ** 2 * gaussian(x), a, b)[0] for c, a, b in zip(levels, ends[:-1], ends[1:]))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codebook_equals_root_of_stationarity_conditions(bits):
    np.testing.assert_allclose(lloyd_max(bits)[1 << bits - 1:], independent_codebook(bits), atol=1e-6)


@pytest.mark.parametrize("bits, positive, mse", [
    (1, [0.79788456], 0.36338023),
    (2, [0.45278003, 1.51041761], 0.11748185),
    (3, [0.24509418, 0.75600528, 1.34390928, 2.15194570], 0.03454776),
    (4, [0.12839503, 0.38804830, 0.65675912, 0.94234046, 1.25623120, 1.61804639, 2.06901723, 2.73258957], 0.00950101)])
def test_codebook_equals_published_values(bits, positive, mse):
    c = lloyd_max(bits)
    np.testing.assert_allclose(c[len(c) // 2:], positive, atol=1e-6)
    assert mean_squared_error(c, (c[1:] + c[:-1]) / 2) == pytest.approx(mse, abs=1e-7)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_codebook_is_symmetric_and_ascending(bits):
    c = lloyd_max(bits)
    assert len(c) == 1 << bits and (np.diff(c) > 0).all()
    np.testing.assert_array_equal(c, -c[::-1])


@pytest.mark.parametrize("bits", [0, 7])
def test_codebook_refuses_other_bit_widths(bits):
    with pytest.raises(ValueError, match="1..6"):
        lloyd_max(bits)


@pytest.mark.parametrize("name, excess_percent", [("turbo2", 0.0001), ("turbo3", 0.004), ("turbo4", 0.12)])
def test_int8_table_loses_next_to_nothing(name, excess_percent):
    f = FAMILIES[name]
    exact = lloyd_max(f.bits)
    edges = (exact[1:] + exact[:-1]) / 2
    np.testing.assert_allclose(f.thresholds, edges, atol=1e-12)
    optimum = mean_squared_error(exact, edges)
    table = mean_squared_error(np.array(f.levels) / f.scale, edges)
    # scale is a least-squares gain, which the quantiser applies per block as <y, c> / <c, c>
    assert 0 <= table / optimum - 1 < excess_percent / 100
    assert mse_of_levels(f.levels, edges) == pytest.approx(table, abs=1e-9)
    assert gain_of_levels(f.levels, edges) == pytest.approx(f.scale, rel=1e-12)
