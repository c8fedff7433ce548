"""f16 windows: exact where they cover everything, the right copy everywhere else, through all that a cache does."""
import shutil
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import architectures
from calibrated import metadata, random_layers, write_sidecar
from pykvq.engine import Context, Model, kl_divergence, quiet_log
from pykvq.support import window_rows
from window_reference import Reference

TOKENS = [(7 * i * i + 3) % 256 for i in range(200)]


def relative(ours, exact):
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(64, heads=4, heads_kv=2)


@pytest.fixture(scope="module")
def model(path):
    quiet_log()
    with Model(path) as loaded:
        yield loaded


@pytest.fixture
def open_context(model):
    """open_context(kv_type, sink, recent, ...), closed at the end of the test."""
    made = []

    def make(kv_type="turbo2", sink=4, recent=16, n_ctx=512, **options):
        made.append(Context(model, n_ctx, kv_type, threads=2, kv_sink=sink, kv_recent=recent, **options))
        return made[-1]
    yield make
    for context in made:
        context.close()


def prefill_and_decode(context, seq=0):
    """Logits of three batches and of 20 tokens one by one; float32 [120, n_vocab]."""
    rows = [context.decode(TOKENS[:40], 0, seq, logits="all"), context.decode(TOKENS[40:100], 40, seq, logits="all")]
    return np.concatenate(rows + [context.decode(TOKENS[i:i + 1], i, seq) for i in range(100, 120)])


# ---- exact

@pytest.mark.parametrize("kv_type", ["turbo2", "turbo3", "turbo4", ("q8_0", "turbo2"), ("turbo2", "f16"), ("f16", "turbo3")], ids=str)
def test_a_window_over_everything_is_the_f16_cache(open_context, kv_type):
    exact = prefill_and_decode(open_context("f16", flash=False))
    assert relative(prefill_and_decode(open_context(kv_type, 0, 512)), exact) < 1e-3
    assert relative(prefill_and_decode(open_context(kv_type, 128, 0)), exact) < 1e-3
    assert relative(prefill_and_decode(open_context(kv_type, 0, 0)), exact) > 1e-2


@pytest.mark.parametrize("head_dim", [80, 96, 112, 128, 192, 256])
def test_every_head_size(tiny_model, head_dim):
    quiet_log()
    with Model(tiny_model(head_dim)) as model, Context(model, 256, "turbo2", threads=2, kv_sink=0, kv_recent=256) as ours, \
            Context(model, 256, "f16", threads=2, flash=False) as f16:
        assert relative(prefill_and_decode(ours), prefill_and_decode(f16)) < 1e-3


@pytest.mark.parametrize("build", [architectures.sliding_window, architectures.soft_capped, architectures.hybrid,
                                   partial(architectures.hybrid, window=64)], ids=["window", "soft cap", "hybrid", "hybrid, window"])
def test_other_caches(tmp_path, build):
    """Exact with a window over everything; nearer than without one when it is smaller than the model's own."""
    quiet_log()
    with Model(build(tmp_path / "m.gguf")) as model:
        def run(kv_type, **options):
            with Context(model, 256, kv_type, threads=2, swa_full=False, **options) as context:
                return prefill_and_decode(context)
        exact = run("f16", flash=False)
        assert relative(run("turbo2", kv_sink=0, kv_recent=256), exact) < 1e-3
        none, some = (relative(run("turbo2", kv_sink=s, kv_recent=r), exact) for s, r in ((0, 0), (8, 32)))
        assert 1e-3 < some < none


@pytest.fixture
def calibrated(path, tmp_path):
    copy = tmp_path / "m.gguf"
    shutil.copy(path, copy)
    write_sidecar(copy, metadata(copy, random_layers((0, 1), 2, 64)))
    return copy


@pytest.mark.parametrize("kv_type", ["oscar2", "turbo3"])
def test_calibrated_keys(calibrated, open_context, kv_type):
    exact = prefill_and_decode(open_context("f16", flash=False))
    with Model(calibrated) as model, Context(model, 512, kv_type, threads=2, kv_sink=0, kv_recent=512) as context:
        assert context.info().calibrated == 2
        assert relative(prefill_and_decode(context), exact) < 4e-3          # the condition of the random bases


