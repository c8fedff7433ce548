"""Devices of other hosts, where a ggml-rpc-server of the same build runs (docs/several-machines.md)."""
from __future__ import annotations

import ctypes

from pykvq.llama_glue import forget, reason
from pykvq.native import library


def add_servers(*endpoints: str) -> None:
    """Make the devices behind "HOST:PORT" available to models loaded afterwards: their layers go there with n_gpu_layers.

    Raises ValueError for a server that cannot be reached or is of another build.
    """
    import llama_cpp.llama_cpp as bindings       # its libraries come first, so that there is one registry of devices
    bindings.llama_backend_init()
    rpc, ggml = library("ggml-rpc"), library("ggml")
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    for endpoint in endpoints:
        forget()
        registry = rpc.ggml_backend_rpc_add_server(endpoint.encode())
        if not registry:
            raise ValueError(reason(f"RPC server {endpoint} cannot be used"))
        ggml.ggml_backend_register(registry)
