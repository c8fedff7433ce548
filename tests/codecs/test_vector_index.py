"""VectorIndex: neighbours, sizes, files and refusals."""
import numpy as np
import pytest

import pykvq.codecs as codecs
from pykvq.codecs import VectorIndex

ALL = [(m, k) for m in ("inner", "cosine", "l2") for k in ("unbiased", "norm", "prod")]


def data(n=600, d=48, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((20, d)) * 2
    return (centres[rng.integers(0, 20, n)] + rng.standard_normal((n, d))).astype(np.float32) * rng.uniform(0.5, 2, (n, 1)).astype(np.float32)


def exact(x, queries, metric):
    """Ids of the best vector and every true score."""
    if metric == "l2":
        score = np.square(queries[:, None].astype(float) - x[None]).sum(-1)
        return score.argmin(1), score
    if metric == "cosine":
        x, queries = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, queries))
    score = queries.astype(float) @ x.T
    return score.argmax(1), score


@pytest.mark.parametrize("metric, method", ALL)
def test_the_true_neighbour_is_found(metric, method):
    x, queries = data(), data(40, seed=1)
    index = VectorIndex(48, 4, metric=metric, method=method)
    np.testing.assert_array_equal(index.add(x[:350]), np.arange(350))
    np.testing.assert_array_equal(index.add(x[350:]), np.arange(350, 600))
    best, score = exact(x, queries, metric)
    scores, ids = index.search(queries, 10)
    assert scores.shape == ids.shape == (40, 10) and scores.dtype == np.float32 and ids.dtype == np.int64
    assert (ids == best[:, None]).any(1).mean() > 0.9
    order = scores if metric == "l2" else -scores
    assert (np.diff(order, axis=1) >= 0).all()
    true = np.take_along_axis(score, ids, 1)
    assert np.abs(scores - true).mean() < (0.4 if method == "prod" else 0.15) * np.abs(score).mean()


@pytest.mark.parametrize("metric, method", ALL)
def test_scores_are_those_of_the_reconstruction(metric, method):
    x, queries = data(200), data(10, seed=1)
    if metric == "cosine":
        x, queries = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, queries))
    index = VectorIndex(48, 3, metric=metric, method=method)
    index.add(x)
    back = index.codec.dequantise(index.codec.quantise(x))
    expected = queries @ back.T
    if metric == "l2":
        expected = np.maximum(np.square(queries).sum(1)[:, None] - 2 * expected + np.square(x).sum(1), 0)
    scores, ids = index.search(queries, 200)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, ids, 1), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(np.sort(ids, 1), np.broadcast_to(np.arange(200), (10, 200)))


@pytest.mark.parametrize("metric, method, rotation", [(*pair, "hadamard") for pair in ALL] + [("inner", "unbiased", "haar"), ("l2", "prod", "haar")])
def test_a_saved_index_answers_the_same(tmp_path, metric, method, rotation):
    index = VectorIndex(48, 2, metric=metric, method=method, rotation=rotation, seed=5)
    index.add(data())
    index.save(tmp_path / "a.index")
    again = VectorIndex.load(tmp_path / "a.index")
    for a, b in zip(index.search(data(7, seed=2), 5), again.search(data(7, seed=2), 5)):
        np.testing.assert_array_equal(a, b)
    again.add(data(3, seed=3))
    index.add(data(3, seed=3))
    np.testing.assert_array_equal(again.search(data(3, seed=3), 1)[1], index.search(data(3, seed=3), 1)[1])
    assert len(again) == 603 and again.nbytes == index.nbytes


def test_blocks_of_rows_and_queries_do_not_matter(monkeypatch):
    import pykvq.codecs.vector_index as module
    index = VectorIndex(48, 3)
    index.add(data())
    whole = index.search(data(30, seed=1), 7)
    monkeypatch.setattr(module, "ROWS", 53)
    monkeypatch.setattr(module, "QUERIES", 4)
    for a, b in zip(whole, index.search(data(30, seed=1), 7)):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("metric, method, floats", [("inner", "unbiased", 1), ("inner", "norm", 1), ("inner", "prod", 2), ("cosine", "unbiased", 1),
                                                    ("cosine", "norm", 0), ("cosine", "prod", 1), ("l2", "unbiased", 2), ("l2", "prod", 3)])
def test_size_is_what_is_stored(metric, method, floats):
    index = VectorIndex(48, 2, metric=metric, method=method)
    index.add(data(10))
    size = 2 if metric == "cosine" else 4
    assert index.nbytes == 10 * (2 * 6 + size * floats) and index.bits_per_value == pytest.approx(2 + 8 * size * floats / 48)


def test_one_vector_and_short_index():
    index = VectorIndex(48)
    scores, ids = index.search(data(2), 3)
    assert scores.shape == ids.shape == (2, 0)
    assert index.add(data(1)[0]) == [0] and len(index) == 1
    assert index.search(data(1)[0], 5)[1].tolist() == [[0]]


@pytest.mark.parametrize("metric, method", ALL)
def test_adding_no_vectors_changes_nothing(metric, method):
    index = VectorIndex(48, 2, metric=metric, method=method)
    assert index.add(np.empty((0, 48))).shape == (0,) and len(index) == 0


def test_no_queries():
    index = VectorIndex(48)
    index.add(data(5))
    assert index.search(np.empty((0, 48)), 3)[1].shape == (0, 3)


@pytest.mark.parametrize("call", [
    lambda i: VectorIndex(48, metric="dot"), lambda i: VectorIndex(48, method="qjl"), lambda i: VectorIndex(48, 0), lambda i: VectorIndex(1),
    lambda i: i.add(np.zeros((2, 47))), lambda i: i.add(np.full((1, 48), np.nan)), lambda i: i.add(np.zeros((2, 2, 48))), lambda i: i.add(np.zeros((1, 48))),
    lambda i: i.search(np.zeros((1, 48)), 3), lambda i: i.search(np.full((1, 48), np.inf), 3), lambda i: i.search(np.ones((1, 40)), 3),
    lambda i: i.search(np.ones((1, 48)), 0)])
def test_bad_input_is_a_value_error_and_changes_nothing(call):
    index = VectorIndex(48, metric="cosine")
    index.add(data(4))
    with pytest.raises(ValueError):
        call(index)
    assert len(index) == 4


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no index")
    np.savez(tmp_path / "arrays.npz", codes=np.zeros(3))
    for name in ("text", "arrays.npz"):
        with pytest.raises(ValueError, match="no index of pykvq"):
            VectorIndex.load(tmp_path / name)
    with pytest.raises(OSError):
        VectorIndex.load(tmp_path / "absent")


def test_other_versions_and_damaged_files_are_refused(tmp_path, monkeypatch):
    import pykvq.codecs.vector_index as module
    index = VectorIndex(48)
    index.add(data(4))
    monkeypatch.setattr(module, "VERSION", 2)
    index.save(tmp_path / "new")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 2"):
        VectorIndex.load(tmp_path / "new")
    index._added = [(index._arrays()[0][:3], index._arrays()[1])]
    index.save(tmp_path / "damaged")
    with pytest.raises(ValueError, match="damaged"):
        VectorIndex.load(tmp_path / "damaged")


def test_public_names_exist():
    for name in codecs.__all__:
        assert getattr(codecs, name).__doc__
    with pytest.raises(AttributeError):
        codecs.absent
