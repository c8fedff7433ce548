#!/usr/bin/env python3
"""llama-server under load: eight slots, short and long prompts, cancellations, saved and restored slots, context shifts.

    python tools/load_server.py MODEL [--minutes 30] [--kv-type turbo3] [--window 64,256] [--unified]

Every answer at temperature 0 is compared with that of a quiet server, asked alone before the load. One that leaves it where two
tokens are as good as tied (TIE) is counted apart. More may differ in a unified cache, whose cells are summed in another order, and
with a window: queries read the keys of their own batch in f16, and what is in a batch depends on all slots.
Every conversation but one of a slot holds a word of its own and asks for it (tools/slot_secrets.py): no answer and no slot file
may hold the word of another. Prints requests by kind, answers that differ, words in wrong places, how many answers and files hold
their own word, and the resident memory over time; exit code 1 when an answer differs that should not, a word is in a wrong place,
none is in its own, or memory grows by more than 5 % after the first fifth.
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
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import slot_secrets                              # noqa: E402
from slot_secrets import Secret                  # noqa: E402

from pykvq.comparison import passage             # noqa: E402
from pykvq.launch import executable              # noqa: E402

SLOTS, TOKENS = 8, 24
TIE = 0.1                                        # difference of two log-probabilities in the quiet server
LENGTHS = (20, 200, 900)                         # of the conversations of a slot, in characters of text
TURNS = {"answered": 65, "restored": 20, "cancelled": 10, "shifted": 5}       # in a hundred


class Server:
    """A llama-server with `slots` slots of 512 tokens. Slots of a unified cache share its cells."""

    def __init__(self, model: str, kv_type: str, folder: Path, window: str = "0,0", threads: int = 2, unified: bool = False, slots: int = SLOTS):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.folder, self.unified = folder, unified
        self.exact = window == "0,0" and not unified     # an answer is what it is alone
        sink, recent = window.split(",")
        self.process = subprocess.Popen(
            [executable("llama-server"), "-m", model, "--port", str(self.port), "-ctk", kv_type, "-ctv", kv_type, "--parallel", str(slots),
             "--ctx-size", str(512 * slots), "--threads", str(threads), "--slot-save-path", f"{folder}/", "--context-shift", "--cache-ram", "0",
             "--kv-unified" if unified else "--no-kv-unified", "--kv-sink", sink, "--kv-recent", recent],
            stdout=(folder / "log").open("w"), stderr=subprocess.STDOUT)
        for _ in range(1500):
            try:
                self.ask("GET", "/health")
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise SystemExit(f"the server did not start: {(folder / 'log').read_text()[-500:]}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)

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

    def slot(self, slot: int, action: str) -> None:
        """action: save, restore or erase; the slot's file is always the same."""
        self.ask("POST", f"/slots/{slot}?action={action}", {"filename": f"{slot}.bin"})

    def saved(self, slot: int) -> bytes:
        """The slot's file, written anew."""
        self.slot(slot, "save")
        return (self.folder / f"{slot}.bin").read_bytes()

    def secret(self, word: str, slot: int) -> Secret:
        """Of the conversation that the slot holds."""
        tokens = self.ask("POST", "/tokenize", {"content": f" {word}"})["tokens"]
        return Secret.of(word, tokens, self.saved(slot), 0 if self.unified else slot)

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


@dataclass(frozen=True)
class Conversation:
    """A prompt of one slot, its word if it has one, and what the quiet server said."""
    slot: int
    prompt: str
    secret: Secret | None
    answer: str
    likely: list[dict]


def ask_alone(server: Server, slots: int = SLOTS, lengths: tuple[int, ...] = LENGTHS) -> list[Conversation]:
    """The conversations of every slot, asked one after the other; one of each slot has no word and asks for one."""
    text, words, made = passage(), iter(slot_secrets.words(slots * len(lengths))), []
    for slot in range(slots):
        for i, length in enumerate((None, *lengths)):
            start = 97 * (slot + slots * i)
            word = None if length is None else next(words)
            prompt = f"{text[start:start + 40]}. {slot_secrets.QUESTION}" if word is None else slot_secrets.plant(word, text[start:start + length])
            answer = server.complete(prompt, slot)
            secret = None if word is None else server.secret(word, slot)
            server.slot(slot, "erase")
            made.append(Conversation(slot, prompt, secret, answer, server.likely(prompt, slot)))
            server.slot(slot, "erase")
    return made


