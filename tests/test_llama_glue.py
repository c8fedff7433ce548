"""Refusals that need no model of their own."""
from dataclasses import replace

import pytest

from pykvq import llama_glue
from pykvq.gguf_header import read_header
from pykvq.llama_glue import check_cache
from pykvq.support import type_id


def test_the_f16_window_counts_before_loading(tiny_model, monkeypatch):
    header = read_header(tiny_model(64))
    turbo3 = type_id("turbo3")
    bare = header.cache_bytes("turbo3", "turbo3", 8192)
    for window, rows in (((-1, -1), 384), ((0, 0), 0), ((16, 64), 128), ((0, 8192), 8256)):
        need = bare + header.cache_bytes("f16", "f16", rows)
        monkeypatch.setattr(llama_glue, "available_memory", lambda: need)
        check_cache(header, turbo3, turbo3, 8192, f16_window=window)
        monkeypatch.setattr(llama_glue, "available_memory", lambda: need - 1)
        with pytest.raises(MemoryError, match="n_ctx=7936 or less" if rows < 8192 else "n_ctx="):
            check_cache(header, turbo3, turbo3, 8192, f16_window=window)


@pytest.mark.parametrize("type_v", ["turbo3", "q8_0"])
def test_quantised_values_of_a_model_with_position_bias(tiny_model, type_v):
    header = replace(read_header(tiny_model(64)), architecture="t5")
    check_cache(header, type_id("turbo3"), type_id("f16"), 256)
    with pytest.raises(ValueError, match="position bias.*use f16 for V"):
        check_cache(header, type_id("turbo3"), type_id(type_v), 256)
