"""Densities and their codebooks against sampling, quadrature and brute force."""
import numpy as np
import pytest
from scipy.integrate import quad

from pykvq.codecs.density import (cell_probabilities, gaussian_codebook, polar_codebook, polar_density, sphere_codebook, sphere_density,
                                  sphere_mse)
from pykvq.codecs.polarquant import to_polar


def sphere(n, d, seed=0):
    x = np.random.default_rng(seed).standard_normal((n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("d", [2, 3, 16, 128, 3072])
def test_sphere_density_is_that_of_sampled_points(d):
    z = np.sort(sphere(4000, d)[:, 0]) * np.sqrt(d)
    ks = np.abs(sphere_density(d).cdf(z) - (np.arange(len(z)) + 0.5) / len(z)).max()
    assert ks < 1.95 / np.sqrt(len(z))                       # Kolmogorov-Smirnov at 0.1 %


@pytest.mark.parametrize("density", [sphere_density(3), sphere_density(5), sphere_density(128), *(polar_density(n) for n in (2, 3, 4))])
def test_cdf_and_moment_are_integrals_of_the_pdf(density):
    at = density.low + (density.high - density.low) * np.array([0.3, 0.45, 0.8])
    for a, b in zip(at[:-1], at[1:]):
        assert np.diff(density.cdf(np.array([a, b])))[0] == pytest.approx(quad(density.pdf, a, b)[0], abs=1e-9)
        assert np.diff(density.moment(np.array([a, b])))[0] == pytest.approx(quad(lambda x: x * density.pdf(x), a, b)[0], abs=1e-9)


@pytest.mark.parametrize("d, bits", [(2, 1), (3, 2), (64, 1), (64, 4), (128, 3), (3072, 4), (128, 6), (128, 8)])
def test_levels_are_the_means_of_their_cells(d, bits):
    c = sphere_codebook(d, bits)
    z = c * np.sqrt(d)
    edges = np.concatenate([[-np.sqrt(d)], (z[1:] + z[:-1]) / 2, [np.sqrt(d)]])
    density = sphere_density(d)
    means = np.diff(density.moment(edges)) / np.diff(density.cdf(edges))
    np.testing.assert_allclose(z, means, atol=1e-7)
    np.testing.assert_allclose(c, -c[::-1], atol=1e-15)
    assert (np.diff(c) > 0).all() and np.abs(c).max() < 1


def test_three_dimensions_are_uniform():
    """Archimedes: a coordinate on the 2-sphere is uniform, so the codebook is equally spaced and the error is 4**-b."""
    np.testing.assert_allclose(sphere_codebook(3, 3), (np.arange(8) - 3.5) / 4, atol=1e-12)
    assert sphere_mse(3, 3) == pytest.approx(4.0 ** -3)


@pytest.mark.parametrize("bits, paper", [(1, np.sqrt(2 / np.pi)), (2, (0.453, 1.51))])
def test_codebook_equals_the_paper_s_for_many_dimensions(bits, paper):
    """Section 3.1 prints +-sqrt(2/pi)/sqrt(d) for one bit and +-0.453/sqrt(d), +-1.51/sqrt(d) for two."""
    d = 10 ** 6
    np.testing.assert_allclose(sphere_codebook(d, bits)[1 << bits - 1:] * np.sqrt(d), paper, atol=5e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_gaussian_codebook_is_the_limit(bits):
    d = 10 ** 6
    np.testing.assert_allclose(sphere_codebook(d, bits), gaussian_codebook(d, bits), atol=1e-5 / np.sqrt(d))
    assert np.abs(sphere_codebook(16, bits) - gaussian_codebook(16, bits)).max() > 1e-3


@pytest.mark.parametrize("d, bits", [(16, 2), (128, 3)])
def test_sphere_mse_is_the_error_of_sampled_points(d, bits):
    c, x = sphere_codebook(d, bits), sphere(20000, d)
    error = np.square(x - c[np.abs(x[..., None] - c).argmin(-1)]).sum(1)
    assert error.mean() == pytest.approx(sphere_mse(d, bits), abs=5 * error.std() / np.sqrt(len(x)))


def test_cell_probabilities_sum_to_one():
    p = cell_probabilities(sphere_codebook(128, 4), 128)
    assert p.sum() == pytest.approx(1) and (p > 0).all()


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_polar_density_is_that_of_gaussian_vectors(level):
    angles, _ = to_polar(np.random.default_rng(level).standard_normal((4000, 16)), 4)
    sample = np.sort(angles[level - 1][:, 0])
    cdf = sample / (2 * np.pi) if level == 1 else polar_density(level).cdf(sample)
    assert np.abs(cdf - (np.arange(len(sample)) + 0.5) / len(sample)).max() < 1.95 / np.sqrt(len(sample))


@pytest.mark.parametrize("level", [2, 3, 4])
def test_polar_codebook_is_symmetric_and_beats_equal_arcs(level):
    c = polar_codebook(level, 2)
    np.testing.assert_allclose(c + c[::-1], np.pi / 2, atol=1e-12)
    psi = polar_density(level).quantile((np.arange(100000) + 0.5) / 100000)
    error = lambda levels: np.square(psi - levels[np.abs(psi[:, None] - levels).argmin(1)]).mean()
    assert error(c) < 0.95 * error(np.pi / 2 * (np.arange(4) + 0.5) / 4)


@pytest.mark.parametrize("call", [lambda: sphere_codebook(1, 2), lambda: sphere_codebook(64, 9), lambda: sphere_codebook(64, -1),
                                  lambda: polar_codebook(2, 0), lambda: polar_density(1), lambda: gaussian_codebook(64, 7)])
def test_bad_parameters_are_value_errors(call):
    with pytest.raises(ValueError):
        call()


def test_codebooks_are_shared_and_read_only():
    with pytest.raises(ValueError):
        sphere_codebook(64, 2)[0] = 0
