"""Rung 2: the scalar C of libggml-base against the numpy reference, bit for bit, for every type."""
import ctypes

import numpy as np
import pytest

from pykvq.codecs import oscar2, turbo
from pykvq.formats import ACTIVATION_IDS, FAMILIES, TIERED, TYPES, WINDOW_IDS

TURBO = [name for name, t in TYPES.items() if t.family in FAMILIES]
from pykvq.native import library

HARD_ROWS = ("gaussian", "tiny", "huge", "outlier", "zero", "constant", "subnormal scale")


@pytest.fixture(scope="module")
def base():
    lib = library("ggml-base")
    for f in (lib.kvq_quantize_row_ref, lib.kvq_dequantize_row_ref):
        f.argtypes, f.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    lib.kvq_levels.argtypes, lib.kvq_levels.restype = [ctypes.c_int], ctypes.POINTER(ctypes.c_int8)
    lib.kvq_scale.argtypes, lib.kvq_scale.restype = [ctypes.c_int], ctypes.c_float
    lib.kvq_family_name.argtypes, lib.kvq_family_name.restype = [ctypes.c_int], ctypes.c_char_p
    lib.kvq_type_for_head.argtypes, lib.kvq_type_for_head.restype = [ctypes.c_int, ctypes.c_int64], ctypes.c_int
    lib.kvq_is_window_type.argtypes, lib.kvq_is_window_type.restype = [ctypes.c_int], ctypes.c_bool
    lib.ggml_type_name.argtypes, lib.ggml_type_name.restype = [ctypes.c_int], ctypes.c_char_p
    lib.ggml_row_size.argtypes, lib.ggml_row_size.restype = [ctypes.c_int, ctypes.c_int64], ctypes.c_size_t
    return lib


def rows(block, kind):
    """Float32 [64, 3 * block] of one difficulty."""
    x = np.random.default_rng(block).standard_normal((64, 3 * block))
    if kind == "outlier":
        x[:, 7] *= 1000
    x = x * {"tiny": 1e-6, "huge": 1e6, "zero": 0, "subnormal scale": 1e-7}.get(kind, 1)
    return (x * 0 + 3.25 if kind == "constant" else x).astype(np.float32)


def c_quantise(base, ggml_type, x, row_bytes):
    out = np.empty((len(x), row_bytes), np.uint8)
    for source, target in zip(x, out):
        base.kvq_quantize_row_ref(ggml_type, source.ctypes.data, target.ctypes.data, x.shape[1])
    return out


def c_dequantise(base, ggml_type, data, k):
    out = np.empty((len(data), k), np.float32)
    for source, target in zip(data, out):
        base.kvq_dequantize_row_ref(ggml_type, source.ctypes.data, target.ctypes.data, k)
    return out


@pytest.mark.parametrize("kind", HARD_ROWS)
@pytest.mark.parametrize("name", TYPES)
def test_quantise_and_dequantise_are_bit_exact(base, name, kind):
    t = TYPES[name]
    x, codec = rows(t.block, kind), turbo if t.family in FAMILIES else oscar2
    data = codec.quantise(x, name)
    np.testing.assert_array_equal(c_quantise(base, t.id, x, 3 * t.bytes), data)
    np.testing.assert_array_equal(c_dequantise(base, t.id, data, x.shape[1]).view(np.uint32), codec.dequantise(data, name).view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
def test_arbitrary_bytes_dequantise_alike(base, name):
    """Saved states may hold any block."""
    t = TYPES[name]
    data = np.random.default_rng(0).integers(0, 256, (256, t.bytes), np.uint8)
    data[:, -1] &= 0xBB                          # no infinities or NaNs in the fp16 scale
    codec = turbo if t.family in FAMILIES else oscar2
    np.testing.assert_array_equal(c_dequantise(base, t.id, data, t.block), codec.dequantise(data, name))


@pytest.mark.parametrize("kind", HARD_ROWS)
@pytest.mark.parametrize("name", ACTIVATION_IDS)
def test_activation_is_bit_exact(base, name, kind):
    n = int(name.rsplit("_", 1)[1])
    x = rows(n, kind)
    np.testing.assert_array_equal(c_quantise(base, ACTIVATION_IDS[name], x, 3 * (n + 4)), turbo.quantise_activation(x, n))


@pytest.mark.parametrize("kind", HARD_ROWS)
@pytest.mark.parametrize("name", WINDOW_IDS)
def test_window_is_bit_exact(base, name, kind):
    n = int(name.rsplit("_", 1)[1])
    x = np.clip(rows(n, kind), -3e3, 3e3)        # what f16 holds
    y = turbo.quantise_window(x, n)
    np.testing.assert_array_equal(c_quantise(base, WINDOW_IDS[name], x, 6*n), y.view(np.uint8))
    back = turbo.dequantise_window(y, n)
    np.testing.assert_array_equal(c_dequantise(base, WINDOW_IDS[name], y, x.shape[1]).view(np.uint32), back.view(np.uint32))
    np.testing.assert_allclose(back, x, atol=2e-3*np.abs(x).max() + 1e-6)


@pytest.mark.parametrize("name", TYPES)
def test_window_of_a_cache_type(base, name):
    t = TYPES[name]
    window = base.kvq_window_type(t.id)
    assert window == (WINDOW_IDS[f"turbo_f16_{t.block}"] if t.family in FAMILIES else 1)
    assert base.kvq_is_window_type(window) == (window != 1) and not base.kvq_is_window_type(t.id)
    assert base.ggml_row_size(window, t.block) == 2*t.block


@pytest.mark.parametrize("name", TYPES)
def test_c_and_python_agree_on_names_sizes_and_tables(base, name):
    t = TYPES[name]
    assert base.ggml_type_name(t.id).decode() == name
    assert base.kvq_family_name(t.id).decode() == t.family
    assert base.ggml_row_size(t.id, 2 * t.block) == 2 * t.bytes


@pytest.mark.parametrize("name", TURBO)
def test_c_and_python_agree_on_levels(base, name):
    t = TYPES[name]
    family = FAMILIES[t.family]
    assert tuple(base.kvq_levels(t.id)[:1 << t.bits]) == family.levels
    assert base.kvq_scale(t.id) == np.float32(family.scale)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576])
@pytest.mark.parametrize("family", [*FAMILIES, *TIERED])
def test_c_and_python_pick_the_same_member(base, family, head_dim):
    from pykvq.formats import TYPE_COUNT
    from pykvq.support import IDS, effective_type
    try:
        expected = IDS[effective_type(family, head_dim)]
    except ValueError:
        expected = TYPE_COUNT
    assert base.kvq_type_for_head(IDS[family], head_dim) == expected
