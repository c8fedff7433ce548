"""The episodic memory of one conversation: what was said, its segments and episodes, and the rows that a question's cache is made of."""
from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from pykvq.epicache.archive import Archive
from pykvq.epicache.build import Builder, Compressed
from pykvq.epicache.cluster import cluster, episodes, representatives
from pykvq.epicache.embed import Encoder
from pykvq.epicache.merge import merged
from pykvq.epicache.recall import Asked, nearest, read, recalled
from pykvq.epicache.segment import Segment, Utterance, segments
from pykvq.sequence_state import SequenceState

INSTRUCTION = "Repeat the part of our conversation with the names, places, dates, events, decisions, promises and opinions in it."


@dataclass
class Episode:
    """One episode: its centroid, and its cache where each has one. version: another one after each change, so that a store knows what to write."""
    centroid: np.ndarray
    cache: Compressed | None
    version: str


@dataclass
class Memory:
    """built: utterances that the episodes were made of; clustered: tokens of history at the last clustering; version: as of an episode; archive: rows of
    all tokens, empty where episodes have caches; starts: first token of each utterance, and the end of the last."""
    prefix: list[int]
    segments: list[Segment] = field(default_factory=list)
    vectors: np.ndarray | None = None
    label: np.ndarray | None = None
    episodes: list[Episode] = field(default_factory=list)
    built: int = 0
    clustered: int = 0
    version: str = ""
    archive: Archive = Archive()
    starts: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.archive.bytes + sum(e.cache.state.bytes for e in self.episodes if e.cache)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First token and end of each segment's utterances."""
        return [(self.starts[s.first], self.starts[s.last]) for s in self.segments]

    def size(self, e: int) -> int:
        """Tokens of an episode's segments."""
        return sum(end - start for (start, end), label in zip(self.spans, self.label) if label == e)

    def tokens(self, utterances: Sequence[Utterance]) -> list[int]:
        """Prefix and history."""
        return [*self.prefix, *(t for u in utterances for t in u.tokens)]


@dataclass(frozen=True)
class Settings:
    """width: utterances of a segment; episodes: their number, None to choose it; sinks: first tokens that stay.

    recall: "question" keeps the rows of every token outside the cache, and each question takes the cells that it attends to from the episodes nearest
    to it, `reach` times the budget of them; together: most tokens of an utterance that stay together, 0: the segments nearest to the question, whole;
    by: "max" or "mean" of the attention of the question's tokens; draft: tokens of a first answer that choose once more with the question, 0: it
    chooses once; whole: share of the budget for the segments nearest to the question as they are. "episode" keeps one cache per episode, made before any question (arXiv 2509.17396). prompt: most
    tokens of an episode's prompt; per_question: most episodes that one question reads; near: how close a second one's similarity must be to the best.
    """
    width: int = 4
    episodes: int | None = None
    sinks: int = 4
    recall: str = "question"
    reach: float = 8.0
    together: int = 64
    by: str = "mean"
    draft: int = 8
    whole: float = 0.0
    prompt: int = 256
    per_question: int = 2
    near: float = 0.8


