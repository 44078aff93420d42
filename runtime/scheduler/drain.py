"""The rate at which work is done lately, and so the seconds until the present work has drained.

Work is counted in generated tokens; a prompt token counts as ``lengths.PROMPT_COST`` of one.
"""

import math
from collections.abc import Iterable

from .lengths import Lengths
from .sequence import Sequence

MEMORY_S = 30.0  # after which past work counts 1 / e
LEAST_S, MOST_S = 1.0, 60.0  # bounds of the time that a client is asked to wait


class Drain:
    """Recent work, and the recent seconds in which there was work to do."""

    __slots__ = ("_answer", "_last_s", "_seconds", "_work")

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._last_s = math.inf
        self._answer = (-1, 0.0)  # the step of the last ``wait_s``, and what it returned

    def begin(self, now_s: float) -> None:
        """There is work to do from ``now_s`` on, if there was none before."""
        self._last_s = min(self._last_s, now_s)

    def note(self, work: float, now_s: float) -> None:
        """``work`` was done since the last ``note``, or since ``begin``."""
        elapsed_s = now_s - self._last_s
        self._last_s = now_s
        if elapsed_s <= 0:
            return
        keep = math.exp(-elapsed_s / MEMORY_S)
        self._work = self._work * keep + work
        self._seconds = self._seconds * keep + elapsed_s

    def pause(self) -> None:
        """There is nothing to do: time does not count until the next ``begin``."""
        self._last_s = math.inf

    def wait_s(self, sequences: Iterable[Sequence], lengths: Lengths, *, step: int) -> float:
        """Expected seconds until ``sequences`` have ended, within the bounds; computed once per step."""
        if self._answer[0] != step:
            self._answer = (step, self._estimate_s(sequences, lengths))
        return self._answer[1]

    def _estimate_s(self, sequences: Iterable[Sequence], lengths: Lengths) -> float:
        if self._work <= 0:
            return LEAST_S
        work = sum(lengths.work(seq) for seq in sequences)
        return min(max(work * self._seconds / self._work, LEAST_S), MOST_S)
