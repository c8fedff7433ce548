"""Bodies of the call sites that patches/0010 puts into llama_cpp: kv_type=, kv_cache_info(), one-line errors.

Imports nothing of llama_cpp at module level, because llama_cpp imports this module while it is being imported itself.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from pathlib import Path

from pykvq.devices import has_gpu
from pykvq.formats import ACTIVATION_IDS, TIERED, TYPE_COUNT
from pykvq.gguf_header import Header, read_header
from pykvq.kv_info import CacheInfo, cache_info
from pykvq.native import library
from pykvq.support import NAMES, VALID_NAMES, family_of, is_quantised, supports, type_id, type_name, window_rows

_errors: deque[str] = deque(maxlen=8)            # the last error lines of llama.cpp
_BIASED = ("t5",)                                # architectures whose attention llama.cpp computes without flash attention
_ERROR, _CONTINUED = 4, 5                        # enum ggml_log_level


def split_kv_type(kv_type: str | tuple[str, str]) -> tuple[str, str]:
    """Names of K and V. Raises ValueError for anything but one known name or a pair of them."""
    pair = (kv_type, kv_type) if isinstance(kv_type, str) else kv_type
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"kv_type takes one name or a pair (K, V), not {kv_type!r}")
    for name in pair:
        type_id(name)
    return tuple(pair)


def resolve_kv_type(kv_type, type_k: int | None, type_v: int | None, flash_attn: bool) -> tuple[int | None, int | None, bool]:
    """ggml ids of K and V and flash_attn as Llama.__init__ goes on with them.

    Raises ValueError for a wrong name, for kv_type beside type_k or type_v, and for a quantised V without flash attention.
    """
    if kv_type is None:
        name = NAMES.get(type_v, "f16")
        if is_quantised(name) and not flash_attn:
            raise ValueError(f"a V cache of type {name} needs flash attention; pass flash_attn=True, or kv_type={name!r}, which sets it")
        return type_k, type_v, flash_attn
    if type_k is not None or type_v is not None:
        raise ValueError("kv_type sets type_k and type_v; pass either kv_type or those two, not both")
    k, v = split_kv_type(kv_type)
    return type_id(k), type_id(v), True


def kvq_is_off(kvq: str) -> bool:
    """llama_context_params.kvq_off for Llama(kvq=...). Raises ValueError for anything but "auto" and "off"."""
    if kvq not in ("auto", "off"):
        raise ValueError(f'kvq takes "auto" or "off", not {kvq!r}')
    return kvq == "off"


def window(kv_sink: int | None, kv_recent: int | None) -> tuple[int, int]:
    """llama_context_params.kv_sink and .kv_recent; None or -1 is the default of the cache type. Raises ValueError for what is no number of tokens."""
    pair = tuple(-1 if n is None else n for n in (kv_sink, kv_recent))
    if not all(isinstance(n, int) and not isinstance(n, bool) and -1 <= n <= 1 << 24 for n in pair):
        raise ValueError(f"kv_sink and kv_recent are numbers of tokens, or None for the default, not {kv_sink!r} and {kv_recent!r}")
    return pair


def is_bulk(key: str) -> bool:
    """True for metadata of megabytes that no reader of Llama.metadata wants."""
    return key.startswith("kvq.blk.")


def check_before_load(llm, n_ctx: int) -> None:
    """Refuse what would fail or abort later, once Llama.__init__ has its parameters. n_ctx 0 is the trained context.

    Raises ModelFileError for a missing or truncated file, ValueError for a head size without a block, MemoryError for a
    cache that cannot fit into the host's memory.
    """
    forget()
    on_device = llm.model_params.n_gpu_layers and llm.context_params.offload_kqv and has_gpu()
    header = read_header(llm.model_path)
    if not llm.model_params.vocab_only:
        check_cache(header, llm.context_params.type_k, llm.context_params.type_v, n_ctx, cache_on_host=not on_device,
                    f16_window=(llm.context_params.kv_sink, llm.context_params.kv_recent))


def check_cache(header: Header, type_k: int, type_v: int, n_ctx: int, cache_on_host: bool = True,
                words: tuple[str, str] = ("n_ctx=", "kv_type"), f16_window: tuple[int, int] = (-1, -1)) -> None:
    """Refuse a cache, by ggml ids, that does not fit the model's heads or the host's memory; raises as check_before_load.

    words: what the caller's user types before a context size, and for a type. f16_window: as window() gives it.
    """
    for unknown in filter(lambda i: not _is_ggml_type(i), (type_k, type_v)):
        raise ValueError(f"{unknown} is no id of a cache type; use kv_type= with one of {', '.join(VALID_NAMES)}")     # it would abort or crash
    names = type_name(type_k), type_name(type_v)
    if not header.heads_kv or not all(name in NAMES.values() for name in names):
        return                                   # nothing is cached, or a type that only llama.cpp itself can judge
    if header.mla and type_k != type_v:
        raise ValueError(f"{header.name} (MLA) keeps its values inside the keys; use one type for both, not K {names[0]} V {names[1]}")
    for name, head_dim in zip(names, header.block_dims):
        ok, reason, fix = supports(name, head_dim)
        if not ok:
            latent = f", the common part of {header.head_dim_k} (K) and {header.head_dim_v} (V) in MLA" if header.mla else ""
            raise ValueError(f"{header.name}: {reason}{latent}; {fix}")
    if names[0] in TIERED and not header.calibrated:
        raise ValueError(f"{header.name}: {names[0]} keeps keys in a calibrated basis, which this model does not carry; "
                         f"run: pykvq embed-rotations {header.path}, or use turbo2")
    if header.architecture in _BIASED and is_quantised(names[1]):
        raise ValueError(f"{header.name}: {header.architecture} adds a position bias, which flash attention does not take, and a V cache of type "
                         f"{names[1]} needs it; use f16 for V")
    if cache_on_host:
        _check_memory(header, *names, n_ctx or header.context_train, words, f16_window)


def _is_ggml_type(i: int) -> bool:
    """True for an id that has a block size: ids of removed types and those that formats.toml leaves free have none."""
    return i in NAMES or 0 <= i < TYPE_COUNT and i not in ACTIVATION_IDS.values() and library("ggml-base").ggml_blck_size(i) > 0


def _check_memory(header: Header, type_k: str, type_v: str, n_ctx: int, words: tuple[str, str], f16_window: tuple[int, int]) -> None:
    rows = 0 if header.mla else window_rows(type_k, type_v, n_ctx, *(None if n < 0 else n for n in f16_window))
    beside = header.cache_bytes("f16", "f16", rows)
    need, free = header.cache_bytes(type_k, type_v, n_ctx) + beside, available_memory()
    if need > free:
        fits = int(n_ctx * max(free - beside, 0) / (need - beside)) // 256 * 256
        raise MemoryError(f"a context of {n_ctx} needs {need / 2**30:.1f} GiB of {type_k}/{type_v} cache (estimated), {free / 2**30:.1f} GiB "
                          f"of memory are free; use {words[0]}{fits} or less, or a smaller {words[1]}")


def available_memory() -> int:
    """Bytes of memory that can be had without swapping: what the kernel and the control group leave; all of it where neither tells."""
    limits = []
    try:
        with open("/proc/meminfo") as f:
            limits += [int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):                # no Linux, no control group, or a group without a limit ("max")
        pass
    if limits:
        return min(limits)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 62


def record(level: int, text: bytes) -> None:
    """Keep error lines of llama.cpp's log, so that reason() can quote them."""
    line = text.decode("utf-8", "replace").strip()
    if level == _ERROR and line:
        _errors.append(line)
    elif level == _CONTINUED and line and _errors:
        _errors[-1] += line


