"""Every codec on arrays of any shape, order, dtype and size of value: it works to the same error, or says what is wrong in one line."""
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvq.codecs import (HaarRotation, HadamardRotation, MixedTurboQuant, PolarQuant, RangeCoder, TurboQuantMSE, TurboQuantProd, VectorIndex,
                          outlier_channels, sphere_codebook, turbo)
from pykvq.codecs import oscar_published

D = 48
MAKE = {"mse": lambda: TurboQuantMSE(D, 3), "unbiased": lambda: TurboQuantMSE(D, 1, scale="unbiased", rotation="hadamard"),
        "least squares": lambda: TurboQuantMSE(D, 8, scale="least-squares"), "prod": lambda: TurboQuantProd(D, 3), "qjl": lambda: TurboQuantProd(D, 1),
        "mixed": lambda: MixedTurboQuant(D, np.arange(0, D, 3), 3, 2), "polar": lambda: PolarQuant(D)}
CODECS = {name: make() for name, make in MAKE.items()}
INDEXES = [(m, k) for m in ("inner", "cosine", "l2") for k in ("unbiased", "norm", "prod")]


def relative_error(codec, x):
    y = codec.dequantise(codec.quantise(x)).astype(np.float64)
    x = np.asarray(x, np.float64)
    return np.linalg.norm(x - y, axis=-1) / np.linalg.norm(x, axis=-1)


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=25)
@given(shape=st.lists(st.integers(0, 4), max_size=3), dtype=st.sampled_from([np.float16, np.float32, np.float64, ">f4"]),
       order=st.sampled_from(["C", "F", "reversed", "strided", "read-only"]), seed=st.integers(0, 2**32 - 1))
def test_shape_order_and_dtype_do_not_matter(name, shape, dtype, order, seed):
    plain = np.random.default_rng(seed).standard_normal((*shape, D)).astype(dtype)
    x = {"C": plain, "F": np.asfortranarray(plain), "reversed": plain[..., ::-1].copy()[..., ::-1], "strided": np.repeat(plain, 2, -1)[..., ::2],
         "read-only": np.broadcast_to(plain, plain.shape)}[order]
    before = x.copy()
    codec = CODECS[name]
    y = codec.dequantise(codec.quantise(x))
    assert y.shape == x.shape and y.dtype == np.float32
    np.testing.assert_array_equal(x, before)
    rows = plain.reshape(-1, D).astype(np.float32)
    one_by_one = [codec.dequantise(codec.quantise(row)) for row in rows]
    np.testing.assert_allclose(y.reshape(-1, D), np.reshape(one_by_one, (-1, D)), rtol=1e-4, atol=6e-5)


@pytest.mark.parametrize("name", [n for n in CODECS if n != "polar"])        # its radii are fp16
@settings(deadline=None, max_examples=25)
@given(exponent=st.integers(-120, 120), seed=st.integers(0, 2**32 - 1))
def test_relative_error_does_not_depend_on_the_size_of_the_values(name, exponent, seed):
    x = np.random.default_rng(seed).standard_normal((3, D)).astype(np.float32)
    assert relative_error(CODECS[name], np.ldexp(x, exponent)) == pytest.approx(relative_error(CODECS[name], x), rel=1e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CODECS)
def test_zero_and_subnormal_vectors_give_finite_ones(name):
    codec = CODECS[name]
    x = np.stack([np.zeros(D), np.full(D, 1e-45), np.where(np.arange(D) == 5, 1e-40, 0)]).astype(np.float32)
    y = codec.dequantise(codec.quantise(x))
    assert (y[0] == 0).all() and np.isfinite(y).all() and np.abs(y).max() < 1e-38


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [np.full(D, np.nan), np.full((2, D), np.inf), np.full(D, 1e300), np.full(D, 3e38), np.where(np.arange(D) % 2, 3e38, -3e38),
                                 np.ones(D) * 1j, np.ones((2, D - 1)), np.float32(1), np.ones((D, 1)), []],
                         ids=["nan", "inf", "beyond float32", "norm beyond float32", "signs", "complex", "short", "scalar", "column", "no values"])
