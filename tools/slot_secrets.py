"""Words planted in conversations, and where they must not turn up: another slot's answer, another slot's file.

A file is searched for the word's tokens and for its rows of the cache, as one layer keeps them for the word's last token. Rows of
another batch may round to other codes, so those of two layers are looked for, K and V.
"""
from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from pykvq.sequence_state import MAGIC, SequenceState

QUESTION = "Remember the word"
_HEADER = 24                                     # of a sealed state, before its text (ggml_kernels/llama/kvq-state.cpp)


def words(n: int, seed: int = 0) -> list[str]:
    """n made-up words, none of which begins another."""
    rng = random.Random(seed)
    made = dict.fromkeys("".join(rng.choice(letters) for letters in ["bdfgklmnprstvz", "aeiou"] * 4) for _ in range(2 * n))
    return list(made)[:n]


def plant(word: str, text: str) -> str:
    """A prompt that asks for its word."""
    return f"{QUESTION} {word}. {text.strip()} {QUESTION} {word}. {QUESTION}"


def file_tokens(data: bytes) -> list[int]:
    """The tokens in front of a slot file."""
    n, = struct.unpack_from("<I", data, 8)
    return list(struct.unpack_from(f"<{n}i", data, 12))


def file_state(data: bytes, stream: int) -> SequenceState:
    """The rows of a slot file. stream: of the slot in its cache, 0 when the cache is unified."""
    start = 12 + 4 * len(file_tokens(data))
    length, = struct.unpack_from("<I", data, start + 4)
    rows = data[start + _HEADER + length:]
    # a file lacks what stands before the number of streams; one without cells of the slot is a zero, which SequenceState wants behind the slot's own
    return SequenceState.parse(struct.pack("<Ii", MAGIC, 0) + rows[:4] + rows[4 + 4 * stream:] + bytes(4 * stream), split=True)


@dataclass(frozen=True)
class Secret:
    """A planted word, its tokens as a file has them, and rows that only its cells have."""
    word: str
    tokens: bytes
    rows: tuple[bytes, ...]

    @classmethod
    def of(cls, word: str, tokens: list[int], data: bytes, stream: int) -> "Secret":
        """tokens: of the word with a space before it; data: the slot file of a conversation that holds it. Raises ValueError where it does not."""
        held, state = file_tokens(data), file_state(data, stream)
        ends = [i + len(tokens) for i in range(len(held)) if held[i:i + len(tokens)] == tokens]
        if not ends or len(state.keys) < 2:
            raise ValueError(f"no tokens of {word!r} in its own file, or a cache of one layer: nothing to look for")
        # not the first layer, whose values know the token alone
        layers = (len(state.keys) // 2, len(state.keys) - 1)
        return cls(word, struct.pack(f"<{len(tokens)}i", *tokens), tuple(part[i].data[ends[0] - 1].tobytes() for i in layers for part in (state.keys, state.values)))

    def in_text(self, text: str) -> bool:
        return self.word in text

    def in_file(self, data: bytes) -> bool:
        return self.tokens in data or any(row in data for row in self.rows)