class Keeper:
    """Builds and updates memories through one Builder. opening: INSTRUCTION as a question, and the opening of its answer; tokenize: of a text."""

    def __init__(self, builder: Builder, encode: Encoder, opening: list[int], tokenize: Callable[[str], list[int]], settings: Settings):
        self.builder, self.encode, self.opening, self.tokenize, self.settings = builder, encode, opening, tokenize, settings
        if settings.recall not in ("question", "episode"):
            raise ValueError(f'recall is "question" or "episode", not {settings.recall!r}')
        if settings.recall == "episode" and len(opening) >= settings.prompt:
            raise ValueError(f"the prompt of an episode may take {settings.prompt} tokens, and its instruction alone takes {len(opening)}; raise prompt")

    def update(self, memory: Memory, utterances: Sequence[Utterance]) -> tuple[Memory, int]:
        """A memory that holds all `utterances`, and how many episodes got some of them; `memory` stays as it is.

        New segments go to the nearest episode. Where episodes have caches, only those that got one read on. When the history has doubled since
        the last time, everything is clustered anew, and caches are built anew; an archive only grows.
        """
        tokens = memory.tokens(utterances)
        if memory.built == len(utterances):
            return memory, 0
        memory = replace(memory, segments=list(memory.segments), episodes=[replace(e) for e in memory.episodes],
                         version=_version())
        fresh = segments(utterances, self.settings.width, memory.built)
        new = self.encode([s.text for s in fresh])
        memory.starts = np.cumsum([len(memory.prefix), *(len(u.tokens) for u in utterances)]).tolist()
        memory.segments += fresh
        memory.vectors = new if memory.vectors is None else np.concatenate([memory.vectors, new])
        if not memory.episodes or len(tokens) >= 2 * memory.clustered:
            touched = self._cluster(memory, tokens)
        else:
            joins = (new @ np.stack([e.centroid for e in memory.episodes]).T).argmax(1)
            memory.label = np.concatenate([memory.label, joins])
            touched = sorted(set(joins.tolist()))
        if self.settings.recall == "question":
            memory.archive = read(self.builder, memory.archive, tokens, self._pinned(memory), self.settings.together > 0)
        for e in touched:
            episode = memory.episodes[e]
            if episode.cache is None:
                continue
            episode.cache = self.builder.extend(episode.cache, tokens, self._prompt(memory, e))
            episode.version = _version()
        memory.built = len(utterances)
        return memory, len(touched)

    def match(self, memory: Memory, question: str) -> tuple[list[int], list[float]]:
        """Episodes for a question, the best first, by q . centroid (not normalised, as published), and their weights, to one
        digit, so that the next question often finds the same cache."""
        similarity = np.stack([e.centroid for e in memory.episodes]) @ self.encode([question])[0]
        order = [int(e) for e in np.argsort(-similarity, kind="stable")[:self.settings.per_question]]
        best = similarity[order[0]]
        kept = [e for e in order if e == order[0] or best > 0 and similarity[e] >= self.settings.near * best]
        return kept, [round(float(similarity[e] / best), 1) if best > 0 else 1.0 for e in kept]

    def lookup(self, memory: Memory, question: str, asked: Asked) -> tuple[list[int], SequenceState]:
        """Episodes for a question, the nearest first, as many as hold `reach` times the budget, and the cells that it takes from their tokens."""
        vector, plan = self.encode([question])[0], self.builder.plan
        order = np.argsort(-(np.stack([e.centroid for e in memory.episodes]) @ vector), kind="stable")
        sizes = np.array([memory.size(e) for e in order])
        near_first = order[:int(np.searchsorted(sizes.cumsum(), self.settings.reach * plan.budget)) + 1].tolist()
        at = np.arange(memory.archive.end)
        always = (at < self._pinned(memory)) | (at >= len(at) - plan.recent)
        near = [i for i, label in enumerate(memory.label) if label in near_first]
        pieces, likeness = [np.arange(*memory.spans[i]) for i in near], memory.vectors[near] @ vector
        candidates = always.copy()
        for piece in pieces:
            candidates[piece] = True
        guess = nearest(pieces, likeness, always, plan.budget)
        if not self.settings.together:
            return near_first, memory.archive.rows(np.flatnonzero(guess))
        if self.settings.whole:
            always = nearest(pieces, likeness, always, int(plan.budget * self.settings.whole))
        starts = np.concatenate([[0], *(np.arange(*span, self.settings.together) for span in pairwise(memory.starts))])
        return near_first, recalled(self.builder, memory.archive, guess, candidates, always, asked, starts, self.settings.by, self.settings.draft)

    def recall(self, memory: Memory, chosen: Sequence[int], weights: Sequence[float], end: int) -> Compressed:
        """One cache of the chosen episodes, after `end` tokens."""
        return merged([memory.episodes[e].cache for e in chosen], weights, self.builder.plan, end)

    def _cluster(self, memory: Memory, tokens: Sequence[int]) -> range:
        n = self.settings.episodes
        found = (cluster(memory.vectors, min(n, len(memory.vectors))) if n else episodes(memory.vectors, len(tokens), self.builder.plan.budget))
        start = self.builder.start(tokens, self._pinned(memory)) if self.settings.recall == "episode" else None
        memory.label, memory.clustered = found.label, len(tokens)
        memory.episodes = [Episode(c, start, "") for c in found.centroids]
        return range(len(memory.episodes))

    def _pinned(self, memory: Memory) -> int:
        return max(len(memory.prefix), self.settings.sinks)

    def _prompt(self, memory: Memory, e: int) -> list[int]:
        """The opening, and as the answer the windows nearest the centroid, as many as fit, in the order in which they were said.

        As an answer, because a model that repeats what was said attends to where it was said (arXiv 2509.17396, its code).
        """
        order = representatives(memory.vectors, memory.episodes[e].centroid, np.flatnonzero(memory.label == e))
        room = self.settings.prompt - len(self.opening)
        taken: dict[int, list[int]] = {}
        for i in order:
            window = self.tokenize(memory.segments[i].text + "\n")[:room if not taken else None]
            if len(window) > room:
                break
            taken[int(i)], room = window, room - len(window)
        return [*self.opening, *(t for i in sorted(taken) for t in taken[i])]


def _version() -> str:
    return uuid.uuid4().hex
