"""libllama on a GPU against libllama on the CPU: decoding, partial offload, states, shifts and copies. pytest -m cuda."""
import shutil

import numpy as np
import pytest

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA driver on this machine"),
]

TYPES = ["turbo2", "turbo3", "turbo4"]
BARE = {"kv_sink": 0, "kv_recent": 0}            # an f16 window would hold most of these short texts
PAIRS = [*TYPES, ("turbo4", "turbo2"), ("q8_0", "turbo3"), ("turbo3", "f16")]
LAYERS = 4
ROOM = 1024


@pytest.fixture(scope="module")
def engine():
    from pykvq.devices import has_gpu
    if not has_gpu():
        pytest.skip("the installation has no GPU backend; install with CMAKE_ARGS=-DGGML_CUDA=on")
    import pykvq.engine
    return pykvq.engine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """8 KV heads of 128 and groups of 4: the shapes whose kernels are the special ones."""
    from pykvq.tiny_model import write_tiny_model
    return write_tiny_model(tmp_path_factory.mktemp("cuda") / "tiny.gguf", 128, heads=32, heads_kv=8, layers=LAYERS)


@pytest.fixture(scope="module")
def models(engine, path):
    made = {n: engine.Model(path, gpu_layers=n) for n in (0, 2, 99)}
    yield made
    for model in made.values():
        model.close()


TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 256, 400)]


def run(engine, model, kv_type, prompt=256, **options):
    """Logits of a prompt in batches and of the rest token by token; float32 [rows, vocabulary]."""
    with engine.Context(model, ROOM, kv_type, n_batch=128, **{**BARE, **options}) as context:
        rows = [context.decode(TOKENS[:prompt], 0, logits="all")]
        rows += [context.decode([token], prompt + i) for i, token in enumerate(TOKENS[prompt:prompt + 48])]
        return np.concatenate(rows)


@pytest.fixture(scope="module")
def reference(engine, models):
    made = {}

    def get(kv_type):
        if kv_type not in made:
            made[kv_type] = run(engine, models[0], kv_type)
        return made[kv_type]
    return get


# Codes on the edge fall either way: weights changed by 1e-7 of themselves give 0.014, 0.004 and 0.002 on the CPU with 2, 3 and 4 bits, by 1e-5
# 0.070, 0.023 and 0.009. What the types themselves cost this model: 1.4, 0.5 and 0.17.
BOUNDS = {"2": 0.07, "3": 0.025, "4": 0.01}


def close(engine, ours, theirs, kv_type):
    """Mean divergences of the two parts of run(), prompt and single tokens, are what rounding does to the type of fewest bits."""
    kl = engine.kl_divergence(theirs, ours)
    names = (kv_type,) if isinstance(kv_type, str) else kv_type
    bound = max(BOUNDS.get(name[-1], 0.0) for name in names)
    return np.isfinite(kl).all() and max(kl[:256].mean(), kl[256:].mean()) < bound


@pytest.mark.parametrize("kv_type", PAIRS)
@pytest.mark.parametrize("layers", [99, 2])
def test_logits_are_the_cpus(engine, models, reference, kv_type, layers):
    assert close(engine, run(engine, models[layers], kv_type), reference(kv_type), kv_type)


@pytest.mark.parametrize("sink, recent", [(16, 32), (64, 256)])
@pytest.mark.parametrize("kv_type", PAIRS)
def test_beside_an_f16_window_too(engine, models, kv_type, sink, recent):
    """Batches of 128 tokens find no room in the ring, single tokens do."""
    options = {"kv_sink": sink, "kv_recent": recent}
    with engine.Context(models[99], ROOM, kv_type, n_batch=128, **options) as context:
        assert all(layer.n_window - 1 - sink - recent < 128 for layer in context.info())
    ours, theirs, bare = (run(engine, models[n], kv_type, **o) for n, o in ((99, options), (0, options), (99, {})))
    assert close(engine, ours, theirs, kv_type) and engine.kl_divergence(ours, bare).mean() > 0


@pytest.mark.parametrize("kv_type", ["oscar2", ("oscar2", "turbo4"), "turbo3"])
def test_calibrated_keys(engine, path, tmp_path, kv_type):
    """With a random transform of every head in a sidecar: oscar2, which needs one, and a type that takes one."""
    from calibrated import metadata, random_layers, write_sidecar
    copy = tmp_path / "calibrated.gguf"
    shutil.copy(path, copy)
    write_sidecar(copy, metadata(copy, random_layers(range(LAYERS), 8, 128, 1.3)))
    rows = []
    for layers in (0, 99):
        with engine.Model(copy, gpu_layers=layers) as model:
            with engine.Context(model, ROOM, kv_type) as context:
                assert context.info().calibrated
            rows.append(run(engine, model, kv_type))
    assert close(engine, rows[1], rows[0], kv_type)


