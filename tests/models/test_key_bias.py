"""A key bias left out of the stored keys: the same logits as with it in an f16 cache, in every way that the cache is used."""
import numpy as np
import pytest

from calibrated import metadata, random_layers, write_sidecar
from pykvq.engine import Context, Model, quiet_log
from test_transforms import TOKENS, prefill_and_decode, relative, shifted

EXACT = 0.03                                     # relative, of the logits: the values are in turbo4, and their noise differs


@pytest.fixture
def biased(tiny_model):
    """biased(...) is the path of a tiny Qwen2 whose key bias is some times as large as what the keys say."""
    quiet_log()
    return lambda **options: tiny_model(64, **{"architecture": "qwen2", "key_bias": 6.0, **options})


@pytest.fixture
def floats(monkeypatch):
    """Keys of floats are stored without their bias too, so that the algebra shows alone; values in turbo4 call our attention."""
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    monkeypatch.setenv("KVQ_TRANSFORM_FLOAT", "turbo3")


def both(path, run, kv_type=("f16", "turbo4"), n_ctx=256, **options):
    """run(context) with the bias left out and kept; asserts that it was."""
    with Model(path) as model:
        out = []
        for kvq, bias in (("auto", "left out"), ("off", "kept")):
            with Context(model, n_ctx, kv_type, threads=2, kvq=kvq, **options) as context:
                assert {layer.key_bias for layer in context.info()} == {bias}
                out.append(run(context))
        return out


@pytest.mark.parametrize("heads, heads_kv", [(1, 1), (2, 1), (4, 2), (7, 1)])
def test_nothing_changes_but_the_keys(biased, floats, heads, heads_kv):
    assert relative(*both(biased(heads=heads, heads_kv=heads_kv), prefill_and_decode)) < EXACT


def test_context_shift(biased, floats):
    assert relative(*both(biased(), shifted, ("q8_0", "turbo4"))) < 2 * EXACT


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_several_sequences(biased, floats, unified):
    lengths = (37, 64, 90, 11)

    def run(context):
        context.decode_batch([(TOKENS[(s + i) % 120], 5 + i, s, False) for s, n in enumerate(lengths) for i in range(n)])
        state = context.save(2)
        context.remove(2, 0)
        context.load(state, 2)
        return context.decode_batch([(TOKENS[s], 5 + n, s, True) for s, n in enumerate(lengths)])
    assert relative(*both(biased(), run, n_ctx=1024, n_seq=4, unified=unified)) < EXACT


def test_far_positions(biased, floats):
    """Positions need not begin at zero: a turn by a multiple of 256 and by the rest."""
    def run(context):
        context.decode(TOKENS[:60], 30000, logits="none")
        return context.decode(TOKENS[60:80], 30060, logits="all")
    assert relative(*both(biased(), run)) < EXACT


@pytest.mark.parametrize("kv_type, bound", [("turbo4", 0.2), ("turbo3", 0.35)])
def test_few_bits_hold_keys_without_their_bias(biased, kv_type, bound):
    path = biased()
    with Model(path) as model, Context(model, 256, "f16", threads=2) as context:
        exact = prefill_and_decode(context)
    without, kept = (relative(x, exact) for x in both(path, prefill_and_decode, kv_type))
    assert without < bound and without < 0.5 * kept


def test_data_for_keys_without_their_bias(biased, floats, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(biased().read_bytes())
    keys = metadata(path, random_layers((0, 1), 2, 64))
    write_sidecar(path, keys | {"kvq.key_bias": "attn_k.bias"})
    with Model(path) as model, Context(model, 256, ("f16", "turbo4")) as context:
        assert {(layer.calibrated, layer.key_bias) for layer in context.info()} == {(True, "left out")}
    assert relative(*both(path, prefill_and_decode)) < EXACT
    assert relative(*both(path, shifted, ("q8_0", "turbo4"))) < 2 * EXACT
    write_sidecar(path, keys)                    # measured with the bias in the keys
    with Model(path) as model:
        with Context(model, 256, ("f16", "turbo4")) as context:
            assert {(layer.calibrated, layer.key_bias) for layer in context.info()} == {(False, "left out")}
        with Context(model, 256, ("turbo4", "f16"), flash=False) as context:
            assert {(layer.calibrated, layer.key_bias) for layer in context.info()} == {(True, "kept")}


def test_without_flash_attention_the_bias_stays(biased):
    with Model(biased()) as model, Context(model, 256, ("turbo4", "f16"), flash=False) as context:
        assert {layer.key_bias for layer in context.info()} == {"kept"}


def test_a_state_stored_with_the_bias_is_refused(biased):
    with Model(biased()) as model, Context(model, 256, "turbo4", kvq="off") as plain, Context(model, 256, "turbo4") as context:
        plain.decode(TOKENS[:50], 0)
        with pytest.raises(ValueError, match="mismatched key type"):
            context.load(plain.save(0), 0)
