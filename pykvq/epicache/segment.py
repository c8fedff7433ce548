"""Utterances and windows of them."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LONG = 500                                # characters of an utterance that is split into sentences first


@dataclass(frozen=True)
class Utterance:
    """What was said: `text` as it is embedded, `tokens` as it stands in the history."""
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A window: utterances first..last-1, and its text."""
    first: int
    last: int
    text: str


def segments(utterances: Sequence[Utterance], width: int = 4, start: int = 0) -> list[Segment]:
    """Windows of `width` utterances from index `start` on, not overlapping.

    A long utterance counts as its sentences, packed to pieces of at most LONG characters, so that no window is cut by an encoder's
    limit (arXiv 2509.17396, section 3.1, and its code).
    """
    pieces = [(i, piece) for i in range(start, len(utterances)) for piece in _pieces(utterances[i].text)]
    return [Segment(part[0][0], part[-1][0] + 1, "\n".join(text for _, text in part))
            for part in (pieces[i:i + width] for i in range(0, len(pieces), width))]


def _pieces(text: str) -> list[str]:
    if len(text) <= LONG:
        return [text]
    pieces = [""]
    for sentence in re.split(r"(?<=[.!?。！？])\s+|\n+", text):
        if pieces[-1] and len(pieces[-1]) + len(sentence) > LONG:
            pieces.append("")
        pieces[-1] = f"{pieces[-1]} {sentence}".strip()
    return pieces
