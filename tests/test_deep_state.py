"""A cache filled from a prefix: the same as the real one for one prefix, its rows repeated beyond."""
import numpy as np
import pytest

from pykvq import deep_state
from pykvq.deep_state import fill_from_prefix
from pykvq.engine import Context, Model
from pykvq.sequence_state import SequenceState, StateError

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 256, 80)]


@pytest.fixture(scope="module")
def model(tiny_model):
    with Model(tiny_model(64)) as loaded:
        yield loaded


def test_one_prefix_is_the_real_prefill(model):
    options = dict(n_seq=2, unified=True, kv_sink=0, kv_recent=0)
    with Context(model, 256, "turbo3", **options) as real, Context(model, 256, "turbo3", **options) as filled:
        real.decode(TOKENS[:64], 0, logits="none")
        fill_from_prefix(filled, TOKENS[:64], 64)
        for i, token in enumerate(TOKENS[64:70]):
            assert np.array_equal(real.decode([token], 64 + i), filled.decode([token], 64 + i))


@pytest.mark.parametrize("kv_type", ["f16", "turbo2", ("turbo4", "f16")])
def test_rows_repeat_at_new_positions(model, kv_type, monkeypatch):
    monkeypatch.setattr(deep_state, "PIECE", 48)                 # pieces that begin inside a prefix
    with Context(model, 256, kv_type, n_seq=2, unified=True, kv_sink=0, kv_recent=0) as context:
        fill_from_prefix(context, TOKENS[:32], 150)
        deep = SequenceState.parse(context.save(0, bare=True))
        assert deep.positions.tolist() == list(range(150))
        context.clear()
        context.decode(TOKENS[:32], 0, logits="none")
        prefix = SequenceState.parse(context.save(0, bare=True))
    assert len(deep.keys + deep.values) == len(prefix.keys + prefix.values) == 4
    for rows, once in zip(deep.keys + deep.values, prefix.keys + prefix.values):
        assert np.array_equal(rows.data, once.data[np.arange(150) % 32])


def test_streams_are_copies_of_the_first(model):
    with Context(model, 3 * 256, "turbo3", n_seq=3, kv_sink=0, kv_recent=0) as context:
        fill_from_prefix(context, TOKENS[:32], 100, n_seq=3)
        rows = context.decode_batch([(TOKENS[40], 100, seq, True) for seq in range(3)])
        state = context.save(0, bare=True)
        assert len(SequenceState.parse(state, split=True).positions) == 101 and SequenceState.parse(state, split=True).to_bytes() == state
        for refused, split in ((state, False), (context.save(1, bare=True), True)):
            with pytest.raises(StateError, match="stream"):
                SequenceState.parse(refused, split)
    with Context(model, 256, "turbo3", n_seq=2, unified=True, kv_sink=0, kv_recent=0) as context:
        fill_from_prefix(context, TOKENS[:32], 100)
        alone = context.decode([TOKENS[40]], 100)
    assert np.abs(rows - alone).max() < 1e-4 * np.abs(alone).max()


def test_a_window_is_as_full_as_after_a_prefill(model):
    """Sinks and recent tokens lie in the window of the filled cache: as many rows travel with its state."""
    with Context(model, 1024, "turbo2", n_seq=2, unified=True, n_batch=32, kv_sink=4, kv_recent=16) as context:
        fill_from_prefix(context, TOKENS[:32], 400)
        filled = len(context.save(0))
        context.clear()
        context.decode((TOKENS[:32] * 13)[:400], 0, logits="none")
        assert len(context.save(0)) == filled


def test_the_last_tokens_of_a_window_are_computed(model):
    for options in (dict(n_seq=2, unified=True), dict(n_seq=2)):
        with Context(model, 1024, "turbo2", n_batch=32, kv_sink=4, kv_recent=16, **options) as context:
            fill_from_prefix(context, TOKENS[:32], 400, n_seq=1 if options.get("unified") else 2)
            filled = context.decode([TOKENS[40]], 400)
            plain = context.save(0, bare=True)
        with Context(model, 1024, "turbo2", n_seq=2, unified=True, kv_sink=0, kv_recent=0) as context:
            fill_from_prefix(context, TOKENS[:32], 400)
            assert len(plain) > len(context.save(0, bare=True)) and np.abs(context.decode([TOKENS[40]], 400) - filled).max() > 0


def test_other_caches_are_refused(model):
    with Context(model, 256, "f16", n_seq=2, unified=True, flash=False) as context:      # V transposed
        with pytest.raises(ValueError, match="one attention cache under flash attention"):
            fill_from_prefix(context, TOKENS[:32], 100)
    with pytest.raises(ValueError):
        SequenceState.parse(b"\0" * 11, split=True)
