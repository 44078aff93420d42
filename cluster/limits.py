"""What a fleet's client may keep, and for how long programs may wait."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.errors import InvalidParams

MAX_AT_ONCE = 8  # programs whose KV is copied at once; the others decode on meanwhile


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """``max_wait_s``: how long a program may wait for an engine. Then its ops fail: as ``Overloaded`` where all engines
    are too busy for it, as ``EngineLost`` where none is ready or one that had it was lost.

    ``max_waiting``: programs that may wait so. ``max_journal_bytes``: of one program; ``max_journals_bytes``: of all,
    and the longest journals go first. A program without its journal runs on, and fails if its engine is lost.
    ``max_pins_bytes``: of what is kept to make the engines' pins again. ``max_rebalanced``: running programs that may
    be on their way to another engine at once because that one has less to do; 0: programs stay where they run.
    """

    max_wait_s: float = 120.0
    max_waiting: int = 10_000
    max_journal_bytes: int = 64 << 20
    max_journals_bytes: int = 1 << 30
    max_pins_bytes: int = 64 << 20
    max_rebalanced: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.max_rebalanced <= MAX_AT_ONCE:
            text = f"max_rebalanced={self.max_rebalanced}: it must be 0 to {MAX_AT_ONCE}; 0 moves no running program"
            raise InvalidParams(text, where="max_rebalanced")
