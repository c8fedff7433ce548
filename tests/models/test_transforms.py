"""Calibrated transforms: the same logits as without them, in every way that the cache is used, and data that are refused."""
import base64
import shutil

import numpy as np
import pytest

from architectures import hybrid, sliding_window, soft_capped
from calibrated import metadata, random_layers, sealed, write_sidecar
from pykvq.calibration.embed import embed_in
from pykvq.engine import Context, Model, quiet_log

EXACT = 4e-3                                     # relative, of the logits: rounding of an f16 cache, by the condition of the bases
TOKENS = [(7 * i * i + 3) % 256 for i in range(120)]


@pytest.fixture
def calibrated(tiny_model, tmp_path):
    """calibrated(head_dim, ...) is the path of a tiny model with random data in a sidecar of its own."""
    def make(head_dim=64, heads=4, heads_kv=2, layers=(0, 1), change=None, spread=3.0, **options):
        path = tmp_path / f"{head_dim}-{heads}-{heads_kv}.gguf"
        shutil.copy(tiny_model(head_dim, heads=heads, heads_kv=heads_kv, **options), path)
        keys = metadata(path, random_layers(layers, heads_kv, head_dim, spread))
        if change:
            change(keys)
        write_sidecar(path, {k: v for k, v in keys.items() if v is not None})
        return path
    quiet_log()
    return make


@pytest.fixture
def floats(monkeypatch):
    """floats("turbo3"): caches of floats are transformed too, with the plan of that type, so that the algebra shows alone."""
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")       # llama.cpp turns q8_0 itself otherwise
    return lambda kv_type: monkeypatch.setenv("KVQ_TRANSFORM_FLOAT", kv_type)


def relative(ours, exact):
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


def prefill_and_decode(context, seq=0):
    """Logits of a batch of 70 and of 20 tokens one by one; float32 [90, n_vocab]."""
    rows = [context.decode(TOKENS[:70], 0, seq, logits="all")]
    return np.concatenate(rows + [context.decode(TOKENS[i:i + 1], i, seq) for i in range(70, 90)])


def both(path, run, kv_type="f16", n_ctx=256, kv_sink=0, kv_recent=0, **options):
    """run(context) with the transforms and without; asserts that they were applied."""
    with Model(path) as model:
        out = []
        for kvq in ("auto", "off"):
            with Context(model, n_ctx, kv_type, threads=2, kvq=kvq, kv_sink=kv_sink, kv_recent=kv_recent, **options) as context:
                assert bool(context.info().calibrated) == (kvq == "auto")
                out.append(run(context))
        return out


@pytest.mark.parametrize("head_dim, plan", [(64, "turbo3"), (80, "turbo2"), (96, "turbo4"), (128, "turbo3"), (192, "turbo3"), (256, "turbo4"),
                                            *((d, "oscar2") for d in (64, 80, 96, 112, 128, 192, 256))])
def test_the_algebra_is_exact(calibrated, floats, head_dim, plan):
    floats(plan)
    assert relative(*both(calibrated(head_dim), prefill_and_decode)) < EXACT


@pytest.mark.parametrize("heads, heads_kv", [(1, 1), (2, 1), (3, 1), (4, 4), (5, 1), (6, 2), (7, 1), (8, 1), (8, 2)])
def test_group_ratios(calibrated, floats, heads, heads_kv):
    floats("turbo3")
    assert relative(*both(calibrated(64, heads, heads_kv), prefill_and_decode)) < EXACT


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_batches_around_the_limit_of_the_fused_kernels(calibrated, floats, heads_kv):
    """On a GPU one to eight tokens are transformed as one operation, more as products."""
    floats("turbo3")

    def run(context):
        sizes, rows = [1, 2, 3, 8, 9, 5], []
        for i, n in enumerate(sizes):
            rows.append(context.decode(TOKENS[sum(sizes[:i]):sum(sizes[:i + 1])], sum(sizes[:i]), logits="all"))
        return np.concatenate(rows)
    assert relative(*both(calibrated(heads_kv=heads_kv), run)) < EXACT


@pytest.mark.parametrize("make, layers", [(sliding_window, range(6)), (hybrid, (1, 3)), (lambda path: hybrid(path, window=32), (1, 3)),
                                          (soft_capped, range(2))], ids=["window", "hybrid", "hybrid window", "soft cap"])
