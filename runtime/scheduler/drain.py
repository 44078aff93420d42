"""How fast work is done, and so how long what is there will take. Never decides who runs.

Work is counted in generated tokens; a prompt's tokens count as ``lengths.PROMPT_COST`` of one.
"""

import math
from collections.abc import Iterable

from .lengths import Lengths
from .sequence import Sequence

MEMORY_S = 30.0  # of work, after which it counts a third
LEAST_S, MOST_S = 1.0, 60.0  # that a client is told to wait


class Drain:
    """Work done over the seconds in which there was any to do, lately."""

    __slots__ = ("_last_s", "_seconds", "_told", "_work")

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._last_s = math.inf
        self._told = (-1, 0.0)  # the step in which somebody asked last, and the answer

    def begin(self, now_s: float) -> None:
        """There is something to do from now on, if there was nothing."""
        self._last_s = min(self._last_s, now_s)

    def note(self, work: float, now_s: float) -> None:
        """``work`` is done: since the last note, or since there is anything to do."""
        elapsed_s = now_s - self._last_s
        self._last_s = now_s
        if elapsed_s <= 0:
            return
        keep = math.exp(-elapsed_s / MEMORY_S)
        self._work = self._work * keep + work
        self._seconds = self._seconds * keep + elapsed_s

    def pause(self) -> None:
        """There is nothing to do: until something begins no time counts."""
        self._last_s = math.inf

    def wait_s(self, sequences: Iterable[Sequence], lengths: Lengths, *, step: int) -> float:
        """Seconds until ``sequences`` are expected to have ended, within the bounds; worked out once in a step."""
        if self._told[0] != step:
            self._told = (step, self._estimate_s(sequences, lengths))
        return self._told[1]

    def _estimate_s(self, sequences: Iterable[Sequence], lengths: Lengths) -> float:
        if self._work <= 0:
            return LEAST_S
        work = sum(lengths.work(seq) for seq in sequences)
        return min(max(work * self._seconds / self._work, LEAST_S), MOST_S)
