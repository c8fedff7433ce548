"""Llama(kv_type=...) and kv_cache_info() of the patched llama_cpp, and what it refuses before loading."""
import pickle

import pytest
from llama_cpp import Llama

from pykvq.support import IDS, VALID_NAMES

F16_BYTES = 30 * 3 * 128 * 2                     # per cell of SmolLM2


@pytest.fixture(scope="module")
def load(smollm2):
    made = []

    def make(model=smollm2, **options):
        made.append(Llama(str(model), **{"n_ctx": 256, "n_batch": 128, "verbose": False, "n_threads": 2, **options}))
        return made[-1]
    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize("kv_type, effective, cell", [
    ("turbo3", ("turbo3_64", "turbo3_64"), 52), (("turbo3", "turbo2"), ("turbo3_64", "turbo2_64"), 44), (["q8_0", "turbo4"], ("q8_0", "turbo4_64"), 102),
    ("f16", ("f16", "f16"), 256), (None, ("f16", "f16"), 256)])
def test_kv_type_sets_both_types_and_is_reported_per_layer(load, kv_type, effective, cell):
    llm = load(kv_type=kv_type, kv_sink=0, kv_recent=0)
    info = llm.kv_cache_info()
    assert len(info) == 30 and info.types == {effective: 30}
    assert info.bytes == 256 * 30 * 3 * cell and info.bytes_f16 == 256 * F16_BYTES
    assert info.ratio == pytest.approx(256 / cell)
    layer = info[7]
    assert (layer.layer, layer.n_head_kv, layer.head_dim_k, layer.head_dim_v, layer.cells, layer.swa, layer.device) == (7, 3, 64, 64, 256, False, "CPU")
    assert layer.bytes_k + layer.bytes_v == 256 * 3 * cell


def test_window_is_set_reported_and_pickled(load):
    llm = pickle.loads(pickle.dumps(load(kv_type="turbo2", kv_sink=4, kv_recent=16)))
    info = llm.kv_cache_info()
    assert {(layer.sink, layer.recent, layer.n_window) for layer in info} == {(4, 16, 64)}        # 4 + 16, a small batch of 16, one more, in steps of 64
    assert info.bytes_window == 64 * F16_BYTES and info.bytes == 256 * 30 * 3 * 36 + info.bytes_window
    assert "MiB of it f16 windows" in str(info)
    llm.close()


def test_window_through_prompt_cache_and_speculative_decoding(load):
    """Rejected drafts and restored prompts leave the same text."""
    from llama_cpp import LlamaRAMCache
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    prompt, window = "Count with me: one, two, three, four, five, one, two, three, four, five, one,", dict(kv_type="turbo2", kv_sink=8, kv_recent=32)
    answer = lambda llm: llm(prompt, max_tokens=12, temperature=0)["choices"][0]["text"]
    llm = load(**window)
    expected = answer(llm)
    assert "two, three" in expected
    llm.set_cache(LlamaRAMCache())
    assert answer(llm) == expected
    llm("Something else in between.", max_tokens=2)
    assert answer(llm) == expected
    assert answer(load(**window, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4))) == expected


@pytest.mark.parametrize("kv_type", ["turbo3", ("q8_0", "turbo4")])
def test_a_window_is_the_default_and_shorter_in_a_short_context(load, kv_type):
    for n_ctx, expected in ((1024, (64, 256)), (256, (27, 84))):
        llm = load(kv_type=kv_type, n_ctx=n_ctx)
        info = llm.kv_cache_info()
        assert {(layer.sink, layer.recent) for layer in info} == {expected} and info.bytes < info.bytes_f16
    llm = load(kv_type=kv_type, kv_sink=0, kv_recent=0)
    assert llm.kv_cache_info().bytes_window == 0


@pytest.mark.parametrize("wrong", [dict(kv_sink=-2), dict(kv_recent=-7)])
def test_negative_window_is_one_line(load, wrong):
    with pytest.raises(ValueError, match="numbers of tokens, or None"):
        load(kv_type="turbo2", **wrong)


def test_it_answers(load):
    text = load(kv_type="turbo4")("The capital of France is", max_tokens=8, temperature=0)["choices"][0]["text"]
    assert "Paris" in text


@pytest.mark.parametrize("head_dim, member", [(80, "turbo2_80"), (96, "turbo2_96"), (112, "turbo2_112"), (128, "turbo2"), (192, "turbo2_64"), (256, "turbo2")])
def test_each_head_size_gets_its_member(load, tiny_model, head_dim, member):
    from pykvq.engine import Context, Model
    with Model(tiny_model(head_dim)) as model, Context(model, 256, "turbo2") as context:
        assert context.info().types == {(member, member): 2}


@pytest.mark.parametrize("wrong", ["turbo5", "", "Q8_0", "turbo3_64", ("turbo3", "none")])
def test_wrong_name_lists_the_valid_ones(load, wrong):
    with pytest.raises(ValueError) as error:
        load(kv_type=wrong)
    assert all(name in str(error.value) for name in VALID_NAMES)


def test_three_names(load):
    with pytest.raises(ValueError, match="pair"):
        load(kv_type=("turbo3", "turbo3", "turbo3"))


@pytest.mark.parametrize("other", [{"type_k": 8}, {"type_v": 1}])
def test_kv_type_beside_type_k_or_type_v(load, other):
    with pytest.raises(ValueError, match="not both"):
        load(kv_type="turbo3", **other)


