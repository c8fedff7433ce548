#!/usr/bin/env python3
"""Answers about long conversations from a fixed number of cache cells: EpiCache against what else fits into them.

    python tools/measure_epicache.py model.gguf locomo10.json [--tokens 4000] [--questions 20] [--run METHOD[:KEY=VALUE,...] ...]
        [--gpu-layers 99] [--minutes 6] [-o rows.jsonl]

DATA is in the format of LoCoMo (conversation, qa). Of each conversation the first --tokens are the history; questions are those whose evidence
lies inside it, the adversarial category 5 left out. Methods:

  full       the whole history in the cache
  window     the first tokens and the last ones: block prefill that drops the middle
  retrieval  windows of utterances nearest to the question, as text, prefilled for each question
  global     one eviction guided by the centre of all windows, no episodes
  episode    one cache per episode made before any question, at most two of them read for one (arXiv 2509.17396)
  epicache   what pykvq does: rows of all tokens outside the cache, each question takes the cells that it attends to from the episodes nearest to it

Keys, several values of one joined by "+" for a row each:

  fraction   the budget is the history divided by it (4)              kv        cache type (f16)
  episodes   their number (chosen)                                    encoder   minilm, model, a GGUF file (auto)
  reach      times the budget that is looked through (8)              together  most tokens of an utterance that stay together (64); 0: segments nearest
  by         max, mean: of the attention of a question's tokens (mean)
  draft      tokens of a first answer that choose once more (8)
  whole      share of the budget for the segments nearest to the question as they are (0)
  block      tokens between two evictions (budget / 2)                layers    code, paper: layer budgets (none)
  prompt     most tokens of an episode's prompt (256)                 per       episodes that a question may read (2)
  shared     1: all layers and heads keep the same tokens (0)         answers   0: no F1 (1)

"log p" is the mean log-likelihood of a reference answer's tokens, F1 that of the words of a greedy answer of at most 24 tokens. "first token" is the
median time from a question to its first logits, with the choice and the load of the cache; "build" the time to make what is asked. A row is one JSON
line, for each conversation, flushed when it is there. --minutes ends the run before a row that has no time left; rows come in the order of --run.
--table FILE makes a table of such lines instead. --write-vectors FILE keeps the vectors of the texts that would be compared, for --vectors FILE on a
machine without the encoder.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.engine import Context, Model, log_softmax, quiet_log                # noqa: E402
from pykvq.epicache.budget import key_similarity, layer_budgets                # noqa: E402
from pykvq.epicache.build import Builder, Plan                                 # noqa: E402
from pykvq.epicache.embed import encoder                                       # noqa: E402
from pykvq.epicache.memory import INSTRUCTION, Keeper, Memory, Settings      # noqa: E402
from pykvq.epicache.queries import QueryCapture                                # noqa: E402
from pykvq.epicache.recall import Asked                                        # noqa: E402
from pykvq.epicache.segment import Utterance, segments                         # noqa: E402

SYSTEM = "You answer questions about a conversation between two friends. Answer with a few words from it."
LONGEST = 24                              # tokens of a greedy answer


METHODS = ("full", "window", "retrieval", "global", "episode", "epicache")


@dataclass(frozen=True)
class Run:
    """One of --run, with one value of each key."""
    method: str
    fraction: int = 4
    kv: str = "f16"
    episodes: int = 0
    encoder: str = "auto"
    reach: float = Settings.reach
    together: int = Settings.together
    by: str = Settings.by
    draft: int = Settings.draft
    whole: float = Settings.whole
    block: int = 0
    layers: str = ""
    prompt: int = Settings.prompt
    per: int = Settings.per_question
    shared: int = 0
    answers: int = 1

    @classmethod
    def parse(cls, text: str) -> list["Run"]:
        """Raises ValueError for an unknown method, key or value."""
        method, _, rest = text.partition(":")
        kinds = {f.name: type(f.default) for f in fields(cls) if f.name != "method"}
        given = dict(pair.split("=", 1) for pair in rest.split(",") if pair)
        if method not in METHODS or set(given) - set(kinds):
            raise ValueError(f"{text}: a run is one of {', '.join(METHODS)}, with keys {', '.join(kinds)}")
        return [cls(method, **dict(zip(given, values))) for values in product(*([kinds[k](v) for v in given[k].split("+")] for k in given))]


class Setup:
    """What all rows share: the model, the command line, the end of the time, and the vectors of a file."""

    def __init__(self, model: Model, args: argparse.Namespace):
        self.model, self.args = model, args
        self.end = time.monotonic() + 60 * args.minutes if args.minutes else None
        self.vectors = np.load(args.vectors) if args.vectors else None
        self.archives: dict = {}

    def context(self, cells: int, kv: str, **options) -> Context:
        return Context(self.model, cells, kv, threads=self.args.threads, **options)

    def encoder(self, name: str):
        """Name and encoder, from the file when one is given."""
        if self.vectors is None:
            return encoder(name, self.model)
        name = "minilm" if name == "auto" else name
        known, x = self.vectors[f"{name}.keys"], self.vectors[name]
        at = {key: i for i, key in enumerate(known.tolist())}
        return name, lambda texts: x[[at[key_of(text)] for text in texts]].astype(np.float32)

    def check(self) -> None:
        if self.end and time.monotonic() > self.end:
            raise TimeoutError


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Talk:
    """One conversation: prefix, utterances and questions as tokens. suffix(question) and closing(text) close the user's message."""

    def __init__(self, model: Model, sample: dict, tokens: int, questions: int):
        before, after = (model.chat_text([("system", SYSTEM), ("user", "@@@")], True) or f"{SYSTEM}\n@@@\n").split("@@@")
        self.model, self.after = model, after
        self.prefix = model.tokenize(before, special=True)
        self.utterances, known, used = [], set(), len(self.prefix)
        for said, text in turns(sample["conversation"]):
            u = Utterance(text, tuple(model.tokenize(text + "\n", bos=False)))
            if used + len(u.tokens) > tokens:
                break
            self.utterances.append(u)
            known.add(said)
            used += len(u.tokens)
        fitting = [q for q in sample["qa"] if q["category"] != 5 and q["evidence"] and set(q["evidence"]) <= known]
        self.questions = fitting[::max(1, len(fitting) // questions)][:questions]

    @property
    def history(self) -> list[int]:
        return [*self.prefix, *(t for u in self.utterances for t in u.tokens)]

    @property
    def room(self) -> int:
        """Cells for a question and its answer."""
        return max(len(self.suffix(q["question"])) + max(LONGEST, len(self.model.tokenize(str(q["answer"]), bos=False))) for q in self.questions)

    def suffix(self, question: str) -> list[int]:
        return self.closing("Based on the conversation above, write an answer in the form of a short phrase for the following question. Use exact "
                            f"words from the conversation whenever possible.\nQuestion: {question} Short answer:")

    def closing(self, text: str) -> list[int]:
        return self.model.tokenize(f"\n{text}{self.after}", bos=False, special=True)


def turns(conversation: dict):
    """(id, text) of every utterance in order; the first of a session carries its date."""
    for key in sorted((k for k in conversation if re.fullmatch(r"session_\d+", k)), key=lambda k: int(k[8:])):
        date = f"[{conversation[f'{key}_date_time']}] "
        for turn in conversation[key]:
            yield turn["dia_id"], f"{date}{turn['speaker']} said: {turn['text']}"
            date = ""


def f1(answer: str, reference: str) -> float:
    """F1 of the words, lower case, without punctuation and articles."""
    a, b = (Counter(w for w in re.sub(r"[^\w\s]", " ", t.lower()).split() if w not in ("a", "an", "the")) for t in (answer, reference))
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values())) if common else 0.0