def test_a_key_bias_left_out(tiny_model):
    quiet_log()
    with Model(tiny_model(64, architecture="qwen2", key_bias=8)) as model:
        def run(kv_type, **options):
            with Context(model, 512, kv_type, threads=2, **options) as context:
                return prefill_and_decode(context), context.info()[0].key_bias
        exact = run("f16", flash=False)[0]
        ours, bias = run("turbo2", kv_sink=0, kv_recent=512)
        assert bias == "left out" and relative(ours, exact) < 4e-3          # its keys are 8 times larger
        assert relative(run("turbo2", kv_sink=8, kv_recent=8)[0], exact) < relative(run("turbo2", kv_sink=0, kv_recent=0)[0], exact)


def shifted(context):
    """Tokens 4..35 dropped, the rest moved up, and 20 more."""
    context.decode(TOKENS[:100], 0, logits="none")
    assert context.remove(0, 4, 36)
    context.shift(0, 36, -32)
    return context.decode(TOKENS[100:120], 68, logits="all")


@pytest.mark.parametrize("kv_type", ["turbo2", ("q8_0", "turbo2"), ("q4_0", "turbo3"), ("f16", "turbo2")], ids=str)
def test_a_context_shift_turns_the_f16_keys(open_context, kv_type):
    exact = shifted(open_context("f16", flash=False))
    assert relative(shifted(open_context(kv_type, 0, 512)), exact) < 3e-3
    assert relative(shifted(open_context(kv_type, 0, 0)), exact) > 1e-2


def test_a_context_shift_turns_calibrated_f16_keys(calibrated, open_context):
    exact = shifted(open_context("f16", flash=False))
    with Model(calibrated) as model, Context(model, 512, "oscar2", threads=2, kv_sink=0, kv_recent=512) as context:
        assert relative(shifted(context), exact) < 1e-2


# ---- the right copy: random sequences of all that a cache does, against a slow reference

SEQS, SINK, RECENT = 3, 3, 6


