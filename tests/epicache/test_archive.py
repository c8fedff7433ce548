"""Rows of a whole history outside the cache, and the cells that a question takes from them."""
import numpy as np
import pytest

from pykvq.engine import Context, Model, quiet_log
from pykvq.epicache.archive import Archive, Chunk, joined
from pykvq.epicache.build import Builder, Plan
from pykvq.epicache.importance import state_scores as scores
from pykvq.epicache.queries import QueryCapture
from pykvq.epicache.recall import Asked, nearest, read, recalled
from pykvq.epicache.rows import values
from pykvq.sequence_state import Rows, SequenceState

RNG = np.random.default_rng(5)
HISTORY, QUESTION = RNG.integers(0, 256, 150).tolist(), RNG.integers(0, 256, 9).tolist()


def state(first, n):
    """Rows that tell which token they are of."""
    rows = Rows(1, np.repeat(np.arange(first, first + n, dtype=np.uint8)[:, None], 4, 1))
    return SequenceState(np.arange(first, first + n, dtype=np.int32), (rows,), (rows,))


def test_rows_come_from_their_chunks():
    archive = Archive().grown([state(0, 5), state(5, 3)], 4).grown([state(8, 2)], 4)
    assert [len(c.state.positions) for c in archive.chunks] == [8, 2] and archive.end == 10
    found = archive.rows(np.array([1, 6, 7, 8]))
    assert found.positions.tolist() == [1, 6, 7, 8] and found.keys[0].data[:, 0].tolist() == [1, 6, 7, 8]


def test_a_short_chunk_is_taken_up():
    first = Archive().grown([state(0, 6)], 4).grown([state(6, 2)], 4)
    then = first.grown([state(8, 1)], 4)
    assert [len(c.state.positions) for c in then.chunks] == [6, 3]
    assert then.chunks[0] is first.chunks[0] and then.chunks[1].version != first.chunks[1].version
    assert joined([c.state for c in then.chunks]).positions.tolist() == list(range(9)) and Archive((Chunk(state(0, 2), "a"),)).end == 2


def test_nearest_pieces_fill_the_budget():
    pieces = [np.arange(0, 4), np.arange(4, 10), np.arange(10, 13), np.arange(12, 15)]
    always = np.arange(15) == 14
    kept = nearest(pieces, np.array([0.1, 0.9, 0.8, 0.2]), always, 9)
    assert np.flatnonzero(kept).tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]       # the second best does not fit any more, what shares a token does


def builder(path, kv_type="f16", **plan):
    quiet_log()
    capture = QueryCapture()
    return Builder(Context(Model(path), 256, kv_type, threads=2, on_tensor=capture), capture, Plan(**{"budget": 60, "block": 32, "recent": 4, **plan}))


def first_keys(kept):
    return values(kept.keys[0].heads(2), 1)


def test_an_archive_holds_every_token(tiny_model):
    """In less cells than it has tokens; keys of the first layer depend on token and position alone."""
    b = builder(tiny_model(64))
    archive = read(b, Archive(), HISTORY, 8)
    assert archive.end == 150 and b.context.last_position(0) == 149
    with Context(b.context.model, 256, threads=2) as whole:
        whole.decode(HISTORY, 0, logits="none")
        full = SequenceState.parse(whole.save(0, bare=True))
    rows = archive.rows(np.arange(150))
    np.testing.assert_allclose(first_keys(rows), first_keys(full), atol=1e-3)
    last = [np.abs(values(x.keys[1].heads(2), 1)[120:] - values(full.keys[1].heads(2), 1)[120:]).max() for x in (rows, full)]
    assert last[0] > 1e-2 > last[1]                      # later layers saw only the budget


def test_a_block_reads_what_it_attends_to(tiny_model, monkeypatch):
    """Keys of the last layer are closer to those of a whole prefill than behind the last cells alone."""
    monkeypatch.setattr("pykvq.epicache.recall.WORDS", 1)         # neighbours have nothing in common in a random history
    b = builder(tiny_model(64, layers=2), budget=40, block=20)
    with Context(b.context.model, 256, threads=2) as whole:
        whole.decode(HISTORY, 0, logits="none")
        full = SequenceState.parse(whole.save(0, bare=True))
    off = {}
    for chosen in (False, True):
        rows = read(b, Archive(), HISTORY, 8, chosen).rows(np.arange(150))
        off[chosen] = np.abs(values(rows.keys[-1].heads(2), 1)[60:] - values(full.keys[-1].heads(2), 1)[60:]).mean()
    assert off[True] < 0.7 * off[False]