def test_other_caches(tmp_path, floats, make, layers):
    floats("turbo3")
    quiet_log()
    path = make(tmp_path / "model.gguf")
    write_sidecar(path, metadata(path, random_layers(layers, 1, 64)))
    assert relative(*both(path, prefill_and_decode, swa_full=False)) < EXACT


def test_without_flash_attention(calibrated, floats):
    floats("turbo3")
    assert relative(*both(calibrated(), prefill_and_decode, flash=False)) < EXACT


@pytest.mark.parametrize("kv_type", ["turbo4", "turbo3", ("turbo4", "f16")])
def test_quantised_caches_are_as_near_as_without(calibrated, kv_type):
    """A rotation and small means gain nothing and lose little."""
    path = calibrated(spread=1)
    with Model(path) as model, Context(model, 256, "f16", threads=2) as context:
        exact = prefill_and_decode(context)
    ours, plain = (relative(x, exact) for x in both(path, prefill_and_decode, kv_type))
    assert 0.5 * plain < ours < 1.7 * plain and ours != plain


@pytest.mark.parametrize("head_dim, block", [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 64), (256, 128)])
def test_oscar2_keeps_keys_in_tiers_and_values_as_turbo2(calibrated, head_dim, block):
    member = (lambda family: family if block == 128 else f"{family}_{block}")
    with Model(calibrated(head_dim, spread=1.5)) as model:
        with Context(model, 256, ("f16", "f16"), threads=2) as context:
            exact = prefill_and_decode(context)
        with Context(model, 256, "oscar2", threads=2, kv_sink=0, kv_recent=0) as context:
            assert {(layer.type_k, layer.type_v) for layer in context.info()} == {(member("oscar2"), member("turbo2"))}
            assert relative(prefill_and_decode(context), exact) < 1
            context.clear()
            batch = context.decode(TOKENS[:90], 0, logits="all")
            context.clear()
            alone = np.concatenate([context.decode(TOKENS[i:i + 1], i) for i in range(90)])
            assert relative(alone, batch) < 0.1                 # float products of another batch size flip a few codes
        with Context(model, 256, ("oscar2", "f16"), threads=2, kv_sink=0, kv_recent=0) as context:
            assert relative(prefill_and_decode(context), exact) < 0.6


def test_oscar2_shifts_copies_and_travels(calibrated):
    with Model(calibrated(spread=1.5)) as model, Context(model, 256, "oscar2", threads=2, n_seq=2) as context:
        context.decode(TOKENS[:60], 0, logits="none")
        context.copy(0, 1)
        direct = context.decode(TOKENS[60:70], 60, 1, logits="all")
        context.remove(1, 60)
        state = context.save(1)
        context.clear()
        context.load(state, 0)
        np.testing.assert_array_equal(context.decode(TOKENS[60:70], 60, 0, logits="all"), direct)
        context.clear()
        assert np.isfinite(shifted(context)).all()


def test_oscar2_without_data_is_refused_with_the_command(tiny_model, calibrated):
    with Model(tiny_model(64)) as model, pytest.raises(ValueError, match=r"which this model does not carry; run: pykvq embed-rotations .*\.gguf"):
        Context(model, 256, "oscar2")
    with Model(calibrated()) as model, pytest.raises(ValueError, match="kvq is off; leave it at auto, or use turbo2"):
        Context(model, 256, "oscar2", kvq="off")
    with Model(calibrated(layers=[1])) as model, pytest.raises(ValueError, match="kvq.blk.0.k.basis.*missing, and cache type oscar2 needs it"):
        Context(model, 256, "oscar2")


def test_values_named_oscar2_need_no_data(tiny_model):
    with Model(tiny_model(64)) as model, Context(model, 256, ("turbo3", "oscar2")) as context:
        assert {(layer.type_k, layer.type_v) for layer in context.info()} == {("turbo3_64", "turbo2_64")}


def test_a_layer_without_data_stays_as_it_is(calibrated, floats):
    floats("turbo3")
    path = calibrated(layers=[1])
    assert relative(*both(path, prefill_and_decode)) < EXACT
    with Model(path) as model, Context(model, 256, "f16") as context:
        assert [layer.calibrated for layer in context.info()] == [False, True]


