"""Sequence states taken apart and put together again, inside the cache that they came from."""
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykvq.engine import Context, Model, quiet_log
from pykvq.epicache.rows import values
from pykvq.sequence_state import SequenceState, StateError

TYPES = ["f16", "q8_0", "turbo3", ("q8_0", "turbo4")]
TOKENS = np.random.default_rng(7).integers(0, 256, 80).tolist()


@pytest.fixture(scope="module", params=TYPES, ids=str)
def context(request, tiny_model):
    quiet_log()
    with Model(tiny_model(64)) as model, Context(model, 256, request.param, threads=2, kv_sink=0, kv_recent=0) as made:
        yield made


def saved(context, tokens=TOKENS):
    context.clear()
    context.decode(tokens, 0, logits="none")
    return SequenceState.parse(context.save(0, bare=True))


def after(context, state, tokens=(1, 2, 3)):
    """Logits of tokens that read a restored state."""
    context.clear()
    context.load(state.to_bytes(), 0, bare=True)
    return context.decode(list(tokens), int(state.positions.max()) + 1, logits="all")


def test_identity(context):
    state = saved(context)
    assert state.to_bytes() == context.save(0, bare=True)
    straight = context.decode([1, 2, 3], len(TOKENS), logits="all")
    assert np.array_equal(after(context, state), straight)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, len(TOKENS) - 2), min_size=1, max_size=len(TOKENS) - 2))
def test_dropped_rows_are_removed_tokens(context, dropped):
    """All layers agree: the same logits as after seq_rm."""
    state = saved(context)
    for i in dropped:
        assert context.remove(0, i, i + 1)
    removed = context.decode([1, 2, 3], len(TOKENS), logits="all")
    kept = np.array([i for i in range(len(TOKENS)) if i not in dropped])
    less = state.gather([np.repeat(kept[None], 2, 0)] * 2, state.positions[kept])
    # The order of cells differs, and with it that of the sums: a new token's row may round to another code.
    difference = np.abs(after(context, less) - removed)
    assert difference.max() < 0.1 and difference.mean() < 1e-2


def test_rows_go_where_they_are_sent(context):
    """Each head takes its own tokens; a filled cell has its key and no value."""
    state = saved(context)
    rng = np.random.default_rng(3)
    chosen = [rng.integers(0, 80, (2, 20)), rng.integers(0, 80, (2, 20))]
    chosen[1][1, 19] = ~7
    made = state.gather(chosen, np.arange(60, 80))
    for layer in range(2):
        k, v = (np.moveaxis(values(rows[layer].heads(2), rows[layer].ggml_type), 1, 0) for rows in (made.keys, made.values))
        was_k, was_v = (np.moveaxis(values(rows[layer].heads(2), rows[layer].ggml_type), 1, 0) for rows in (state.keys, state.values))
        for h in range(2):
            source = np.where(chosen[layer][h] < 0, ~chosen[layer][h], chosen[layer][h])
            assert np.array_equal(k[h], was_k[h][source])
            assert np.array_equal(v[h], np.where(chosen[layer][h][:, None] < 0, 0, was_v[h][source]))
    assert np.isfinite(after(context, made)).all()


def test_order_of_cells_does_not_matter(context):
    state = saved(context)
    order = np.random.default_rng(1).permutation(len(TOKENS))
    turned = state.gather([np.repeat(order[None], 2, 0)] * 2, state.positions[order])
    np.testing.assert_allclose(after(context, turned), after(context, state), atol=2e-2, rtol=0)


def test_f16_copies_are_left_out(tiny_model):
    with Model(tiny_model(64)) as model, Context(model, 256, "turbo2", kv_sink=4, kv_recent=16) as windowed, \
            Context(model, 256, "turbo2", kv_sink=0, kv_recent=0) as plain:
        state = saved(windowed)
        assert len(windowed.save(0, bare=True)) > len(state.to_bytes())
        plain.load(state.to_bytes(), 0, bare=True)
        assert plain.save(0, bare=True) == state.to_bytes()
        after(windowed, state)


def test_empty(context):
    context.clear()
    state = SequenceState.parse(context.save(0, bare=True))
    assert not len(state.positions) and state.to_bytes() == context.save(0, bare=True)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_cut_or_longer_state_is_refused(context, data):
    whole = saved(context, TOKENS[:5]).to_bytes()
    n = data.draw(st.integers(0, len(whole) + 9))
    if n != len(whole):
        with pytest.raises(StateError):
            SequenceState.parse((whole + bytes(9))[:n])


@pytest.mark.parametrize("change, words", [((0, 1), "not a sequence state"), ((8, 2), "2 streams"), ((20, 3), "more than plain positions"),
                                           ((16 + 5 * 12, 1), "transposed")])
def test_another_layout_is_refused(context, change, words):
    data = bytearray(saved(context, TOKENS[:5]).to_bytes())
    struct.pack_into("<I", data, *change)
    with pytest.raises(StateError, match=words):
        SequenceState.parse(bytes(data))
