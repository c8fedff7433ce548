#!/usr/bin/env python3
"""Bytes and time on the wire to a ggml-rpc-server that holds all layers, per cache type.

    python tools/measure_rpc.py MODEL [--types f16 turbo4 turbo3 turbo2] [--delay-ms 0] [--prompt 512] [--tokens 32]

The server runs on this machine behind a link that counts bytes and delays each way by --delay-ms.
"""
from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from rpc_proxy import Link                       # noqa: E402

from pykvq.comparison import passage             # noqa: E402
from pykvq.engine import Context, Model, quiet_log   # noqa: E402
from pykvq.launch import executable              # noqa: E402
from pykvq.rpc import add_servers                # noqa: E402


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--types", nargs="+", default=["f16", "turbo4", "turbo3", "turbo2"])
    ap.add_argument("--delay-ms", type=float, default=0.0)
    ap.add_argument("--prompt", type=int, default=512)
    ap.add_argument("--tokens", type=int, default=32)
    a = ap.parse_args()
    quiet_log()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen([executable("ggml-rpc-server"), "-p", str(port), "-d", "CPU"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        link = Link(port, a.delay_ms / 1000)
        add_servers(f"127.0.0.1:{link.port}")

        def passed(action) -> tuple[int, float]:
            before, start = link.sent + link.received, time.perf_counter()
            action()
            return link.sent + link.received - before, time.perf_counter() - start
        with Model(a.model, gpu_layers=999) as model:
            print(f"{model.header.name}: {link.sent:,} bytes to load; delay {a.delay_ms:g} ms each way\n")
            print("| cache | bytes per token, prefill | bytes per token, decode | tokens/s, decode | bytes of a saved state |\n|---|---|---|---|---|")
            tokens = model.tokenize(passage())[:a.prompt]
            for name in a.types:
                with Context(model, a.prompt + a.tokens + 64, name, kv_sink=0, kv_recent=0) as context:
                    prefill, _ = passed(lambda: context.decode(tokens, 0))
                    decode, seconds = passed(lambda: [context.decode([9], len(tokens) + i) for i in range(a.tokens)])
                    state, _ = passed(lambda: context.save(0))
                    print(f"| {name} | {prefill // len(tokens):,} | {decode // a.tokens:,} | {a.tokens / seconds:.1f} | {state:,} |", flush=True)
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
