"""docs/models.md holds what every family of models does with every type, and is what it does today."""
from pathlib import Path

import families
import pytest
import shapes

from pykvq.engine import Context, Model, quiet_log

DOC = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("name", families.FAMILIES)
def test_family(name, tmp_path):
    assert families.row(tmp_path, name) in DOC.read_text().splitlines(), "run: python tools/generate_models_table.py"


@pytest.mark.parametrize("name", ["one KV head, LayerNorm", "fused projections", "dense"])
def test_many_layers_of_few_tensors(name, tmp_path):
    """llama.cpp sizes a graph by the tensors of the model; what the cache adds to a layer must fit too."""
    architecture, extra, *tensors = families.FAMILIES[name]
    quiet_log()
    with Model(shapes.write(tmp_path / "m.gguf", architecture, {**extra, "block_count": 64}, *tensors)) as model, \
            Context(model, 1024, "turbo3", n_batch=256, threads=2) as context:
        assert context.info()[0].n_window == 384 and context.decode([1] * 300, 0).shape == (1, model.n_vocab)


def test_table_has_no_other_rows():
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| ") and not line.startswith("| architecture")]
    assert len(rows) == len(families.FAMILIES) >= 25


def test_a_wrong_cache_is_noticed(tmp_path, monkeypatch):
    """The tolerance is a test: the values of another type do not pass it."""
    monkeypatch.setitem(families.TOLERANCE, "turbo4", 0.01)
    with pytest.raises(AssertionError):
        families.row(tmp_path, "dense")


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_batch_larger_than_the_ring_is_read_in_f16(name, tmp_path):
    """As the f16 cache has it, because a batch counts as recent as a whole: the copy that the graph makes is right in every builder of attention."""
    error = families.batch_beside_a_window(families.write(tmp_path / "m.gguf", name))
    assert error is None or error < 4e-3
