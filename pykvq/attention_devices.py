"""Where flash attention really ran: observed in the graph while it is computed, not read off a setting."""
from __future__ import annotations

import ctypes
import re

from pykvq.ggml_tensor import OP_OFFSET, Tensor, op_number, root
from pykvq.native import library

_KEYS = re.compile(rb"cache_k_l(\d+)")


class AttentionDevices:
    """An eval callback that notes, per layer, the backend whose buffer holds the result of FLASH_ATTN_EXT: it computed it."""

    def __init__(self):
        self.by_layer: dict[int, str] = {}
        self._op, self._name = op_number("FLASH_ATTN_EXT"), library("ggml-base").ggml_backend_buffer_name
        self._name.argtypes, self._name.restype = [ctypes.c_void_p], ctypes.c_char_p

    def __call__(self, pointer, ask, _) -> bool:
        if ctypes.c_int.from_address(pointer + OP_OFFSET).value != self._op:
            return not ask
        if not ask:
            t = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
            keys = _KEYS.match(root(t.src[1].contents).name)
            if keys:
                name = self._name(root(t).buffer).decode()
                self.by_layer[int(keys[1])] = "CPU" if name.endswith("_Host") else name      # pinned memory of the host
        return True
