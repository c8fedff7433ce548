"""Which cache type works where: the one query that the tools, the Python API and the tests ask before a model is loaded."""
from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

from pykvq.formats import BLOCKS, FAMILIES, TIERED, TYPES

# Cache types of llama.cpp itself: ggml id, values per block, bytes per block (the list of --cache-type-k).
UPSTREAM = {"f32": (0, 1, 4), "f16": (1, 1, 2), "bf16": (30, 1, 2), "q8_0": (8, 32, 34), "q4_0": (2, 32, 18), "q4_1": (3, 32, 20),
            "iq4_nl": (20, 32, 18), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24)}

# Families that each backend has kernels for (cache write, dequantise, flash attention at every declared block size).
OURS = (*FAMILIES, *TIERED)
KERNELS = {"cpu": frozenset(OURS), "cuda": frozenset(OURS), "metal": frozenset(OURS), "vulkan": frozenset()}

# Backends whose attention returns a key bias that the stored keys lack.
KEY_BIAS_BACKENDS = frozenset({"cpu", "cuda"})

# First and last tokens of a sequence that a cache of these types also keeps in f16, and the tokens of a batch that find room there at least (kvq-window.cpp).
WINDOW, WINDOW_ROOM = (64, 256), 16

IDS = {name: row[0] for name, row in UPSTREAM.items()} | {name: t.id for name, t in TYPES.items()}
NAMES = {i: name for name, i in IDS.items()}
VALID_NAMES = (*OURS, *UPSTREAM)            # what users type; the cache picks members such as turbo3_64 by itself


class Support(NamedTuple):
    """ok, or why not and what to do instead."""
    ok: bool
    reason: str = ""
    fix: str = ""


def window_rows(type_k: str, type_v: str, cells: int, sink: int | None = None, recent: int | None = None) -> int:
    """Rows that one sequence's f16 window takes beside a cache of `cells`, 0 when none of the types is of this package; None is the default."""
    if not {type_k, type_v} & set(OURS):
        return 0
    most = max(cells // 2 - WINDOW_ROOM - 1, 0)
    sink = min(WINDOW[0], most // 4) if sink is None else sink
    recent = min(WINDOW[1], max(most - sink, 0)) if recent is None else recent
    rows = min(sink + recent + (WINDOW_ROOM if recent else 0), cells) + 1
    return (rows + 63) // 64 * 64 if sink + recent else 0


def type_id(name: str) -> int:
    """ggml id of a cache type; a family's id is that of its 128 member, from which the cache picks per layer.

    Raises ValueError, listing the valid names, for any other name, and for a member: a layer may have to get another one.
    """
    if name not in VALID_NAMES:
        member = f" ({name} is a block layout, which the cache picks by head size)" if isinstance(name, str) and name in TYPES else ""
        raise ValueError(f"unknown cache type {name!r}{member}; valid: {', '.join(VALID_NAMES)}")
    return IDS[name]


def type_name(ggml_type: int) -> str:
    """Name of a ggml id as the cache reports it, e.g. "turbo3_64"; "type 77" for an id that is no cache type."""
    return NAMES.get(ggml_type, f"type {ggml_type}")


def family_of(name: str) -> str:
    """"turbo3" for every member of the family, the name itself for llama.cpp's own types. Raises ValueError as type_id does."""
    if name in TYPES:
        return TYPES[name].family
    type_id(name)
    return name


def effective_type(name: str, head_dim: int) -> str:
    """The type that a layer of `head_dim` really gets: the first member, in the order of formats.BLOCKS, whose block divides it.

    Raises ValueError for an unknown name and for a head size that no block divides.
    """
    family = family_of(name)
    if family in UPSTREAM:
        block = UPSTREAM[family][1]
        if head_dim % block:
            raise ValueError(f"the block of {block} values of {family} does not divide head size {head_dim}")
        return family
    for n in BLOCKS:
        if head_dim > 0 and head_dim % n == 0:
            return next(t.name for t in TYPES.values() if t.family == family and t.block == n)
    raise ValueError(f"no block of {family} ({', '.join(map(str, sorted(BLOCKS)))} values) divides head size {head_dim}")


def block_for(name: str, head_dim: int) -> int:
    """Values per block in a layer of `head_dim`. Raises ValueError as effective_type does."""
    effective = effective_type(name, head_dim)
    return TYPES[effective].block if effective in TYPES else UPSTREAM[effective][1]


def row_bytes(name: str, head_dim: int) -> int:
    """Cache bytes of one vector of `head_dim` values. Raises ValueError as effective_type does."""
    effective = effective_type(name, head_dim)
    block, size = (TYPES[effective].block, TYPES[effective].bytes) if effective in TYPES else UPSTREAM[effective][1:]
    return head_dim // block * size


def is_quantised(name: str) -> bool:
    """True when a V cache of this type needs flash attention."""
    return family_of(name) not in ("f32", "f16", "bf16")


def supports(name: str, head_dim: int | tuple[int, int], backend: str = "cpu") -> Support:
    """Whether `backend` can keep and attend a cache of type `name` with heads of `head_dim` values.

    name: a family or a type of llama.cpp. head_dim: of K and V, or the pair (K, V) where they differ.
    backend: "cpu", "cuda", "metal" or "vulkan". Raises ValueError for an unknown name or backend and for a
    head_dim that is none.
    """
    type_id(name)
    if backend not in KERNELS:
        raise ValueError(f"unknown backend {backend!r}; valid: {', '.join(KERNELS)}")
    heads = tuple(head_dim) if isinstance(head_dim, (tuple, list)) else (head_dim,)
    if len(heads) not in (1, 2) or not all(isinstance(d, Integral) and d > 0 for d in heads):
        raise ValueError(f"head_dim is a number of values per head, or such a pair for K and V, not {head_dim!r}")
    try:
        _fit(name, heads)
    except ValueError as error:
        return Support(False, str(error), _alternative(heads, backend))
    if name in OURS and name not in KERNELS[backend]:
        return Support(False, f"the {backend} backend has no kernels for {name}",
                       "keep the cache on the CPU (--no-kv-offload, offload_kqv=False) or use f16 or q8_0")
    return Support(True)


def _fit(name: str, heads: tuple[int, ...]) -> None:
    for d in heads:
        effective_type(name, d)


def _alternative(heads: tuple[int, ...], backend: str) -> str:
    """Remedy for a head size: the first two types that fit it, ours first."""
    fits = []
    for name in (*sorted(KERNELS[backend]), "q8_0", "f16"):
        try:
            _fit(name, heads)
            fits.append(name)
        except ValueError:
            continue
    return f"use {' or '.join(fits[:2])}"
