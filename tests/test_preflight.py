"""Bad input of llama-server and its siblings, seen before anything is loaded."""
import pytest

from pykvq.preflight import complaint


@pytest.mark.parametrize("arguments", [
    [], ["--help"], ["--version"], ["-hf", "someone/model"], ["--cache-type-k", "turbo3", "--cache-type-v", "turbo2", "-fa", "on"],
    ["--flash-attn", "off"], ["-ctk", "turbo3", "-fa", "off"], ["-c", "2000000000"]])
def test_nothing_speaks_against_these(arguments):
    assert complaint(arguments) is None


def test_a_model_that_fits(smollm2):
    assert complaint(["-m", str(smollm2), "-ctk", "turbo3", "-ctv", "turbo3", "-c", "8192"]) is None


@pytest.mark.parametrize("option", ["-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "-ctkd", "--cache-type-v-draft"])
def test_unknown_type(option):
    assert complaint([option, "turbo5"]).startswith("unknown cache type 'turbo5'; valid: turbo2, turbo3, turbo4")


@pytest.mark.parametrize("option", ["-ctk", "--cache-type-v", "--cache-type-k-draft"])
def test_option_without_a_value(option):
    assert complaint(["-m", "x.gguf", option]).startswith(f"{option} needs a value: turbo2, turbo3, turbo4, oscar2, f32")
    assert complaint(["-m"]) == "-m needs a value"


def test_block_layouts_are_no_names():
    assert "turbo3_80 is a block layout" in complaint(["-ctk", "turbo3_80"])


def test_unknown_type_in_a_list():
    assert "'turbo9'" in complaint(["-ctk", "f16,turbo9"], "llama-bench")
    assert complaint(["-ctk", "turbo3,f16,q8_0", "-ctv", "f16"], "llama-bench") is None
    assert "'turbo3,f16'" in complaint(["-ctk", "turbo3,f16"], "llama-server")


@pytest.mark.parametrize("off", ["off", "0", "1,0"])
def test_quantised_values_without_flash_attention(off):
    assert "leave --flash-attn on" in complaint(["-ctv", "turbo3", "-fa", off])


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_V", "turbo3")
    assert complaint([]) is None
    assert complaint(["-ctv", "turbo9"]).startswith("unknown cache type 'turbo9'")        # an option wins
    monkeypatch.setenv("LLAMA_ARG_FLASH_ATTN", "off")
    assert "needs flash attention" in complaint([])


def test_missing_and_truncated_model(tmp_path, smollm2):
    assert complaint(["-m", "/nonexistent.gguf"]) == "no model file at /nonexistent.gguf; check the path"
    (tmp_path / "cut.gguf").write_bytes(smollm2.open("rb").read(30_000_000))
    assert "truncated: 30000000 of 98362432 bytes; download it again" in complaint(["--model", str(tmp_path / "cut.gguf")])


def test_draft_model_is_looked_at_too(tmp_path, smollm2):
    both = ["-m", str(smollm2), "-md", str(smollm2), "-ctkd", "turbo3", "-ctvd", "turbo3"]
    assert complaint(both) is None
    assert complaint([*both, "-fa", "off"]).startswith("a V cache of type turbo3 needs flash attention")
    assert complaint(["-m", str(smollm2), "--spec-draft-model", "/nonexistent.gguf"]) == "no model file at /nonexistent.gguf; check the path"


def test_draft_type_without_a_draft_model_is_no_matter():
    assert complaint(["-ctvd", "turbo3", "-fa", "off"]) is None


def test_unknown_kvq_mode(monkeypatch):
    assert complaint(["--kvq", "off"]) is None
    assert complaint(["--kvq", "on"]) == "--kvq takes auto or off, not on"
    monkeypatch.setenv("LLAMA_ARG_KVQ", "yes")
    assert "not yes" in complaint([])


def test_negative_context():
    assert "use 0 for the model's own" in complaint(["-c", "-5"])


def test_context_in_odd_digits_is_left_to_the_program(smollm2):
    assert complaint(["-m", str(smollm2), "-c", "\u00b2"]) is None


def test_head_size_without_a_block(tiny_model):
    assert "no block of turbo3" in complaint(["-m", str(tiny_model(72)), "-ctk", "turbo3"])


def test_context_larger_than_memory(smollm2):
    message = complaint(["-m", str(smollm2), "-c", "2000000000", "-ctk", "turbo2", "-ctv", "turbo2", "-ngl", "0"])
    assert "GiB of memory are free; use -c " in message and "n_ctx" not in message


def test_the_last_of_repeated_options_counts():
    assert complaint(["-ctk", "turbo5", "-ctk", "turbo3"]) is None
