"""The range coder: exact, and as short as the entropy says."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvq.codecs import RangeCoder, index_entropy, sphere_codebook, TurboQuantMSE
from pykvq.codecs.density import cell_probabilities


@pytest.mark.parametrize("bits, entropy", [(1, 1.0), (2, 1.911), (3, 2.825), (4, 3.765)])
def test_entropy_of_the_gaussian_limit(bits, entropy):
    assert index_entropy(sphere_codebook(10 ** 5, bits), 10 ** 5) == pytest.approx(entropy, abs=1e-3)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_coded_size_of_real_codes_is_their_entropy(bits):
    d = 128
    x = np.random.default_rng(bits).standard_normal((2000, d))
    codes = TurboQuantMSE(d, bits).quantise(x).codes
    coder = RangeCoder(cell_probabilities(sphere_codebook(d, bits), d))
    data = coder.encode(codes)
    assert 8 * len(data) / codes.size == pytest.approx(index_entropy(sphere_codebook(d, bits), d), rel=0.01)
    np.testing.assert_array_equal(coder.decode(data, codes.size), codes.ravel())


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.floats(0, 1), min_size=2, max_size=20).filter(lambda w: sum(w) > 1e-3), count=st.integers(0, 700),
       seed=st.integers(0, 2**32 - 1))
def test_round_trip(weights, count, seed):
    codes = np.random.default_rng(seed).integers(0, len(weights), count).astype(np.uint8)
    coder = RangeCoder(weights)
    np.testing.assert_array_equal(coder.decode(coder.encode(codes), count), codes)


@pytest.mark.parametrize("call", [
    lambda: RangeCoder([1.0]), lambda: RangeCoder([0.5, -0.1]), lambda: RangeCoder([0, 0]), lambda: RangeCoder(np.ones((2, 2))),
    lambda: RangeCoder([0.5, 0.5]).encode(np.array([2], np.uint8)), lambda: RangeCoder([0.5, 0.5]).decode(b"abc", 3),
    lambda: RangeCoder([0.5, 0.5]).decode(RangeCoder([0.5, 0.5]).encode(np.zeros(64, np.uint8)), 10 ** 5)])
def test_bad_input_is_a_value_error(call):
    with pytest.raises(ValueError):
        call()
