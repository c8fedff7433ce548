"""Geometry and wholeness from the header."""
from dataclasses import replace

import pytest

from pykvq.gguf_header import ModelFileError, read_header


def test_geometry_of_smollm2(smollm2):
    h = read_header(smollm2)
    assert (h.architecture, h.context_train, h.heads_kv, h.head_dims, h.window, h.mla) == ("llama", 8192, (3,) * 30, (64, 64), 0, False)
    assert h.cache_bytes("f16", "f16", 8192) == 30 * 3 * 8192 * 2 * 128
    assert h.cache_bytes("turbo3", "turbo2", 8192) == 30 * 3 * 8192 * (26 + 18)


@pytest.mark.parametrize("head_dim", [72, 80, 128, 256])
def test_geometry_of_random_models(tiny_model, head_dim):
    h = read_header(tiny_model(head_dim, layers=3, heads_kv=1))
    assert h.head_dims == (head_dim, head_dim) and h.heads_kv == (1, 1, 1)


def write_header_only(path, arch, **values):
    from gguf import GGUFWriter
    w = GGUFWriter(str(path), arch)
    for key, value in values.items():
        key = f"{arch}.{key.replace('__', '.')}"
        w.add_array(key, value) if isinstance(value, list) else w.add_uint32(key, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_hybrid_models_cache_only_attention_layers(tmp_path):
    h = read_header(write_header_only(tmp_path / "m.gguf", "lfm2", block_count=4, embedding_length=256, context_length=4096,
                                      attention__head_count=4, attention__head_count_kv=[0, 2, 0, 1]))
    assert h.heads_kv == (2, 1) and h.head_dims == (64, 64)


def test_mla_stores_only_keys(tmp_path):
    h = read_header(write_header_only(tmp_path / "m.gguf", "deepseek2", block_count=2, embedding_length=256, attention__head_count=4,
                                      attention__head_count_kv=1, attention__key_length=576, attention__value_length=512,
                                      attention__key_length_mla=192))
    assert h.mla and h.head_dims == (576, 512)
    assert h.cache_bytes("turbo3", "turbo3", 100) == 2 * 100 * 9 * 26
    assert h.cache_bytes("f16", "f16", 100) == 2 * 100 * 576 * 2
    h = replace(h, head_dim_k=512, head_dim_v=448)         # 128 divides the key, but not the part of it that is the value
    assert h.block_dims == (64, 64) and h.cache_bytes("turbo3", "turbo3", 100) == 2 * 100 * 8 * 26


def test_a_damaged_number_of_layers_takes_no_memory(tmp_path):
    """Found by tests/fuzz/sidecar_reader.py: a list of two billion head counts."""
    with pytest.raises(ModelFileError, match="says that it has 2147483647 layers, and llama.cpp reads 512"):
        read_header(write_header_only(tmp_path / "m.gguf", "llama", block_count=2 ** 31 - 1, embedding_length=256, attention__head_count=4))


def test_sliding_window_gives_a_lower_bound(tmp_path):
    h = read_header(write_header_only(tmp_path / "m.gguf", "gemma3", block_count=12, embedding_length=256, attention__head_count=4,
                                      attention__head_count_kv=1, attention__sliding_window=512))
    assert h.cache_bytes("f16", "f16", 8192) == (2 * 8192 + 10 * 512) * 2 * 128


@pytest.mark.parametrize("size", [0, 2, 4, 24, 1000, 2_000_000, 50_000_000])
def test_cut_files_are_refused(tmp_path, smollm2, size):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(smollm2.open("rb").read(size))
    with pytest.raises(ModelFileError, match="truncated") as error:
        read_header(cut)
    assert "\n" not in str(error.value)


def test_one_missing_byte_is_noticed(tmp_path, tiny_model):
    whole = tiny_model(64).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-1])
    with pytest.raises(ModelFileError, match=f"{len(whole) - 1} of {len(whole)} bytes"):
        read_header(tmp_path / "cut.gguf")


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ModelFileError, match="no model file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="no model file"):
        read_header(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFileError, match="no GGUF"):
        read_header(tmp_path / "x.gguf")


@pytest.mark.parametrize("version, words", [((9).to_bytes(4, "little"), "GGUF version 9, and this llama.cpp reads 2 and 3"),
                                            ((1).to_bytes(4, "little"), "GGUF version 1"),
                                            ((3).to_bytes(4, "big"), "big-endian GGUF file; turn it with: gguf-convert-endian")])
def test_other_versions_and_byte_orders(tmp_path, tiny_model, version, words):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + version + tiny_model(64).read_bytes()[8:])
    with pytest.raises(ModelFileError, match=words):
        read_header(tmp_path / "x.gguf")
