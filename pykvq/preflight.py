"""What can be known from the command line of a llama.cpp program before it loads anything: one line and exit code 2 instead
of a usage text, an abort, or a process that the kernel kills for its memory."""
from __future__ import annotations

import os
from collections.abc import Sequence

from pykvq.gguf_header import ModelFileError, read_header
from pykvq.llama_glue import check_cache
from pykvq.native import NativeError, library_dir
from pykvq.support import VALID_NAMES, is_quantised, type_id

_MODEL = ("-m", "--model")
_DRAFT_MODEL = ("-md", "--model-draft", "--spec-draft-model")
_TYPE_K, _TYPE_V = ("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")
_DRAFT_K = ("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k")
_DRAFT_V = ("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v")
_FLASH, _CONTEXT, _LAYERS = ("-fa", "--flash-attn"), ("-c", "--ctx-size"), ("-ngl", "--gpu-layers", "--n-gpu-layers")
_TYPED = {*_TYPE_K, *_TYPE_V, *_DRAFT_K, *_DRAFT_V}
_VALUED = {*_MODEL, *_DRAFT_MODEL, *_TYPED, *_CONTEXT, *_LAYERS}
_KVQ = ("--kvq",)
# what llama.cpp's programs read where an option is absent
_ENVIRONMENT = {_MODEL: "LLAMA_ARG_MODEL", _TYPE_K: "LLAMA_ARG_CACHE_TYPE_K", _TYPE_V: "LLAMA_ARG_CACHE_TYPE_V",
                _FLASH: "LLAMA_ARG_FLASH_ATTN", _CONTEXT: "LLAMA_ARG_CTX_SIZE", _LAYERS: "LLAMA_ARG_N_GPU_LAYERS", _KVQ: "LLAMA_ARG_KVQ"}
_GPU_LIBRARIES = ("cuda", "hip", "metal", "vulkan", "sycl", "musa", "cann", "opencl")


def complaint(arguments: Sequence[str], program: str = "llama-server") -> str | None:
    """Why these arguments of a program cannot work, in one line; None when nothing speaks against them.

    Only what is certain: a model that is still to be downloaded, or a setting left to llama.cpp, is not judged.
    """
    if program == "ggml-rpc-server":             # has no model, and its -c is another
        return None
    if arguments and arguments[-1] in _VALUED:
        return f"{arguments[-1]} needs a value" + (f": {', '.join(VALID_NAMES)}" if arguments[-1] in _TYPED else "")
    try:
        types_k, types_v = ([_value(arguments, names, "f16")] for names in (_TYPE_K, _TYPE_V))
        if program == "llama-bench":             # it alone takes lists
            types_k, types_v = types_k[0].split(","), types_v[0].split(",")
        draft_k, draft_v = (_value(arguments, names, "f16") for names in (_DRAFT_K, _DRAFT_V))
        for name in (*types_k, *types_v, draft_k, draft_v):
            type_id(name)
        draft = _value(arguments, _DRAFT_MODEL, "")
        quantised = next(filter(is_quantised, (*types_v, draft_v) if draft else types_v), None)
        if quantised and {"off", "0", "false", "disabled"} & {*_value(arguments, _FLASH, "auto").split(",")}:
            return f"a V cache of type {quantised} needs flash attention; leave --flash-attn on or auto, or use --cache-type-v f16"
        kvq = _value(arguments, _KVQ, "auto")
        if kvq not in ("auto", "off"):
            return f"--kvq takes auto or off, not {kvq}"
        model, context = _value(arguments, _MODEL, ""), _value(arguments, _CONTEXT, "0")
        if context[:1] == "-" and context[1:].isdecimal():
            return f"a context of {context} tokens is none; use 0 for the model's own or a positive number"
        if model and "," not in model:
            header = read_header(model)
            n_ctx = int(context) if context.isdecimal() else 0
            on_host = not (_has_gpu() or "--rpc" in arguments) or _value(arguments, _LAYERS, "auto") == "0" or {"-nkvo", "--no-kv-offload"} & {*arguments}
            for k, v in ((k, v) for k in types_k for v in types_v):
                check_cache(header, type_id(k), type_id(v), n_ctx, cache_on_host=bool(on_host and n_ctx), words=("-c ", "cache type (-ctk, -ctv)"))
        if draft:
            check_cache(read_header(draft), type_id(draft_k), type_id(draft_v), 0, cache_on_host=False)
    except (ModelFileError, ValueError, MemoryError) as error:
        return str(error)
    except NativeError:
        return None                              # the program itself says what is missing
    return None


def _value(arguments: Sequence[str], names: Sequence[str], default: str) -> str:
    """What follows the last of these options, or their environment variable."""
    found = [value for option, value in zip(arguments, arguments[1:]) if option in names]
    return found[-1] if found else os.environ.get(_ENVIRONMENT.get(names, ""), default)


def _has_gpu() -> bool:
    return any(path for name in _GPU_LIBRARIES for path in library_dir().glob(f"*ggml-{name}*"))