def score(setup: Setup, run: Run, context: Context, talk: Talk, prepare: Callable[[str, list[int]], int]) -> dict:
    """Ask every question behind the cache that prepare(question, its tokens) loads; it returns the next position."""
    likelihoods, f1s, times = [], [], []
    for q in talk.questions:
        setup.check()
        suffix, reference = talk.suffix(q["question"]), str(q["answer"])
        began = time.perf_counter()
        start = prepare(q["question"], suffix)
        logits = context.decode(suffix, start)[-1]
        times.append(time.perf_counter() - began)
        gold = context.model.tokenize(reference, bos=False)
        rows = np.concatenate([logits[None], context.decode(gold[:-1], start + len(suffix), logits="all")])
        likelihoods.append(float(log_softmax(rows)[np.arange(len(gold)), gold].mean()))
        context.remove(0, start + len(suffix))
        answer = []
        while run.answers and len(answer) < LONGEST and not context.model.ends(token := int(logits.argmax())):
            answer.append(token)
            logits = context.decode([token], start + len(suffix) + len(answer) - 1)[-1]
        f1s.append(f1(context.model.text(answer), reference))
        context.remove(0, start)
    return {"log_p": float(np.mean(likelihoods)), "f1": float(np.mean(f1s)) if run.answers else None, "first_token_s": statistics.median(times),
            "questions": len(times), "log_p_each": [round(x, 3) for x in likelihoods]}


def bytes_of(context: Context, cells: int) -> int:
    info = context.info()
    return round(info.bytes * cells / info[0].cells)


def run_full(setup: Setup, run: Run, talk: Talk, budget: int) -> dict:
    history = talk.history
    with setup.context(len(history) + talk.room, run.kv) as context:
        began = time.perf_counter()
        context.decode(history, 0, logits="none")
        context.wait()
        built = time.perf_counter() - began
        row = score(setup, run, context, talk, lambda *_: len(history))
        return {**row, "build_s": built, "refill_s": built, "peak_bytes": bytes_of(context, len(history))}


