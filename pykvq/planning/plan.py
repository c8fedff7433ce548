"""Memory of a model with a cache type, as the build would allocate it.

libllama is asked itself, with llama_model_params.no_alloc: it reads the header, lays out weights, caches and the compute graph and
allocates none of them. So every architecture that it can load is planned by the code that will allocate it.
"""
from __future__ import annotations

from dataclasses import dataclass

from pykvq.engine import Context, Model
from pykvq.kv_info import CacheInfo
from pykvq.support import OURS

_STEP = 256                          # llama.cpp pads the cells of a sequence to this


@dataclass(frozen=True)
class Setup:
    """What is planned: `context` tokens over all `parallel` sequences (llama-server's -c and -np), micro-batches of `ubatch` tokens.

    foreign: for a GPU that this build does not drive, so what CUDA adds to the graph is estimated.
    """
    context: int
    parallel: int = 1
    ubatch: int = 512
    unified: bool = False
    swa_full: bool = False
    kv_sink: int | None = None
    kv_recent: int | None = None
    foreign: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes of one type. kv includes f16 windows; `state` is the recurrent part; `scratch` is inside `compute`: f16 copies of one layer, estimated; `host`
    is what of the total lies in the host's memory where a GPU holds the rest."""
    info: CacheInfo
    weights: int
    kv: int
    state: int
    compute: int
    scratch: int
    host: int

    @property
    def total(self) -> int:
        """Weights, caches, compute."""
        return self.weights + self.kv + self.state + self.compute

    @property
    def device(self) -> int:
        """What the budget has to hold: all but the host's part."""
        return self.total - self.host


def memory(model: Model, kv_type: tuple[str, str], setup: Setup) -> Memory:
    """Of a model opened with no_alloc. Raises ValueError when llama.cpp refuses the type or the context."""
    with Context(model, setup.context, kv_type, n_seq=setup.parallel, unified=setup.unified, n_batch=setup.ubatch, swa_full=setup.swa_full,
                 n_outputs=setup.parallel, kv_sink=setup.kv_sink, kv_recent=setup.kv_recent) as context:
        info, buffers = context.info(), context.memory_info()
    scratch = _copies(info) if setup.foreign else 0
    caches = sum(b.context for b in buffers)
    on_gpu = any(not b.host for b in buffers)
    host = sum(b.weights + b.context + b.compute for b in buffers if b.host) if on_gpu else 0
    return Memory(info, sum(b.weights for b in buffers), info.bytes, caches - info.bytes, sum(b.compute for b in buffers) + scratch, scratch, host)


def _copies(info: CacheInfo) -> int:
    """Most that CUDA's prefill adds to the graph: K and V of one layer in f16, for every type but f16 and those of this package."""
    return max((layer.bytes_f16 for layer in info if not {layer.type_k.split("_")[0], layer.type_v.split("_")[0]} <= {"f16", *OURS}), default=0)


def longest(model: Model, kv_type: tuple[str, str], setup: Setup, budget: int, limit: int) -> int:
    """The longest context, up to `limit` tokens, whose memory fits `budget` bytes; 0 when none does."""
    step = _STEP * setup.parallel

    def fits(steps: int) -> bool:
        return memory(model, kv_type, Setup(steps * step, **{k: v for k, v in vars(setup).items() if k != "context"})).device <= budget
    low, high = 0, max(limit // step, 1)
    if fits(high):
        return high * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step