def test_floats_and_upstream_types_are_left_alone(calibrated):
    with Model(calibrated()) as model:
        for kv_type in ("f16", "q8_0", "q4_0"):
            with Context(model, 256, kv_type) as context:
                assert not context.info().calibrated


# ---- what the cache does

def shifted(context):
    context.decode(TOKENS[:100], 0, logits="none")
    assert context.remove(0, 4, 36)
    context.shift(0, 36, -32)
    return context.decode(TOKENS[100:120], 68, logits="all")


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_context_shift(calibrated, floats, heads_kv):
    """q8_0, because llama.cpp turns floats in place; its own noise bounds the test, a missing step is far above."""
    floats("turbo3")
    assert relative(*both(calibrated(heads_kv=heads_kv), shifted, ("q8_0", "f16"))) < 0.04


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_several_sequences_in_one_batch(calibrated, floats, unified):
    floats("turbo3")
    lengths = (37, 64, 90, 11)

    def run(context):
        context.decode_batch([(TOKENS[(s + i) % 120], i, s, False) for s, n in enumerate(lengths) for i in range(n)])
        together = context.decode_batch([(TOKENS[s], n, s, True) for s, n in enumerate(lengths)])
        more = context.decode_batch([(TOKENS[i], lengths[s] + 1 + i, s, True) for s in range(4) for i in range(5)])
        return np.concatenate([together, more])
    assert relative(*both(calibrated(), run, n_ctx=1024, n_seq=4, unified=unified)) < EXACT


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_sequence_copy_and_states(calibrated, floats, unified):
    floats("turbo3")

    def run(context):
        context.decode(TOKENS[:60], 0, logits="none")
        context.copy(0, 1)
        first = context.decode(TOKENS[60:70], 60, 1, logits="all")
        state = context.save(1)
        context.clear()
        context.load(state, 0)
        return np.concatenate([first, context.decode(TOKENS[70:90], 70, 0, logits="all")])
    assert relative(*both(calibrated(), run, n_ctx=512, n_seq=2, unified=unified)) < EXACT


def test_a_state_stored_with_other_data_is_refused(calibrated):
    with Model(calibrated()) as model:
        with Context(model, 256, "turbo4", kvq="off") as plain:
            plain.decode(TOKENS[:50], 0)
            state = plain.save(0)
        with Context(model, 256, "turbo4") as context:
            with pytest.raises(ValueError, match="under another setting; transforms"):
                context.load(state, 0)


# ---- data that do not fit

def changed(key, change):
    """A change of the decoded array, which it gets as bytes in a bytearray."""
    def apply(keys):
        raw = bytearray(base64.b64decode(keys[key]))
        change(raw)
        keys[key] = base64.b64encode(raw).decode()
    return apply


