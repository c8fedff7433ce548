"""The saved state of one sequence, by the name that it had before other modules read it too."""
from pykvq.sequence_state import Rows, SequenceState, StateError

__all__ = ["Rows", "SequenceState", "StateError"]
