"""Bit planes."""
import numpy as np
import pytest

from pykvq.codecs.packing import pack, packed_bytes, unpack


@pytest.mark.parametrize("bits", range(9))
@pytest.mark.parametrize("d", [1, 8, 50, 64])
def test_every_code_survives(bits, d):
    codes = np.random.default_rng(d).integers(0, 1 << bits, (3, 2, d)).astype(np.uint8)
    data = pack(codes, bits)
    assert data.dtype == np.uint8 and data.shape == (3, 2, packed_bytes(d, bits)) and packed_bytes(d, bits) == bits * ((d + 7) // 8)
    np.testing.assert_array_equal(unpack(data, d, bits), codes)


def test_layout():
    np.testing.assert_array_equal(pack(np.array([1, 0, 3, 2, 0, 0, 0, 1], np.uint8), 2), [0b10100001, 0b00110000])


def test_wrong_length_is_a_value_error():
    with pytest.raises(ValueError, match="need 8"):
        unpack(np.zeros((2, 7), np.uint8), 32, 2)
