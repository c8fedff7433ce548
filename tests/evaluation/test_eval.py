"""pykvq eval as a whole, on a tiny random model with a vocabulary of bytes: resuming, JSON, page, refusals."""
import json

import architectures
import numpy as np
import pytest
import shapes
from click.testing import CliRunner

from pykvq.cli import main
from pykvq.engine import Context, Model, quiet_log
from pykvq.evaluation.run import F16, Evaluation, Setup
from pykvq.evaluation.summary import summary
from pykvq.tiny_model import write_tiny_model

SMALL = Setup(context=96, chunks=2, rows=48, lengths=(384,), texts=1, generated=12)
TURBO3 = ("turbo3", "turbo3")
BARE = {"kv_sink": 0, "kv_recent": 0}            # a text of 96 tokens would lie in the f16 window


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return architectures.sliding_window(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path):
    quiet_log()
    with Model(path) as loaded:
        yield loaded


@pytest.fixture
def opened(monkeypatch):
    """The types of the contexts that are opened."""
    made, original = [], Context.__init__

    def counting(self, model, n_ctx, kv_type="f16", **options):
        made.append(kv_type)
        original(self, model, n_ctx, kv_type, **options)
    monkeypatch.setattr(Context, "__init__", counting)
    return made


def test_f16_against_itself_and_a_type_against_f16(model, tmp_path):
    evaluation = Evaluation(model, SMALL, threads=2, window=BARE, folder=tmp_path)
    evaluation.run([F16, TURBO3, ("f16", "turbo3")])
    f16, turbo3, values = (summary(evaluation, pair) for pair in (F16, TURBO3, ("f16", "turbo3")))
    assert f16.kld.value == pytest.approx(0, abs=1e-6) and f16.same_top.value == 1 and f16.lost == 0 and min(f16.first_divergence) == 12
    assert turbo3.kld.value > 0.001 and turbo3.kld.low < turbo3.kld.value < turbo3.kld.high and 0 < turbo3.same_top.value < 1
    assert turbo3.layers == ["6 x K turbo3_64 V turbo3_64"] and turbo3.bytes < values.bytes < f16.bytes
    assert 0 < values.kld.value < turbo3.kld.value and len(turbo3.drift) == 8


def test_the_f16_pass_serves_later_types(model, tmp_path, opened):
    Evaluation(model, SMALL, threads=2, window=BARE, folder=tmp_path).run([F16])
    opened.clear()
    Evaluation(model, SMALL, threads=2, window=BARE, folder=tmp_path).run([F16, TURBO3])
    assert opened and F16 not in opened and "f16" not in opened
    opened.clear()
    Evaluation(model, SMALL, threads=2, window=BARE, folder=tmp_path).run([F16, TURBO3])
    assert opened == []


