#!/usr/bin/env python3
"""llama-server under load: eight slots, short and long prompts, cancellations, saved and restored slots, context shifts.

    python tools/load_server.py MODEL [--minutes 30] [--kv-type turbo3] [--window 64,256]

Every answer at temperature 0 is compared with that of a quiet server, asked alone before the load. Sums of a batch of other
sizes round otherwise, so an answer may leave the quiet one where two tokens are as good as tied (TIE); those are counted apart.
Prints requests by kind, answers that differ, and the resident memory over time; exit code 1 when an answer differs without a
tie or memory grows by more than 5 % after the first fifth.
"""
from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.comparison import passage             # noqa: E402
from pykvq.launch import executable              # noqa: E402

SLOTS, TOKENS = 8, 24
TIE = 0.1                                        # difference of two log-probabilities in the quiet server


class Server:
    """A llama-server with eight slots of 512 tokens."""

    def __init__(self, model: str, kv_type: str, folder: Path, window: str | None = None, threads: int = 2):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.process = subprocess.Popen(
            [executable("llama-server"), "-m", model, "--port", str(self.port), "-ctk", kv_type, "-ctv", kv_type, "--parallel", str(SLOTS),
             "--ctx-size", str(512 * SLOTS), "--threads", str(threads), "--slot-save-path", f"{folder}/", "--context-shift", "--cache-ram", "0",
             *([] if window is None else ["--kv-sink", window.split(",")[0], "--kv-recent", window.split(",")[1]])],
            stdout=(folder / "log").open("w"), stderr=subprocess.STDOUT)
        for _ in range(300):
            try:
                self.ask("GET", "/health")
                return
            except OSError:
                time.sleep(0.2)
        raise SystemExit("the server did not start")

    def ask(self, method: str, path: str, body=None, timeout: float = 900):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def complete(self, prompt: str, slot: int, tokens: int = TOKENS, timeout: float = 900) -> str:
        return self.ask("POST", "/completion", {"prompt": prompt, "id_slot": slot, "n_predict": tokens, "temperature": 0, "seed": 1,
                                                "cache_prompt": True, "ignore_eos": True}, timeout)["content"]

    def likely(self, prompt: str, slot: int) -> list[dict]:
        """Per token of the answer its text and the likeliest tokens with their log-probabilities."""
        answer = self.ask("POST", "/completion", {"prompt": prompt, "id_slot": slot, "n_predict": TOKENS, "temperature": 0, "seed": 1,
                                                  "cache_prompt": False, "ignore_eos": True, "n_probs": 4})
        return answer["completion_probabilities"]

    def resident(self) -> int:
        """Bytes in memory (Linux)."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096


def tied(tokens: list[dict], answer: str) -> bool:
    """Whether the answer leaves the quiet one at a token that another one nearly equals, for that other one."""
    text = ""
    for token in tokens:
        if answer.startswith(text + token["token"]):
            text += token["token"]
            continue
        best = token["top_logprobs"][0]["logprob"]
        return any(best - t["logprob"] < TIE and t["token"] != token["token"] and (answer.startswith(text + t["token"]) or not t["token"].strip("\ufffd"))
                   for t in token["top_logprobs"])
    return False


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--minutes", type=float, default=30)
    ap.add_argument("--kv-type", default="turbo3")
    ap.add_argument("--threads", type=int, default=2, help="of the server; 1 on a machine that others use: threads wait for each other")
    ap.add_argument("--window", metavar="SINK,RECENT", help="first and last tokens in f16; default: the type's own")
    a = ap.parse_args()
    text = passage()
    prompts = [text[i * 97:i * 97 + n] for i, n in enumerate([40, 60, 90, 150, 200, 250, 300, 400] * 2)]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(a.model, a.kv_type, Path(folder), a.window, a.threads)
        try:
            quiet, likely = {}, {}
            for i, prompt in enumerate(prompts):
                quiet[prompt] = server.complete(prompt, i % SLOTS)
                server.ask("POST", f"/slots/{i % SLOTS}?action=erase", {})
                likely[prompt] = server.likely(prompt, i % SLOTS)
                server.ask("POST", f"/slots/{i % SLOTS}?action=erase", {})
            start = time.monotonic()
            end, counts, wrong, memory = start + 60 * a.minutes, Counter(), [], []

            def compare(kind: str, slot: int, prompt: str, answer: str) -> None:
                counts["compared"] += 1
                if answer != quiet[prompt]:
                    if tied(likely[prompt], answer):
                        counts["tied"] += 1
                    else:
                        wrong.append((kind, slot, repr(prompt[:30]), repr(answer), "not", repr(quiet[prompt])))

            def work(slot: int) -> None:
                mine = random.Random(slot)
                while time.monotonic() < end:
                    prompt, kind = mine.choice(prompts), mine.random()
                    try:
                        if kind < 0.1:                       # gone before the answer
                            counts["cancelled"] += 1
                            server.complete(prompt, slot, 400, timeout=mine.uniform(0.05, 0.5))
                        elif kind < 0.15:                    # runs into the end of the context, which shifts
                            server.complete(prompt, slot, 600)
                            counts["shifted"] += 1
                        elif kind < 0.3:
                            first = server.complete(prompt, slot)
                            server.ask("POST", f"/slots/{slot}?action=save", {"filename": f"{slot}.bin"})
                            server.ask("POST", f"/slots/{slot}?action=erase", {})
                            server.complete(mine.choice(prompts), slot)
                            server.ask("POST", f"/slots/{slot}?action=restore", {"filename": f"{slot}.bin"})
                            counts["restored"] += 1
                            compare("first", slot, prompt, first)
                            compare("restored", slot, prompt, server.complete(prompt, slot))
                        else:
                            counts["answered"] += 1
                            compare("answered", slot, prompt, server.complete(prompt, slot))
                    except (TimeoutError, urllib.error.URLError, ConnectionError) as error:
                        if kind >= 0.1:
                            wrong.append((repr(error), slot, prompt[:30]))
            threads = [threading.Thread(target=work, args=(slot,)) for slot in range(SLOTS)]
            mark = 0
            for t in threads:
                t.start()
            while any(t.is_alive() for t in threads):
                memory.append(server.resident())
                if time.monotonic() - start > 60 * mark:
                    print(f"minute {mark:2}: {memory[-1] / 2**20:.1f} MiB, {dict(counts)}, {len(wrong)} differ", flush=True)
                    mark += max(1, int(a.minutes) // 6)
                time.sleep(min(5, max(0.5, a.minutes)))
            alive = server.process.poll() is None
        finally:
            server.process.terminate()
            server.process.wait(30)
    settled = memory[len(memory) // 5:] or memory
    print(f"{a.minutes:g} minutes, {dict(counts)}; {len(wrong)} answers differ from the quiet server's; server alive: {alive}")
    print(f"resident memory: {memory[0] / 2**20:.1f} MiB at the start, {settled[0] / 2**20:.1f} after a fifth, {memory[-1] / 2**20:.1f} at the end, "
          f"{max(memory) / 2**20:.1f} at most")
    for line in wrong[:10]:
        print(*line, file=sys.stderr)
    return int(not alive or bool(wrong) or memory[-1] > 1.05 * settled[0])


if __name__ == "__main__":
    sys.exit(main())
