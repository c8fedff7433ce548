"""Refusals that need no model of their own."""
from dataclasses import replace

import pytest

from pykvq.gguf_header import read_header
from pykvq.llama_glue import check_cache
from pykvq.support import type_id


@pytest.mark.parametrize("type_v", ["turbo3", "q8_0"])
def test_quantised_values_of_a_model_with_position_bias(tiny_model, type_v):
    header = replace(read_header(tiny_model(64)), architecture="t5")
    check_cache(header, type_id("turbo3"), type_id("f16"), 256)
    with pytest.raises(ValueError, match="position bias.*use f16 for V"):
        check_cache(header, type_id("turbo3"), type_id(type_v), 256)