def fill(raw, value):
    raw[:] = value * (len(raw) // len(value))


BAD = {
    "version": (lambda k: k.update({"kvq.version": 2}), "kvq.version", "another version"),
    "codebook": (lambda k: k.update({"kvq.codebook": "fnv1a64:0"}), "kvq.codebook", "levels"),
    "other model": (lambda k: k.update({"kvq.fingerprint": "fnv1a64:0000000000000000"}), "kvq.fingerprint", "another model"),
    "no fingerprint": (lambda k: k.update({"kvq.fingerprint": None}), "kvq.fingerprint", "missing"),
    "shape": (lambda k: k.update({"kvq.blk.1.k.basis": k["kvq.blk.1.k.mean"]}), "kvq.blk.1.k.basis", "16384 expected"),
    "truncated": (lambda k: k.update({"kvq.blk.0.k.basis": k["kvq.blk.0.k.basis"][:-3]}), "kvq.blk.0.k.basis", "cut off"),
    "no base64": (lambda k: k.update({"kvq.blk.0.k.mean": "!" + k["kvq.blk.0.k.mean"][1:]}), "kvq.blk.0.k.mean", "base64"),
    "key bias": (lambda k: k.update({"kvq.key_bias": "another"}), "kvq.key_bias", "cannot remove"),
    "not a number": (changed("kvq.blk.1.k.mean", lambda raw: fill(raw, b"\x00\x7e")), "kvq.blk.1.k.mean", "not finite"),
    "singular": (changed("kvq.blk.1.k.basis", lambda raw: fill(raw, b"\x00\x3c")), "kvq.blk.1.k.basis", "no inverse"),
    "no spectrum": (lambda k: k.update({"kvq.blk.0.k.lambda": None}), "kvq.blk.0.k.lambda", "missing"),
    "negative spectrum": (changed("kvq.blk.0.k.lambda", lambda raw: fill(raw, b"\x00\x00\x80\xbf")), "kvq.blk.0.k.lambda", "descending"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_are_refused_in_one_line(calibrated, name):
    change, key, why = BAD[name]
    with Model(calibrated(change=change)) as model:
        with pytest.raises(ValueError) as error:
            Context(model, 256, "turbo3")
        text = str(error.value)
        assert key in text and why in text and "\n" not in text
        assert "pykvq embed-rotations" in text and "--force" in text and "--kvq off" in text
        for kv_type, kvq in (("turbo3", "off"), ("f16", "auto")):
            Context(model, 256, kv_type, kvq=kvq).close()


@pytest.mark.parametrize("where", ["sidecar", "model"])
@pytest.mark.parametrize("key", ["kvq.blk.1.k.basis", "kvq.blk.0.k.mean", "kvq.blk.1.k.lambda", "kvq.key_bias"])
def test_a_bit_that_leaves_the_data_plausible(tiny_model, tmp_path, where, key):
    """Only the checksum tells; without one, as older files are, the same data are taken."""
    quiet_log()
    model = tmp_path / "m.gguf"
    shutil.copy(tiny_model(64), model)
    keys = metadata(model, random_layers([0, 1], 2, 64))
    damaged = dict(keys)
    if key == "kvq.key_bias":
        damaged[key] = "measured"
        damaged |= {f"kvq.blk.{i}.k.bias": keys[f"kvq.blk.{i}.k.mean"] for i in (0, 1)}
    else:
        changed(key, lambda raw: raw.__setitem__(0, raw[0] ^ 1))(damaged)
    for seal, values, refused in ((sealed(keys)["kvq.checksum"], damaged, True), (None, damaged, False), (sealed(keys)["kvq.checksum"], keys, False)):
        values = values | ({"kvq.checksum": seal} if seal else {})
        if where == "sidecar":
            path = model
            write_sidecar(path, values)
        else:
            path = embed_in(model, values, tmp_path / "with.gguf", force=True)
        with Model(path) as loaded:
            if refused:
                with pytest.raises(ValueError, match="kvq.checksum of .*: the kvq data are damaged .*; run: pykvq embed-rotations .* --force"):
                    Context(loaded, 256, "turbo3")
            else:
                with Context(loaded, 256, "turbo3") as context:
                    assert context.info().calibrated


def test_a_file_that_is_no_gguf_is_refused(calibrated):
    path = calibrated()
    path.with_name(f"{path.stem}.kvq.gguf").write_bytes(b"nothing")
    with Model(path) as model, pytest.raises(ValueError, match="damaged"):
        Context(model, 256, "turbo3")


# ---- through llama_cpp.Llama

def test_llama(calibrated, capfd):
    import llama_cpp
    from llama_cpp import Llama, _logger
    path = calibrated()
    llama_cpp.llama_log_set(_logger.llama_log_callback, None)
    states = {}
    for kvq in ("auto", "off"):
        llm = Llama(str(path), kv_type="turbo3", kvq=kvq, n_ctx=256, n_threads=2, verbose=True)
        info = llm.kv_cache_info()
        assert info.calibrated == (2 if kvq == "auto" else 0) and ("calibrated" in str(info)) == (kvq == "auto")
        llm.eval(TOKENS[:10])
        states[kvq] = llm.save_state()
        log = capfd.readouterr().err
        assert ("calibrated: 2 of 2 layers (64-4-2.kvq.gguf)" in log) == (kvq == "auto")
        assert not any(key.startswith("kvq.blk.") for key in llm.metadata)
    with pytest.raises(ValueError, match="other calibrated transforms"):
        llm.load_state(states["auto"])
    llm.close()
    with pytest.raises(ValueError, match='"auto" or "off"'):
        Llama(str(path), kv_type="turbo3", kvq="on")