class Load:
    """What the slots do at once, and what of it was wrong."""

    def __init__(self, server: Server, conversations: list[Conversation]):
        self.server, self.conversations = server, conversations
        self.counts, self.wrong, self.misplaced = Counter(), [], []
        for c in conversations:
            self.examine("alone", c, c.answer)

    def examine(self, kind: str, own: Conversation, said: str | bytes) -> None:
        """No other conversation's word may be in an answer or a slot file."""
        def holds(secret: Secret) -> bool:
            return secret.in_file(said) if isinstance(said, bytes) else secret.in_text(said)
        what = "files" if isinstance(said, bytes) else "answers"
        self.counts[f"{what} examined"] += 1
        self.counts[f"{what} with their own word"] += own.secret is not None and holds(own.secret)
        self.misplaced += [(kind, what, "of slot", own.slot, "with the word of slot", c.slot, c.secret.word)
                           for c in self.conversations if c is not own and c.secret and holds(c.secret)]

    def compare(self, kind: str, own: Conversation, answer: str) -> None:
        self.counts["compared"] += 1
        self.examine(kind, own, answer)
        if answer != own.answer:
            if tied(own.likely, answer):
                self.counts["tied"] += 1
            else:
                self.wrong.append((kind, own.slot, repr(own.prompt[:30]), repr(answer), "not", repr(own.answer)))

    def turn(self, kind: str, slot: int, mine: random.Random) -> None:
        """One thing that a slot's user does; `mine` chooses the conversations."""
        own = [c for c in self.conversations if c.slot == slot]
        chosen = mine.choice(own)
        try:
            if kind == "cancelled":                      # gone before the answer
                self.server.complete(chosen.prompt, slot, 400, timeout=mine.uniform(0.05, 0.5))
            elif kind == "shifted":                      # runs into the end of the context
                self.examine(kind, chosen, self.server.complete(chosen.prompt, slot, 600))
            elif kind == "restored":
                self.compare("first", chosen, self.server.complete(chosen.prompt, slot))
                self.examine("saved", chosen, self.server.saved(slot))
                self.server.slot(slot, "erase")
                other = mine.choice(own)
                self.compare("after an erased one", other, self.server.complete(other.prompt, slot))
                self.server.slot(slot, "restore")
                self.compare(kind, chosen, self.server.complete(chosen.prompt, slot))
            else:
                self.compare(kind, chosen, self.server.complete(chosen.prompt, slot))
        except (TimeoutError, urllib.error.URLError, ConnectionError) as error:
            if kind != "cancelled":
                self.wrong.append((repr(error), slot, chosen.prompt[:30]))
        self.counts[kind] += 1

    def work(self, slot: int, end: float) -> None:
        """One slot's user, until that time."""
        mine = random.Random(slot)
        while time.monotonic() < end:
            self.turn(*mine.choices(list(TURNS), list(TURNS.values())), slot, mine)

    def run(self, minutes: float, say=print) -> list[int]:
        """All slots for that long; returns the resident memory over time."""
        start, mark, memory = time.monotonic(), 0, []
        threads = [threading.Thread(target=self.work, args=(slot, start + 60 * minutes)) for slot in {c.slot for c in self.conversations}]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            memory.append(self.server.resident())
            if time.monotonic() - start > 60 * mark:
                say(f"minute {mark:2}: {memory[-1] / 2**20:.1f} MiB, {dict(self.counts)}, {len(self.wrong)} differ, {len(self.misplaced)} words in wrong places")
                mark += max(1, int(minutes) // 6)
            time.sleep(min(5, max(0.5, minutes)))
        return memory


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--minutes", type=float, default=30)
    ap.add_argument("--kv-type", default="turbo3")
    ap.add_argument("--threads", type=int, default=2, help="of the server; 1 on a machine that others use: threads wait for each other")
    ap.add_argument("--window", metavar="SINK,RECENT", default="0,0", help="first and last tokens in f16; default: none")
    ap.add_argument("--unified", action="store_true", help="one cache for all slots; none reaches its end then, so nothing shifts")
    a = ap.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(a.model, a.kv_type, Path(folder), a.window, a.threads, a.unified)
        try:
            load = Load(server, ask_alone(server))
            memory = load.run(a.minutes, lambda line: print(line, flush=True))
            alive = server.process.poll() is None
        finally:
            server.stop()
    settled = memory[len(memory) // 5:] or memory
    silent = [what for what in ("answers", "files") if not load.counts[f"{what} with their own word"]]
    print(f"{a.minutes:g} minutes, {dict(load.counts)}; {len(load.wrong)} answers differ from the quiet server's; "
          f"{len(load.misplaced)} words in wrong places; server alive: {alive}")
    print(f"resident memory: {memory[0] / 2**20:.1f} MiB at the start, {settled[0] / 2**20:.1f} after a fifth, {memory[-1] / 2**20:.1f} at the end, "
          f"{max(memory) / 2**20:.1f} at most")
    for line in (load.wrong + load.misplaced)[:10]:
        print(*line, file=sys.stderr)
    for what in silent:
        print(f"none of the {what} holds even its own word, so the search for others' says nothing: take a larger model", file=sys.stderr)
    return int(not alive or bool(load.wrong and server.exact or load.misplaced or silent) or memory[-1] > 1.05 * settled[0])


if __name__ == "__main__":
    sys.exit(main())
