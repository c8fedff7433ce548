"""Segments, clusters, scores, budgets and the choice of tokens, on numbers made by hand."""
import numpy as np
import pytest

from pykvq.epicache.budget import layer_budgets
from pykvq.epicache.cluster import episodes, representatives
from pykvq.epicache.importance import attention_scores
from pykvq.epicache.queries import LayerQueries
from pykvq.epicache.segment import LONG, Utterance, segments
from pykvq.epicache.select import select


def utterances(*texts):
    return [Utterance(text, (1,)) for text in texts]


def test_windows_do_not_overlap_and_cover_all():
    found = segments(utterances(*"abcdefghij"), 4)
    assert [(s.first, s.last) for s in found] == [(0, 4), (4, 8), (8, 10)] and found[0].text == "a\nb\nc\nd"
    assert [(s.first, s.last) for s in segments(utterances(*"abcdefghij"), 4, start=8)] == [(8, 10)]


def test_a_long_utterance_counts_as_its_pieces():
    long = " ".join(f"This is sentence number {i}." for i in range(60))
    found = segments(utterances("short", long), 2)
    assert len(found) > 1 and all(len(s.text) <= 2 * LONG + 60 for s in found)
    assert " ".join(s.text.replace("\n", " ") for s in found) == f"short {long}"


def clouds(n, per=12, d=16):
    rng = np.random.default_rng(n)
    x = np.repeat(np.linalg.qr(rng.standard_normal((d, n)))[0].T, per, 0) + 0.1 * rng.standard_normal((n * per, d))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_episodes_are_found(n):
    found = episodes(clouds(n), history=9000, budget=3000)        # 3 to 6 are allowed
    assert len(found.centroids) == n
    assert all(len(set(found.label[i * 12:i * 12 + 12])) == 1 for i in range(n))


def test_an_episode_fits_the_budget():
    assert len(episodes(clouds(2), history=9000, budget=2000).centroids) >= 5
    assert len(episodes(clouds(2, per=1), history=9000, budget=100).centroids) == 2       # never more than there are segments


def test_representatives_are_nearest_first():
    x = clouds(1, per=6)
    order = representatives(x, x[3] * 5, np.arange(6))
    assert order[0] == 3 and (np.diff(x[order] @ x[3]) <= 0).all()


@pytest.mark.parametrize("held", [1 << 22, 21])
def test_scores_are_the_largest_softmax_weight(held, monkeypatch):
    monkeypatch.setattr("pykvq.epicache.importance._WEIGHTS", held)
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((5, 4, 8)).astype(np.float32), rng.standard_normal((7, 2, 8)).astype(np.float32)
    scores, mean = (attention_scores(LayerQueries(q, None), k, np.arange(7), by) for by in ("max", "mean"))
    for h in range(2):
        logits = np.einsum("tgd,kd->tgk", q[:, 2 * h:2 * h + 2], k[:, h])
        weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        np.testing.assert_allclose(scores[h], weights.max((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(mean[h], weights.mean((0, 1)), rtol=1e-5)


def test_each_head_keeps_its_best_and_what_is_pinned():
    scores = [np.array([[.1, .9, .2, .8, .3, 0], [.9, .1, .8, .2, .7, 0]])]
    pinned = np.array([1, 0, 0, 0, 0, 1], bool)
    assert select(scores, pinned, [4])[0].tolist() == [[0, 1, 3, 5], [0, 2, 4, 5]]
    shared = select([scores[0], scores[0][::-1]], pinned, [4, 4], shared=True)
    assert len({tuple(row) for layer in shared for row in layer}) == 1 and {0, 5} <= set(shared[0][0])


def test_a_smaller_layer_is_filled_with_what_nobody_reads():
    scores = [np.array([[.5, .4, .3, .01, .2]]), np.array([[.5, .4, -np.inf, .3, .02]])]
    first, second = select(scores, np.array([1, 0, 0, 0, 0], bool), [2, 4])
    assert first.tolist() == [[0, 1, ~3, ~3]] and second.tolist() == [[0, 1, 3, 4]]
    assert select(scores, np.array([1, 0, 0, 0, 0], bool), [5, 5])[1].tolist() == [[0, 1, 3, 4, ~4]]      # a filled cell is never kept


def test_what_must_stay_must_fit():
    with pytest.raises(ValueError, match="raise it"):
        select([np.zeros((1, 6))], np.ones(6, bool), [5])


def test_both_formulas_of_a_layer_budget():
    s = np.array([1.0, 0.9, 0.7, 0.5])
    code = layer_budgets(s, 1000, "code")
    weight = ((1.0 - s) / 0.5) ** 1.1
    assert code.tolist() == [250, *(4000 * weight / weight.sum()).astype(int)[1:]]
    paper = layer_budgets(s, 1000, "paper")
    assert paper[0] == 1 and paper[1:].sum() <= 4000 < paper.sum() + 8 and (np.diff(paper) > 0).all()
    assert layer_budgets(np.ones(3), 90, "code").tolist() == layer_budgets(np.ones(3), 90, "paper").tolist() == [90] * 3
    with pytest.raises(ValueError, match="code"):
        layer_budgets(s, 10, "v3")


def test_one_head_that_stands_out_decides_for_all():
    """Three heads spread their attention, one looks at a fact."""
    flat = np.array([[.3, .2, .19, .18, .13, 0]] * 3 + [[.1, 0, 0, 0, 0, .9]])
    assert select([flat], np.zeros(6, bool), [2], shared=True)[0].tolist() == [[0, 5]] * 4