@pytest.mark.parametrize("name", ["turbo3", "q4_0"])
def test_quantised_values_need_flash_attention(load, name):
    with pytest.raises(ValueError, match="flash_attn=True"):
        load(type_v=IDS[name])
    assert load(type_v=IDS[name], flash_attn=True).kv_cache_info()[0].type_v.startswith(name)


def test_quantised_keys_work_without_flash_attention_or_say_why(load):
    llm = load(type_k=IDS["turbo4"])
    assert "Paris" in llm("The capital of France is", max_tokens=8, temperature=0)["choices"][0]["text"]


def test_head_size_without_a_block_is_refused_before_loading(load, tiny_model):
    with pytest.raises(ValueError, match="no block of turbo3 .* divides head size 72; use f16"):
        load(tiny_model(72), kv_type="turbo3")


def test_missing_truncated_and_foreign_files(load, tmp_path, smollm2):
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "none.gguf")
    (tmp_path / "cut.gguf").write_bytes(smollm2.open("rb").read(40_000_000))
    with pytest.raises(ValueError, match="truncated: 40000000 of 98362432 bytes"):
        load(tmp_path / "cut.gguf", kv_type="turbo3")


def test_context_larger_than_memory(load):
    with pytest.raises(MemoryError, match=r"n_ctx=\d+ or less, or a smaller kv_type"):
        load(kv_type="turbo3", n_ctx=2_000_000_000)


def test_error_of_llama_cpp_is_in_the_exception(load, tmp_path, tiny_model):
    """A file that is whole but of an unknown architecture: only llama.cpp itself can tell."""
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(tiny_model(64).read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamma"))
    with pytest.raises(ValueError, match="Failed to load model.*lamma") as error:
        load(strange)
    assert "\n" not in str(error.value)


def test_pickle_keeps_the_types(load):
    copy = pickle.loads(pickle.dumps(load(kv_type=("turbo4", "turbo2"))))
    assert copy.kv_cache_info().types == {("turbo4_64", "turbo2_64"): 30}
    copy.close()


# ---- saved states

def continuation(llm, prompt="One, two, three, four,"):
    return llm(prompt, max_tokens=8, temperature=0)["choices"][0]["text"]


def test_state_round_trip(load):
    first, second = load(kv_type="turbo3"), load(kv_type="turbo3")
    first.eval(first.tokenize(b"One, two, three, four, five, six,"))
    second.load_state(pickle.loads(pickle.dumps(first.save_state())))
    assert second.n_tokens == first.n_tokens
    following = [next(llm.generate(llm.tokenize(b" seven,", add_bos=False), temp=0, reset=False)) for llm in (first, second)]
    assert following[0] == following[1]


def test_state_of_another_type_is_refused_and_nothing_changes(load):
    source, target = load(kv_type="turbo3"), load(kv_type="turbo4")
    source.eval(source.tokenize(b"Something else entirely"))
    expected = continuation(target)
    with pytest.raises(ValueError, match=r"K turbo3_64 V turbo3_64.*kv_type=\('turbo3', 'turbo3'\)"):
        target.load_state(source.save_state())
    assert continuation(target) == expected


def test_state_of_another_model_is_refused(load, tiny_model):
    from pykvq.llama_glue import stamped
    source, target = load(kv_type="turbo3"), load(kv_type="turbo3")
    state = stamped(source, source.save_state())
    state.kvq_identity = {**state.kvq_identity, "model": "0" * 64, "name": "Other 7B"}
    with pytest.raises(ValueError, match=r"another model \(Other 7B\)"):
        target.load_state(state)


def test_state_longer_than_the_context_is_refused(load):
    source, target = load(kv_type="turbo3", n_ctx=512), load(kv_type="turbo3", n_ctx=256)
    source.eval([1] * 300)
    with pytest.raises(ValueError, match="n_ctx=300"):
        target.load_state(source.save_state())


def test_damaged_state_is_refused_and_the_model_goes_on(load):
    llm = load(kv_type="turbo3")
    expected = continuation(llm)
    state = llm.save_state()
    state.llama_state = state.llama_state[:1000]
    state.llama_state_size = 1000
    with pytest.raises(RuntimeError, match="Failed to set llama state data"):
        llm.load_state(state)
    assert continuation(llm) == expected


@pytest.mark.parametrize("wrong", [-1, 4, 50, 245, 999])
@pytest.mark.parametrize("which", ["type_k", "type_v"])
def test_ids_that_are_no_type_are_refused(load, which, wrong):
    with pytest.raises(ValueError, match=f"{wrong} is no id of a cache type; use kv_type"):
        load(flash_attn=True, **{which: wrong})


def test_id_of_a_block_layout_is_refused(load):
    with pytest.raises(ValueError, match="turbo3_80 is a block layout"):
        load(type_k=IDS["turbo3_80"])


@pytest.mark.parametrize("wrong", [3, b"turbo3", {"k": "turbo3", "v": "turbo3"}, {"turbo3", "turbo2"}])
def test_kv_type_of_another_kind(load, wrong):
    with pytest.raises(ValueError, match="one name or a pair"):
        load(kv_type=wrong)


def test_closed_model_tells_so(smollm2):
    llm = Llama(str(smollm2), kv_type="turbo3", n_ctx=256, verbose=False)
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.kv_cache_info()