@pytest.mark.parametrize("kv_type", ["turbo2", "turbo3", "turbo4"])
@pytest.mark.parametrize("head_dim, heads, heads_kv", [(128, 32, 8), (128, 12, 2), (64, 14, 2)])
def test_a_key_bias_is_returned_to_the_logit(engine, tmp_path, head_dim, heads, heads_kv, kv_type):
    """Keys are stored without attn_k.bias on both devices, for the linear kernel and for the shapes of small Qwen2 models."""
    from pykvq.tiny_model import write_tiny_model
    biased = write_tiny_model(tmp_path / "biased.gguf", head_dim, heads=heads, heads_kv=heads_kv, layers=LAYERS, architecture="qwen2", key_bias=8)
    rows = []
    for layers in (0, 99):
        with engine.Model(biased, gpu_layers=layers) as model:
            with engine.Context(model, ROOM, kv_type) as context:
                assert {layer.key_bias for layer in context.info().layers} == {"left out"}
            rows.append(run(engine, model, kv_type))
    assert close(engine, rows[1], rows[0], kv_type)


@pytest.mark.parametrize("kv_type", TYPES)
def test_cache_kept_on_the_host(engine, models, reference, kv_type):
    assert close(engine, run(engine, models[99], kv_type, offload=False), reference(kv_type), kv_type)


@pytest.mark.parametrize("kv_type", TYPES)
def test_states_travel_between_devices_byte_for_byte(engine, models, kv_type):
    with engine.Context(models[0], ROOM, kv_type, n_batch=128) as cpu, engine.Context(models[99], ROOM, kv_type, n_batch=128) as gpu:
        cpu.decode(TOKENS[:200], 0, logits="none")
        state = cpu.save(0)
        gpu.load(state, 0)
        assert gpu.save(0) == state
        after_gpu, after_cpu = gpu.decode(TOKENS[200:201], 200), cpu.decode(TOKENS[200:201], 200)
        assert engine.kl_divergence(after_cpu, after_gpu).max() < 2e-3
        cpu.clear()
        moved = gpu.save(0)
        cpu.load(moved, 0)
        assert cpu.save(0) == moved


@pytest.mark.parametrize("kv_type", TYPES)
def test_context_shift(engine, models, kv_type):
    """Dropping the start and moving the rest back, as a server does when its context is full."""
    rows = []
    for layers in (0, 99):
        with engine.Context(models[layers], ROOM, kv_type, n_batch=128, **BARE) as context:
            context.decode(TOKENS[:200], 0, logits="none")
            assert context.remove(0, 4, 68)
            context.shift(0, 68, -64)
            rows.append(np.concatenate([context.decode([token], 136 + i) for i, token in enumerate(TOKENS[200:216])]))
    assert engine.kl_divergence(*rows).mean() < 1e-2       # the shifted keys are quantised a second time


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("kv_type", TYPES)
def test_a_copied_sequence_goes_on_like_its_source(engine, models, kv_type, unified):
    with engine.Context(models[99], ROOM, kv_type, n_batch=128, n_seq=3, unified=unified) as context:
        context.decode(TOKENS[:150], 0, seq=0, logits="none")
        context.copy(0, 2)
        source, target = (np.concatenate([context.decode([token], 150 + i, seq=seq) for i, token in enumerate(TOKENS[150:160])]) for seq in (0, 2))
    assert engine.kl_divergence(source, target).max() < 1e-5


def test_several_sequences_in_one_batch(engine, models):
    """Eight streams decode together what each decodes alone."""
    with engine.Context(models[99], 8 * 256, "turbo3", n_batch=128, n_seq=8, **BARE) as together, \
            engine.Context(models[99], 256, "turbo3", n_batch=128, **BARE) as alone:
        for seq in range(8):
            together.decode(TOKENS[seq:seq + 100 + seq], 0, seq=seq, logits="none")
        rows = together.decode_batch([(TOKENS[300 + seq], 100 + seq, seq, True) for seq in range(8)])
        for seq in range(8):
            alone.clear()
            alone.decode(TOKENS[seq:seq + 100 + seq], 0, logits="none")
            assert engine.kl_divergence(alone.decode([TOKENS[300 + seq]], 100 + seq), rows[seq:seq + 1]).max() < 2e-3


def test_attention_that_lands_on_the_cpu_is_told(engine, models):
    """A mix without a CUDA kernel runs on the CPU, with a line that names the layer's cache and the reason."""
    import llama_cpp.llama_cpp as native
    lines = []

    @native.llama_log_callback
    def collect(level, text, _):
        lines.append(text.decode(errors="replace"))

    native.llama_log_set(collect, None)
    try:
        with engine.Context(models[99], 256, ("turbo3", "q4_0"), n_batch=128) as context:
            assert np.isfinite(context.decode(TOKENS[:20], 0)).all()
    finally:
        engine.quiet_log()
    told = [line for line in lines if "falls back to the CPU" in line]
    assert told, [line for line in lines if "kvq" in line]
    for layer in range(LAYERS):
        assert any(f"FLASH_ATTN_EXT of cache_k_l{layer} " in line and "f16 and q8_0 alone" in line for line in told), told