@pytest.mark.parametrize("after", [1, 40, 99, 103, 107])
def test_an_interrupted_run_goes_on(model, tmp_path, after):
    """Cut off after so many reports of progress; the figures are those of a run that was not."""
    calls = 0

    def begin(total):
        def advance(label, done):
            nonlocal calls
            calls += 1
            if calls == after:
                raise KeyboardInterrupt
        return advance
    whole = Evaluation(model, SMALL, threads=2, window=BARE, folder=tmp_path / "whole")
    whole.run([F16, TURBO3])
    cut = Evaluation(model, SMALL, threads=2, window=BARE, folder=tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        cut.run([F16, TURBO3], begin)
    cut.run([F16, TURBO3])
    assert cut.chunks().shape == whole.chunks().shape and (cut.chunks() >= 0).all()
    if after > 98:                               # a sampler that was cut off may round otherwise
        assert summary(cut, TURBO3) == summary(whole, TURBO3)


def test_the_work_that_is_announced_is_the_work_that_is_done(model, tmp_path):
    announced, done = [], []

    def begin(total):
        announced.append(total)
        return lambda label, n: done.append(n)
    Evaluation(model, SMALL, threads=2, window=BARE, folder=tmp_path).run([F16, TURBO3], begin)
    assert sum(done) == pytest.approx(announced[0], rel=0.1)


def test_another_setup_or_text_shares_nothing(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox. " * 40)
    keys = {Evaluation(model, setup, text=t, folder=tmp_path).store.key for setup in (SMALL, Setup()) for t in (None, text)}
    text.write_text("The slow brown fox. " * 40)
    assert len(keys | {Evaluation(model, SMALL, text=text, folder=tmp_path).store.key}) == 5


def test_texts_of_a_file(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    chunks = Evaluation(model, SMALL, text=text, folder=tmp_path).chunks()
    assert chunks.shape == (2, 96) and chunks.dtype == np.int32 and "quick brown fox" in model.text(chunks[0].tolist())


@pytest.mark.parametrize("build, words", [
    (architectures.encoder_decoder, "has an encoder"), (write_tiny_model, "no tokenizer"),
    (lambda path: shapes.write(path, *shapes.ARCHITECTURES["state alone"]), "keeps no KV cache")], ids=["encoder", "no tokenizer", "no cache"])
def test_models_that_cannot_be_judged(build, words, tmp_path):
    with Model(build(tmp_path / "m.gguf")) as model, pytest.raises(ValueError, match=words):
        Evaluation(model, SMALL, folder=tmp_path)


@pytest.mark.parametrize("build", [architectures.hybrid, architectures.latent])
def test_other_kinds_of_caches(build, tmp_path):
    with Model(build(tmp_path / "m.gguf")) as model:
        evaluation = Evaluation(model, SMALL, threads=2, window=BARE, folder=tmp_path)
        evaluation.run([F16, TURBO3])
        assert summary(evaluation, F16).kld.value == pytest.approx(0, abs=1e-5) and summary(evaluation, TURBO3).kld.value > 1e-4


# ---- the command

@pytest.fixture
def run(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "cache"))

    def invoke(*arguments):
        return CliRunner().invoke(main, ["eval", str(path), "--ctx", "96", "--chunks", "2", "--length", "384", "--quick", "--threads", "2",
                                         *map(str, arguments)])
    return invoke


def test_command_as_json(run):
    result = run("--json", "--quiet", "--kv-type", "turbo3", "--tolerance", "100", "--kv-sink", 0, "--kv-recent", 0)
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and result.stderr == "" and report["measured"] and report["device"]
    assert [r["kv_type"] for r in report["results"]] == [["turbo3", "turbo3"], ["turbo3", "f16"], ["f16", "turbo3"]]
    assert report["verdict"]["kv_type"] == ["turbo3", "turbo3"] and not report["verdict"]["able"] and "too few" in report["verdict"]["sentence"]
    assert set(report["results"][0]["kld_quantiles"]) == {"90", "99", "99.9"} and report["results"][0]["retrieval"]["384"] == [0] * 5


def test_command_ends_with_the_verdict_and_1_when_nothing_fits(run):
    result = run("--kv-type", "turbo2", "--no-parts", "--tolerance", "0.000001", "--kv-sink", 0, "--kv-recent", 0)
    assert result.exit_code == 1 and "Stay with f16" in result.stdout.strip().splitlines()[-1] + result.stdout
    assert "the f16 pass is kept" in result.stderr


def test_a_window_that_holds_most_of_the_text_is_told(run):
    result = run("--json", "--kv-type", "turbo2", "--no-parts", "--kv-sink", 16, "--kv-recent", 64)
    row = json.loads(result.stdout)["results"][0]
    assert row["window"] == 80 and "of the 96 tokens of a text 80 lie in its f16 window" in result.stderr
    assert json.loads(run("--json", "--kv-type", "turbo3", "--no-parts").stdout)["results"][0]["window"] == 27 + 84       # the default in 256 cells
    assert "lie in its f16 window" not in run("--json", "--kv-type", "turbo2", "--no-parts", "--kv-sink", 0, "--kv-recent", 0).stderr


@pytest.mark.parametrize("arguments, words", [(["--ctx", "4096"], "trained for"), (["--kv-type", "turbo9"], "turbo9"), (["--tolerance", "0"], "range"),
                                              (["--text", "/nonexistent"], "does not exist")])
def test_refusals(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""


def test_page_without_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = run("--html", tmp_path / "page.html")
    assert result.exit_code == 2 and "pip install 'pykvq[plot]'" in result.stderr
