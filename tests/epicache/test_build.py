"""Block prefill and eviction inside a real context of a tiny model."""
import numpy as np
import pytest

from pykvq.engine import Context, Model, quiet_log
from pykvq.epicache.budget import key_similarity
from pykvq.epicache.build import Builder, Plan
from pykvq.epicache.importance import state_scores
from pykvq.epicache.queries import QueryCapture
from pykvq.epicache.rows import values
from pykvq.sequence_state import SequenceState

RNG = np.random.default_rng(11)
HISTORY, PROMPT = RNG.integers(0, 256, 150).tolist(), RNG.integers(0, 256, 9).tolist()


def builder(path, kv_type="f16", n_ctx=256, **plan):
    quiet_log()
    capture = QueryCapture()
    context = Context(Model(path), n_ctx, kv_type, threads=2, on_tensor=capture)
    return Builder(context, capture, Plan(**{"budget": 60, "block": 32, "recent": 4, **plan}))


def full_softmax_scores(b, prompt, start):
    """What attention itself computes: from the state with the prompt in it, causal mask and all, its own keys left out of the softmax."""
    with b.capture.capture() as queries:
        b.context.decode(prompt, start, logits="none")
    b.context.remove(0, start)
    return state_scores(queries, b.layers, b.heads_kv, SequenceState.parse(b.context.save(0, bare=True)))


@pytest.mark.parametrize("kv_type", ["f16", "turbo3", ("q8_0", "turbo4")], ids=str)
def test_kept_cells_are_the_most_attended(tiny_model, kv_type):
    b = builder(tiny_model(64), kv_type)
    start = b.start(HISTORY, 8)
    assert start.end == 64 and len(start.state.positions) == 64
    made = b.extend(start, HISTORY, PROMPT)
    assert made.end == 150 and len(made.state.positions) == 60 and made.state.positions.max() == 149
    for tokens, scores in zip(made.tokens, made.scores):
        for row, s in zip(tokens, scores):
            assert len(set(row)) == 60 and set(range(8)) <= set(row) and set(range(146, 150)) <= set(row)
            assert np.isfinite(s).all() and (s > 0).all()
    assert any(not np.array_equal(made.tokens[0][0], other) for layer in made.tokens for other in layer)       # heads differ
    b.restore(made.state)
    assert np.isfinite(b.context.decode([1, 2], 150)).all()


def test_queries_and_keys_give_the_attention_of_the_model(tiny_model):
    """A budget that loses nothing: with all cells kept, the answer is that of plain prefill; dropping the least attended hardly moves it,
    dropping the most attended does."""
    b = builder(tiny_model(64), budget=150, block=150)
    whole = b.start(HISTORY, 1)
    b.restore(whole.state)
    full = b.context.decode(PROMPT, 150)
    b.context.remove(0, 150)
    scores = full_softmax_scores(b, PROMPT, 150)
    moved = []
    for worst in (False, True):
        chosen = [np.sort(np.argsort(-layer if not worst else layer, 1)[:, :100], 1) for layer in scores]
        b.restore(whole.state.gather(chosen, np.arange(50, 150)))
        moved.append(np.abs(b.context.decode(PROMPT, 150) - full).mean())
    assert moved[0] < 0.5 * moved[1], moved


def test_a_left_out_key_bias_is_scored(tiny_model):
    """turbo4 leaves the bias out, f16 keeps it: the scores must agree, and without the bias they would not."""
    path = tiny_model(64, architecture="qwen2", key_bias=6.0)
    found = {}
    for kv_type in ("f16", ("turbo4", "turbo4")):
        b = builder(path, kv_type, shared=True)
        assert {x.key_bias for x in b.context.info()} == {"kept" if kv_type == "f16" else "left out"}
        b.context.clear()
        b.context.decode(HISTORY[:100], 300, logits="none")          # both parts of the table of turns
        found[kv_type] = full_softmax_scores(b, PROMPT, 400)
    a, c = (np.concatenate([np.log(layer).ravel() for layer in s]) for s in found.values())
    assert np.corrcoef(a, c)[0, 1] > 0.98


def test_layers_that_differ_need_positions_of_their_own(tiny_model):
    with pytest.raises(ValueError, match="share their tokens"):
        builder(tiny_model(64, architecture="qwen2", key_bias=6.0), "turbo3")


def test_shared_tokens_stand_at_their_positions(tiny_model):
    b = builder(tiny_model(64, architecture="qwen2", key_bias=6.0), "turbo3", shared=True)
    made = b.extend(b.start(HISTORY, 8), HISTORY, PROMPT)
    assert np.array_equal(made.state.positions, made.tokens[0][0]) and made.state.positions.max() == 149
    assert all(np.array_equal(row, made.state.positions) for layer in made.tokens for row in layer)


def test_layer_budgets(tiny_model):
    b = builder(tiny_model(64), layers=(40, 80))
    made = b.extend(b.start(HISTORY, 8), HISTORY, PROMPT)
    assert [(layer >= 0).sum(1).tolist() for layer in made.tokens] == [[40, 40], [80, 80]]
    filled = values(made.state.values[0].heads(2), made.state.values[0].ggml_type)[(made.tokens[0] < 0).T]
    assert (filled == 0).all()


def test_growth_continues_where_it_stood(tiny_model):
    """Two extensions see the same blocks as one."""
    b = builder(tiny_model(64))
    once = b.extend(b.start(HISTORY, 8), HISTORY, PROMPT)
    first = b.extend(b.start(HISTORY, 8), HISTORY[:96], PROMPT)
    twice = b.extend(first, HISTORY, PROMPT)
    for x, y in zip(once.tokens, twice.tokens):
        assert np.array_equal(x, y)
    assert once.state.to_bytes() == twice.state.to_bytes()


def test_block_mask_moves_later_layers_only(tiny_model):
    quiet_log()
    with Model(tiny_model(64)) as model, Context(model, 256, "f16", threads=2, kvq="off") as context:
        similar = key_similarity(context, [2, 2], HISTORY, block=32, sinks=8, window=20)
        same = key_similarity(context, [2, 2], HISTORY, block=150, sinks=8, window=20)
    assert similar[0] == pytest.approx(1) and 0.3 < similar[1] < 0.99        # keys of the first layer depend on their token alone
    assert same == pytest.approx(1)


def test_other_caches_are_refused(tmp_path):
    from architectures import latent, sliding_window
    for make in (sliding_window, latent):
        with pytest.raises(ValueError, match="no sliding window, no latent cache"):
            builder(make(tmp_path / "model.gguf"), "f16")
