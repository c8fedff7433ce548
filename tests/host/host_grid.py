"""The grid of tests/cuda/test-kvq-cuda.cpp for the host machines: in parts, without what would take a CPU minutes."""
from __future__ import annotations

import re

FILTER = """
#include <cstdlib>
// the checks of other parts, and those that would take a CPU minutes
static bool left_out(const double work) {
    static int n;
    const char * part = getenv("HOST_PART"), * parts = getenv("HOST_PARTS");
    return work > LIMIT || (part && n++ % atoi(parts) != atoi(part));
}
"""
WORK = "double(p.dk)*p.heads_kv*p.gqa*p.tokens*p.seqs*(p.n_kv + p.n_window)"


def in_parts(text: str, limit: float) -> str:
    """The grid's program; HOST_PART of HOST_PARTS in the environment says what a run checks. limit: products of queries and keys."""
    for name, work in (("rows", "0"), ("attention", WORK), ("write_and_attention", WORK), ("four_writes", "0"), ("transform", "0")):
        text, count = re.subn(rf"(static void check_{name}\([^)]*\) {{\n)", rf"\1    if (left_out({work})) {{ return; }}\n", text, count=1)
        assert count, f"check_{name} has changed"
    return FILTER.replace("LIMIT", str(limit)) + text