def test_what_cannot_be_coded_is_a_value_error_without_a_warning(name, bad):
    with pytest.raises(ValueError):
        CODECS[name].quantise(bad)


@pytest.mark.parametrize("call", [
    lambda: TurboQuantMSE(64, 2.5), lambda: TurboQuantMSE(64.0, 2), lambda: TurboQuantMSE(64, 9), lambda: TurboQuantMSE(1, 2, codebook="gaussian"),
    lambda: TurboQuantMSE(0, 2, codebook="gaussian"), lambda: TurboQuantProd(64, 9), lambda: TurboQuantProd("64", 2), lambda: PolarQuant(0),
    lambda: PolarQuant(64, (9, 2)), lambda: PolarQuant(-16), lambda: MixedTurboQuant(64, [1.5, 2.5], 3, 2), lambda: MixedTurboQuant(64, [], 3, 2),
    lambda: MixedTurboQuant(64, np.arange(64), 3, 2), lambda: MixedTurboQuant(64, np.arange(64) < 9, 3, 2), lambda: outlier_channels(np.full((3, 4), np.nan), 2),
    lambda: outlier_channels(np.empty((0, 4)), 2), lambda: outlier_channels(3.0, 1), lambda: HaarRotation(0), lambda: HadamardRotation(0),
    lambda: HadamardRotation(64).apply(np.ones(65)), lambda: HadamardRotation(64).invert(np.ones((3, 1))), lambda: HaarRotation(64).apply(np.ones(65)),
    lambda: VectorIndex(64, 2.5), lambda: RangeCoder([1, np.inf]), lambda: RangeCoder([1, np.nan]), lambda: RangeCoder([1, 1]).encode(np.array([256])),
    lambda: RangeCoder([1, 1]).encode(np.array([-256])), lambda: RangeCoder([1, 1]).encode(np.array([0.7]))])
def test_bad_parameters_are_value_errors(call):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value) and "object" not in str(error.value)


def test_numpy_integers_are_integers(tmp_path):
    index = VectorIndex(np.int64(D), np.int32(2))
    index.add(np.ones(D))
    index.save(tmp_path / "a")
    assert VectorIndex.load(tmp_path / "a").d == D


@pytest.mark.parametrize("d", [2, 3, 5, 64, 100_000, 100_001, 10**7])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_codebooks_exist_for_few_and_for_many_dimensions(d, bits):
    c = sphere_codebook(d, bits) * np.sqrt(d)
    assert (np.diff(c) > 0).all()
    np.testing.assert_allclose(c, -c[::-1], atol=1e-12)
    if d >= 100_000:
        np.testing.assert_allclose(c, sphere_codebook(10**5, bits) * np.sqrt(10**5), rtol=2e-4)


@settings(deadline=None, max_examples=40)
@given(equal=st.integers(1, 256), zero=st.integers(0, 255), scale=st.sampled_from([1e-300, 1.0, 1e300]), seed=st.integers(0, 2**32 - 1))
def test_coder_takes_any_probabilities(equal, zero, scale, seed):
    """Many symbols of no probability must not take the frequency of another one."""
    p = np.concatenate([np.full(equal, scale), np.zeros(zero)])[:256]
    if len(p) < 2:
        p = np.append(p, 0)
    coder = RangeCoder(p)
    assert coder.frequency.min() >= 1 and coder.frequency.sum() == 1 << 14
    codes = np.random.default_rng(seed).integers(0, len(p), 500)
    np.testing.assert_array_equal(coder.decode(coder.encode(codes), 500), codes)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0, 128), (2, 0)])
