"""The free KV slots, as a stack of slot ids.

A slot is one row of the KV pool: the keys and values of one token in every layer.
"""

import numpy as np


class OutOfSlots(Exception):
    """More slots are needed than are free or evictable; no slot was taken or evicted."""

    def __init__(self, need: int, free: int, evictable: int) -> None:
        super().__init__(
            f"{need:,} slots needed, but {free:,} are free and {evictable:,} evictable; "
            "release or shorten a lease first, or give the cache more slots"
        )
        self.need = need
        self.free = free
        self.evictable = evictable


class SlotPool:
    """A new pool gives slots in ascending order. Slots that are given back are taken next, in the same order."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: a pool needs at least 1 slot")
        self.num_slots = num_slots
        self.num_free = num_slots
        self._stack = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # [0, num_free) free, top last

    def take(self, n: int) -> np.ndarray:
        """``n`` slot ids, int32; at least as many must be free."""
        assert 0 <= n <= self.num_free, f"{n} slots taken of {self.num_free} free"
        bottom = self.num_free - n
        taken = self._stack[bottom : self.num_free][::-1].copy()
        self.num_free = bottom
        return taken

    def give(self, slots: np.ndarray) -> None:
        top = self.num_free + len(slots)
        assert top <= self.num_slots, f"{len(slots)} slots given back of {self.num_slots - self.num_free} that are out"
        self._stack[self.num_free : top] = slots[::-1]
        self.num_free = top

    def free_slots(self) -> np.ndarray:
        """The free slot ids as a view, valid until the next call."""
        return self._stack[: self.num_free]
