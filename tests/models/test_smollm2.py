"""Rung 5: a real model (head size 64) through every cache type, in batches and token by token, and all that the cache does."""
import numpy as np
import pytest

from pykvq.comparison import forced, greedy, passage
from pykvq.engine import Context, Model, kl_divergence, quiet_log

READ, SCORED, DECODED = 160, 144, 32             # tokens of the bundled text: read, scored in one batch, scored one by one

# Mean KL from f16 over the bundled text, about 1.3 times what the numpy codec gives (tools/measure_kld.py).
BOUNDS = {("turbo4", "turbo4"): 0.08, ("turbo3", "turbo3"): 0.25, ("turbo2", "turbo2"): 1.4,
          ("turbo4", "turbo2"): 0.35, ("turbo3", "turbo2"): 0.5, ("f16", "turbo2"): 0.25, ("q8_0", "turbo3"): 0.08,
          ("turbo3", "f16"): 0.25, ("turbo4", "q8_0"): 0.08, ("q4_0", "turbo4"): 0.10}
OURS = ["turbo4", "turbo3", "turbo2"]


@pytest.fixture(scope="module")
def model(smollm2):
    quiet_log()
    with Model(smollm2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text(model):
    return model.tokenize(passage())


@pytest.fixture
def open_context(model):
    """open_context(kv_type, ...) with everything closed at the end of the test; no f16 window, which test_windows.py tests."""
    made = []

    def make(kv_type, n_ctx=512, **options):
        made.append(Context(model, n_ctx, kv_type, **{"threads": 2, "kv_sink": 0, "kv_recent": 0, **options}))
        return made[-1]
    yield make
    for context in made:
        context.close()


def near(a, b, kv_type):
    """Equal up to rounding, which the next layer's quantiser amplifies to a part of its own noise."""
    pair = kv_type if isinstance(kv_type, tuple) else (kv_type, kv_type)
    return kl_divergence(a, b).mean() < BOUNDS[pair]


def both_ways(context, text):
    """Logits after READ tokens: SCORED in one batch, and the first DECODED of them again, token by token."""
    context.clear()
    context.decode(text[:READ], 0, logits="none")
    batch = context.decode(text[READ:READ + SCORED], READ, logits="all")
    context.remove(0, READ)
    return batch, np.concatenate([context.decode(text[READ + i:READ + i + 1], READ + i) for i in range(DECODED)])


@pytest.fixture(scope="module")
def f16(model, text):
    """Logits of the f16 cache, in one batch and token by token."""
    with Context(model, 512, "f16", threads=2) as context:
        return both_ways(context, text)


@pytest.fixture(scope="module")
def divergence(model, text, f16):
    """divergence(pair): mean KL from f16 in a batch and token by token; measured once per pair."""
    known = {}

    def measure(pair):
        if pair not in known:
            with Context(model, 512, pair, threads=2, kv_sink=0, kv_recent=0) as context:
                known[pair] = tuple(kl_divergence(a, b).mean() for a, b in zip(f16, both_ways(context, text)))
        return known[pair]
    return measure


@pytest.mark.parametrize("pair", BOUNDS, ids="-".join)
def test_divergence_in_batches_and_token_by_token(divergence, pair):
    batch, single = divergence(pair)
    assert batch < BOUNDS[pair]
    assert single < 1.5 * BOUNDS[pair]           # fewer tokens scatter more


@pytest.mark.parametrize("ours", [0, 1], ids=["batch", "single"])
def test_more_bits_diverge_less(divergence, ours):
    kl = [divergence((t, t))[ours] for t in OURS]
    assert 0 < kl[0] < kl[1] < kl[2]


@pytest.fixture(scope="module")
def exact_weights(model, text):
    """True when llama.cpp's own matrix products give the same bits for a token alone and in a batch, as on x86."""
    with Context(model, 512, "q4_0", threads=2) as context:
        batch, single = both_ways(context, text)
    return np.array_equal(batch[:DECODED], single)


@pytest.mark.parametrize("pair", [("turbo4", "turbo4"), ("turbo3", "turbo3"), ("f16", "turbo2"), ("turbo3", "q8_0")], ids="-".join)
def test_decode_equals_prefill(open_context, text, exact_weights, pair):
    """The last token of a prompt, once more alone, over the very same cache, and with another number of threads."""
    two, one = open_context(pair), open_context(pair, threads=1)
    for n in (1, 2, 33, 200):
        two.clear()
        batch = two.decode(text[:n], 0)
        one.clear()
        one.load(two.save(0), 0)
        for context in (two, one):
            context.remove(0, n - 1)
            single = context.decode(text[n - 1:n], n - 1)
            assert np.array_equal(batch, single) if exact_weights else near(batch, single, "turbo3"), n


@pytest.mark.parametrize("kv_type", OURS)
def test_greedy_answer_equals_its_forced_replay(open_context, model, kv_type):
    context = open_context(kv_type)
    prompt = model.chat_tokens("Name a colour.")
    answer, logits = greedy(context, prompt, 12)
    np.testing.assert_array_equal(forced(context, prompt, answer), logits)


# ---- what the cache does

@pytest.mark.parametrize("kv_type", OURS)
def test_context_shift(open_context, text, kv_type):
    """Drop tokens from the middle, move the rest, go on: as near to f16 doing the same as without a shift."""
    after = {}
    for name in ("f16", kv_type):
        context = open_context(name, 256)
        context.decode(text[:200], 0, logits="none")
        assert context.remove(0, 4, 68)
        context.shift(0, 68, -64)
        after[name] = context.decode(text[200:232], 136, logits="all")
    assert kl_divergence(after["f16"], after[kv_type]).mean() < 1.5 * BOUNDS[kv_type, kv_type]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("kv_type", ["turbo3", ("turbo4", "turbo2")])
def test_sequence_copy(open_context, text, kv_type, unified):
    context = open_context(kv_type, 512, n_seq=2, unified=unified)
    context.decode(text[:100], 0, logits="none")
    context.copy(0, 1)
    ours = context.decode(text[100:108], 100, seq=1, logits="all")
    assert near(context.decode(text[100:108], 100, seq=0, logits="all"), ours, kv_type)      # unified: at other cells of the span
    context.remove(0, 0)
    assert near(context.decode(text[108:109], 108, seq=1), _fresh(open_context, kv_type, text[:109]), kv_type)


def _fresh(open_context, kv_type, tokens):
    return open_context(kv_type).decode(tokens, 0)


@pytest.mark.parametrize("kv_type", OURS)
def test_removing_a_tail_restores_the_logits(open_context, text, kv_type):
    context = open_context(kv_type)
    context.decode(text[:100], 0, logits="none")
    first = context.decode(text[100:101], 100)
    context.decode(text[300:340], 101, logits="none")
    assert context.remove(0, 100)
    np.testing.assert_array_equal(context.decode(text[100:101], 100), first)


@pytest.mark.parametrize("seq", [None, 0], ids=["whole", "sequence"])
@pytest.mark.parametrize("kv_type", ["turbo3", ("turbo4", "turbo2")])
def test_state_round_trip(open_context, text, kv_type, seq):
    source = open_context(kv_type)
    source.decode(text[:120], 0)
    state = source.save(seq)
    expected = source.decode(text[120:124], 120, logits="all")
    target = open_context(kv_type)
    target.load(state, seq)
    np.testing.assert_array_equal(target.decode(text[120:124], 120, logits="all"), expected)


@pytest.mark.parametrize("seq", [None, 0], ids=["whole", "sequence"])
def test_state_of_another_type_is_refused_in_one_line(open_context, text, seq):
    source, target = open_context("turbo3"), open_context("turbo4")
    source.decode(text[:50], 0)
    target.decode(text[:50], 0)
    with pytest.raises(ValueError) as error:
        target.load(source.save(seq), seq)
    assert "\n" not in str(error.value) and "turbo3_64" in str(error.value) and "turbo4_64" in str(error.value)
    target.clear()
    assert np.array_equal(target.decode(text[:50], 0), _fresh(open_context, "turbo4", text[:50]))      # nothing is left half-written


def test_state_is_as_small_as_the_cache(open_context, text):
    sizes = {}
    for kv_type in ("f16", "turbo2"):
        context = open_context(kv_type)
        context.decode(text[:400], 0)
        sizes[kv_type] = len(context.save(0))
    assert sizes["f16"] / sizes["turbo2"] > 6.8


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("kv_type", ["turbo3", "turbo2"])
def test_several_sequences_in_one_batch(open_context, text, kv_type, unified):
    """Three sequences of different length, then eight times one token of each in one batch, against each alone."""
    lengths, more = (37, 64, 101), 8             # one token alone scatters too much to be judged
    context = open_context(kv_type, 768, n_seq=3, unified=unified)
    starts = [text[100 * s:100 * s + n] for s, n in enumerate(lengths)]
    context.decode_batch([(token, i, s, False) for s, tokens in enumerate(starts) for i, token in enumerate(tokens)])
    together = np.stack([context.decode_batch([(text[500 + more * s + i], n + i, s, True) for s, n in enumerate(lengths)]) for i in range(more)], 1)
    for s, tokens in enumerate(starts):
        alone = open_context(kv_type).decode(tokens + text[500 + more * s:500 + more * (s + 1)], 0, logits="all")[-more:]
        assert near(together[s], alone, kv_type), s


def test_odd_batch_sizes_agree(open_context, text):
    whole = _fresh(open_context, "turbo3", text[:131])
    context = open_context("turbo3")
    for first, last in ((0, 1), (1, 3), (3, 8), (8, 65), (65, 130)):
        context.decode(text[first:last], first, logits="none")
    assert near(whole, context.decode(text[130:131], 130), "turbo3")


# ---- through llama_cpp.Llama

@pytest.fixture(scope="module")
def llama(smollm2):
    from llama_cpp import Llama
    made = []

    def make(**options):
        made.append(Llama(str(smollm2), kv_type="turbo4", n_ctx=512, n_threads=2, verbose=False, **options))
        return made[-1]
    yield make
    for llm in made:
        llm.close()


LIST = "Count with me: one, two, three, four, five, six, seven, one, two, three, four, five,"


def complete(llm, prompt=LIST, n=12):
    return llm(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]


def test_prompt_cache_gives_the_same_text(llama):
    from llama_cpp import LlamaRAMCache
    llm = llama()
    expected = complete(llm)
    llm.set_cache(LlamaRAMCache())
    assert complete(llm) == expected
    complete(llm, "An unrelated prompt in between.", 2)
    assert complete(llm) == expected and llm.cache.cache_size > 0


def test_speculative_decoding_gives_the_same_text(llama):
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    assert complete(llama(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4))) == complete(llama())
