"""The project's Metal kernels and their host code on the host machine, over the grid of the CUDA kernels (tests/cuda/test-kvq-cuda.cpp).

Lanes of a simdgroup run in no promised order here, so only barriers order memory; every access is checked.
"""
import json

import pytest

from metal_host import HERE, ROOT, execute

GRID, PARTS = ROOT / "tests/cuda/test-kvq-cuda.cpp", 8


@pytest.fixture(scope="module")
def libraries(machine, own_libraries):
    """The project's kernels, and upstream's writes and attention of plain f16 beside them."""
    text = machine.upstream_kernels("quantize", r"set_rows_f32_i(32|64)_f16")
    return [*own_libraries, machine.library(text, "upstream-f16")]


@pytest.fixture(scope="module")
def traffic(machine):
    """The program that counts bytes, and upstream's attention over f16 for comparison."""
    return (machine.program(HERE / "test-traffic.cpp"), machine.library(machine.upstream_kernels("fa_vec_f16", r"f16_dk128_dv128$"), "upstream-vec"),
            machine.library(machine.upstream_kernels("fa_aux", r"vec_reduce"), "upstream-reduce"))


def run_grid(libraries, program, *arguments):
    done = execute(program, libraries, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "FAULT" not in done.stdout and " 0 failures" in done.stdout


@pytest.fixture(scope="module")
def grid(machine):
    """The CUDA test's program."""
    return machine.program(GRID)


def test_operations_match_the_cpu(libraries, grid):
    """Rows bit for bit, attention within the limits of the CUDA test; a fault of the machine is a failure."""
    run_grid(libraries, grid, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_whole_grid(libraries, grid, part):
    """One eighth a run, without the contexts that would take a CPU minutes."""
    run_grid(libraries, grid, "--part", f"{part}/{PARTS}", "--most", "1e7")


def test_missing_barrier_is_found(machine, libraries, traffic):
    """The weights of a tile, without the barrier before other lanes read them."""
    text = machine.own_kernels()["decode"]
    before, barrier, after = text.partition("weight;\n    }\n    simdgroup_barrier(mem_flags::mem_threadgroup);")
    assert barrier, "the source has changed; plant the fault elsewhere"
    # a library that comes first hides the kernels of those behind it
    bad = machine.library(before + "weight;\n    }\n" + after, "planted")
    done = execute(traffic[0], [bad, *libraries, *traffic[1:]])
    assert done.returncode == 1 and "without a barrier" in done.stdout


def test_a_group_reads_the_cache_once(libraries, traffic):
    """Bytes of the cache that a decode step fetches, each once a threadgroup: the stored bytes, whatever the group size. In the
    same kernel, f16 takes 16 / 3.125 times as much as turbo3."""
    done = execute(traffic[0], [*libraries, *traffic[1:]])
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    read = {(r["k"], r["v"], r["gqa"]): r for r in map(json.loads, done.stdout.splitlines())}
    for gqa in (1, 4, 8):
        ours = read["turbo3", "turbo3", gqa]
        assert ours["k_bytes"] == ours["v_bytes"] == ours["k_stored"]
        f16 = read["f16", "turbo3", gqa]["k_bytes"] + read["turbo3", "f16", gqa]["v_bytes"]
        assert f16/(ours["k_bytes"] + ours["v_bytes"]) == pytest.approx(16/3.125)
    assert read["f16", "f16", 4]["k_bytes"] == 4*read["f16", "f16", 4]["k_stored"]       # upstream: once for every query head
