"""Rung 3 on the CPU backend: its kernels, for whatever SIMD this machine has, against numpy. The full grid is in
test_cpu_kernels.cpp, which test_full_grid compiles against the installed libraries."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attention_graph import F16, F32, Q4_0, Q8_0, Ggml, KeyBias, Window, attention_in_double
from pykvq.codecs import oscar2, turbo
from pykvq.formats import ACTIVATION_IDS, BLOCKS, FAMILIES, TIERED, TYPES, WINDOW_IDS
from pykvq.native import library_dir

ROOT = Path(__file__).parents[2]
OTHERS = {"f32": F32, "f16": F16, "q8_0": Q8_0, "q4_0": Q4_0}
OURS = (*FAMILIES, *TIERED)


@pytest.fixture(scope="module")
def ggml():
    return Ggml()


def type_for(name, head_dim):
    """The ggml type that a cache named `name` has at this head size, and values a block."""
    if name in OTHERS:
        return OTHERS[name], 32 if name.startswith("q") else 1
    block = next(n for n in BLOCKS if head_dim % n == 0)
    return TYPES[name if block == 128 else f"{name}_{block}"].id, block


def rows(block, kind):
    """Float32 [16, 3 * block] of one difficulty."""
    x = np.random.default_rng(block).standard_normal((16, 3*block))
    if kind == "outlier":
        x[:, 7] *= 1000
    if kind == "constant":
        x = x*0 + 3.25
    return (x*{"tiny": 1e-12, "huge": 1e12, "zero": 0}.get(kind, 1)).astype(np.float32)


HARD_ROWS = ("gaussian", "tiny", "huge", "outlier", "zero", "constant")


@pytest.mark.parametrize("kind", HARD_ROWS)
@pytest.mark.parametrize("name", TYPES)
def test_quantise_is_bit_exact(ggml, name, kind):
    x = rows(TYPES[name].block, kind)
    codec = turbo if TYPES[name].family in FAMILIES else oscar2
    np.testing.assert_array_equal(ggml.quantise(TYPES[name].id, x), codec.quantise(x, name))


@pytest.mark.parametrize("kind", HARD_ROWS)
@pytest.mark.parametrize("name", ACTIVATION_IDS)
def test_activation_is_bit_exact(ggml, name, kind):
    n = int(name.rsplit("_", 1)[1])
    x = rows(n, kind)
    np.testing.assert_array_equal(ggml.quantise(ACTIVATION_IDS[name], x), turbo.quantise_activation(x, n))


@pytest.mark.parametrize("kind", HARD_ROWS)
@pytest.mark.parametrize("name", WINDOW_IDS)
def test_window_is_bit_exact(ggml, name, kind):
    n = int(name.rsplit("_", 1)[1])
    x = np.clip(rows(n, kind), -3e3, 3e3)
    np.testing.assert_array_equal(ggml.quantise(WINDOW_IDS[name], x), turbo.quantise_window(x, n).view(np.uint8))


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf, 3e38))
@pytest.mark.parametrize("name", TYPES)
def test_rows_that_are_not_finite_do_not_crash(ggml, name, value):
    x = rows(TYPES[name].block, "gaussian")
    x[:, 5] = value
    assert ggml.quantise(TYPES[name].id, x).shape == (16, 3*TYPES[name].bytes)


@pytest.mark.parametrize("name", TYPES)
def test_vec_dot(ggml, name):
    """Equal to the product of the dequantised rows, but for the rounding of a few float operations."""
    t = TYPES[name]
    traits = ggml.cpu_traits(t.id).contents
    rng = np.random.default_rng(t.id)
    for blocks in (1, 2, 9):
        n = blocks*t.block
        x = ggml.quantise(t.id, rng.standard_normal((1, n)).astype(np.float32))
        y = rng.standard_normal((1, n)).astype(np.float32)
        query = y
        if t.family in FAMILIES:                 # oscar2 meets plain floats
            y = ggml.quantise(traits.vec_dot_type, y)
            query = ggml.dequantise(traits.vec_dot_type, y, n)
        result = np.empty(1, np.float32)
        traits.vec_dot(n, result.ctypes.data, 0, x.ctypes.data, 0, y.ctypes.data, 0, 1)
        want = np.dot(ggml.dequantise(t.id, x, n)[0].astype(np.float64), query[0].astype(np.float64))
        assert abs(result[0] - want) < 1e-5*n


def make_mask(kind, tokens, n_kv):
    """Additive [tokens, n_kv]; the first token of "holes" sees nothing."""
    position = np.arange(n_kv - tokens, n_kv)[:, None]
    t = np.arange(n_kv)[None, :]
    seen = {"causal": t <= position, "window": (t <= position) & (t > position - 40),
            "holes": ((t + position) % 3 == 0) & (position > n_kv - tokens)}[kind]
    return np.where(seen, -0.01*np.abs(position - t), -np.inf)


def check(ggml, k_name, v_name, dk, dv=None, kv_heads=2, group=3, tokens=1, n_kv=577, mask=None, sinks=False, max_bias=0.0, softcap=0.0, key_bias=None, n_ring=0, hidden=None, threads=2):
    """n_ring: rows of an f16 window, each the copy of some cell, which the cache's mask then hides. hidden: "cache" or "window", in full."""
    dv = dv or dk
    (k_type, k_block), (v_type, _) = type_for(k_name, dk), type_for(v_name, dv)
    rng = np.random.default_rng([dk, group, tokens, n_kv])
    q = 1.5*rng.standard_normal((tokens, kv_heads*group, dk)).astype(np.float32)
    k = ggml.quantise(k_type, rng.standard_normal((kv_heads, n_kv, dk)).astype(np.float32))
    v = ggml.quantise(v_type, rng.standard_normal((kv_heads, n_kv, dv)).astype(np.float32))
    m = None if mask is None else make_mask(mask, tokens, n_kv)
    s = rng.standard_normal(kv_heads*group) if sinks else None
    window = None
    if n_ring:
        k16, v16 = (rng.standard_normal((kv_heads, n_ring, d)).astype(np.float32) for d in (dk, dv))
        k16, v16 = ggml.quantise(ggml.window_type(k_type), k16), ggml.quantise(ggml.window_type(v_type), v16)
        m = np.zeros((tokens, n_kv)) if m is None else m
        cell = rng.integers(n_kv, size=n_ring)
        m16 = np.where(rng.random(n_ring) < 0.7, m[:, cell], -np.inf)      # rows of other sequences and free ones
        m = m.copy()
        m[:, cell] = -np.inf
        for name, part in (("cache", m), ("window", m16)):
            part[...] = -np.inf if hidden == name else part
        window = Window(k16, v16, m16)
    bias = None
    if key_bias is not None:
        n_rot, interleaved, *few = key_bias
        bias = KeyBias(rng.standard_normal(q.shape).astype(np.float32), 3*rng.standard_normal((kv_heads, dk)).astype(np.float32),
                       np.where(rng.random(n_kv + n_ring) < 0.1, rng.integers(16000, size=n_kv + n_ring), np.arange(n_kv + n_ring) + 9000)
                       .astype(np.int32), n_rot, interleaved, pairs=np.sort(rng.permutation(n_rot//2)[:few[0]]) if few else None)
    options = dict(mask=m, sinks=s, max_bias=max_bias, softcap=softcap, key_bias=bias)

    whole = dict(options) if window is None else dict(options, mask=np.concatenate([m, m16], 1))

    def double(query):
        keys, values = ggml.dequantise(k_type, k, dk), ggml.dequantise(v_type, v, dv)
        if window is None:
            return attention_in_double(query, keys, values, **whole)
        keys = [keys, ggml.dequantise(ggml.window_type(k_type), window.k, dk)]
        values = np.concatenate([values, ggml.dequantise(ggml.window_type(v_type), window.v, dv)], 1)
        return attention_in_double(query, np.concatenate(keys, 1), values, query16=(q, n_kv), **whole)

    def error(got, want):
        return ((got - want)**2).sum()/max((want**2).sum(), 1e-30)

    options["window"] = window
    got = ggml.run_attention(q, k, v, k_type, v_type, threads=threads, **options)
    exact = double(q)
    # Packed keys meet the query in int8; against the same query only the rounding of float sums is left.
    packed = q
    if k_name in TIERED:
        b = q.reshape(*q.shape[:-1], -1, k_block)
        unit = np.abs(b).max(-1, keepdims=True) / 127
        packed = (np.rint(b / unit) * unit).reshape(q.shape)
    elif k_name in FAMILIES:
        packed = ggml.dequantise(ACTIVATION_IDS[f"kvq_q8_{k_block}"], ggml.quantise(ACTIVATION_IDS[f"kvq_q8_{k_block}"], q), dk)
    assert error(got, double(packed)) < 1e-7
    assert error(got, exact) < 2e-3
    assert error(ggml.run_attention(q, k, v, k_type, v_type, threads=threads, use_ref=True, **options), exact) < 1e-9


PAIRS = [(k, v) for k in (*OURS, *OTHERS) for v in (*OURS, *OTHERS) if k in OURS or v in OURS]


@pytest.mark.parametrize("dk, dv", ((64, 64), (128, 128), (256, 256), (576, 512)))
@pytest.mark.parametrize("k, v", PAIRS)
def test_attention_type_pairs(ggml, k, v, dk, dv):
    check(ggml, k, v, dk, dv, kv_heads=1, n_kv=97)


@pytest.mark.parametrize("dk, dv", ((80, 80), (96, 96), (112, 112), (192, 192), (192, 128)))
@pytest.mark.parametrize("name", OURS)
def test_attention_head_sizes(ggml, name, dk, dv):
    check(ggml, name, name, dk, dv, n_kv=130, tokens=3, mask="causal")


@pytest.mark.parametrize("tokens", (1, 2, 3, 8, 17, 64))
@pytest.mark.parametrize("group", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16))
def test_attention_group_and_batch(ggml, group, tokens):
    check(ggml, "turbo3", "turbo2", 64, kv_heads=1, group=group, tokens=tokens, n_kv=161, mask="causal")


@pytest.mark.parametrize("threads", (1, 2, 3, 4))
@pytest.mark.parametrize("n_kv", (1, 5, 33, 256, 577, 1100))
def test_attention_lengths_and_threads(ggml, n_kv, threads):
    check(ggml, "turbo3", "turbo3", 64, kv_heads=1, group=4, n_kv=n_kv, threads=threads)


@pytest.mark.parametrize("options", (
    dict(mask="window"), dict(mask="holes"), dict(mask="holes", sinks=True), dict(sinks=True), dict(softcap=10.0),
    dict(mask="causal", max_bias=8.0), dict(mask="window", max_bias=8.0, softcap=10.0, sinks=True)), ids=str)
@pytest.mark.parametrize("k, v", (("turbo3", "turbo3"), ("oscar2", "turbo2"), ("turbo2", "q8_0"), ("f16", "turbo4")))
def test_attention_options(ggml, k, v, options):
    check(ggml, k, v, 64, group=5, tokens=7, n_kv=300, **options)


@pytest.mark.parametrize("tokens, group", ((1, 1), (1, 7), (3, 2), (40, 4)))
@pytest.mark.parametrize("rotated, interleaved", ((64, False), (64, True), (24, False), (24, True)))
def test_attention_with_a_key_bias_left_out(ggml, rotated, interleaved, tokens, group):
    for k, v in (("turbo3", "turbo3"), ("turbo4", "f16")):
        check(ggml, k, v, 64, group=group, tokens=tokens, n_kv=300, mask="window", key_bias=(rotated, interleaved))


@pytest.mark.parametrize("pairs", (1, 7, 8, 16, 24))
@pytest.mark.parametrize("tokens, group", ((1, 7), (40, 4)))
def test_attention_with_a_key_bias_of_some_pairs(ggml, tokens, group, pairs):
    check(ggml, "turbo3", "turbo3", 64, group=group, tokens=tokens, n_kv=300, mask="window", key_bias=(64, False, pairs))
    check(ggml, "turbo4", "turbo2", 128, group=group, tokens=tokens, n_kv=300, mask="causal", key_bias=(96, True, pairs))
    check(ggml, "oscar2", "turbo2", 256, group=2, tokens=tokens, n_kv=100, key_bias=(256, False, pairs), n_ring=70)


@pytest.mark.parametrize("k, v", PAIRS)
def test_window_type_pairs(ggml, k, v):
    check(ggml, k, v, 64, kv_heads=2, group=3, n_kv=97, n_ring=70)
    check(ggml, k, v, 256, kv_heads=1, group=2, n_kv=97, n_ring=64, tokens=3, mask="causal")


@pytest.mark.parametrize("dk, dv", ((80, 80), (96, 96), (112, 112), (128, 128), (192, 128)))
def test_window_head_sizes(ggml, dk, dv):
    for k, v in (("turbo2", "turbo2"), ("oscar2", "turbo2")):
        check(ggml, k, v, dk, dv, n_kv=130, n_ring=192, tokens=2, mask="causal")


@pytest.mark.parametrize("tokens", (1, 2, 8, 17, 64))
@pytest.mark.parametrize("group", (1, 2, 5, 7, 16))
def test_window_group_and_batch(ggml, group, tokens):
    check(ggml, "oscar2", "turbo2", 64, kv_heads=1, group=group, tokens=tokens, n_kv=161, n_ring=128, mask="causal")


@pytest.mark.parametrize("options", (
    dict(mask="window"), dict(mask="holes", sinks=True), dict(sinks=True), dict(softcap=10.0), dict(hidden="cache"), dict(hidden="window"),
    dict(hidden="cache", sinks=True, mask="causal"), dict(mask="causal", max_bias=8.0), dict(mask="window", max_bias=8.0, softcap=10.0, sinks=True),
    dict(key_bias=(64, False)), dict(key_bias=(24, True), mask="window"), dict(hidden="cache", key_bias=(64, False), tokens=1)), ids=str)
@pytest.mark.parametrize("k, v", (("turbo3", "turbo3"), ("oscar2", "turbo2"), ("q8_0", "turbo2"), ("turbo4", "f16")))
def test_window_options(ggml, k, v, options):
    check(ggml, k, v, 64, **{"group": 5, "tokens": 7, "n_kv": 300, "n_ring": 600, **options})


def test_a_window_is_read(ggml):
    """Planted faults: a row of the window, its mask or the type of the domain changes the answer."""
    rng = np.random.default_rng(5)
    k_type, v_type = type_for("turbo2", 64)[0], type_for("turbo2", 64)[0]
    q = rng.standard_normal((2, 4, 64)).astype(np.float32)
    k, v = (ggml.quantise(k_type, rng.standard_normal((2, 80, 64)).astype(np.float32)) for _ in range(2))
    k16, v16 = (ggml.quantise(ggml.window_type(k_type), rng.standard_normal((2, 64, 64)).astype(np.float32)) for _ in range(2))
    mask16 = np.zeros((2, 64))
    run = lambda k16, v16, mask16: ggml.run_attention(q, k, v, k_type, v_type, window=Window(k16, v16, mask16))
    base, damaged, masked = run(k16, v16, mask16), k16.copy(), mask16.copy()
    damaged[1, 40] = damaged[1, 41]
    masked[:, 63] = -np.inf
    plain = ggml.dequantise(ggml.window_type(k_type), k16, 64).astype(np.float16).view(np.uint8)
    for other in (run(damaged, v16, mask16), run(k16, v16[:, ::-1], mask16), run(k16, v16, masked), run(plain, v16, mask16)):
        assert np.abs(other - base).max() > 1e-3


def test_a_token_alone_has_the_same_bits_as_in_a_batch(ggml):
    rng = np.random.default_rng(3)
    k_type, v_type = type_for("turbo3", 64)[0], type_for("turbo4", 64)[0]
    q = rng.standard_normal((9, 6, 64)).astype(np.float32)
    k = ggml.quantise(k_type, rng.standard_normal((2, 1100, 64)).astype(np.float32))
    v = ggml.quantise(v_type, rng.standard_normal((2, 1100, 64)).astype(np.float32))
    mask = make_mask("causal", 9, 1100)
    whole = ggml.run_attention(q, k, v, k_type, v_type, mask=mask, threads=1)
    for i in range(9):
        alone = ggml.run_attention(q[i:i + 1], k, v, k_type, v_type, mask=mask[i:i + 1], threads=2)
        np.testing.assert_array_equal(alone[0], whole[i])


def test_full_grid(tmp_path):
    """Every pair, head size, group ratio, batch, mask and option; prints the CPU's features, so it says what it ran on."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler to build test_cpu_kernels.cpp with")
    run = subprocess.run([sys.executable, ROOT/"tools"/"vendor.py", "--print-dir"], capture_output=True, text=True, check=True)
    upstream, libraries, program = Path(run.stdout.strip()), library_dir(), tmp_path/"test_cpu_kernels"
    subprocess.run([compiler, "-std=c++17", "-O2", f"-I{ROOT/'ggml_kernels'/'include'}", f"-I{upstream/'vendor'/'llama.cpp'/'ggml'/'include'}",
                    Path(__file__).with_name("test_cpu_kernels.cpp"), "-o", program, f"-L{libraries}", f"-Wl,-rpath,{libraries}",
                    "-lggml-cpu", "-lggml-base"], check=True)
    result = subprocess.run([program, "--quick"], capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout
