"""A key bias left out of the stored keys: the same logits as with it in an f16 cache, in every way that the cache is used."""
import numpy as np
import pytest

from architectures import sliding_window
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
            with Context(model, n_ctx, kv_type, threads=2, kvq=kvq, kv_sink=0, kv_recent=0, **options) as context:
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


# ---- a part of the bias, which the graph then splits

def pair_bits(pairs):
    bits = np.zeros(128, np.uint8)
    bits[pairs] = 1
    return np.packbits(bits, bitorder="little")


SOME = {0: [1, 5, 8, 30], 1: [0, 2, 3, 17, 31]}
LARGE = (1, 5, 30)
UNEVEN = tuple(6.0 if i % 32 in LARGE else 0.02 for i in range(128))


def test_a_bias_that_few_pairs_carry_stays_in_the_others(biased, floats):
    path = biased(key_bias=UNEVEN)
    with Model(path) as model, Context(model, 256, ("f16", "turbo4")) as context:
        assert {layer.bias_pairs for layer in context.info()} == {16}
    assert relative(*both(path, prefill_and_decode)) < EXACT
    assert relative(*both(path, shifted, ("q8_0", "turbo4"))) < 2 * EXACT


def test_a_bias_that_bits_can_hold_stays(biased):
    with Model(biased(key_bias=0.1)) as model, Context(model, 256, "turbo4") as context:
        assert {(layer.key_bias, layer.bias_pairs) for layer in context.info()} == {("kept", 0)}


@pytest.mark.parametrize("pairs", [SOME, {0: [], 1: [7]}, {0: range(32), 1: [4]}], ids=["some", "none", "all"])
def test_data_name_the_pairs(biased, floats, tmp_path, pairs):
    """What they name leaves the keys and comes back, the rest is in the keys; every pair is large, so one that gets lost or counts twice shows."""
    path = tmp_path / "model.gguf"
    path.write_bytes(biased().read_bytes())
    arrays = random_layers((0, 1), 2, 64, spread=1.5) | {f"kvq.blk.{i}.k.pairs": pair_bits(list(p)) for i, p in pairs.items()}
    write_sidecar(path, metadata(path, arrays) | {"kvq.key_bias": "attn_k.bias"})
    out = []
    with Model(path) as model:
        for kvq in ("auto", "off"):
            with Context(model, 256, ("f16", "turbo4"), threads=2, kvq=kvq, kv_sink=0, kv_recent=0) as context:
                if kvq == "auto":
                    assert [(layer.key_bias, layer.bias_pairs) for layer in context.info()] == [("left out" if p else "kept", len(p)) for p in pairs.values()]
                out.append(prefill_and_decode(context))
    assert relative(*out) < 2 * EXACT


@pytest.mark.parametrize("bits, complaint", [(pair_bits([3, 32]), "names a pair that the heads do not have"), (pair_bits([3])[:4], "4 bytes, 16 expected")],
                         ids=["too far", "too short"])
def test_pairs_that_do_not_fit_are_refused(biased, tmp_path, bits, complaint):
    path = tmp_path / "model.gguf"
    path.write_bytes(biased().read_bytes())
    write_sidecar(path, metadata(path, random_layers((0, 1), 2, 64) | {"kvq.blk.1.k.pairs": bits}) | {"kvq.key_bias": "attn_k.bias"})
    with Model(path) as model, pytest.raises(ValueError, match=f"kvq.blk.1.k.pairs.*{complaint}"):
        Context(model, 256, "turbo4")


# ---- a measured bias, which is subtracted before a key is stored

@pytest.fixture
def measured(tiny_model, tmp_path):
    """measured(...) is the path of a tiny model with data for keys without a random bias, 30 times as large as the keys."""
    quiet_log()

    def make(bias=30.0, layers=(0, 1), heads_kv=2, d=64, pairs=None, **options):
        path = tmp_path / "measured.gguf"
        path.write_bytes(tiny_model(d, heads_kv=heads_kv, **options).read_bytes())
        rng, arrays = np.random.default_rng(1), random_layers(layers, heads_kv, d, spread=1.5)
        for i in layers:
            arrays[f"kvq.blk.{i}.k.bias"] = (bias * rng.standard_normal((heads_kv, d))).astype(np.float16)
            if pairs is not None:
                arrays[f"kvq.blk.{i}.k.pairs"] = pair_bits(pairs)
        write_sidecar(path, metadata(path, arrays) | {"kvq.key_bias": "measured"})
        return path
    return make


def with_and_without(path, run, kv_type=("f16", "turbo4"), n_ctx=256, **options):
    """run(context) with the data and without them; asserts that they were used."""
    with Model(path) as model:
        out = []
        for kvq in ("auto", "off"):
            with Context(model, n_ctx, kv_type, threads=2, kvq=kvq, kv_sink=0, kv_recent=0, **options) as context:
                assert {layer.key_bias == "left out" and layer.calibrated for layer in context.info()} == {kvq == "auto"}
                out.append(run(context))
        return out


@pytest.mark.parametrize("options", [{}, {"heads": 1, "heads_kv": 1}, {"heads": 7, "heads_kv": 1}, {"d": 80}, {"d": 128},
                                     {"architecture": "qwen2", "key_bias": 6.0}], ids=str)
def test_a_measured_bias_changes_nothing_but_the_keys(measured, floats, options):
    """Interleaved and NEOX pairs, prefill and one by one; the bias is large, so a wrong turn of it is an error of many times the logit."""
    assert relative(*with_and_without(measured(**options), prefill_and_decode)) < 2 * EXACT


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_of_a_measured_bias_only_the_named_pairs_leave(measured, floats, architecture):
    """The data hold large numbers for the other pairs too, which must then be neither subtracted nor returned."""
    path = measured(pairs=[2, 3, 11, 29, 31], architecture=architecture)
    with Model(path) as model, Context(model, 256, ("f16", "turbo4")) as context:
        assert {layer.bias_pairs for layer in context.info()} == {5}
    assert relative(*with_and_without(path, prefill_and_decode)) < 2 * EXACT


def test_a_layer_without_pairs_costs_nothing(measured):
    with Model(measured(pairs=[])) as model, Context(model, 256, "turbo4") as context:
        assert {(layer.calibrated, layer.key_bias, layer.bias_pairs) for layer in context.info()} == {(True, "none", 0)}


def test_a_measured_bias_turns_with_a_shift(measured, floats):
    assert relative(*with_and_without(measured(bias=5.0), shifted, ("q8_0", "turbo4"))) < 4 * EXACT


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_a_measured_bias_in_several_sequences(measured, floats, unified):
    """Sequences of other lengths and first positions, one copied, one saved and loaded."""
    lengths = (37, 64, 90, 11)

    def run(context):
        context.decode_batch([(TOKENS[(s + i) % 120], 5 + 9 * s + i, s, False) for s, n in enumerate(lengths) for i in range(n)])
        state = context.save(2)
        context.remove(2, 0)
        context.load(state, 2)
        context.remove(3, 0)
        context.copy(0, 3)
        starts = [5 + 9 * s + n for s, n in enumerate(lengths)][:3] + [5 + lengths[0]]
        return np.concatenate([context.decode_batch([(TOKENS[s + i], start + i, s, True) for s, start in enumerate(starts)]) for i in range(4)])
    assert relative(*with_and_without(measured(), run, n_ctx=1024, n_seq=4, unified=unified)) < 2 * EXACT


def test_a_measured_bias_at_far_positions(measured, floats):
    def run(context):
        context.decode(TOKENS[:60], 30000, logits="none")
        return context.decode(TOKENS[60:80], 30060, logits="all")
    assert relative(*with_and_without(measured(bias=5.0), run)) < 2 * EXACT


@pytest.mark.parametrize("kv_type", ["turbo4", "oscar2"])
def test_decoding_agrees_with_a_batch(measured, kv_type):
    with Model(measured(bias=1.0)) as model, Context(model, 256, kv_type, threads=2, kv_sink=0, kv_recent=0) as context:
        batch = context.decode(TOKENS[:90], 0, logits="all")
        context.clear()
        alone = np.concatenate([context.decode(TOKENS[i:i + 1], i) for i in range(90)])
    assert relative(alone, batch) < 0.1          # float products of another batch size flip a few codes


def test_a_layer_without_a_bias_is_refused(measured):
    path = measured()
    write_sidecar(path, metadata(path, random_layers((0, 1), 2, 64)) | {"kvq.key_bias": "measured"})
    with Model(path) as model, pytest.raises(ValueError, match="kvq.blk.0.k.bias.*missing"):
        Context(model, 256, "turbo4")


def test_where_the_cache_cannot_return_it_the_data_are_not_used(measured, tmp_path):
    with Model(measured()) as model, Context(model, 256, ("turbo4", "f16"), flash=False) as context:
        assert {(layer.calibrated, layer.key_bias) for layer in context.info()} == {(False, "none")}
    path = sliding_window(tmp_path / "window.gguf")
    arrays = random_layers(range(6), 1, 64) | {f"kvq.blk.{i}.k.bias": np.ones((1, 64), np.float16) for i in range(6)}
    write_sidecar(path, metadata(path, arrays) | {"kvq.key_bias": "measured"})
    with Model(path) as model:
        with Context(model, 256, "turbo4") as context:
            assert {(layer.calibrated, layer.key_bias) for layer in context.info()} == {(False, "none")}
        with pytest.raises(ValueError, match=r"gemma3 is not known for it.*run: pykvq embed-rotations .* --force --key-bias none"):
            Context(model, 256, "oscar2")


def test_a_state_stored_without_the_measured_bias_is_refused(measured):
    with Model(measured()) as model, Context(model, 256, "turbo4", kvq="off") as plain, Context(model, 256, "turbo4") as context:
        plain.decode(TOKENS[:50], 0)
        with pytest.raises(ValueError, match="under another setting; transforms"):
            context.load(plain.save(0), 0)


def test_without_flash_attention_the_bias_stays(biased):
    with Model(biased()) as model, Context(model, 256, ("turbo4", "f16"), flash=False) as context:
        assert {layer.key_bias for layer in context.info()} == {"kept"}


def test_a_state_stored_with_the_bias_is_refused(biased):
    with Model(biased()) as model, Context(model, 256, "turbo4", kvq="off") as plain, Context(model, 256, "turbo4") as context:
        plain.decode(TOKENS[:50], 0)
        with pytest.raises(ValueError, match="under another setting; transforms"):
            context.load(plain.save(0), 0)
