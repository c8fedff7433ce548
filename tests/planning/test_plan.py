"""pykvq plan against what libllama then allocates, over architectures; and the command."""
import json
from dataclasses import replace
from functools import partial

import pytest
import shapes
from allocation import allocated
from click.testing import CliRunner

from pykvq.cli import main
from pykvq.engine import Context, Model
from pykvq.planning.plan import Setup, longest, memory
from pykvq.planning.traffic import weight_bytes_per_token
from pykvq.tiny_model import write_tiny_model

TYPES = ("f16", "q4_0", "turbo4", "turbo3", "turbo2")


@pytest.fixture(scope="module", params=shapes.ARCHITECTURES)
def path(request, tmp_path_factory):
    return shapes.write(tmp_path_factory.mktemp("shape") / "m.gguf", *shapes.ARCHITECTURES[request.param])


def test_plan_is_what_is_allocated(path):
    large = path.stat().st_size > 1 << 28
    with Model(path, no_alloc=True) as header, Model(path) as real:
        for kv_type, parallel in [(t, 1) for t in TYPES] + [("turbo3", 4)]:
            setup = Setup(2048, parallel, 128)
            planned = memory(header, (kv_type, kv_type), setup)
            kv, state, compute = allocated(real, kv_type, setup, run=kv_type == "turbo3" and not large)
            assert (planned.kv, planned.state) == (kv, state), (kv_type, parallel)
            assert planned.compute == pytest.approx(compute, rel=0.1), (kv_type, parallel)
            assert planned.weights >= 0.98 * path.stat().st_size


def test_a_plan_of_another_setup_is_not_what_is_allocated(tiny_model):
    """The comparison above can fail."""
    with Model(tiny_model(64), no_alloc=True) as header, Model(tiny_model(64)) as real:
        kv, _, compute = allocated(real, "turbo3", Setup(2048, 1, 128))
        assert memory(header, ("turbo2", "turbo3"), Setup(2048, 1, 128)).kv != kv
        assert memory(header, ("turbo3", "turbo3"), Setup(2048, 1, 512)).compute != pytest.approx(compute, rel=0.1)


def test_a_header_alone_allocates_nothing(tiny_model):
    with Model(tiny_model(64), no_alloc=True) as header, Context(header, 1 << 20, "f16") as context:
        assert context.info().bytes == (1 << 20) * 2 * 2 * 2 * 64 * 2 and sum(b.compute for b in context.memory_info()) > 0


def test_f16_windows_are_counted(tiny_model):
    setup = Setup(2048, 1, 128, kv_sink=64, kv_recent=128)
    with Model(tiny_model(64), no_alloc=True) as header, Model(tiny_model(64)) as real, Context(
            real, 2048, "turbo3", n_batch=128, n_outputs=1, kv_sink=64, kv_recent=128) as context:
        planned, bare = memory(header, ("turbo3", "turbo3"), setup), memory(header, ("turbo3", "turbo3"), replace(setup, kv_sink=0, kv_recent=0))
        assert planned.kv == context.info().bytes and planned.info.bytes_window == context.info().bytes_window == planned.kv - bare.kv > 0
        assert planned.compute == pytest.approx(sum(b.compute for b in context.memory_info()), rel=0.1)


def test_longest_context_fits_and_the_next_does_not(tiny_model):
    setup = Setup(256, parallel=2)
    with Model(tiny_model(64), no_alloc=True) as header:
        budget = memory(header, ("turbo3", "turbo3"), replace(setup, context=5 * 512)).total
        assert longest(header, ("turbo3", "turbo3"), setup, budget, 1 << 16) == 5 * 512
        assert longest(header, ("turbo3", "turbo3"), setup, budget - 1, 1 << 16) == 4 * 512
        assert longest(header, ("turbo3", "turbo3"), setup, 1 << 40, 4096) == 4096
        assert longest(header, ("turbo3", "turbo3"), setup, 1000, 4096) == 0


def test_copies_that_cuda_makes_are_of_llama_cpp_s_types_alone(tiny_model):
    setup = Setup(2048, foreign=True)
    with Model(tiny_model(64), no_alloc=True) as header:
        assert memory(header, ("q4_0", "q4_0"), setup).scratch == 2048 * 2 * 64 * 2 * 2       # K and V of 2 heads in f16
        assert memory(header, ("turbo3", "turbo3"), setup).scratch == memory(header, ("f16", "f16"), setup).scratch == 0


def test_a_token_reads_the_experts_that_are_used(tmp_path):
    path = shapes.write(tmp_path / "m.gguf", *shapes.ARCHITECTURES["experts"])
    experts = 4 * 3 * 8 * 64 * 256 * 2               # layers, matrices, experts, width inside, width, bytes
    assert weight_bytes_per_token(path) == pytest.approx(path.stat().st_size - experts * 6 / 8, rel=0.02)      # tied: the embedding is read


