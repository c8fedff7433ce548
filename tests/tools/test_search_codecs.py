"""The codes of tools/search_codecs.py."""
import numpy as np
import pytest
import search_codecs


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).standard_normal((400, 64))


def test_trellis_errs_less_than_scalar_codes(rows):
    scalar, trellis = (((search_codecs.block(rows, 2, code=code) - rows) ** 2).mean() for code in (search_codecs.lloyd, search_codecs.trellis))
    assert 0.0625 < trellis < 0.85 * scalar                  # above the rate-distortion bound


def test_trellis_steps_from_its_last_code(rows):
    """Two equal levels in the table aside, a path is legal when each level's row is the column of the one before."""
    levels = search_codecs.trellis(rows)
    at = np.abs(levels[..., None] - search_codecs.TRELLIS).argmin(-1)
    assert (at[:, 1:] % 4 == at[:, :-1] // 4).all() and (at[:, 0] % 4 == 0).all()


@pytest.mark.parametrize("gain", [0, .5, 1])
def test_gain(rows, gain):
    """Least squares, length-keeping, unbiased."""
    back = search_codecs.block(rows, 2, gain)
    xx, xb, bb = ((a * b).sum(1) for a, b in ((rows, rows), (rows, back), (back, back)))
    np.testing.assert_allclose({0: xb / bb, .5: xx / bb, 1: xx / xb}[gain], 1, rtol=2e-3)


def test_scales_of_8_bits_are_near():
    scales = np.geomspace(2.0 ** -8, 2.0 ** 7.9, 1000)
    coded = search_codecs.sixteenths_of_octaves(scales)
    np.testing.assert_allclose(coded, scales, rtol=0.022)
    assert len(set(coded)) <= 256
