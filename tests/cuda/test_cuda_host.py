"""The project's CUDA kernels and their host code on a CPU (tests/cuda/host), against the CPU backend; no GPU needed.

Every access to shared and device memory is checked, and the machine itself by faults planted into the kernels.
"""
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cuda_host import GRID, KERNELS, MISSING, PLAIN, ROOT, WATCHED, Machine

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}")


def run_parts(program: Path, parts: int, *arguments: str) -> str:
    """What a grid printed, run in parts beside each other; it must be right and free of faults."""
    def one(part: int) -> subprocess.CompletedProcess:
        return subprocess.run([program, *arguments, "--part", f"{part}/{parts}"], capture_output=True, text=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(one, range(1, parts + 1)))
    text = "".join(d.stdout + d.stderr for d in done)
    assert all(d.returncode == 0 for d in done), text[-4000:]
    assert "FAULT" not in text and text.count(" 0 failures") == parts, text[-4000:]
    return text


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return Machine().program(tmp_path_factory.mktemp("cuda-host") / "grid")


@pytest.mark.parametrize("mode", ["quick", "host"])
def test_operations_match_the_cpu(program, mode):
    """Rows bit for bit, attention within the limits of the GPU's test."""
    run_parts(program, 4, mode)


@pytest.mark.slow
@pytest.mark.parametrize("join", [None, "3"])
def test_steps_match_the_cpu(program, monkeypatch, join):
    """Norm and RoPE in the launches that read them, at every head size and with every option."""
    if join:
        monkeypatch.setenv("KVQ_CUDA_JOIN", join)
    run_parts(program, 4, "steps")


@pytest.mark.parametrize("case, join, launches", [
    ("step", None, ["RMS_NORM 0", "MUL 0", "ROPE 0", "RMS_NORM 10", "FLASH_ATTN_EXT 0"]), ("step", "3", ["RMS_NORM 13", "FLASH_ATTN_EXT 0"]),
    ("calibrated step", None, ["RMS_NORM 11", "SET_ROWS 6", "FLASH_ATTN_EXT 0"]), ("calibrated step", "3", ["RMS_NORM 20", "FLASH_ATTN_EXT 0"]), ("large step", None, None)])
def test_norm_and_rope_have_no_launch_of_their_own(cases, tmp_path, case, join, launches):
    """Of up to eight tokens; the first node of every launch behind the products and the number of nodes that it did beside it."""
    done = subprocess.run([Machine().program(tmp_path / "steps", cases)], capture_output=True, text=True, env={**os.environ, "CASE": case, "CUDA_HOST_TRACE": "1", **({"KVQ_CUDA_JOIN": join} if join else {})})
    assert done.returncode == 0, done.stdout[-2000:]
    nodes = re.findall(r"^node (\w+) .*, (\d+) more$", done.stdout, flags=re.M)
    if launches:
        assert [f"{op} {n}" for op, n in nodes if op not in ("SCALE", "CONT")][:len(launches)] == launches
    else:
        assert ("ROPE", "0") in nodes


@pytest.mark.slow
def test_whole_grid(tmp_path, monkeypatch):
    """Every kernel that is compiled for a GPU; contexts that would take a CPU minutes left out."""
    monkeypatch.setenv("CUDA_HOST_PADDING", "1")
    run_parts(Machine().program(tmp_path / "grid", whole=True), 16, "--most", "3e6")


@pytest.mark.slow
def test_kernels_of_older_devices(tmp_path):
    """Compute capability 8.0: neither bulk copies nor clusters nor warpgroup products."""
    run_parts(Machine(arch=800).program(tmp_path / "grid"), 4, "quick")


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="copies of rows that are no multiple of 16 bytes read up to 4 bytes behind a full cache: chunks of kvq_set_window")
def test_nothing_behind_a_full_cache_is_read(tmp_path):
    """The grid has two rows behind the last token; without them the copies must stop at the tensor's end."""
    text, count = re.subn(r"p\.n_kv \+ 2\b", "p.n_kv", GRID.read_text())
    assert count >= 4
    source = tmp_path / "tight.cpp"
    source.write_text(text)
    run_parts(Machine().program(tmp_path / "tight", source), 4, "quick")


