"""The host machine proves itself on upstream's q4_0 kernels: right results, and every planted fault found."""
import re

import pytest

from metal_host import HERE, execute

WANTED = r"q4_0_dk(64_dv64|128_dv128)$|(cpy|get_rows|set_rows).*q4_0|flash_attn_ext_(pad|blk|vec_reduce|kv_q4_0_f16)|f16_dk(64_dv64|128_dv128)$"
FILES = ("quantize", "fa_q4_0", "fa_vec_q4_0", "fa_f16", "fa_aux")

# name: (file, part of the source, what it becomes, cases that must fail, what must be said; an empty text is a wrong result)
FAULTS = {
    "barrier between logits and softmax gone": ("fa_q4_0", r"(simdgroup_store\(mqk, ss \+ 8\*cc, SH, 0, false\);\s*\}\s*\}\s*)threadgroup_barrier\([^;]*;", r"\1", "mat",
                                                "without a barrier"),
    "barrier that orders no threadgroup memory": ("fa_q4_0", r"(= vs2;.*?)threadgroup_barrier\(mem_flags::mem_threadgroup\)", r"\1threadgroup_barrier(mem_flags::mem_none)", "mat",
                                                  "without a barrier"),
    "barrier inside a branch": ("fa_q4_0", r"threadgroup_barrier\(mem_flags::mem_threadgroup\);(\s*float S\[NQ\])",
                                r"if (sgitg > 0) { threadgroup_barrier(mem_flags::mem_threadgroup); }\1", "mat", "barrier"),
    "threadgroup memory read before it is written": ("fa_vec_q4_0", r"sq4\[qq\*PK4 \+ i\] = \(q4_t\) q4\[i\];", ";", "vec", "uninitialised"),
    "wrong lane in a reduction": ("fa_vec_q4_0", r"simd_shuffle_down\(mqk\[qq\]\[cc\], 4\)", "simd_shuffle_down(mqk[qq][cc], 3)", "vec", ""),
    "lane that does not exist": ("fa_vec_q4_0", r"simd_shuffle\(mqk\[qq\]\[cc\], NL\*ty\)", "simd_shuffle(mqk[qq][cc], NL*ty + 32)", "vec", "lane that does not exist"),
    "off by one row of the cache": ("quantize", r"(void\s+kernel_set_rows_q32\(.*?)i1\*args\.nb1", r"\1(i1 + 1)*args.nb1", "set", ""),
    "store behind the end of a tensor": ("quantize", r"pdst\[ind\] = temp;", "pdst[ind + 16] = temp;", "get", "store outside the buffers"),
    "wrong KV head for a query head": ("fa_vec_q4_0", r"ikv2 = iq2/\(args\.ne02/args\.ne_12_2\);", "ikv2 = iq2 % args.ne_12_2;", "vec", ""),
    "load behind the last token": ("quantize", r"dequantize_func\(src_data \+ i00/nl", "dequantize_func(src_data + 4 + i00/nl", "to", "a load of"),
    "misaligned load": ("quantize", r"xb \+ 1\);(\s*const float d1 = il \?)", r"((const char *) xb + 3));\1", "get", "misaligned"),
    "matrix read without its transpose": ("fa_q4_0", r"(simdgroup_load\(mk, sk \+ 16\*k \+ 0\*8, 4\*16, 0, )true", r"\1false", "mat", ""),
    "all threadgroups write one result": ("fa_aux", r"dst \+ rid\*DV4;", "dst;", "vec", "two threads store"),
}


@pytest.fixture(scope="module")
def proof(machine):
    """Program, translated texts and libraries of upstream's kernels."""
    texts = {name: machine.upstream_kernels(name, WANTED) for name in FILES}
    return machine.program(HERE / "test-q4-0.cpp"), texts, {name: machine.library(text, f"upstream-{name}") for name, text in texts.items()}


def test_upstream_kernels_are_right(proof):
    program, _, libraries = proof
    done = execute(program, libraries.values())
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok ") == 8


def test_upstream_relies_on_lanes_in_step(proof):
    """Without lanes that run together, its vector kernel reads what other lanes have not written yet. The project's kernels run so."""
    program, _, libraries = proof
    done = execute(program, libraries.values(), "vec", strict=True)
    assert done.returncode == 1 and "without a barrier" in done.stdout


# a compiler run each; the others wait for the slow tests
QUICK = {"barrier between logits and softmax gone", "wrong lane in a reduction", "store behind the end of a tensor"}


@pytest.mark.parametrize("fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAULTS])
def test_planted_fault_is_found(machine, proof, fault):
    file, old, new, case, said = FAULTS[fault]
    program, texts, libraries = proof
    text, count = re.subn(old, new, texts[file], flags=re.S)
    assert count, "the source has changed; plant the fault elsewhere"
    bad = machine.library(text, "planted")
    done = execute(program, [bad if name == file else library for name, library in libraries.items()], case)
    assert done.returncode == 1, done.stdout
    assert said in done.stdout, done.stdout