def forget() -> None:
    """Drop recorded errors, so that reason() quotes only what comes after."""
    _errors.clear()


def reason(message: str) -> str:
    """`message` with the cause that llama.cpp logged, as one line; forgets the recorded errors.

    The first error is the cause, those after it tell what failed because of it; but one that names a remedy knows more.
    """
    texts = [line.split(": ", 1)[-1] for line in _errors]
    forget()
    hint = "; use a smaller n_ctx or a smaller kv_type" if any("alloc" in text for text in texts) else ""
    cause = next((text for text in texts if "; run: " in text or "to RPC server" in text), texts[0] if texts else "")
    return f"{message}: {cause}{hint}" if cause else message


def info(llm) -> CacheInfo:
    """Body of Llama.kv_cache_info(). Raises ValueError once the model is closed."""
    import llama_cpp.llama_cpp as bindings
    if not llm.ctx:
        raise ValueError("this Llama is closed; load the model again")
    return cache_info(bindings._lib, llm.ctx)


def _identity(llm) -> dict[str, object]:
    metadata = json.dumps(llm.metadata, sort_keys=True).encode()
    return {"model": hashlib.sha256(metadata).hexdigest(), "name": llm.metadata.get("general.name", ""),
            "types": [(layer.type_k, layer.type_v) for layer in info(llm)],
            "transforms": [layer.transform for layer in info(llm)]}


def stamped(llm, state):
    """The LlamaState with what check_state compares: the model's metadata, cache types and transforms of every layer."""
    state.kvq_identity = _identity(llm)
    return state


def check_state(llm, state) -> None:
    """Refuse, before anything is overwritten, a LlamaState of another model or cache type, or one too long for the context.

    Raises ValueError.
    """
    forget()
    if state.n_tokens > llm.n_ctx():
        raise ValueError(f"the saved state holds {state.n_tokens} tokens, the context {llm.n_ctx()}; load the model with n_ctx={state.n_tokens}")
    theirs, ours = getattr(state, "kvq_identity", None), _identity(llm)
    if theirs is None:
        return                                   # saved by an unpatched llama_cpp: llama.cpp's own checks remain
    if theirs["model"] != ours["model"]:
        raise ValueError(f"the saved state belongs to another model ({theirs['name'] or 'unnamed'}); load that model first")
    if theirs["types"] != ours["types"]:
        k, v = theirs["types"][0]
        raise ValueError(f"the saved state holds a cache of type K {k} V {v}, this context has K {ours['types'][0][0]} V {ours['types'][0][1]}; "
                         f"load the model with kv_type={(family_of(k), family_of(v))!r}")
    if theirs["transforms"] != ours["transforms"]:
        raise ValueError("the saved state was stored with other calibrated transforms; load the model with the calibration and the kvq= of then")
