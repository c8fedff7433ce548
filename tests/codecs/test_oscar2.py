"""The numpy reference of oscar2's block: layout, distortion by tier, spreads and refusals."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvq.codecs import oscar2
from pykvq.codecs.lloyd_max import lloyd_max
from pykvq.formats import TIERED, TYPES

NAMES = [name for name, t in TYPES.items() if t.family in TIERED]
FAMILY = TIERED["oscar2"]


def gaussian(rows, k, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def there_and_back(x, name):
    return oscar2.dequantise(oscar2.quantise(x, name), name)


def test_levels_are_lloyd_max_times_ratio_within_half_a_unit():
    for tier in FAMILY.tiers:
        for ratio, levels in zip(tier.ratios, tier.levels, strict=True):
            assert np.abs(np.array(levels) - FAMILY.scale * ratio * lloyd_max(tier.bits)).max() < (0.5 if len(tier.ratios) > 1 else 1.0)
            assert max(levels) < 128


@pytest.mark.parametrize("name", NAMES)
def test_shape_bytes_and_average_bits(name):
    t = TYPES[name]
    x = gaussian(6, 3 * t.block).reshape(2, 3, 3 * t.block)
    data = oscar2.quantise(x, name)
    assert data.dtype == np.uint8 and data.shape == (2, 3, 3 * t.bytes)
    assert there_and_back(x, name).shape == x.shape
    assert t.bytes * 8 == 2 * t.block + 16


@pytest.mark.parametrize("name", NAMES)
def test_distortion_falls_by_tier_to_that_of_lloyd_max(name):
    n = TYPES[name].block
    x = gaussian(4096, n)
    error = ((there_and_back(x, name) - x) ** 2).mean(0)
    for part, expected in ((slice(0, n // 4), 0.0095), (slice(n // 4, n // 2), 0.1175), (slice(n // 2, n), 0.3634)):
        assert 0.75 < error[part].mean() / expected < 1.05


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tier, ratio", [(1, 0.6), (1, 1.7), (2, 0.45), (2, 2.2)])
def test_a_tier_of_another_spread_keeps_its_relative_error(name, tier, ratio):
    n = TYPES[name].block
    part = (slice(n // 4, n // 2), slice(n // 2, n))[tier - 1]
    x = gaussian(2048, n)
    x[:, part] *= ratio
    error = ((there_and_back(x, name) - x)[:, part] ** 2).mean() / (x[:, part] ** 2).mean()
    assert error < (0.135, 0.40)[tier - 1]


@pytest.mark.parametrize("name", NAMES)
def test_layout(name):
    """Coordinate i of each tier lies where docs/formats.md says: flipping one code changes that coordinate alone."""
    n = TYPES[name].block
    data = oscar2.quantise(gaussian(1, n), name)
    for i, byte, mask in ((1, 1, 0x0F), (n // 8 + 1, 1, 0xF0), (n // 4, n // 8, 0x03), (n // 4 + n // 16, n // 8, 0x0C),
                          (n // 2 + 1, n // 8 + n // 16 + 1, 0x01), (n - 1, n // 4 - 1, 0x80)):
        other = data.copy()
        other[0, byte] ^= mask
        changed = np.flatnonzero(oscar2.dequantise(other, name) != oscar2.dequantise(data, name))
        assert changed.tolist() == [i]


def test_scale_has_five_mantissa_bits_and_never_overflows():
    data = oscar2.quantise(gaussian(64, 128) * np.float32(1e6), "oscar2")
    last = np.ascontiguousarray(data[:, -2:]).view("<u2")[:, 0]
    assert np.isfinite((last & 0xFFE0).astype(np.uint16).view("<f2")).all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zero(name):
    assert not there_and_back(np.zeros((2, TYPES[name].block), np.float32), name).any()


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**32 - 1), st.floats(1e-2, 1e2))
def test_error_scales_with_the_input(name, seed, factor):
    x = gaussian(4, TYPES[name].block, seed)
    error = ((there_and_back(x * np.float32(factor), name) / factor - x) ** 2).mean()
    assert error < 0.6


@pytest.mark.parametrize("call, message", [
    (lambda: oscar2.quantise(np.zeros((1, 64)), "turbo2_64"), "no tiered cache type"),
    (lambda: oscar2.quantise(np.zeros((1, 65)), "oscar2_64"), "no multiple of the block"),
    (lambda: oscar2.dequantise(np.zeros((1, 19), np.uint8), "oscar2_64"), "no multiple of the block")])
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
