#!/usr/bin/env python3
"""Answers about long conversations from a fixed number of cache cells: EpiCache against what else fits into them.

    python tools/measure_epicache.py model.gguf locomo10.json [--tokens 4000] [--questions 20] [--fractions 4 6 10]
        [--methods full window retrieval global epicache] [--kv-type f16 turbo3] [--episodes N] [--encoder minilm] [--layer-budget code] [-o rows.jsonl]

DATA is in the format of LoCoMo (conversation, qa). Of each conversation the first --tokens are the history; questions are those whose evidence
lies inside it, the adversarial category 5 left out. A budget is the history divided by a fraction. Per method:

  full       the whole history in the cache
  window     the first tokens and the last ones: block prefill that drops the middle
  retrieval  windows of utterances nearest to the question, as text, prefilled for each question
  global     one eviction guided by the centre of all windows, no episodes
  epicache   one cache per episode, at most two of them read for a question

"log p" is the mean log-likelihood of a reference answer's tokens, F1 that of the words of a greedy answer of at most 24 tokens. "first token" is the
median time from a question to its first logits, with the load of the cache; "build" the time to make the caches. A row is one JSON line, for each
conversation.
"""
from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pykvq.engine import Context, Model, log_softmax, quiet_log                # noqa: E402
from pykvq.epicache.budget import key_similarity, layer_budgets                # noqa: E402
from pykvq.epicache.build import Builder, Plan                                 # noqa: E402
from pykvq.epicache.embed import encoder                                       # noqa: E402
from pykvq.epicache.memory import INSTRUCTION, Keeper, Memory, Settings                     # noqa: E402
from pykvq.epicache.queries import QueryCapture                                # noqa: E402
from pykvq.epicache.segment import Utterance, segments                         # noqa: E402

SYSTEM = "You answer questions about a conversation between two friends. Answer with a few words from it."
LONGEST = 24                              # tokens of a greedy answer
TAIL = 192                                # cells for a question and its answer


class Talk:
    """One conversation: prefix, utterances and questions as tokens. suffix(question) and closing(text) close the user's message."""

    def __init__(self, model: Model, sample: dict, tokens: int, questions: int):
        before, after = model.chat_text([("system", SYSTEM), ("user", "@@@")], True).split("@@@")
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


def score(context: Context, talk: Talk, prepare: Callable[[str], int]) -> dict:
    """Ask every question behind the cache that prepare(question) loads; it returns the next position."""
    likelihoods, f1s, times = [], [], []
    for q in talk.questions:
        suffix, reference = talk.suffix(q["question"]), str(q["answer"])
        began = time.perf_counter()
        start = prepare(q["question"])
        logits = context.decode(suffix, start)[-1]
        times.append(time.perf_counter() - began)
        gold = context.model.tokenize(reference, bos=False)
        rows = np.concatenate([logits[None], context.decode(gold[:-1], start + len(suffix), logits="all")])
        likelihoods.append(float(log_softmax(rows)[np.arange(len(gold)), gold].mean()))
        context.remove(0, start + len(suffix))
        answer = []
        while len(answer) < LONGEST and not context.model.ends(token := int(logits.argmax())):
            answer.append(token)
            logits = context.decode([token], start + len(suffix) + len(answer) - 1)[-1]
        f1s.append(f1(context.model.text(answer), reference))
        context.remove(0, start)
    return {"log_p": float(np.mean(likelihoods)), "f1": float(np.mean(f1s)), "first_token_s": statistics.median(times), "questions": len(times),
            "log_p_each": [round(x, 3) for x in likelihoods]}


def bytes_of(context: Context, cells: int) -> int:
    info = context.info()
    return round(info.bytes * cells / info[0].cells)


def run_full(model, talk, budget, args, kv_type):
    history = talk.history
    with Context(model, len(history) + TAIL, kv_type, threads=args.threads) as context:
        began = time.perf_counter()
        context.decode(history, 0, logits="none")
        built = time.perf_counter() - began
        row = score(context, talk, lambda _: len(history))
        return {**row, "build_s": built, "refill_s": built, "peak_bytes": bytes_of(context, len(history))}


