"""A deep cache without its prefill: the saved state of a short prefix, its rows repeated at further positions.

For measuring speed: attention reads as much as after a real prefill; what the model says after it means nothing.
"""
from __future__ import annotations

from collections.abc import Sequence

from pykvq.engine import Context
from pykvq.sequence_state import SequenceState, StateError

PIECE = 16384                            # tokens put into the cache at a time


def fill_from_prefix(context: Context, tokens: Sequence[int], depth: int, n_seq: int = 1) -> None:
    """Put `depth` tokens into each of the sequences 0 to n_seq - 1, of which only `tokens` are computed.

    One sequence needs a context of two with a unified cache: pieces are loaded as sequence 1 and given to sequence 0, because
    a load replaces what a sequence had. More need a cache without unified=True: the first is loaded whole, then copied. Where the cache
    has an f16 window, its last tokens are computed, and those of one sequence's sinks, so that it is as full as after a prefill.
    Raises ValueError for a cache of another kind.
    """
    context.clear()
    if not depth:
        return
    context.decode(tokens[:depth], 0, logits="none")
    try:
        state = SequenceState.parse(context.save(0, bare=True), split=True)
    except StateError as error:
        raise ValueError(f"the saved state is not that of one attention cache under flash attention ({error}); this model needs a real prefill") from error
    context.clear()
    sink, filled = context.info()[0].sink, max(depth - context.info()[0].recent, 0)
    if n_seq > 1 and filled:
        context.load(state.repeated(0, filled), 0, bare=True)
    else:
        context.decode([tokens[i % len(tokens)] for i in range(min(sink, filled))], 0, logits="none")
        for start in range(sink, filled, PIECE):
            context.load(state.repeated(start, min(PIECE, filled - start)), 1, bare=True)
            context.copy(1, 0)
            context.remove(1, 0)
    context.decode([tokens[i % len(tokens)] for i in range(filled, depth)], filled, logits="none")
    for seq in range(1, n_seq):
        context.copy(0, seq)
