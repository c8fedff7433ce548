"""pykvq bench: rows, ratios, and the backend that really ran the attention."""
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pykvq.attention_devices import AttentionDevices
from pykvq.bench import F16, Setup, _context, _prefill, bench, observe
from pykvq.cli import main
from pykvq.engine import Context, Model

QUICK = Setup(tokens=2, prefill=32, repeats=3, prefix=64, threads=2)
ARGUMENTS = ("--tokens", "2", "--prefill", "32", "--repeats", "2", "--threads", "2", "--depth", "0", "--depth", "200", "--kv-type", "turbo3",
             "--kv-sink", "0", "--kv-recent", "0")


@pytest.fixture
def run(tiny_model):
    def invoke(*arguments):
        return CliRunner().invoke(main, ["bench", str(tiny_model(64)), *ARGUMENTS, *arguments])
    return invoke


def test_rows_for_every_depth_and_type(tiny_model):
    with Model(tiny_model(64)) as model:
        rows = bench(model, [F16, ("turbo3", "q8_0")], [0, 200], QUICK)
    assert [(r.kv_type, r.depth) for r in rows] == [(F16, 0), (("turbo3", "q8_0"), 0), (F16, 200), (("turbo3", "q8_0"), 200)]
    for row in rows:
        assert len(row.decode_seconds) == len(row.prefill_seconds) == 3 and row.decode > 0 and row.prefill > row.decode / 100
        assert row.attention == {"prefill": {"CPU": 2}, "decode": {"CPU": 2}} and row.fallback == ()
    assert [r.filled for r in rows] == ["prefill", "prefill", "repeated prefix", "repeated prefix"]
    assert rows[1].info.types == {("turbo3_64", "q8_0"): 2}
    assert rows[0].ratios(rows[0]) == {"decode": 1, "prefill": 1}


def test_ratio_is_that_of_rounds(tiny_model):
    with Model(tiny_model(64)) as model:
        base = bench(model, [F16], [0], QUICK)[0]
    slow = replace(base, decode_seconds=tuple(2 * s for s in base.decode_seconds), prefill_seconds=tuple(4 * s for s in base.prefill_seconds))
    assert slow.ratios(base) == {"decode": 0.5, "prefill": 0.25}


def test_attention_on_the_cpu_with_the_cache_on_a_device_is_a_fallback(tiny_model, monkeypatch):
    """Planted: the cache says that it lies on CUDA0, while the graph runs on the CPU."""
    info = Context.info
    monkeypatch.setattr(Context, "info", lambda self: type(info(self))(tuple(replace(layer, device="CUDA0") for layer in info(self))))
    with Model(tiny_model(64)) as model:
        assert observe(model, F16, QUICK, [1] * 128) == ({"prefill": {"CPU": 2}, "decode": {"CPU": 2}}, (0, 1))
    result = CliRunner().invoke(main, ["bench", str(tiny_model(64)), *ARGUMENTS])
    assert result.exit_code == 1 and "attention of 2 layers whose cache is on a device ran on the CPU" in result.stderr


def test_attention_without_the_flash_operation_is_not_seen(tiny_model):
    watcher = AttentionDevices()
    with Model(tiny_model(64)) as model, Context(model, 256, flash=False, on_tensor=watcher, threads=2) as context:
        context.decode([1, 2, 3], 0)
    assert watcher.by_layer == {}


def test_the_f16_window_is_full_in_every_round(tiny_model):
    """A prefill takes the rows of the tokens before it, and is undone: the saved state shows how many rows there are."""
    setup, tokens = Setup(tokens=2, prefill=128, threads=2, kv_sink=4, kv_recent=32), [(7 * i) % 256 for i in range(128)]
    with Model(tiny_model(64)) as model, _context(model, 512, ("turbo3", "turbo3"), setup) as context:
        context.decode(tokens, 0, logits="none")
        before = len(context.save(0))
        _prefill(context, tokens, 128)
        assert len(context.save(0)) == before


def test_command_as_json(run):
    result = run("--json", "--quiet")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and result.stderr == "" and len(report["rows"]) == 4
    turbo3 = report["rows"][3]
    assert (turbo3["type"], turbo3["depth"], turbo3["effective"]) == ("turbo3", 200, [["turbo3_64", "turbo3_64", 2]])
    assert turbo3["decode_to_f16"] > 0 and turbo3["attention"]["decode"] == {"CPU": 2} and turbo3["layers"][0] == [0, "turbo3_64", "turbo3_64", "CPU"]
    assert turbo3["kv_bytes"] == 256 * 2 * 2 * 2 * 26


def test_command_as_a_table(run):
    result = run()
    assert result.exit_code == 0 and "2 x K turbo3_64 V turbo3_64" in result.stdout and "attention ran on" in result.stdout


@pytest.mark.parametrize("arguments", [("--kv-type", "turbo9"), ("--depth", "-1"), ("--repeats", "0")])
def test_usage_errors(run, arguments):
    assert run(*arguments).exit_code == 2