def operations(most, steps=14):
    """Batches of up to `most` tokens and what happens between them."""
    return st.lists(st.one_of(
        st.tuples(st.just("decode"), st.integers(0, SEQS - 1), st.integers(1, most)),
        st.tuples(st.just("together"), st.just(0), st.just(most // 8)),
        st.tuples(st.just("copy"), st.integers(0, SEQS - 1), st.integers(0, SEQS - 1)),
        st.tuples(st.just("restore"), st.integers(0, SEQS - 1), st.integers(0, SEQS - 1)),
        st.tuples(st.just("cut"), st.integers(0, SEQS - 1), st.integers(1, 5)),
        st.tuples(st.just("shift"), st.integers(0, SEQS - 1), st.integers(1, 4))), min_size=4, max_size=steps)


def play(context, reference, steps, longest=60):
    """Runs the steps on both; the largest relative difference of the logits of a batch."""
    worst, clock = 0.0, 0

    def decode(entries):
        nonlocal worst, clock
        tokens = [(TOKENS[(clock + i) % 200], seq) for i, seq in enumerate(entries)]
        clock += len(entries)
        at = {}
        batch = []
        for token, seq in tokens:
            position = at.get(seq, reference.next(seq))
            at[seq] = position + 1
            batch.append((token, position, seq, True))
        worst = max(worst, relative(context.decode_batch(batch), reference.decode(tokens)))

    for name, seq, n in [("decode", 0, 8), *steps, ("together", 0, 1)]:
        length = reference.next(seq)
        if length > longest:
            continue
        if name == "decode":
            decode([seq] * n)
        elif name == "together":
            decode(([s for s in range(SEQS) if reference.next(s)] or [0]) * n)
        elif name == "copy" and seq != n and length:
            context.remove(n, 0)
            context.copy(seq, n)
            reference.copy(seq, n)
            decode([n])                          # llama.cpp copies a stream's data before the next batch, over what was restored until then
        elif name == "restore" and seq != n and length:
            state = context.save(seq)
            context.load(state, n)
            reference.restore(seq, n)
        elif name == "cut" and length > n:       # what speculative decoding does with rejected tokens
            context.remove(seq, length - n)
            reference.remove(seq, length - n)
        elif name == "shift" and length > 2 + n and not any(len(c.seqs) > 1 for c in reference.cells):
            for cache in (context, reference):
                cache.remove(seq, 2, 2 + n)
                cache.shift(seq, 2 + n, -n)
            decode([seq])
    return worst


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("kv_type", [("turbo2", "turbo2"), ("f16", "turbo2"), ("turbo3", "f16")], ids="-".join)
def test_every_query_reads_the_copy_that_the_rule_picks(model, path, kv_type, unified):
    with Context(model, 256 * SEQS, kv_type, threads=1, n_batch=8, n_seq=SEQS, unified=unified, kv_sink=SINK, kv_recent=RECENT) as context:
        @settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
        @given(operations(8))
        def run(steps):
            context.clear()
            assert play(context, Reference(path, kv_type, SINK, RECENT, unified), steps) < 5e-3
        run()


# batches that find no room in the ring: rows in steps of 64, one that nobody reads, those of every sequence's window
ROOM = {True: 63 - SEQS * (SINK + RECENT), False: 63 - SINK - RECENT}


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("kv_type, limit", [(("f16", "turbo2"), 5e-3), (("turbo2", "turbo2"), 2e-2)], ids=str)      # 2e-2: queries of large batches keep more bits than the reference's
def test_the_rule_holds_for_batches_larger_than_the_ring(model, path, kv_type, limit, unified):
    with Context(model, 512 * SEQS, kv_type, threads=2, n_batch=192, n_seq=SEQS, unified=unified, kv_sink=SINK, kv_recent=RECENT) as context:
        assert context.info()[0].n_window == 64

        @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
        @given(operations(72, 6))
        def run(steps):
            context.clear()
            assert play(context, Reference(path, kv_type, SINK, RECENT, unified, ROOM[unified]), steps, 110) < limit
        run()


@pytest.mark.parametrize("sink, recent", [(SINK + 1, RECENT), (SINK, RECENT + 1)])
def test_another_rule_would_show(model, path, sink, recent):
    steps = [("decode", 0, 8)] * 3 + [("decode", 0, 1)] * 3
    with Context(model, 256, ("f16", "turbo2"), threads=1, n_batch=8, kv_sink=SINK, kv_recent=RECENT) as context:
        assert play(context, Reference(path, ("f16", "turbo2"), SINK, RECENT, True), steps) < 5e-3
        context.clear()
        assert play(context, Reference(path, ("f16", "turbo2"), sink, recent, True), steps) > 1e-2


def test_another_rule_would_show_after_a_large_batch(model, path):
    steps = [("decode", 0, 90), ("cut", 0, 4), ("decode", 0, 1)]
    with Context(model, 512, ("f16", "turbo2"), threads=1, n_batch=192, kv_sink=SINK, kv_recent=RECENT) as context:
        for room, good in ((ROOM[False], True), (1 << 30, False)):
            context.clear()
            worst = play(context, Reference(path, ("f16", "turbo2"), SINK, RECENT, True, room), steps, 200)
            assert worst < 5e-3 if good else worst > 1e-2


# ---- saved states

@pytest.mark.parametrize("seq", [None, 0], ids=["whole", "sequence"])
@pytest.mark.parametrize("kv_type", ["turbo2", ("f16", "turbo2")], ids=str)
def test_the_window_travels_with_a_state(open_context, kv_type, seq):
    source, target = open_context(kv_type), open_context(kv_type)
    source.decode(TOKENS[:100], 0)
    target.decode(TOKENS[100:], 0)               # rows that must not survive
    target.load(source.save(seq), seq)
    rows = [np.concatenate([c.decode(TOKENS[i:i + 1], i) for i in range(100, 108)]) for c in (source, target)]
    assert relative(*rows) < 1e-4


@pytest.mark.parametrize("seq", [None, 0], ids=["whole", "sequence"])
@pytest.mark.parametrize("saved, loaded", [((4, 16), (0, 0)), ((0, 0), (4, 16)), ((4, 16), (2, 8)), ((4, 16), (64, 64)), ((4, 16), (0, 8))], ids=str)
def test_a_state_of_another_window_loads_into_what_fits(open_context, saved, loaded, seq):
    """Its next tokens are as near to f16 as the smaller of the two windows makes them."""
    source, target = open_context("turbo2", *saved), open_context("turbo2", *loaded)
    source.decode(TOKENS[:100], 0)
    target.load(source.save(seq), seq)
    both = min(saved[0], loaded[0]), max(min(saved[1], loaded[1]), min(loaded[1], 1))      # the next token itself is recent
    expected = open_context("turbo2", *saved)
    expected.decode(TOKENS[:100], 0)
    smaller = open_context("turbo2", *both)
    smaller.load(expected.save(seq), seq)
    rows = [c.decode(TOKENS[100:101], 100) for c in (target, smaller)]
    assert relative(*rows) < 1e-4


def test_a_damaged_window_of_a_state_is_refused(open_context):
    source, target = open_context(), open_context()
    source.decode(TOKENS[:50], 0)
    state = source.save(0)
    for damaged in (state[:-64], state[:-40000] + b"\xff" * 40000):
        try:
            target.load(damaged, 0)
        except ValueError as error:
            assert "\n" not in str(error)
        target.clear()
    target.load(state, 0)
    assert relative(target.decode(TOKENS[50:51], 50), source.decode(TOKENS[50:51], 50)) < 1e-4


def test_a_state_without_a_window_is_as_before(open_context):
    """Its layout is that of builds which know no windows: the type of the keys is the plain one."""
    sizes = []
    for recent in (0, 16):
        context = open_context("turbo2", 0, recent)
        context.decode(TOKENS[:60], 0)
        sizes.append(len(context.save(0)))
    layers, k_and_v, row = 2, 2, 128 * 2
    assert sizes[1] - sizes[0] == 4 + 4 + 15 * (4 + layers * k_and_v * row) + layers * 16


# ---- what is told and refused

def test_info_and_defaults(open_context):
    for kv_type in ("turbo2", "turbo3", "turbo4", ("q8_0", "turbo4"), ("turbo3", "f16")):
        info = open_context(kv_type, None, None, 2048).info()
        assert (info[0].sink, info[0].recent, info[0].n_window) == (64, 256, 384)         # 64 + 256 + a small batch + 1, in steps of 64
    info = open_context("turbo2", 4, 16, n_batch=64).info()
    assert info[0].n_window == 64 and info[0].bytes_window == 2 * 64 * 128 * 2
    assert info.bytes == sum(layer.bytes_k + layer.bytes_v + layer.bytes_window for layer in info)
    for kv_type in ("f16", "q8_0"):
        assert open_context(kv_type, 4, 16).info()[0].n_window == 0


@pytest.mark.parametrize("n_ctx, n_seq, sink, recent", [(256, 1, 27, 84), (512, 1, 59, 180), (768, 1, 64, 256), (1024, 4, 30, 93), (4096, 4, 64, 256)])
def test_by_default_a_short_cache_stays_smaller_than_f16(open_context, n_ctx, n_seq, sink, recent):
    info = open_context("turbo4", None, None, n_ctx, n_seq=n_seq, unified=True).info()
    assert (info[0].sink, info[0].recent) == (sink, recent) and info[0].n_window <= max(n_ctx // 2, 64)
    assert info.ratio > 1.2
    assert info[0].n_window == window_rows("turbo4", "turbo4", n_ctx) or n_seq > 1


def test_one_number_leaves_the_other_at_its_default(open_context):
    for given, expected in (((0, None), (0, 256)), ((None, 0), (64, 0)), ((16, None), (16, 256))):
        layer = open_context("turbo3", *given, 2048).info()[0]
        assert (layer.sink, layer.recent) == expected and layer.n_window == window_rows("turbo3", "turbo3", 2048, *given)


def test_no_more_rows_than_cells(open_context):
    context = open_context("turbo2", 1 << 20, 1 << 20)
    assert context.info()[0].n_window == 576
    assert relative(prefill_and_decode(context), prefill_and_decode(open_context("f16", flash=False))) < 1e-3


def test_a_negative_window_is_refused(open_context):
    with pytest.raises(ValueError, match="numbers of tokens"):
        open_context("turbo2", -5, 16)


def test_latent_keys_have_no_window(tmp_path):
    quiet_log()
    with Model(architectures.latent(tmp_path / "m.gguf")) as model, Context(model, 256, "turbo2", threads=2, kv_sink=4, kv_recent=16) as context:
        assert context.info()[0].n_window == 0
        assert np.isfinite(prefill_and_decode(context)).all()


def test_a_window_fills_what_it_should(open_context):
    """The gain is real: every window is nearer to f16 than a smaller one."""
    exact = prefill_and_decode(open_context("f16", flash=False))
    kl = [kl_divergence(exact, prefill_and_decode(open_context("turbo2", *window))).mean() for window in ((0, 0), (4, 0), (4, 16), (16, 64))]
    assert kl == sorted(kl, reverse=True) and kl[-1] < kl[0] / 3
