"""The polar form and its codec."""
import numpy as np
import pytest

from pykvq.codecs import PolarQuant
from pykvq.codecs.polarquant import from_polar, to_polar


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_polar_form_is_exact(levels):
    x = np.random.default_rng(0).standard_normal((3, 5, 64))
    angles, radius = to_polar(x, levels)
    assert [a.shape[-1] for a in angles] == [64 >> i + 1 for i in range(levels)] and radius.shape == (3, 5, 64 >> levels)
    assert (angles[0] >= 0).all() and (angles[0] < 2 * np.pi).all() and all((a >= 0).all() and (a <= np.pi / 2).all() for a in angles[1:])
    np.testing.assert_allclose(from_polar(angles, radius), x, atol=1e-12)
    np.testing.assert_allclose(radius, np.linalg.norm(x.reshape(3, 5, -1, 1 << levels), axis=-1), atol=1e-12)


def test_bits_of_the_paper_s_setting():
    assert PolarQuant(128).bits_per_value() == 3.875


def test_error_falls_fourfold_with_each_bit_of_every_angle():
    x = np.random.default_rng(1).standard_normal((1000, 64))
    error = []
    for extra in range(3):
        p = PolarQuant(64, (4 + extra, 2 + extra, 2 + extra, 2 + extra))
        back = p.dequantise(p.quantise(x))
        assert back.dtype == np.float32 and back.shape == x.shape
        error.append(np.square(back - x).mean())
    assert 3 < error[0] / error[1] < 4.5 and 3 < error[1] / error[2] < 4.5
    assert error[0] < 0.05


def test_norms_survive():
    """Angles carry no length: the norm of the reconstruction is that of the vector, up to fp16."""
    x = np.random.default_rng(2).standard_normal((50, 32)).astype(np.float32)
    p = PolarQuant(32, (3, 2))
    np.testing.assert_allclose(np.linalg.norm(p.dequantise(p.quantise(x)), axis=1), np.linalg.norm(x, axis=1), rtol=1e-3)


@pytest.mark.parametrize("call", [
    lambda: PolarQuant(24), lambda: PolarQuant(32, ()), lambda: PolarQuant(32, (0, 2)), lambda: PolarQuant(32, (2, 9)),
    lambda: PolarQuant(32).quantise(np.zeros((2, 31))), lambda: PolarQuant(32).quantise(np.full((1, 32), np.nan)),
    lambda: PolarQuant(32).quantise(np.full((1, 32), 1e6)), lambda: to_polar(np.zeros((2, 6)), 2), lambda: to_polar(np.zeros((2, 6)), 0)])
def test_bad_input_is_a_value_error(call):
    with pytest.raises(ValueError):
        call()
