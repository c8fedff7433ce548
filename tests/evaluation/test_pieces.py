"""The parts of an evaluation, each against its definition."""
import agreement
import numpy as np
import pytest
from agreement import ours, theirs

from pykvq.comparison import passage
from pykvq.engine import Context, Model, kl_divergence, log_softmax, quiet_log
from pykvq.evaluation import generation, retrieval
from pykvq.evaluation.logits import Distributions, surprise
from pykvq.evaluation.run import F16, Setup, configurations, score
from pykvq.evaluation.store import Store, model_identity


@pytest.fixture(scope="module")
def model(smollm2):
    quiet_log()
    with Model(smollm2) as loaded:
        yield loaded


def logits(n=50, vocabulary=3000, noise=0.3):
    rng = np.random.default_rng(0)
    exact = (rng.standard_normal((n, vocabulary)) * 4).astype(np.float32)
    return exact, exact + (noise * rng.standard_normal(exact.shape)).astype(np.float32)


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_divergence_from_16_bits_is_the_exact_one(noise):
    exact, other = logits(noise=noise)
    np.testing.assert_allclose(Distributions.of(exact).divergence(other), kl_divergence(exact, other), rtol=0.003, atol=1e-6)


def test_divergence_sees_another_distribution():
    exact, other = logits()
    assert not np.allclose(Distributions.of(exact).divergence(exact[::-1]), kl_divergence(exact, other), rtol=0.5)
    assert np.abs(Distributions.of(exact).divergence(exact)).max() < 1e-6


def test_divergence_does_not_mind_a_common_shift():
    exact, other = logits()
    np.testing.assert_allclose(Distributions.of(exact + 7).divergence(other - 9), kl_divergence(exact, other), rtol=0.003)


def test_surprise_is_the_negative_log_likelihood():
    exact, _ = logits()
    tokens = np.arange(50)
    np.testing.assert_allclose(surprise(exact, tokens), -log_softmax(exact)[tokens, tokens], rtol=1e-5)


def test_divergence_agrees_with_llama_perplexity(smollm2, program, tmp_path):
    """To 1 %, over the second halves of two chunks of 128 tokens."""
    quiet_log()
    text = tmp_path / "text.txt"
    text.write_text(passage())
    upstream = theirs(program("llama-perplexity"), smollm2, text, tmp_path, "turbo3", 128, 2)
    assert ours(smollm2, text, "turbo3", 128, 2) == pytest.approx(upstream, rel=0.01)
    assert ours(smollm2, text, "turbo2", 128, 2) != pytest.approx(upstream, rel=0.5)


def test_scored_positions():
    assert Setup(context=1024, rows=256).positions[-1] == 1022 and len(Setup(context=1024, rows=256).positions) == 256
    short = Setup(context=64, rows=256).positions
    assert len(short) == len(set(short)) == 62 and short[-1] == 62


def test_score_returns_the_rows_that_were_asked_for(model):
    tokens, positions = np.array(model.tokenize(passage())[:96]), np.array([3, 40, 94])
    with Context(model, 256, threads=2, n_batch=64) as context:
        rows = score(context, tokens, positions)
        context.clear()
        everything = context.decode(tokens.tolist(), 0, logits="all")
    np.testing.assert_allclose(rows, everything[positions], atol=0.15)
    assert rows.shape == (3, model.n_vocab)


# ---- retrieval

def test_facts_lie_at_their_depths(model):
    t = retrieval.task(model, 512, 0)
    text = model.text(t.tokens)
    assert 480 <= len(t.tokens) <= 520 and retrieval.task(model, 512, 0) == t and retrieval.task(model, 512, 1) != t
    for depth, question, answer in zip(retrieval.DEPTHS, t.questions, t.answers):
        fact = model.text(question + answer).strip()
        assert text.count(fact) == 1 and abs(text.index(fact) / len(text) - depth) < 0.06


def test_a_model_finds_facts_and_not_what_was_never_said(model):
    t = retrieval.task(model, 256, 0)
    with Context(model, retrieval.room(256), n_seq=2, unified=True, threads=2) as context:
        found = retrieval.answer(context, t)
        never_said = retrieval.answer(context, retrieval.Task(t.tokens, t.questions, retrieval.task(model, 256, 1).answers))
    assert found.sum() >= 3 and never_said.sum() == 0


# ---- generation

def test_first_divergence():
    a = np.array([1, 2, 3, 4])
    assert [generation.first_divergence(a, np.array(b)) for b in ([1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 9, 4])] == [4, 0, 2]


def test_repetition():
    assert generation.repetition(np.arange(20)) == 0
    assert generation.repetition(np.zeros(20, int)) == pytest.approx(16 / 17)
    assert generation.repetition(np.tile(np.arange(5), 4)) == pytest.approx(12 / 17)


def test_greedy_is_the_most_likely_token_every_time(model):
    prompt = model.tokenize(passage())[:32]
    with Context(model, 256, threads=2) as context:
        run = generation.greedy(context, prompt, 12)
        context.clear()
        forced = context.decode(prompt + run.tolist(), 0, logits="all")[len(prompt) - 1:-1]
    picked = forced[np.arange(12), run]
    assert (forced.max(1) - picked < 0.3).all()              # one batch rounds otherwise than single tokens


# ---- store

def test_store_keeps_pieces_apart(tmp_path):
    store = Store({"a": 1}, tmp_path)
    assert not store.has("x")
    store.put("x", numbers=np.arange(3))
    assert store.has("x") and store.get("x")["numbers"].tolist() == [0, 1, 2] and store.bytes() > 0
    assert not Store({"a": 2}, tmp_path).has("x") and Store({"a": 1}, tmp_path).has("x")
    store.clear()
    assert not store.has("x")


def test_damaged_piece_names_the_remedy(tmp_path):
    store = Store({}, tmp_path)
    store.put("x", numbers=np.arange(3))
    (store.folder / "x.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(ValueError, match="--restart"):
        store.get("x")


def test_other_weights_and_another_calibration_are_another_model(tiny_model, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_model(64).read_bytes())
    first = model_identity(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = model_identity(path)
    path.with_name("m.kvq.gguf").write_bytes(b"GGUF")
    assert len({first, second, model_identity(path)}) == 3


def test_configurations_hold_both_and_each_alone():
    assert configurations([("turbo3", "turbo3"), ("q8_0", "turbo3")], True) == [
        F16, ("turbo3", "turbo3"), ("turbo3", "f16"), ("f16", "turbo3"), ("q8_0", "turbo3"), ("q8_0", "f16")]
    assert configurations([("turbo3", "turbo3"), F16], False) == [F16, ("turbo3", "turbo3")]


def test_agreement_reads_the_figure_that_is_printed(monkeypatch, tmp_path):
    class Result:
        returncode, stdout, stderr = 0, "Mean    KLD:   0.188599 ±   0.0104\nMean    RMS Δp ...", ""
    monkeypatch.setattr(agreement.subprocess, "run", lambda *a, **k: Result)
    assert agreement.theirs("x", tmp_path, tmp_path, tmp_path, "turbo3", 128, 2) == 0.188599