def test_a_token_reads_no_embedding_beside_an_output_matrix(tiny_model):
    size, embedding = tiny_model(64).stat().st_size, 256 * 128 * 4
    assert weight_bytes_per_token(tiny_model(64)) == pytest.approx(size - embedding, rel=0.01)


def test_a_split_model_is_planned_whole(tiny_model, tmp_path, monkeypatch):
    import gguf
    whole = tiny_model(64)
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=8))
    write_tiny_model(tmp_path / "m.gguf", 64)
    first, *others = sorted(tmp_path.glob("m-*.gguf"))
    setup = Setup(2048)
    with Model(first, no_alloc=True) as split, Model(whole, no_alloc=True) as single:
        assert others and memory(split, ("turbo3", "turbo3"), setup) == memory(single, ("turbo3", "turbo3"), setup)
    assert weight_bytes_per_token(first) == weight_bytes_per_token(whole)
    others[-1].unlink()
    result = CliRunner().invoke(main, ["plan", str(first)])
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.fixture
def plan():
    def run(*args):
        return CliRunner().invoke(main, ["plan", *map(str, args)])
    return run


def test_command_prints_three_lines_a_type(plan, smollm2):
    result = plan(smollm2, "--vram", "1G", "--kv-type", "turbo3", "--kv-type", "q8_0,turbo2")
    assert result.exit_code == 0, result.stderr
    for text in ("turbo3", "q8_0,turbo2", "4.00x smaller with 8.4 MiB of f16 window", "up to 8192 tokens (trained)", "fits"):
        assert text in " ".join(result.stdout.split())
    assert [result.stdout.count(part) for part in ("weights", "KV cache", "compute")] == [2, 2, 2]


def test_command_as_json(plan, smollm2):
    result = plan(smollm2, "--json", "--quiet", "--vram", "200M", "--ctx", 8192, "--bandwidth", 100)
    report = json.loads(result.stdout)
    rows = {r["type"]: r for r in report["types"]}
    assert result.exit_code == 0 and result.stderr == ""
    assert rows["f16"]["kv"] == 8192 * 30 * 2 * 3 * 128 and not rows["f16"]["fits"] and 0 < rows["f16"]["longest_context"] < 8192
    assert rows["turbo2"]["fits"] and rows["turbo2"]["longest_context"] == 8192 and rows["turbo2"]["effective"] == [["turbo2_64", "turbo2_64", 30]]
    row = rows["turbo3"]
    assert row["total"] == row["weights"] + row["kv"] + row["state"] + row["compute"]
    assert row["tokens_per_second_at_most"] == pytest.approx(100e9 / row["bytes_per_token"])
    assert report["budget"] == 200 << 20 and report["estimated"] and "oscar2" not in rows


def test_command_measures_bandwidth_for_this_machine_only(plan, smollm2):
    assert json.loads(plan(smollm2, "--json", "--auto", "--kv-type", "turbo3").stdout)["budget_is"].startswith("free")
    report = json.loads(plan(smollm2, "--json", "--vram", "24G", "--kv-type", "turbo3").stdout)
    assert report["types"][0]["tokens_per_second_at_most"] is None or report["bandwidth_is"] == "measured"


def test_nothing_fits(plan, smollm2):
    result = plan(smollm2, "--vram", "64M", "--kv-type", "turbo2")
    assert result.exit_code == 1 and "does not fit" in result.stdout and "no context fits" in " ".join(result.stdout.split())
    assert "no type fits into 0.1 GiB; use a smaller --ctx" in result.stderr


def test_no_type_that_works_is_an_error_of_one_line(plan, smollm2):
    result = plan(smollm2, "--kv-type", "oscar2")
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "run: pykvq embed-rotations" in result.stderr


def test_a_type_that_cannot_work_is_a_row_with_the_reason(plan, tiny_model):
    report = json.loads(plan(tiny_model(72), "--json", "--kv-type", "turbo3", "--kv-type", "f16").stdout)
    turbo3, f16 = report["types"]
    assert not turbo3["works"] and "head size 72" in turbo3["reason"] and f16["works"]


@pytest.mark.parametrize("arguments, words", [(["--vram", "24"], "no size such as 24G"), (["--vram", "24G", "--auto"], "exclude each other"),
                                              (["--ctx", "10"], "not in the range")])
def test_usage_errors(plan, smollm2, arguments, words):
    result = plan(smollm2, *arguments)
    assert result.exit_code == 2 and words in result.stderr


def test_missing_file(plan):
    result = plan("/nonexistent.gguf")
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