# ---- faults ----

DECODE = '#include "kvq-decode-shapes.cuh"\nkvq_decode_entry kvq_find_decode_33(int dk, int, bool) {{ return dk == {d} ? {make} : kvq_decode_entry {{}}; }}\n'
WHOLE_TILES = DECODE.format(d=128, make="kvq_decode_small<3, 3, 128>()")
ANY_SHAPE = DECODE.format(d=256, make="kvq_decode_make<3, 3, 256, 256, 128, 128, 1, 32, 3, 1>()")
CASES = {
    "linear": "P(3, 3, 128, 8, 4, 1, 1, 1088)", "short": "P(3, 3, 128, 8, 4, 1, 1, 128)", "general": "P(3, 3, 256, 2, 2, 2, 1, 420)",
    "prefill": "P(3, 3, 64, 1, 2, 32, 1, 200)", "wgmma": "P(3, 3, 64, 1, 4, 32, 1, 460)",
}

# a layer's step of decoding, see build_step
STEP = "step p = {{ {shape} }}; {options} check_step(p);"
STEPS = {
    "step": STEP.format(shape="3, 3, 128, 8, 4, 1", options="p.window = p.attends = true;"),
    "large step": STEP.format(shape="3, 3, 128, 2, 4, 9", options=""),
    "kept step": STEP.format(shape="3, 3, 128, 2, 2, 3", options="p.kept = p.factors = p.own_memory = true; p.neox = false;"),
    "calibrated step": STEP.format(shape="OSCAR2, 2, 128, 8, 4, 1", options="p.transform = p.window = p.attends = true;"),
    "calibrated step of several": STEP.format(shape="OSCAR2, 2, 128, 2, 2, 3", options="p.transform = p.kept = p.factors = p.own_memory = true; p.n_dims = 64;"),
}

