"""Single layers with types of their own, through engine.Context."""
import numpy as np
import pytest

from pykvq.engine import Context, Model


@pytest.fixture(scope="module")
def model(tiny_model):
    with Model(tiny_model(64)) as loaded:
        yield loaded


def types(context):
    return [(layer.type_k, layer.type_v) for layer in context.info()]


def test_a_layer_gets_its_own_types_and_the_next_context_does_not(model):
    with Context(model, 256, "turbo3", layer_types={1: ("turbo4", "f16")}) as context:
        assert types(context) == [("turbo3_64", "turbo3_64"), ("turbo4_64", "f16")]
    with Context(model, 256, "turbo3") as context:
        assert types(context) == [("turbo3_64", "turbo3_64")] * 2


def test_logits_are_those_of_a_cache_of_these_types(model):
    """Named layer by layer in an f16 cache, a type does what it does as the cache's own."""
    def logits(kv_type, layer_types=None):
        with Context(model, 256, kv_type, kv_sink=0, kv_recent=0, layer_types=layer_types) as context:
            context.decode(list(range(1, 60)), 0, logits="none")
            return context.decode([60], 59)
    named = logits("f16", {i: ("turbo2", "turbo3") for i in range(2)})
    np.testing.assert_array_equal(named, logits(("turbo2", "turbo3")))
    assert np.abs(named - logits("f16")).max() > 1e-3


@pytest.mark.parametrize("name", ["q8_0", "turbo5"])
def test_other_types_are_refused(model, name):
    with pytest.raises(ValueError, match="single layers take f16, turbo and oscar2" if name == "q8_0" else "unknown cache type"):
        Context(model, 256, "turbo3", layer_types={0: (name, name)})
