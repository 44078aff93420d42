"""The states inside a number of a list: each stands for the numbers that the digits so far may still spell."""

from collections.abc import Iterable

import numpy as np

from ..machine import Machine

Live = tuple[tuple[int, int], ...]  # (number, the language of its rest)


class NumberList:
    """An automaton for the spellings of several numbers, which it tells apart: number i ends with result i + 1.

    ``spellings[i]`` is the language of number ``first`` + i. States have local numbers from ``first_local`` on.
    """

    def __init__(self, machine: Machine, spellings: Iterable[int], first: int, first_local: int) -> None:
        self._machine = machine
        self._states: dict[Live, int] = {}
        self._first_local = first_local
        self._start = tuple(enumerate(spellings, first))
        self._moves: dict[Live, list[tuple[int, int, Live]]] = {}
        self._bits: list[int] = []  # of the numbers that each state may spell
        todo = [self._start]
        for live in todo:
            for _, _, after in self._moves_of(live):
                if after not in self._states:
                    self._states[after] = self._add_state(after)
                    todo.append(after)

    @property
    def num_states(self) -> int:
        return len(self._bits)

    def begin(self, row: np.ndarray) -> None:
        """Write the codes of a number's first byte into the row of a state."""
        self._fill(row, self._start)

    def allowed(self, numbers: int) -> np.ndarray:
        """uint8 [num_states]: whether each state may spell one of the numbers whose bits are set."""
        return np.array([bits & numbers > 0 for bits in self._bits], np.uint8)

    def _add_state(self, live: Live) -> int:
        nullable = self._machine.expressions.nullable
        self._bits.append(sum(1 << i for i, _ in live))
        return self._machine.add_state(
            lambda row: self._fill(row, live),
            ends=next((self._machine.result(i + 1) for i, rest in live if nullable[rest]), -1),
            local=self._first_local + len(self._bits) - 1,
        )

    def _moves_of(self, live: Live) -> list[tuple[int, int, Live]]:
        """Ranges of bytes [low, high), and the numbers after each."""
        found = self._moves.get(live)
        if found is None:
            ex = self._machine.expressions
            after: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for i, rest in live:
                for low, high, to in ex.steps(rest):
                    for byte in range(low, high):
                        after.setdefault((byte, byte + 1), []).append((i, to))
            found = self._moves[live] = [(low, high, tuple(to)) for (low, high), to in sorted(after.items())]
        return found

    def _fill(self, row: np.ndarray, live: Live) -> None:
        for low, high, after in self._moves_of(live):
            row[low:high] = self._states[after]