def run_window(setup: Setup, run: Run, talk: Talk, budget: int) -> dict:
    history, sinks, block = talk.history, len(talk.prefix) + 4, run.block or max(32, budget // 2)
    with setup.context(budget + block + talk.room, run.kv) as context:
        began = time.perf_counter()
        for start in range(0, len(history), block):
            part = history[start:start + block]
            context.decode(part, start, logits="none")
            context.remove(0, sinks, max(sinks, start + len(part) - (budget - sinks)))
        context.wait()
        built = time.perf_counter() - began
        return {**score(setup, run, context, talk, lambda *_: len(history)), "build_s": built, "peak_bytes": bytes_of(context, budget + block)}


def run_retrieval(setup: Setup, run: Run, talk: Talk, budget: int) -> dict:
    name, encode = setup.encoder(run.encoder)
    found = segments(talk.utterances)
    vectors = encode([s.text for s in found])
    with setup.context(budget + talk.room, run.kv) as context:
        def prepare(question: str, _) -> int:
            chosen, used = [], len(talk.prefix)
            for i in np.argsort(-(vectors @ encode([question])[0])):
                n = sum(len(talk.utterances[u].tokens) for u in range(found[i].first, found[i].last))
                if used + n <= budget:
                    chosen.append(i)
                    used += n
            text = [t for i in sorted(chosen) for u in range(found[i].first, found[i].last) for t in talk.utterances[u].tokens]
            context.clear()
            context.decode([*talk.prefix, *text], 0, logits="none")
            return len(talk.prefix) + len(text)
        return {**score(setup, run, context, talk, prepare), "build_s": 0.0, "peak_bytes": bytes_of(context, budget), "encoder": name}


def run_epicache(setup: Setup, run: Run, talk: Talk, budget: int) -> dict:
    name, encode = setup.encoder(run.encoder)
    block, n = min(run.block or max(32, budget // 2), len(talk.history)), 1 if run.method == "global" else run.episodes or None
    settings = Settings(prompt=run.prompt, episodes=n, reach=run.reach, together=run.together, by=run.by, draft=run.draft, whole=run.whole, per_question=run.per,
                        recall="question" if run.method == "epicache" else "episode")
    layers = None
    if run.layers:
        sample = talk.history[:min(len(talk.history), 2048)]
        with setup.context(len(sample) + 8, "f16", kvq="off") as context:
            similar = key_similarity(context, [layer.n_head_kv for layer in context.info()], sample, block=len(sample) // 4, sinks=32)
        layers = tuple(int(n) for n in layer_budgets(similar, budget, run.layers))
    cells, capture = max(layers or [budget]), QueryCapture()
    behind = talk.room if run.method == "epicache" else max(talk.room, settings.prompt)
    with setup.context(cells + block + behind, run.kv, on_tensor=capture) as context:
        shared = bool(run.shared) or any(layer.key_bias == "left out" for layer in context.info())
        ran: list[int] = []
        builder = Builder(context, capture, Plan(budget, block, layers, shared=shared), ran.append)
        keeper = Keeper(builder, encode, talk.closing(INSTRUCTION), lambda text: setup.model.tokenize(text, bos=False), settings)
        memory, built, tokens = built_memory(setup, run, keeper, talk, (id(talk), budget, block, run.kv, bool(run.together)), ran)
        end = len(talk.history)

        def prepare(question: str, suffix: list[int]) -> int:
            if run.method == "epicache":
                builder.restore(keeper.lookup(memory, question, Asked([], suffix))[1])
            else:
                builder.restore(keeper.recall(memory, *keeper.match(memory, question), end).state)
            return end
        return {**score(setup, run, context, talk, prepare), "build_s": built, "build_tokens": tokens, "n_episodes": len(memory.episodes),
                "peak_bytes": bytes_of(context, cells + block + (0 if run.method == "epicache" else settings.prompt)), "stored_bytes": memory.bytes,
                "is_shared": shared, "encoder": name, "block": block, "layer_tokens": [min(layers), max(layers)] if layers else None}


def built_memory(setup: Setup, run: Run, keeper: Keeper, talk: Talk, key, ran: list[int]):
    """A memory of the talk, seconds and tokens of its build. An archive is the same whatever the episodes are, and is made once."""
    began, known = time.perf_counter(), setup.archives.get(key) if run.method == "epicache" else None
    memory = Memory(talk.prefix)
    if known:
        memory.archive = known[0]
    memory, _ = keeper.update(memory, talk.utterances)
    if known:
        return memory, *known[1:]
    built = time.perf_counter() - began
    if run.method == "epicache":
        setup.archives[key] = memory.archive, built, sum(ran)
    return memory, built, sum(ran)


RUN = {"full": run_full, "window": run_window, "retrieval": run_retrieval, "global": run_epicache, "episode": run_epicache, "epicache": run_epicache}
DEFAULT = ["full", *(f"{method}:fraction=4+6+10" for method in ("epicache", "retrieval", "window", "global", "episode"))]


def write_vectors(setup: Setup, talks: list[Talk], names: list[str], path: Path) -> None:
    texts = sorted({text for talk in talks for text in (*(s.text for s in segments(talk.utterances)), *(q["question"] for q in talk.questions))})
    arrays = {}
    for name in names:
        arrays[name] = setup.encoder(name)[1](texts).astype(np.float16)
        arrays[f"{name}.keys"] = np.array([key_of(text) for text in texts])
    np.savez_compressed(path, **arrays)


def table(path: Path) -> str:
    """Means over conversations, weighed by their questions, in the order of the lines; log p also against the whole f16 cache's."""
    shown, groups = [f.name for f in fields(Run)], {}
    defaults = {f.name: f.default for f in fields(Run)}          # lines of an earlier form lack a key
    for line in path.read_text().splitlines():
        row = json.loads(line)
        groups.setdefault((row["model"], *(row["run"].get(name, defaults[name]) for name in shown)), []).append(row)

    def mean(rows: list[dict], name: str) -> float:
        return sum(r[name] * r["questions"] for r in rows) / sum(r["questions"] for r in rows)
    whole = {(r["model"], r["talk"]): r["log_p"] for rows in groups.values() for r in rows if r["run"]["method"] == "full" and r["run"]["kv"] == "f16"}
    head = ("model", "method", "budget", "keys", "questions", "log p", "to full", "F1", "peak cache", "stored", "build", "to first token")
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (model, *key), rows in groups.items():
        run = dict(zip(shown, key))
        keys = ", ".join(f"{f.name} {run[f.name]}" for f in fields(Run)
                         if f.name not in ("method", "fraction", "answers") and run[f.name] != f.default)
        known = [r for r in rows if (model, r["talk"]) in whole]
        to_full = f"{(mean(known, 'log_p') / mean([{**r, 'log_p': whole[model, r['talk']]} for r in known], 'log_p') - 1):+.1%}" if known else ""
        f1_ = f"{mean(rows, 'f1'):.3f}" if rows[0]["f1"] is not None else ""
        budget = "1" if run["method"] == "full" else f"1/{run['fraction']}"
        out.append(f"| {model} | {run['method']} | {budget} | {keys} | {sum(r['questions'] for r in rows)} | {mean(rows, 'log_p'):.3f} | {to_full} | {f1_} | "
                   f"{mean(rows, 'peak_bytes') / 2**20:.1f} MiB | {mean(rows, 'stored_bytes') / 2**20:.1f} MiB | {mean(rows, 'build_s'):.2f} s | "
                   f"{mean(rows, 'first_token_s'):.3f} s |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=20, help="of each conversation")
    parser.add_argument("--conversations", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="conversations before the first")
    parser.add_argument("--run", nargs="+", default=DEFAULT, metavar="METHOD[:KEY=VALUE,...]", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--gpu-layers", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="end before this much time has passed")
    parser.add_argument("--vectors", type=Path, help="vectors of texts that --write-vectors kept")
    parser.add_argument("--write-vectors", type=Path, metavar="FILE")
    parser.add_argument("--encoders", nargs="+", default=["minilm"], help="of --write-vectors")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a table of its lines")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    runs = [run for text in args.run for run in Run.parse(text)]
    quiet_log()
    with Model(args.model, args.gpu_layers) as model:
        setup = Setup(model, args)
        samples = json.loads(args.data.read_text())[args.skip:args.skip + args.conversations]
        talks = [Talk(model, sample, args.tokens, args.questions) for sample in samples]
        if args.write_vectors:
            write_vectors(setup, talks, args.encoders, args.write_vectors)
            return
        try:
            for run, (number, talk) in product(runs, enumerate(talks, args.skip)):
                setup.check()
                try:
                    row = RUN[run.method](setup, run, talk, len(talk.history) // (1 if run.method == "full" else run.fraction))
                except (ValueError, RuntimeError, MemoryError) as error:          # the other rows still count
                    print(f"{run}: {error}", file=sys.stderr, flush=True)
                    continue
                told = {"model": args.model.stem, "talk": number, "history": len(talk.history), "stored_bytes": 0, **row, "run": vars(run)}
                print(line := json.dumps(told), flush=True)
                if args.output:
                    with args.output.open("a") as f:
                        f.write(line + "\n")
        except TimeoutError:
            print("the time is over", file=sys.stderr)


if __name__ == "__main__":
    main()