def test_reading_on_is_like_reading_once(tiny_model):
    b = builder(tiny_model(64))
    once, first = read(b, Archive(), HISTORY, 8), read(b, Archive(), HISTORY[:96], 8)
    b.context.clear()
    twice = read(b, first, HISTORY, 8)
    for x, y in zip(once.rows(np.arange(150)).keys, twice.rows(np.arange(150)).keys):
        np.testing.assert_allclose(values(x.heads(2), 1), values(y.heads(2), 1), atol=0.02)


def asked(b, archive, guess=None, size=1, draft=0, **change):
    all_ = np.ones(150, bool)
    always = (np.arange(150) < 8) | (np.arange(150) >= 146)
    return recalled(b, archive, always if guess is None else guess, change.get("candidates", all_), always, Asked([], QUESTION), np.arange(0, 150, size),
                    change.get("by", "max"), draft)


def moved(b, archive, found):
    """How far the logits of the question are from those behind all rows."""
    out = []
    for x in (archive.rows(np.arange(150)), found):
        b.restore(x)
        out.append(b.context.decode(QUESTION, 150)[-1])
    return np.abs(out[0] - out[1]).mean()


@pytest.mark.parametrize("kv_type", ["f16", "turbo3", ("q8_0", "turbo4")], ids=str)
def test_a_question_takes_what_it_attends_to(tiny_model, kv_type):
    """Closer to all rows than the latest cells and than the cells of another question are."""
    b = builder(tiny_model(64), kv_type)
    archive = read(b, Archive(), HISTORY, 8)
    found = asked(b, archive)
    assert len(found.positions) == 60 and found.positions.max() == 149
    latest = archive.rows(np.array([*range(8), *range(98, 150)]))
    assert moved(b, archive, found) < 0.7 * moved(b, archive, latest)


def test_what_is_no_candidate_stays_outside(tiny_model):
    b = builder(tiny_model(64), shared=True)
    archive, candidates = read(b, Archive(), HISTORY, 8), np.arange(150) % 2 == 0
    candidates[:8] = candidates[146:] = True
    found = asked(b, archive, candidates=candidates)
    assert candidates[found.positions].all() and len(found.positions) == 60
    few = np.arange(150) < 20
    few[146:] = True
    assert asked(b, archive, candidates=few).positions.tolist() == [*range(20), *range(146, 150)]        # all fit: nothing is chosen


def test_what_belongs_together_stays_together(tiny_model):
    b = builder(tiny_model(64), shared=True)
    archive = read(b, Archive(), HISTORY, 8)
    found = asked(b, archive, size=10).positions
    inside = found[(found >= 10) & (found < 140)]        # the rest stays in any case
    whole = [n for n in np.bincount(inside // 10) if n]
    assert sum(n == 10 for n in whole) >= len(whole) - 1 > 2         # one does not fit whole


def test_a_left_out_key_bias_shares_tokens_at_their_positions(tiny_model):
    b = builder(tiny_model(64, architecture="qwen2", key_bias=6.0), "turbo3", shared=True)
    archive = read(b, Archive(), HISTORY, 8)
    found = asked(b, archive)
    whole = archive.rows(found.positions)
    assert len(found.positions) == 60 and found.to_bytes() == whole.to_bytes()


def test_a_draft_of_the_answer_chooses_once_more(tiny_model, monkeypatch):
    """Behind the cells of the first choice."""
    b = builder(tiny_model(64))
    archive, seen, behind = read(b, Archive(), HISTORY, 8), [], []
    monkeypatch.setattr("pykvq.epicache.recall.state_scores", lambda queries, *rest: seen.append(queries[1].q.shape[0]) or scores(queries, *rest))
    monkeypatch.setattr(b, "restore", lambda state, real=b.restore: behind.append(state.to_bytes()) or real(state))
    once = asked(b, archive)
    assert len(asked(b, archive, draft=5).positions) == 60
    assert seen == [9, 9, 14] and behind[2] == once.to_bytes()


def test_a_long_text_is_sampled(tiny_model, monkeypatch):
    b, seen = builder(tiny_model(64)), []
    archive = read(b, Archive(), HISTORY, 8)
    monkeypatch.setattr("pykvq.epicache.recall.ENOUGH", 4)
    monkeypatch.setattr("pykvq.epicache.recall.state_scores", lambda queries, *rest: seen.append(queries[1].q.shape[0]) or scores(queries, *rest))
    asked(b, archive)
    assert seen == [4]
