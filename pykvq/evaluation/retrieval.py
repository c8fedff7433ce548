"""Planted facts: a text of made-up sentences in which codes are hidden at several depths, and the questions that ask for them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pykvq.engine import Context, Model

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)

_COLOURS = ("red", "blue", "green", "yellow", "black", "white", "grey", "brown")
_PLACES = ("lighthouse", "warehouse", "garage", "library", "workshop", "bakery", "museum", "cottage", "stable", "office")
_PEOPLE = ("farmer", "teacher", "doctor", "painter", "sailor", "baker", "student", "driver", "singer", "lawyer", "gardener", "mason")
_DEEDS = ("walked to", "talked about", "looked at", "wrote about", "thought of", "waited near", "came back from", "asked about", "went past", "drew")
_THINGS = ("the river", "the old bridge", "the market", "the long road", "the small garden", "the mountain", "the station", "the harbour", "the forest",
           "the new school", "the stone wall", "the wide field")
_TIMES = ("in the morning", "at noon", "in the evening", "before the rain", "after lunch", "on Monday", "last summer", "during the holidays",
          "while it snowed", "on the way home")


@dataclass(frozen=True)
class Task:
    """tokens: the text. questions[i] and answers[i]: token ids of the question for the fact at DEPTHS[i] and of its code."""
    tokens: list[int]
    questions: tuple[list[int], ...]
    answers: tuple[list[int], ...]


def task(model: Model, length: int, seed: int) -> Task:
    """A text of about `length` tokens with one fact at each of DEPTHS. The same model, length and seed give the same text."""
    rng = np.random.default_rng([seed, length])

    def pick(words: Sequence[str]) -> str:
        return words[rng.integers(len(words))]

    def ids(text: str) -> list[int]:
        return model.tokenize(text, bos=False)
    names = rng.choice([f"{colour} {place}" for colour in _COLOURS for place in _PLACES], len(DEPTHS), replace=False)
    codes = rng.choice(np.arange(1000, 10000), len(DEPTHS), replace=False)
    questions = [ids(f"\n\nThe code of the {name} is") for name in names]
    whole = [ids(f"\n\nThe code of the {name} is {code}") for name, code in zip(names, codes)]
    same = [next((i for i, (a, b) in enumerate(zip(q, w)) if a != b), len(q)) for q, w in zip(questions, whole)]
    tokens, next_fact = model.tokenize(""), 0
    while True:
        if next_fact < len(DEPTHS) and len(tokens) >= DEPTHS[next_fact] * length:
            tokens += ids(f" The code of the {names[next_fact]} is {codes[next_fact]}.")
            next_fact += 1
        sentence = ids(f" The {pick(_PEOPLE)} {pick(_DEEDS)} {pick(_THINGS)} {pick(_TIMES)}.")
        if next_fact == len(DEPTHS) and len(tokens) + len(sentence) > length:
            return Task(tokens, tuple(w[:n] for w, n in zip(whole, same)), tuple(w[n:] for w, n in zip(whole, same)))
        tokens += sentence


def room(length: int) -> int:
    """Cells that answer() needs beyond a text of `length` tokens."""
    return (length + 128 + 255) // 256 * 256


def answer(context: Context, t: Task, advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
    """Whether a greedy continuation of each question would be its code; bool [len(DEPTHS)].

    The context needs two sequences and a unified cache: the text is read once, and each question goes on in a copy of it.
    """
    context.clear()
    for first in range(0, len(t.tokens), context.n_batch):
        part = t.tokens[first:first + context.n_batch]
        context.decode(part, first, logits="none")
        advance(len(part))
    found = []
    for question, code in zip(t.questions, t.answers):
        context.copy(0, 1)
        asked, start = question + code[:-1], len(t.tokens)
        entries = [(token, start + i, 1, i >= len(question) - 1) for i, token in enumerate(asked)]
        logits = np.concatenate([context.decode_batch(entries[i:i + context.n_batch]) for i in range(0, len(entries), context.n_batch)])
        context.remove(1, 0)
        found.append(logits.argmax(1).tolist() == code)
    return np.array(found)
