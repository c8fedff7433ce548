"""Every command and every refusal through click's runner: exit codes, streams, JSON."""
import errno
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pykvq.cli import main
from pykvq.cli.doctor import Check
from pykvq.support import VALID_NAMES


@pytest.fixture
def run():
    def invoke(*args, stdin=None):
        return CliRunner().invoke(main, [str(a) for a in args], input=stdin)
    return invoke


def one_line_error(result, *words):
    """Exit code 2, nothing on stdout, one line on stderr that holds all words."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_version_names_llama_cpp(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("pykvq ") and "llama.cpp " in result.stdout and "not installed" not in result.stdout


def test_help_lists_the_commands(run):
    text = run("--help").stdout
    for command in ("types", "doctor", "chat", "compare", "completion"):
        assert command in text


@pytest.mark.parametrize("arguments, words", [
    (["squeeze"], ("No such command 'squeeze'", "run: pykvq --help")), (["--squeeze"], ("No such option", "run: pykvq --help")),
    (["types", "--head-dim", "0"], ("'--head-dim'", "run: pykvq types --help")), (["types", "extra"], ("extra", "run: pykvq types --help")),
    (["plan", "--vram", "24G", "--auto"], ("exclude each other", "run: pykvq plan --help")), (["serve"], ("MODEL", "run: pykvq serve --help"))])
def test_usage_errors_are_one_line_with_the_next_command(run, arguments, words):
    one_line_error(run(*arguments), *words)


# ---- types

def test_types_lists_every_type(run):
    result = run("types")
    assert result.exit_code == 0
    for name in VALID_NAMES:
        assert name in result.stdout


def test_types_as_json(run):
    rows = {r["type"]: r for r in json.loads(run("types", "--json", "--head-dim", 64).stdout)["types"]}
    assert rows["turbo3"]["effective"] == "turbo3_64" and rows["turbo3"]["bits_per_value"] == 3.25
    assert rows["turbo2"]["smaller_than_f16"] == 7.111


def test_types_says_no_with_exit_code_1(run):
    result = run("types", "--json", "--head-dim", 72)
    assert result.exit_code == 1
    rows = {r["type"]: r for r in json.loads(result.stdout)["types"]}
    assert not rows["turbo3"]["supported"] and rows["turbo3"]["fix"] == "use f16" and rows["f16"]["supported"]


def test_types_refuses_an_unknown_backend(run):
    result = run("types", "--backend", "tpu")
    assert result.exit_code == 2 and "cuda" in result.stderr


# ---- completion

@pytest.mark.parametrize("shell, mark", [("bash", "complete -o nosort -F"), ("zsh", "#compdef pykvq"), ("fish", "complete --no-files")])
def test_completion(run, shell, mark):
    result = run("completion", shell)
    assert result.exit_code == 0 and mark in result.stdout and "_PYKVQ_COMPLETE" in result.stdout
    assert json.loads(run("completion", shell, "--json").stdout)["shell"] == shell


@pytest.mark.parametrize("typed, offered", [("tur", ["turbo2", "turbo3", "turbo4"]), ("q8_0,turbo", ["q8_0,turbo2", "q8_0,turbo3", "q8_0,turbo4"]),
                                            ("turbo3,f16,t", [])])
def test_completion_of_types(typed, offered):
    environment = {**os.environ, "_PYKVQ_COMPLETE": "bash_complete", "COMP_WORDS": f"pykvq chat --kv-type {typed}", "COMP_CWORD": "3"}
    result = subprocess.run([sys.executable, "-c", "from pykvq.cli import main; main(prog_name='pykvq')"], env=environment,
                            capture_output=True, text=True)
    assert [line.split(",", 1)[1] for line in result.stdout.split()] == offered


def test_completion_in_fish_keeps_a_pair_together(run):
    assert "string split --max 1" in run("completion", "fish").stdout


# ---- doctor

def test_doctor_finds_this_installation_whole(run):
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["ok"], report
    names = [c["name"] for c in report["checks"]]
    for name in ("llama_cpp", "libraries", "cache types", "codec", "attention CPU turbo2", "attention CPU turbo3", "attention CPU turbo4"):
        assert name in names


def test_doctor_exits_1_on_a_fault(run, monkeypatch):
    monkeypatch.setattr("pykvq.cli.doctor.check_backends", lambda: [])
    monkeypatch.setattr("pykvq.cli.doctor.check_packages", lambda: [Check("FAIL", "llama_cpp", "overwritten", "reinstall it")])
    result = run("doctor")
    assert result.exit_code == 1 and "overwritten; reinstall it" in result.stdout


def test_doctor_reports_a_missing_library(run, monkeypatch, tmp_path):
    from pykvq import native
    native.library.cache_clear()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    result = run("doctor", "--json")
    monkeypatch.undo()
    native.library.cache_clear()
    failed = [c for c in json.loads(result.stdout)["checks"] if c["status"] == "FAIL"]
    assert result.exit_code == 1 and any("libggml-base" in c["detail"] for c in failed)


# ---- bad input, the same for chat and compare

@pytest.mark.parametrize("command", ["chat", "compare"])
class TestBadInput:
    def test_unknown_type_lists_the_valid_ones(self, run, smollm2, command):
        result = run(command, smollm2, "--kv-type", "turbo5")
        assert result.exit_code == 2 and result.stdout == ""
        for name in VALID_NAMES:
            assert name in result.stderr

    def test_block_layout_is_no_name(self, run, smollm2, command):
        result = run(command, smollm2, "--kv-type", "turbo3,turbo3_80")
        assert result.exit_code == 2 and "turbo3_80 is a block layout" in result.stderr

    @pytest.mark.parametrize("option, value", [("--threads", 100_000), ("--threads", 0), ("--gpu-layers", -5), ("--ctx", 10)])
    def test_numbers_out_of_range(self, run, smollm2, command, option, value):
        result = run(command, smollm2, option, value)
        assert result.exit_code == 2 and "not in the range" in result.stderr

    def test_three_types(self, run, smollm2, command):
        assert run(command, smollm2, "--kv-type", "turbo3,turbo2,f16").exit_code == 2

    def test_missing_file(self, run, command):
        one_line_error(run(command, "/nonexistent/model.gguf"), "/nonexistent/model.gguf")

    def test_no_gguf(self, run, tmp_path, command):
        (tmp_path / "readme.gguf").write_text("hello, this is text")
        one_line_error(run(command, tmp_path / "readme.gguf"), "no GGUF file")

    @pytest.mark.parametrize("size", [0, 3, 100, 5000, 10_000_000])
    def test_truncated_file(self, run, tmp_path, smollm2, command, size):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(smollm2.open("rb").read(size))
        one_line_error(run(command, cut), "truncated", "download it again")

    def test_head_size_without_a_block(self, run, tiny_model, command):
        one_line_error(run(command, tiny_model(72), "--kv-type", "turbo3", "--ctx", 512), "turbo3", "head size 72", "use f16")

    def test_context_larger_than_memory(self, run, smollm2, command):
        one_line_error(run(command, smollm2, "--ctx", 2_000_000_000), "2000000000", "GiB", "use --ctx ", "a smaller --kv-type")

    def test_no_model_and_no_demo(self, run, monkeypatch, command):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        one_line_error(run(command), "pip install 'pykvq[demo]'")


# ---- chat

def test_chat_reads_prompts_line_by_line_and_tells_memory(run, smollm2):
    result = run("chat", smollm2, "--ctx", 512, "--max-tokens", 8, "--temperature", 0, stdin="Say hello.\n\nSay it again.\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr.count("KV cache") == 2 and "30 x K turbo3_64 V turbo3_64" in result.stderr and "5.6 MiB of it f16 windows" in result.stderr
    assert "2 answers" in result.stderr


def test_chat_as_json_lines(run, smollm2):
    result = run("chat", smollm2, "--json", "--quiet", "--kv-type", "turbo4,turbo2", "--kv-sink", 0, "--kv-recent", 0, "--ctx", 512,
                 "--max-tokens", 8, stdin="One.\nTwo.\n")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and result.stderr == ""
    assert [r["prompt"] for r in rows] == ["One.", "Two."] and all(r["answer"] for r in rows)
    assert rows[0]["kv_bytes"] == 512 * 30 * 3 * (34 + 18) and rows[1]["context_used"] > rows[0]["context_used"]


def test_chat_refuses_a_temperature_that_is_no_number(run, smollm2):
    assert run("chat", smollm2, "--temperature", "nan", stdin="Hi.\n").exit_code == 2


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals in the standard library")
def test_chat_in_a_terminal_survives_a_prompt_that_is_too_long(program, smollm2):
    import pty
    ours, theirs = pty.openpty()
    command = [program("pykvq"), "chat", str(smollm2), "--ctx", "256", "--max-tokens", "4", "--threads", "2"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.write(ours, b"word " * 300 + b"\nhello\n\x04")
        _, notes = process.communicate(timeout=120)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0 and "raise --ctx" in notes and "1 answer," in notes, notes


def test_chat_refuses_bytes_that_are_no_text(run, smollm2):
    result = run("chat", smollm2, "--quiet", "--ctx", 256, "--max-tokens", 4, stdin=b"caf\xe9\n")
    one_line_error(result, "not utf-8 text", "0xe9")


@pytest.mark.parametrize("error, code, stderr", [(KeyboardInterrupt, 130, "\n"), (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "")])
def test_interrupt_and_closed_pipe_are_no_verdict_on_the_input(run, monkeypatch, error, code, stderr):
    monkeypatch.setattr("pykvq.cli.types.describe", lambda *_: (_ for _ in ()).throw(error))
    result = run("types")
    assert (result.exit_code, result.stderr) == (code, stderr)


def test_chat_drops_whole_turns_and_says_so(run, smollm2):
    prompt = "Tell me about the number seven and why it is odd, in as many words as you like."
    result = run("chat", smollm2, "--json", "--system", "You are terse.", "--ctx", 256, "--max-tokens", 64, "--temperature", 0,
                 stdin=f"{prompt}\n" * 5)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and len(rows) == 5
    assert rows[-1]["dropped_turns"] > 0 and "dropped" in result.stderr


def test_chat_refuses_a_prompt_longer_than_the_context(run, smollm2):
    result = run("chat", smollm2, "--quiet", "--ctx", 256, "--max-tokens", 16, stdin="word " * 400)
    assert result.exit_code == 2 and "raise --ctx" in result.stderr


def test_gpu_layers_without_a_gpu_are_told(run, smollm2):
    from pykvq.devices import has_gpu
    if has_gpu():
        pytest.skip("there is a GPU")
    result = run("chat", smollm2, "--gpu-layers", 99, "--ctx", 256, "--max-tokens", 2, stdin="Hi.\n")
    assert result.exit_code == 0 and "--gpu-layers is ignored" in result.stderr


# ---- compare

def test_compare_as_json(run, smollm2):
    result = run("compare", smollm2, "--json", "--quiet", "--ctx", 512, "--max-tokens", 12, "--depth", 64,
                 "--kv-type", "turbo4", "--kv-type", "turbo3,turbo2", "--kv-sink", 0, "--kv-recent", 0)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    f16, turbo4, mixed = report["results"]
    assert f16["kv_type"] == ["f16", "f16"] and f16["kl_answer"] == 0 and f16["kl_text"] == 0
    assert mixed["effective"] == ["turbo3_64", "turbo2_64"]
    assert f16["bytes"] == 512 * 30 * 2 * 3 * 128 and turbo4["bytes"] == 512 * 30 * 2 * 3 * 34
    assert 0 < turbo4["kl_text"] < mixed["kl_text"] and turbo4["tokens_per_second"] > 0
    assert result.stderr == ""


def test_compare_prints_a_table_without_colour(run, smollm2, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    result = run("compare", smollm2, "--ctx", 512, "--max-tokens", 4, "--depth", 16, "--kv-type", "turbo2", "--kv-sink", 0, "--kv-recent", 0)
    assert result.exit_code == 0 and "\x1b" not in result.output
    assert "turbo2" in result.stdout and "7.11x" in result.stdout and "answers (greedy)" in result.stdout


def test_compare_refuses_a_small_context(run, smollm2):
    one_line_error(run("compare", smollm2, "--quiet", "--ctx", 512, "--depth", 4096), "raise --ctx")
