"""The one support query."""
import pytest

import pykvq
from pykvq.formats import TYPES
from pykvq.kv_info import times
from pykvq.support import KERNELS, OURS, VALID_NAMES, effective_type, family_of, row_bytes, supports, type_id, type_name


@pytest.mark.parametrize("head_dim, block", [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 64), (256, 128),
                                             (320, 64), (512, 128), (576, 64)])
@pytest.mark.parametrize("family", OURS)
def test_every_declared_head_size_has_a_member_without_padding(family, head_dim, block):
    assert pykvq.supports(family, head_dim) == (True, "", "")
    assert pykvq.block_for(family, head_dim) == block
    assert TYPES[effective_type(family, head_dim)].block == block


@pytest.mark.parametrize("head_dim, others", [(72, "f16"), (40, "f16"), (32, "q8_0 or f16"), (16, "f16")])
def test_other_head_sizes_are_refused_with_a_type_that_fits(head_dim, others):
    ok, reason, fix = pykvq.supports("turbo3", head_dim)
    assert not ok and "turbo3" in reason and f"head size {head_dim}" in reason
    assert fix == f"use {others}"


def test_pair_of_head_sizes():
    assert supports("turbo2", (576, 512)).ok
    assert supports("turbo2", (192, 128)).ok
    assert "72" in supports("turbo2", (128, 72)).reason


def test_members_are_found_not_named():
    assert effective_type("turbo3", 64) == "turbo3_64" and family_of("turbo3_64") == "turbo3"
    for query in (lambda: supports("turbo3_64", 64), lambda: type_id("turbo3_80")):
        with pytest.raises(ValueError, match="block layout, which the cache picks by head size.; valid: turbo2, turbo3"):
            query()


def test_types_of_llama_cpp_follow_its_block_of_32():
    assert supports("q8_0", 64).ok and supports("f16", 72).ok
    assert not supports("q4_0", 72).ok
    assert pykvq.block_for("q4_0", 64) == 32 and pykvq.block_for("f16", 72) == 1


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("family", OURS)
def test_backends_say_ok_only_for_declared_kernels(backend, family):
    ok, reason, fix = supports(family, 128, backend)
    assert ok == (family in KERNELS[backend])
    assert ok or (backend in reason and "--no-kv-offload" in fix)
    assert supports("q8_0", 128, backend).ok


@pytest.mark.parametrize("name", ["turbo5", "TURBO3", "", "q3_K", "turbo3_72"])
def test_unknown_type_lists_the_valid_names(name):
    for query in (lambda: supports(name, 128), lambda: type_id(name), lambda: row_bytes(name, 128)):
        with pytest.raises(ValueError) as error:
            query()
        assert all(valid in str(error.value) for valid in VALID_NAMES)


def test_unknown_backend():
    with pytest.raises(ValueError, match="cpu, cuda, metal, vulkan"):
        supports("turbo3", 128, "tpu")


@pytest.mark.parametrize("wrong", ["64", 64.5, None, 0, -1, (), (64, 64, 64), (64, "64")])
def test_head_sizes_that_are_none(wrong):
    with pytest.raises(ValueError, match="number of values per head"):
        supports("turbo3", wrong)


def test_ids_and_names_are_inverse():
    for name in VALID_NAMES:
        assert type_name(type_id(name)) == name
    assert all(type_name(t.id) == t.name for t in TYPES.values())
    assert type_name(77) == "type 77"


def test_row_bytes():
    assert row_bytes("turbo3", 64) == 26 and row_bytes("turbo2", 256) == 68 and row_bytes("turbo4", 576) == 9 * 34
    assert row_bytes("f16", 72) == 144 and row_bytes("q4_0", 64) == 36


@pytest.mark.parametrize("ratio, words", [(4.923, "4.92x smaller"), (1.001, "1.00x"), (1, "1.00x"), (0.996, "1.00x"), (0.75, "1.33x larger")])
def test_sizes_are_told_as_smaller_or_larger(ratio, words):
    assert times(ratio) == words
