"""Rung 5 on tiny random models: caches with a sliding window, beside a recurrent state, behind an encoder, with latent keys."""
from functools import partial

import architectures
import numpy as np
import pytest
from llama_cpp import Llama

from pykvq.comparison import passage
from pykvq.engine import Context, Model, kl_divergence, quiet_log

BUILDERS = {"sliding window": architectures.sliding_window, "hybrid": architectures.hybrid,
            "hybrid, sliding window": partial(architectures.hybrid, window=64), "latent 576": architectures.latent,
            "latent 512, value 448": partial(architectures.latent, rank=448), "encoder-decoder": architectures.encoder_decoder}
ERROR = {"turbo2": 0.6, "turbo3": 0.35, "turbo4": 0.2}      # relative, of the logits
BATCH, TOTAL = 160, 200                          # tokens: the first ones in one batch, the others one by one
EXPECTED_LAYERS = {"sliding window": 6}          # cached layers, 2 elsewhere: those that are recurrent cache nothing


@pytest.fixture(scope="module", params=BUILDERS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def path(name, tmp_path_factory):
    return BUILDERS[name](tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path):
    quiet_log()
    with Model(path) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text(model):
    return model.tokenize(passage())[:TOTAL]


@pytest.fixture
def open_context(name, model, text):
    """open_context(type): with flash attention; T5 takes f16 values only, and its encoder has read the text."""
    made = []

    def make(kv_type, **options):
        encoder = name == "encoder-decoder"
        made.append(Context(model, 512, (kv_type, "f16") if encoder else kv_type, threads=2, kv_sink=0, kv_recent=0, **options))
        if encoder:
            made[-1].encode(text[:64])
        return made[-1]
    yield make
    for context in made:
        context.close()


def one_by_one(context, tokens, start):
    return np.concatenate([context.decode([token], start + i) for i, token in enumerate(tokens)])


def relative(ours, exact):
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


@pytest.fixture
def exact(open_context, text):
    return open_context("f16").decode(text, 0, logits="all")


def test_effective_types(name, open_context):
    info = open_context("turbo3").info()
    values = "f16" if name == "encoder-decoder" else "turbo3_64"
    assert info.types == {("turbo3_64", values): EXPECTED_LAYERS.get(name, 2)}
    assert {layer.swa for layer in info} == {"sliding window": {True, False}, "hybrid, sliding window": {True}}.get(name, {False})


def test_every_type_in_a_batch_and_token_by_token(name, open_context, text, exact):
    errors = {}
    for kv_type in ERROR:
        context = open_context(kv_type)
        rows = np.concatenate([context.decode(text[:BATCH], 0, logits="all"), one_by_one(context, text[BATCH:], BATCH)])
        errors[kv_type] = relative(rows[:BATCH], exact[:BATCH]), relative(rows[BATCH:], exact[BATCH:])
        if kv_type == "turbo4":
            assert 0 < kl_divergence(exact, rows).mean() < 0.12
        # the tokens after the batch again, now as a batch
        context = open_context(kv_type)
        context.decode(text[:BATCH], 0, logits="none")
        assert relative(context.decode(text[BATCH:], BATCH, logits="all"), rows[BATCH:]) < 0.01
    assert all(max(errors[t]) < ERROR[t] for t in ERROR), errors
    assert errors["turbo4"] < errors["turbo3"] < errors["turbo2"]


def test_state_goes_on_where_it_was_saved(open_context, text):
    source, target = open_context("turbo3"), open_context("turbo3")
    source.decode(text[:BATCH], 0)
    target.load(source.save(0), 0)
    rows = [one_by_one(context, text[BATCH:BATCH + 8], BATCH) for context in (source, target)]
    # a saved window lies at other cells, so sums are taken in another order, and quantisers amplify that
    assert relative(*rows) < 0.01


def test_state_of_another_type_is_refused(open_context, text):
    source, target = open_context("turbo3"), open_context("turbo4")
    source.decode(text[:BATCH], 0)
    with pytest.raises(ValueError, match="saved under another setting; cache: .*turbo3.*, not .*turbo4"):
        target.load(source.save(0), 0)


@pytest.mark.parametrize("sequence", [None, 0])
def test_state_of_set_bits_is_refused(open_context, sequence):
    with pytest.raises(ValueError, match="no saved state of such a cache"):
        open_context("turbo3").load(b"\xff" * 4096, sequence)


def test_context_shift(open_context, text):
    """Dropping tokens and moving up the rest: as close to f16, which does the same, as without a shift."""
    def shifted(kv_type):
        context = open_context(kv_type)
        context.decode(text[:BATCH], 0, logits="none")
        if not context.remove(0, 4, 36):
            pytest.skip("this memory cannot forget tokens in its middle")
        context.shift(0, 36, -32)
        return one_by_one(context, text[BATCH:], BATCH - 32)
    exact = shifted("f16")
    assert relative(shifted("turbo4"), exact) < 1.5 * ERROR["turbo4"]        # the keys are quantised once more
    assert relative(shifted("turbo3"), exact) < 1.5 * ERROR["turbo3"]


def test_llama(name, path):
    """Through the bindings, which never encode: T5 is an error there, not an abort."""
    kv_type = ("turbo3", "f16") if name == "encoder-decoder" else "turbo3"
    llm = Llama(str(path), n_ctx=256, n_threads=2, verbose=False, kv_type=kv_type)
    if name == "encoder-decoder":
        with pytest.raises(RuntimeError, match="needs llama_encode first"):
            llm("Hello", max_tokens=4)
    else:
        assert llm("Hello", max_tokens=4, temperature=0)["usage"]["completion_tokens"] == 4
    llm.close()