def run_window(model, talk, budget, args, kv_type):
    history, sinks, block = talk.history, len(talk.prefix) + 4, max(32, budget // 2)
    with Context(model, budget + block + TAIL, kv_type, threads=args.threads) as context:
        began = time.perf_counter()
        for start in range(0, len(history), block):
            part = history[start:start + block]
            context.decode(part, start, logits="none")
            context.remove(0, sinks, max(sinks, start + len(part) - (budget - sinks)))
        return {**score(context, talk, lambda _: len(history)), "build_s": time.perf_counter() - began, "peak_bytes": bytes_of(context, budget + block)}


def run_retrieval(model, talk, budget, args, kv_type):
    _, encode = encoder(args.encoder, model)
    found = segments(talk.utterances)
    vectors = encode([s.text for s in found])
    with Context(model, budget + TAIL, kv_type, threads=args.threads) as context:
        def prepare(question: str) -> int:
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
        return {**score(context, talk, prepare), "build_s": 0.0, "peak_bytes": bytes_of(context, budget)}


def run_epicache(model, talk, budget, args, kv_type, episodes=None):
    name, encode = encoder(args.encoder, model)
    block = args.block or max(32, budget // 2)
    settings = Settings(prompt=args.prompt, episodes=episodes)
    layers = None
    if args.layer_budget:
        sample = talk.history[:min(len(talk.history), 2048)]
        with Context(model, len(sample) + 8, "f16", threads=args.threads, kvq="off") as context:
            similar = key_similarity(context, [layer.n_head_kv for layer in context.info()], sample, block=len(sample) // 4, sinks=32)
        layers = tuple(int(n) for n in layer_budgets(similar, budget, args.layer_budget))
    cells, capture = max(layers or [budget]), QueryCapture()
    with Context(model, cells + block + max(TAIL, settings.prompt), kv_type, threads=args.threads, on_tensor=capture) as context:
        shared = args.shared or any(layer.key_bias == "left out" for layer in context.info())
        ran = []
        builder = Builder(context, capture, Plan(budget, block, layers, shared=shared), ran.append)
        keeper = Keeper(builder, encode, talk.closing(INSTRUCTION), lambda text: model.tokenize(text, bos=False), settings)
        began = time.perf_counter()
        memory, _ = keeper.update(Memory(talk.prefix), talk.utterances)
        built, end = time.perf_counter() - began, len(talk.history)

        def prepare(question: str) -> int:
            builder.restore(keeper.recall(memory, *keeper.match(memory, question), end).state)
            return end
        rows = []
        for n in args.per_question[:len(memory.episodes)]:
            keeper.settings = replace(settings, per_question=n)
            rows.append({**score(context, talk, prepare), "build_s": built, "build_tokens": sum(ran), "episodes": len(memory.episodes), "per_question": n,
                         "peak_bytes": bytes_of(context, cells + block + settings.prompt), "stored_bytes": memory.bytes, "shared": shared,
                         "encoder": name, "prompt": args.prompt, "block": block, "layers": [min(layers), max(layers)] if layers else None})
        return rows


RUN = {"full": run_full, "window": run_window, "retrieval": run_retrieval, "epicache": lambda *a: run_epicache(*a, episodes=a[3].episodes),
       "global": lambda *a: run_epicache(*a, episodes=1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=20, help="of each conversation")
    parser.add_argument("--conversations", type=int, default=1)
    parser.add_argument("--fractions", type=int, nargs="*", default=[4, 6, 10])
    parser.add_argument("--methods", nargs="*", choices=list(RUN), default=list(RUN))
    parser.add_argument("--kv-type", nargs="*", default=["f16"], dest="kv_types")
    parser.add_argument("--episodes", type=int, help="default: chosen")
    parser.add_argument("--per-question", type=int, nargs="*", default=[2], help="episodes that a question may read; a row for each number")
    parser.add_argument("--prompt", type=int, default=256, help="most tokens of an episode's prompt")
    parser.add_argument("--block", type=int, help="tokens between two evictions; default: half the budget")
    parser.add_argument("--encoder", default="auto")
    parser.add_argument("--layer-budget", choices=["code", "paper"])
    parser.add_argument("--shared", action="store_true", help="all layers and heads keep the same tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    quiet_log()
    with Model(args.model) as model:
        talks = [Talk(model, sample, args.tokens, args.questions) for sample in json.loads(args.data.read_text())[:args.conversations]]
        for kv_type in args.kv_types:
            for fraction, method in [(1, "full")] * ("full" in args.methods) + [(f, m) for f in args.fractions for m in args.methods if m != "full"]:
                for talk in talks:
                    found = RUN[method](model, talk, len(talk.history) // fraction, args, kv_type)
                    for row in found if isinstance(found, list) else [found]:
                        line = json.dumps({"method": method, "fraction": fraction, "kv_type": kv_type, "history": len(talk.history), **row})
                        print(line, flush=True)
                        if args.output:
                            with args.output.open("a") as f:
                                f.write(line + "\n")


if __name__ == "__main__":
    main()