def test_cache_types_of_empty_arrays(shape):
    data = turbo.quantise(np.empty(shape), "turbo3")
    assert data.shape == (*shape[:-1], shape[-1] // 128 * 50) and turbo.dequantise(data, "turbo3").shape == shape
    assert turbo.quantise_activation(np.empty(shape), 128).shape == (*shape[:-1], shape[-1] // 128 * 132)


@pytest.mark.parametrize("shape", [(0, 256), (3, 0, 64), (2, 0)])
def test_published_oscar_of_empty_arrays(shape):
    assert oscar_published.dequantise(*oscar_published.quantise(np.empty(shape), 0.96)).shape == shape


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric, method", INDEXES)
@settings(deadline=None, max_examples=15)
@given(exponent=st.integers(-40, 40), dtype=st.sampled_from([np.float16, np.float32, np.float64]), seed=st.integers(0, 2**32 - 1))
def test_index_ranks_alike_whatever_the_size_of_the_values(metric, method, exponent, dtype, seed):
    x = np.random.default_rng(seed).standard_normal((30, D)).astype(dtype).astype(np.float32)
    plain, scaled = VectorIndex(D, 3, metric=metric, method=method), VectorIndex(D, 3, metric=metric, method=method)
    plain.add(x[:25])
    scaled.add(np.asfortranarray(np.ldexp(x[:25], exponent)))
    np.testing.assert_array_equal(plain.search(x[25:].astype(dtype), 1)[1], scaled.search(np.ldexp(x[25:], exponent), 1)[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric, method", INDEXES)
@pytest.mark.parametrize("size", [1e20, 3e38, 1e300, np.nan, np.inf])
def test_index_never_answers_with_a_score_that_is_no_number(metric, method, size):
    index = VectorIndex(D, 2, metric=metric, method=method)
    index.add(np.eye(D))
    x = np.sign(np.random.default_rng(0).standard_normal((2, D))) * size
    for call in (lambda: index.add(x), lambda: index.search(x, 3)):
        before = len(index)
        try:
            call()
        except ValueError:
            assert len(index) == before
    assert np.isfinite(index.search(np.ones(D), 99)[0]).all()


def test_adding_one_by_one_is_adding_at_once():
    x = np.random.default_rng(0).standard_normal((40, D))
    one, all_ = VectorIndex(D, 2), VectorIndex(D, 2)
    for i, row in enumerate(x):
        assert one.add(row) == [i] and len(one) == i + 1
    all_.add(x)
    for a, b in zip(one.search(x, 5), all_.search(x, 5)):
        np.testing.assert_allclose(a, b, rtol=1e-4)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_harmless(data, tmp_path_factory):
    """Bits flipped, ends cut off: ValueError, or an index that answers (the change hit padding)."""
    path = tmp_path_factory.mktemp("index") / "a"
    index = VectorIndex(8, 2)
    index.add(np.eye(8))
    index.save(path)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole = whole[:at]
    else:
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    try:
        assert np.isfinite(VectorIndex.load(path).search(np.ones(8))[0]).all()
    except ValueError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("change", [
    {"centroids": np.zeros(3, np.float32)}, {"rotation": np.ones((1, 7), np.int8)}, {"codes": np.zeros((8, 2), np.int64)},
    {"factors": np.zeros((3, 1), np.float32)}, {"header": np.frombuffer(b'{"version": 1}', np.uint8)}, {"header": np.frombuffer(b"[1]", np.uint8)},
    {"header": np.frombuffer(b'{"version": 1, "d": "8", "bits": 2, "metric": "inner", "method": "norm", "rotation": "haar"}', np.uint8)}])
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, change):
    index = VectorIndex(8, 2)
    index.add(np.eye(8))
    index.save(tmp_path / "a")
    with np.load(io.BytesIO((tmp_path / "a").read_bytes())) as file:
        arrays = dict(file) | change
    with open(tmp_path / "b", "wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(ValueError, match="damaged"):
        VectorIndex.load(tmp_path / "b")
