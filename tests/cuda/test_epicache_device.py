"""EpiCache with all layers on the GPU chooses the cells that it chooses on the CPU. pytest -m cuda."""
import shutil

import numpy as np
import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA driver on this machine")]

TOKENS = np.random.default_rng(4).integers(0, 256, 700).tolist()
ALWAYS = (np.arange(700) < 8) | (np.arange(700) >= 696)


def asked(path, kv_type, gpu_layers, shared):
    """Positions and rows of the cells that a question takes, and the logits behind them."""
    from pykvq.engine import Context, Model
    from pykvq.epicache.archive import Archive
    from pykvq.epicache.build import Builder, Plan
    from pykvq.epicache.queries import QueryCapture
    from pykvq.epicache.recall import Asked, read, recalled
    from pykvq.epicache.rows import values
    capture = QueryCapture()
    with Model(path, gpu_layers=gpu_layers) as model, Context(model, 512, kv_type, n_batch=128, on_tensor=capture) as context:
        builder = Builder(context, capture, Plan(200, 100, recent=4, shared=shared))
        archive = read(builder, Archive(), TOKENS, 8)
        state = recalled(builder, archive, ALWAYS, np.ones(700, bool), ALWAYS, Asked([], TOKENS[:20]), np.arange(700))
        builder.restore(state)
        keys = [values(k.heads(8), k.ggml_type) for k in state.keys]
        return archive.end, state.positions, keys, context.decode(TOKENS[20:40], 700)[-1]


@pytest.mark.parametrize("kv_type, shared", [("f16", False), ("turbo3", False), (("q8_0", "turbo4"), True)], ids=str)
def test_the_same_cells_as_on_the_cpu(tmp_path, kv_type, shared):
    from pykvq.devices import has_gpu
    from pykvq.tiny_model import write_tiny_model
    if not has_gpu():
        pytest.skip("the installation has no GPU backend; install with CMAKE_ARGS=-DGGML_CUDA=on")
    path = write_tiny_model(tmp_path / "tiny.gguf", 128, heads=32, heads_kv=8, layers=2)
    cpu, gpu = (asked(path, kv_type, layers, shared) for layers in (0, 99))
    assert cpu[0] == gpu[0] == 700 and len(cpu[1]) == len(gpu[1]) == 200
    if shared:
        assert len(set(cpu[1].tolist()) & set(gpu[1].tolist())) > 180
    else:                                        # keys of the first layer tell which token a head has taken
        a, b = (np.moveaxis(x[2][0], 1, 0) for x in (cpu, gpu))
        same = [(np.linalg.norm(x[:, None] - y[None], axis=2).min(1) < 0.3 * np.linalg.norm(x, axis=1)).mean() for x, y in zip(a, b)]
        assert np.mean(same) > 0.9, same
    assert np.corrcoef(cpu[3], gpu[3])[0, 1] > 0.98
