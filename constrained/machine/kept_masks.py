"""The masks of a machine, each content once: most configurations share the mask of another one.

Compiled walks write a mask to one place and look its content up here (``walk.keep_mask``).
"""

import numpy as np

from . import walk
from .machine import Machine
from .untouched import untouched


class KeptMasks:
    """Room for ``capacity`` masks. They are read-only, and stay where they are as long as somebody holds one."""

    def __init__(self, machine: Machine, capacity: int) -> None:
        self._machine = machine
        self.capacity = capacity
        self.rows: list[np.ndarray] = []  # by number
        self._told: dict[int, tuple[np.ndarray, int, bool]] = {}  # by number; see ``told``
        self.clear()

    def clear(self) -> None:
        """Begin again in new memory."""
        machine, num_words = self._machine, self._machine.vocabulary.num_words
        num_slots = 4 << (self.capacity - 1).bit_length()
        self._kept = untouched((self.capacity, num_words), np.uint32)
        self._readable = self._kept.view()
        self._readable.flags.writeable = False
        machine.set_array(walk.KEPT, self._kept)
        machine.set_array(walk.KEPT_KEYS, np.zeros(num_slots, np.int64))
        machine.set_array(walk.KEPT_AT, np.full(num_slots, -1, np.int32))
        control = machine.control
        control[walk.KEPT_SLOTS] = num_slots - 1
        control[walk.NUM_KEPT] = 0
        control[walk.MAX_KEPT] = self.capacity
        self.rows, self._told = [], {}

    def row(self, number: int) -> np.ndarray:
        """uint32 [ceil(V / 32)]: the mask of a number."""
        rows = self.rows
        while number >= len(rows):
            rows.append(self._readable[len(rows)])
        return rows[number]

    def told(self, number: int) -> tuple[np.ndarray, int, bool]:
        """The mask of a number, the one token that it allows (-1 if there are more, or none), and whether it allows the
        end token."""
        found = self._told.get(number)
        if found is None:
            row, eos = self.row(number), self._machine.vocabulary.eos
            found = self._told[number] = row, only_token(row), bool(row[eos >> 5] >> (eos & 31) & 1)
        return found


def only_token(row: np.ndarray) -> int:
    """The one token that a mask (uint32 [W]) allows; -1 if there are more, or none."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return -1
    word = int(row[words[0]])
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else -1
