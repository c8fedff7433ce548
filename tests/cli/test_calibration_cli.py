"""pykvq calibrate, embed-rotations and inspect through click's runner: a small model from command to load."""
import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from pykvq.calibration.metadata import decode
from pykvq.cli import main
from pykvq.engine import Context, Model
from pykvq.gguf_file import GgufFile


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Every test has an empty cache folder of its own."""
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


@pytest.fixture
def run():
    def invoke(*args):
        return CliRunner().invoke(main, [str(a) for a in args])
    return invoke


@pytest.fixture
def model(tiny_model, tmp_path):
    shutil.copy(tiny_model(64), tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def one_line_error(result, *words):
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr


FAST = ("--tokens", 1024, "--threads", 1)


def test_calibrate_then_embed_uses_the_statistics(run, model, cache, monkeypatch):
    result = run("calibrate", model, *FAST)
    assert result.exit_code == 0 and "2 layers, 1024 tokens (own samples" in result.stdout, result.output
    assert len(list(cache.iterdir())) == 1 and "embed-rotations" in result.stderr
    monkeypatch.setattr("pykvq.engine.Model.__init__", None)                    # nothing is loaded again
    result = run("embed-rotations", model, *FAST)
    assert result.exit_code == 0 and "transforms of 2 layers" in result.stdout, result.output
    assert sorted(decode(GgufFile(model.parent / "tiny.kvq.gguf")).layers) == [0, 1]


def test_statistics_file_of_one_s_own(run, model, tmp_path, cache):
    stats = tmp_path / "s.npz"
    value = json.loads(run("calibrate", model, "-o", stats, "--json", *FAST).stdout)
    assert value["statistics"] == str(stats) and value["tokens"] == 1024 and value["layers"] == [0, 1] and not cache.exists()
    result = run("embed-rotations", model, "--stats", stats, "-o", tmp_path / "out.gguf", "--json")
    value = json.loads(result.stdout)
    assert value["layers"] == [0, 1] and decode(GgufFile(tmp_path / "out.gguf"))
    with Model(tmp_path / "out.gguf") as m, Context(m, 256, threads=1) as c:
        assert np.isfinite(c.decode([1, 2], 0)).all()


def test_embed_in_place_and_inspect(run, model, cache):
    assert run("inspect", model).exit_code == 1
    assert run("embed-rotations", model, "--in-place", *FAST).exit_code == 0
    result = run("inspect", model)
    assert result.exit_code == 0 and "own samples" in result.stdout and "oscar2" in result.stdout
    value = json.loads(run("inspect", model, "--json").stdout)
    assert value["fits"] and value["current"] and [layer["layer"] for layer in value["layers"]] == [0, 1]
    assert value["layers"][0]["error_turbo3"] < value["layers"][0]["error_turbo2"]
    spectrum = np.array(value["layers"][0]["spectrum"])
    assert spectrum.shape == (2, 64) and (np.diff(spectrum, axis=1) <= 0).all()
    one_line_error(run("embed-rotations", model, "--in-place", *FAST), "--force")
    assert run("embed-rotations", model, "--in-place", "--force", *FAST).exit_code == 0


def test_inspect_says_when_the_sidecar_is_of_another_model(run, model):
    assert run("embed-rotations", model, *FAST).exit_code == 0
    raw, f = bytearray(model.read_bytes()), GgufFile(model)
    raw[f.data_start + f.tensors["output_norm.weight"].offset] ^= 1
    model.write_bytes(raw)
    result = run("inspect", model)
    assert result.exit_code == 1 and "another model" in result.stderr
    assert run("inspect", model.parent / "tiny.kvq.gguf").exit_code == 0         # alone it fits whatever it was made for


def test_a_damaged_sidecar_does_not_stop_its_own_replacement(run, model):
    (model.parent / "tiny.kvq.gguf").write_bytes(b"GGUF\3\0\0\0 no more")
    one_line_error(run("embed-rotations", model, *FAST), "--force")
    assert run("embed-rotations", model, "--force", *FAST).exit_code == 0 and run("inspect", model).exit_code == 0


def test_plot(run, model, tmp_path):
    pytest.importorskip("matplotlib")
    assert run("embed-rotations", model, *FAST).exit_code == 0
    assert run("inspect", model, "--plot", tmp_path / "p.png").exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    one_line_error(run("inspect", model, "--plot", tmp_path / "p.xyz"), "xyz")


def test_plot_without_matplotlib_names_the_extra(run, model, tmp_path, monkeypatch):
    assert run("embed-rotations", model, *FAST).exit_code == 0
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    one_line_error(run("inspect", model, "--plot", tmp_path / "p.png"), "pip install", "[plot]")


def test_bad_input(run, model, tmp_path):
    one_line_error(run("calibrate", tmp_path / "none.gguf"), "no model file")
    one_line_error(run("inspect", tmp_path / "none.gguf"), "no model file")
    (tmp_path / "short.txt").write_text("too short")
    assert run("embed-rotations", model, "-o", "x.gguf", "--in-place").exit_code == 2
    assert run("calibrate", model, "--text", tmp_path / "absent.txt").exit_code == 2
    (tmp_path / "junk.npz").write_text("junk")
    one_line_error(run("embed-rotations", model, "--stats", tmp_path / "junk.npz"), "no statistics file")
    (tmp_path / "there.gguf").write_text("precious")
    one_line_error(run("embed-rotations", model, "-o", tmp_path / "there.gguf", *FAST), "--force")
    result = run("embed-rotations", model, "--key-bias", "attn_k.bias", *FAST)
    assert result.exit_code == 2 and "warning: the cache of this version does not return that bias for llama" in result.stderr and "error: tiny.gguf has no blk.0.attn_k.bias" in result.stderr


def test_statistics_of_another_model_are_refused(run, smollm2, model, tmp_path):
    assert run("calibrate", model, "-o", tmp_path / "s.npz", *FAST).exit_code == 0
    one_line_error(run("embed-rotations", smollm2, "--stats", tmp_path / "s.npz", "-o", tmp_path / "o.gguf"), "another model")
    assert not (tmp_path / "o.gguf").exists()


def test_a_real_model(run, smollm2, tmp_path):
    """SmolLM2-135M on two chunks of its own samples: from the command to a file that loads and predicts plausible errors."""
    assert run("embed-rotations", smollm2, "-o", tmp_path / "out.gguf", "--tokens", 512, "--threads", 2).exit_code == 0
    value = json.loads(run("inspect", tmp_path / "out.gguf", "--json").stdout)
    assert len(value["layers"]) == 30 and all(layer["heads_kv"] == 3 and layer["head_dim"] == 64 for layer in value["layers"])
    for layer in value["layers"]:
        assert 0 < layer["error_turbo4"] < layer["error_turbo3"] < layer["error_oscar2"] < layer["error_turbo2"] < 2
        assert layer["error_turbo3"] < layer["error_turbo3_uncalibrated"]
