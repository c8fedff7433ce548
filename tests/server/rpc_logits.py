"""Logits of a model for several cache types, on this machine or on RPC servers; a program of its own, since devices stay registered.

    rpc_logits.py MODEL OUT.npz [HOST:PORT,...] TYPE...
"""
import sys

import numpy as np

from pykvq.engine import Context, Model, quiet_log
from pykvq.rpc import add_servers

model_path, out, servers, *types = sys.argv[1:]
quiet_log()
if servers:
    add_servers(*servers.split(","))
tokens = [(7 * i * i + 3) % 256 for i in range(96)]
result = {}
with Model(model_path, gpu_layers=99 if servers else 0) as model:
    for name in types:
        with Context(model, 256, tuple(name.split("-")) if "-" in name else name, threads=2) as context:
            rows = [context.decode(tokens[:80], 0, logits="all")]
            rows += [context.decode(tokens[i:i + 1], i) for i in range(80, 96)]
            result[name] = np.concatenate(rows)
            context.shift(0, 40, 3)              # the K-shift and a saved state run through the wire too
            state = context.save(0)
            context.load(state, 0)
            result[name + " shifted"] = context.decode(tokens[:1], 99)
            result[name + " device"] = np.array(sorted({layer.device for layer in context.info()}))
np.savez(out, **result)