# name: (file, part of the source, what it becomes, source that is compiled anew, case, what must be said; an empty text is a wrong result)
FAULTS = {
    "stage filled while it is read": ("kvq-decode.cuh", r"__syncthreads\(\);(\s*fetch\(tile \+ S::STAGES - 1\);)", r"\1", WHOLE_TILES, "linear", "that another thread reads, without a barrier"),
    "bulk copy not waited for": ("kvq-decode.cuh", r"kvq_bulk_wait\(full_s \+ i % S::STAGES\*8, .*?\);", ";", WHOLE_TILES, "linear", "that a copy is on its way to"),
    "queries overwritten without a fence": ("kvq-decode.cuh", r"(if \(LINEAR\) \{\s*)kvq_bulk_fence\(\);", r"\1", WHOLE_TILES, "linear", "without a fence"),
    "wait for the wrong phase": ("kvq-decode.cuh", r"\(i/S::STAGES\) & 1\);", "1 - ((i/S::STAGES) & 1));", WHOLE_TILES, "linear", "that a copy is on its way to"),
    "cluster not waited for": ("kvq-decode.cuh", r"kvq_cluster_sync\(\);(\s*if \(row < n_rows\))", r"\1", WHOLE_TILES, "short", "a block that may not have begun"),
    "block leaves its cluster early": ("kvq-decode.cuh", r"kvq_cluster_sync\(\);( +// the others may)", r"\1", WHOLE_TILES, "short", "a block that has left"),
    "asynchronous copies not waited for": ("kvq-decode.cuh", r"kvq_cp_wait<S::STAGES - 2>\(\)", "kvq_cp_wait<S::STAGES - 1>()", ANY_SHAPE, "general", "that a copy is on its way to"),
    "tokens of another lane": ("kvq-decode.cuh", r"const int k_at  = \(sl\*T \+ g\)", "const int k_at  = (sl*T + (g ^ 1))", ANY_SHAPE, "general", ""),
    "barrier inside a branch": ("kvq-decode.cuh", r"__syncthreads\(\);(\s*fetch\(tile \+ S::STAGES - 1\);)", r"if (warp > 0) { __syncthreads(); }\1", ANY_SHAPE, "general", "barrier"),
    "tile dequantised while it is read": ("kvq-prefill.cuh", r"(kvq_cp_wait<0>\(\);\s*)__syncthreads\(\);", r"\1", "instances/kvq-prefill-64.cu", "prefill", "without a barrier"),
    "warpgroup product not waited for": ("kvq-hopper.cuh", r"kvq_wgmma_wait<1>\(\)", "kvq_wgmma_wait<2>()", "hopper/kvq-hopper.cu", "wgmma", ""),
    "tile not shown to the tensor cores": ("kvq-hopper.cuh", r"kvq_async_fence\(\);", ";", "hopper/kvq-hopper.cu", "wgmma", "no fence has shown it"),
    "tile overwritten under a product": ("kvq-hopper.cuh", r"kvq_bulk_wait\(empty_s \+ 8\*slot,", "if (tile < 0) kvq_bulk_wait(empty_s + 8*slot,", "hopper/kvq-hopper.cu", "wgmma", "that another thread reads, without a barrier"),
    "barrier that counts too many": ("kvq-hopper.cuh", r"kvq_barrier_init\(full_s \+ 8\*lane, 256\)", "kvq_barrier_init(full_s + 8*lane, 257)", "hopper/kvq-hopper.cu", "wgmma", "wait for each other for ever"),
    "squares summed before they are there": ("kvq-rows.cuh", r"(__fmul_rn\(x\[r\], x\[r\]\);\s*\}\s*\}\s*)__syncwarp\(\);", r"\1", "kvq-rows.cu", "rows", "without a barrier"),
    "row behind the last": ("kvq-rows.cu", r"kvq_row_index\(a, at\)\*a\.nb_dst\[1\]", "(kvq_row_index(a, at) + 1)*a.nb_dst[1]", "kvq-rows.cu", "rows", ""),
    "sums halved without a barrier": ("kvq-combine.cuh", r"(const int half = \(rows \+ 1\)/2;\s*)__syncthreads\(\);", r"\1", "instances/kvq-prefill-64.cu", "prefill", "without a barrier"),
    "launch before not waited for": ("kvq-combine.cuh", r"kvq_pdl_wait\(\);\s*kvq_pdl_launch\(\);", "", "instances/kvq-prefill-64.cu", "prefill", "before the wait for the launch before"),
    "result behind the end": ("kvq-combine.cuh", r"float \* out = a\.dst \+ row\*DV;", "float * out = a.dst + row*DV + 4;", "instances/kvq-prefill-64.cu", "prefill", "store outside the buffers"),
    "partner of another pair": ("kvq-rotary.cuh", r"\(first \? i \+ half : i - half\) : i \^ 1;", "(first ? i + half - 1 : i - half) : i ^ 1;", "kvq-rows.cu", "step", ""),
    "turned the other way": ("kvq-rotary.cuh", r"other\[r\] = first \? -angle\.y : angle\.y;", "other[r] = first ? angle.y : -angle.y;", "kvq-rows.cu", "step", ""),
    "queries turned the other way": ("kvq-rotary.cuh", r"second\*angle\[p\]\.y;", "second*-angle[p].y;", "kvq-rows.cu", "step", ""),
    "factors left out": ("kvq-rotary.cuh", r"if \(t\.factors\)", "if (t.factors && pair < 0)", "kvq-rows.cu", "kept step", ""),
    "norm of half a row": ("kvq-rotary.cuh", r"i < t\.d; i \+= 32\)", "i < t.d/2; i += 32)", "kvq-rows.cu", "step", ""),
    "turned keys not stored": ("kvq-cuda.cu", r"if \(n_written && kvq_used_within", "if (n_written || kvq_used_within", "kvq-cuda.cu", "kept step", ""),
    "queries asked for while they are made": ("kvq-cuda.cu", r"if \(!made && next", "if (next", "kvq-cuda.cu", "step", "before the wait for the launch before"),
    "transform of a turn the other way": ("kvq-transform.cu", r"\(first \? -angle\.y : angle\.y\)", "(first ? angle.y : -angle.y)", "kvq-transform.cu", "calibrated step", ""),
    "transform of the first token's turn": ("kvq-transform.cu", r"set_token\(token\[c\]\);", ";", "kvq-transform.cu", "calibrated step of several", ""),
    "turn of columns without a barrier": ("kvq-transform.cu", r"__syncthreads\(\);(\s*set_token)", r"\1", "kvq-transform.cu", "calibrated step", "without a barrier"),
    "transformed keys written before they are whole": ("kvq-transform.cu", r"__syncthreads\(\);(\s*for \(int u = warp)", r"\1", "kvq-transform.cu", "calibrated step", "without a barrier"),
    "transformed keys not kept": ("kvq-transform.cu", r"if \(set\.keeps_keys\)", "if (set.keeps_keys && block < 0)", "kvq-transform.cu", "calibrated step of several", ""),
    "transform that waits for nothing": ("kvq-transform.cu", r"kvq_pdl_wait\(\);", ";", "kvq-transform.cu", "calibrated step", "FAULT"),
}
# so that every way of joining launches is walked
JOINED = {"KVQ_CUDA_JOIN": "3"}
# a compiler run each; the others wait for the slow tests
QUICK = {"queries asked for while they are made", "turned the other way", "tile not shown to the tensor cores", "tile overwritten under a product", "sums halved without a barrier"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The grid's program with a few cases in place of its grid, by name."""
    text = GRID.read_text()
    start = text.index("static void check_all(const bool quick) {")
    lines = "".join(f'    if (name == "{name}") {{ {case} }}\n' for name, case in [*((n, f"check_attention({c});") for n, c in CASES.items()), *STEPS.items()])
    body = f'static void check_all(bool) {{\n    const std::string name = getenv("CASE");\n{lines}    if (name == "rows") {{ check_rows(member(3, 64)); }}\n    (void) check_transforms; (void) check_steps; (void) check_windows; (void) check_biases;\n}}\n'
    end = text.index("\n}\n", start) + 3
    source = tmp_path_factory.mktemp("cuda-host-cases") / "cases.cpp"
    source.write_text(text[:start] + body + text[end:])
    return source


@pytest.mark.parametrize("fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAULTS])
def test_planted_fault_is_found(cases, tmp_path, fault):
    file, old, new, source, case, said = FAULTS[fault]
    kernels = tmp_path / "cuda"
    shutil.copytree(KERNELS, kernels)
    text, count = re.subn(old, new, (kernels / file).read_text(), count=1, flags=re.S)
    assert count, "the source has changed; plant the fault elsewhere"
    (kernels / file).write_text(text)
    machine, planted = Machine(), Machine(kernels, folder=tmp_path / "objects")
    if source.startswith("#include"):
        (kernels / "planted.cu").write_text(source)
        stands_for = next(p for p, _ in machine.jobs(False) if p.name.startswith("quick-33")).name
        made = planted.compile(kernels / "planted.cu", WATCHED)
    else:
        stands_for = Path(source).name
        made = planted.compile(kernels / source, PLAIN if source == "kvq-cuda.cu" else WATCHED)      # host code is not watched
    program = machine.program(tmp_path / "planted", cases, replaced={stands_for: made})
    done = subprocess.run([program], capture_output=True, text=True, env={**os.environ, **JOINED, "CASE": case, "CUDA_HOST_SM": "1"}, timeout=600)
    assert done.returncode == 1, done.stdout
    assert said in done.stdout if said else "FAIL" in done.stdout or "FAULT" in done.stdout, done.stdout


@pytest.mark.parametrize("case", ["wgmma", "prefill", *STEPS, *(pytest.param(c, marks=pytest.mark.slow) for c in ("linear", "short", "general", "rows"))])
def test_cases_of_the_faults_are_right_without(cases, tmp_path, case):
    done = subprocess.run([Machine().program(tmp_path / "right", cases)], capture_output=True, text=True, env={**os.environ, **JOINED, "CASE": case, "CUDA_HOST_SM": "1"})
    assert done.returncode == 0 and "FAULT" not in done.stdout, done.stdout


def test_every_instruction_has_a_twin():
    """A function that the kernels' header has and the machine's lacks would be found when a kernel that calls it is compiled, and no sooner."""
    names = [set(re.findall(r"\b(kvq_\w+)\(", p.read_text())) for p in (KERNELS / "kvq-ptx.cuh", ROOT / "tests/cuda/host/kvq-ptx-host.h")]
    assert names[0] <= names[1], names[0] - names[1]
