"""Every declared head size and group ratio through a random model: the whole path, without a download."""
import numpy as np
import pytest

from pykvq.engine import Context, Model, quiet_log

TOKENS = [(7 * i * i + 3) % 256 for i in range(90)]
ERROR = {"turbo2": 0.6, "turbo3": 0.35, "turbo4": 0.2}      # relative, of the logits


def logits(model, kv_type, **options):
    """One batch of 70, then token by token; float32 [90, n_vocab]."""
    with Context(model, 256, kv_type, threads=2, kv_sink=0, kv_recent=0, **options) as context:
        rows = [context.decode(TOKENS[:70], 0, logits="all")]
        return np.concatenate(rows + [context.decode(TOKENS[i:i + 1], i) for i in range(70, len(TOKENS))])


def relative(ours, exact):
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256, 320])
def test_head_sizes(tiny_model, head_dim):
    quiet_log()
    with Model(tiny_model(head_dim)) as model:
        exact = logits(model, "f16")
        errors = {t: relative(logits(model, t), exact) for t in ERROR}
    assert errors["turbo4"] < errors["turbo3"] < errors["turbo2"]
    assert all(errors[t] < ERROR[t] for t in ERROR), errors


@pytest.mark.parametrize("heads, heads_kv", [(1, 1), (2, 1), (3, 1), (4, 4), (5, 1), (6, 2), (7, 1), (8, 1), (12, 1), (16, 1)])
def test_group_ratios(tiny_model, heads, heads_kv):
    quiet_log()
    with Model(tiny_model(64, heads=heads, heads_kv=heads_kv)) as model:
        exact = logits(model, "f16")
        assert relative(logits(model, ("turbo4", "turbo3")), exact) < ERROR["turbo3"]


@pytest.mark.parametrize("pair", [(k, v) for k in ("turbo2", "turbo3", "turbo4", "f16", "q8_0", "bf16") for v in ("turbo2", "turbo3", "turbo4", "f16", "q8_0")
                                  if "turbo" in k + v], ids="-".join)
def test_every_pair_of_types(tiny_model, pair):
    quiet_log()
    with Model(tiny_model(128)) as model:
        error = relative(logits(model, pair), logits(model, "f16"))
    assert error < max(ERROR.get(t, 0.05) for t in pair), error
