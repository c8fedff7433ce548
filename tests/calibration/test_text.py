"""Where the tokens come from and where the chunks stand."""
import numpy as np
import pytest

from pykvq.calibration.positions import chunk_positions
from pykvq.calibration.run import calibrate
from pykvq.calibration.text import SPAN, _draw, own_samples, start_token, text_chunks, text_hash
from pykvq.engine import Context, Model, log_softmax, quiet_log

quiet_log()


@pytest.fixture(scope="module")
def smol(smollm2):
    with Model(smollm2) as model:
        yield model


def test_positions_cover_the_trained_range_without_leaving_it():
    for chunks, trained in ((16, 32768), (3, 2048), (1, 8192)):
        p = chunk_positions(chunks, 512, trained)
        parts = np.sort(p * chunks // (trained - 511))
        assert np.array_equal(parts, np.arange(chunks)) and p.max() <= trained - 512
    assert list(chunk_positions(4, 512, 512)) == list(chunk_positions(4, 512, 0)) == [0] * 4
    assert not np.array_equal(chunk_positions(8, 512, 8192), chunk_positions(8, 512, 8192, seed=1))
    early = chunk_positions(32, 512, 131072)[:8]
    assert np.ptp(early) > 65536                                     # an interrupted run has seen far positions too


def test_samples_follow_the_model_s_distribution(tiny_model):
    """First sampled token of many chunks against the probabilities after the start token; chi square over 256 tokens."""
    with Model(tiny_model(64)) as model:
        tokens = np.full((2048, 2), -1, np.int32)
        own_samples(model, tokens, threads=1)
        assert tokens.shape == (2048, 2) and set(tokens[:, 0]) == {start_token(model)}
        with Context(model, 256, threads=1) as context:
            p = np.exp(log_softmax(context.decode([int(tokens[0, 0])], 0))[0])
    counts = np.bincount(tokens[:, 1], minlength=256)
    assert ((counts - 2048 * p) ** 2 / (2048 * p)).sum() < 256 + 6 * np.sqrt(2 * 256)


def test_samples_are_reproducible(tiny_model):
    with Model(tiny_model(64)) as model:
        one, same, other = (np.full((3, 40), -1, np.int32) for _ in range(3))
        for tokens, seed in ((one, 0), (same, 0), (other, 1)):
            own_samples(model, tokens, seed=seed, threads=1)
    assert np.array_equal(one, same) and not np.array_equal(one, other) and len({tuple(row) for row in one}) == 3
    assert text_hash(one) == text_hash(same) != text_hash(other)


def test_sampling_goes_on_where_it_was_interrupted(tiny_model):
    """A group that is whole is left alone, one half-way goes on with the same draws; the keys of its start are computed again."""
    with Model(tiny_model(64)) as model:
        whole = np.full((40, 24), -1, np.int32)
        own_samples(model, whole, threads=1)
        half, told = whole.copy(), []
        half[32:, 10:] = -1
        own_samples(model, half, threads=1, advance=told.append)
        assert np.array_equal(half[:32], whole[:32]) and (half[32:] == whole[32:]).mean() > .9 and told == [8] * 14


def test_the_last_token_can_be_drawn_and_nothing_beyond():
    logits = np.zeros((3, 5), np.float32)
    assert list(_draw(logits, np.array([0.0, 0.9999999, 1.0]))) == [0, 4, 4]


def test_draws_invert_the_cumulative_distribution():
    """Over several spans of the sum, the last of them short."""
    rng = np.random.default_rng(0)
    logits, u = (3 * rng.standard_normal((200, 3 * SPAN + 7))).astype(np.float32), rng.random(200)
    p = np.exp(logits.astype(np.float64))
    at, share = _draw(logits, u), (p.cumsum(1) / p.sum(1, keepdims=True))
    above, below = share[np.arange(200), at], share[np.arange(200), at] - p[np.arange(200), at] / p.sum(1)
    assert (below - 1e-6 <= u).all() and (u <= above + 1e-6).all() and len(set(at // SPAN)) == 4


def test_text_is_cut_at_even_distances(smol, tmp_path):
    words = [f"word{i} " * 400 for i in range(10)]
    (tmp_path / "a.txt").write_text("".join(words[:5]))
    (tmp_path / "b.txt").write_text("".join(words[5:]))
    chunks = text_chunks(smol, [tmp_path / "a.txt", tmp_path / "b.txt"], 10, 256)
    assert chunks.shape == (10, 256) and set(chunks[:, 0]) == {start_token(smol)}
    for i, chunk in enumerate(chunks):
        assert f"word{i}" in smol.text(chunk.tolist())


def test_text_of_uneven_density_is_cut_by_tokens(smol, tmp_path):
    (tmp_path / "a.txt").write_text(" " * 8000 + "one two three four five six " * 700)
    assert text_chunks(smol, [tmp_path / "a.txt"], 8, 256).shape == (8, 256)


def test_too_little_text_is_told_with_what_there_is(smol, tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 500)
    with pytest.raises(ValueError, match=r"1\d\d\d tokens, 4096 are asked for; use --tokens 1024"):
        text_chunks(smol, [tmp_path / "a.txt"], 8, 512)


def test_provenance_of_a_text_names_file_and_content(smollm2, tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 500)
    stats = calibrate(smollm2, tmp_path / "s.npz", text=[tmp_path / "a.txt"], tokens=512, threads=1)
    assert stats.source.startswith("text a.txt (") and str(tmp_path) not in stats.source
    (tmp_path / "a.txt").write_text("four five six " * 500)
    with pytest.raises(ValueError, match="another run"):
        calibrate(smollm2, tmp_path / "s.npz", text=[tmp_path / "a.txt"], tokens=512, threads=1)


def test_chunks_of_a_short_trained_context_fit_it(tiny_model):
    stats = calibrate(tiny_model(64, context=256), tokens=512, threads=1)
    assert stats.tokens.shape == (2, 256) and list(stats.positions) == [0, 0]
