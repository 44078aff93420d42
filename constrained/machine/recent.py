"""A cache of bounded size that keeps what was put in most recently."""

from typing import Generic, TypeVar

from ..tables import PART_BITS, Parts, in_parts

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Keeps at least the last ``capacity`` entries, at most twice as many.

    Two dictionaries: entries go into ``young``; when it is full, it replaces the old one, whose entries are dropped.
    """

    __slots__ = ("capacity", "old", "young")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.young: dict[Key, Value] = {}
        self.old: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        found = self.young.get(key)
        if found is None:
            found = self.old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Key, value: Value) -> None:
        if len(self.young) >= self.capacity:
            self.old, self.young = self.young, {}
        self.young[key] = value


class RecentByNumber(Generic[Value]):
    """As ``Recent``, for keys that are numbers from 0 on, in parts (``tables``)."""

    __slots__ = ("_num_young", "capacity", "old", "young")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.young: Parts[int, Value] = in_parts()
        self.old: Parts[int, Value] = in_parts()
        self._num_young = 0

    def get(self, number: int) -> Value | None:
        part = number >> PART_BITS
        found = self.young[part].get(number)
        if found is None:
            found = self.old[part].get(number)
            if found is not None:
                self.put(number, found)
        return found

    def put(self, number: int, value: Value) -> None:
        if self._num_young >= self.capacity:
            self.age()
        part = self.young[number >> PART_BITS]
        self._num_young -= len(part)
        part[number] = value
        self._num_young += len(part)

    def age(self) -> None:
        """Drop the old entries; the young ones are then the old ones."""
        self.old, self.young, self._num_young = self.young, in_parts(), 0
