"""The devices that ggml sees, with their memory."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass

from pykvq.native import library

_CPU, _GPU, _INTEGRATED = 0, 1, 2            # enum ggml_backend_dev_type
_BACKENDS = {"CPU": "cpu", "CUDA": "cuda", "Metal": "metal", "MTL": "metal", "Vulkan": "vulkan"}     # by the start of a device's name


@dataclass(frozen=True)
class Device:
    """A device that can hold a cache; bytes of its memory, `free` as it is now."""
    name: str
    description: str
    gpu: bool
    free: int
    total: int

    @property
    def backend(self) -> str | None:
        """As pykvq.support names it; None for one without kernels of ours."""
        return next((backend for start, backend in _BACKENDS.items() if self.name.startswith(start)), None)


def devices() -> list[Device]:
    """CPU, GPUs and integrated GPUs. Raises NativeError when the libraries are missing."""
    lib, base = library("ggml"), library("ggml-base")
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.argtypes, lib.ggml_backend_dev_get.restype = [ctypes.c_size_t], ctypes.c_void_p
    for f in (base.ggml_backend_dev_name, base.ggml_backend_dev_description):
        f.argtypes, f.restype = [ctypes.c_void_p], ctypes.c_char_p
    base.ggml_backend_dev_type.argtypes, base.ggml_backend_dev_type.restype = [ctypes.c_void_p], ctypes.c_int
    base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    base.ggml_backend_dev_memory.restype = None
    found = []
    for handle in map(lib.ggml_backend_dev_get, range(lib.ggml_backend_dev_count())):
        kind = base.ggml_backend_dev_type(handle)
        if kind in (_CPU, _GPU, _INTEGRATED):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            base.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
            found.append(Device(base.ggml_backend_dev_name(handle).decode(), base.ggml_backend_dev_description(handle).decode(),
                                kind != _CPU, free.value, total.value))
    return found


def has_gpu() -> bool:
    """Whether a GPU can hold layers. llama_supports_gpu_offload is true of every build that has RPC."""
    return any(device.gpu for device in devices())
