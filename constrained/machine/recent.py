"""A cache of bounded size that keeps what was put in most recently."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from ..tables import PART_BITS, Parts, in_parts

Key = TypeVar("Key")
Value = TypeVar("Value")


DROPPED_AT_ONCE = 4  # more than the one that is put in, so they do not pile up


class Leaving:
    """Entries that a cache keeps no longer and drops a few at a time. Their memory is in no processor cache any more:
    a mask that dropped 4,096 at once took 8 to 22 ms longer.
    """

    __slots__ = ("tables",)

    def __init__(self) -> None:
        self.tables: list[dict[Any, Any]] = []

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    def add(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Takes the tables."""
        self.tables += tables

    def drop_some(self) -> None:
        tables = self.tables
        with suppress(KeyError, IndexError):  # another thread dropped the last one
            for _ in range(DROPPED_AT_ONCE):
                if tables[-1]:
                    tables[-1].popitem()
                else:
                    tables.pop()


class Recent(Generic[Key, Value]):
    """Keeps at least the last ``capacity`` entries, at most twice as many.

    Two dictionaries: entries go into ``young``; when it is full, it replaces ``old``, whose entries are then
    ``leaving``: each ``put`` drops a few of them.
    """

    __slots__ = ("capacity", "leaving", "old", "young")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.young: dict[Key, Value] = {}
        self.old: dict[Key, Value] = {}
        self.leaving = Leaving()

    def get(self, key: Key) -> Value | None:
        found = self.young.get(key)
        if found is None:
            found = self.old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Key, value: Value) -> None:
        if len(self.young) >= self.capacity:
            self.leaving.add([self.old])
            self.old, self.young = self.young, {}
        self.young[key] = value
        if self.leaving.tables:
            self.leaving.drop_some()

    def forget(self) -> None:
        """Keep nothing of what was put in."""
        self.leaving.add([self.old, self.young])
        self.old, self.young = {}, {}


class RecentByNumber(Generic[Value]):
    """As ``Recent``, for keys that are numbers from 0 on, in parts (``tables``)."""

    __slots__ = ("_num_young", "capacity", "leaving", "old", "young")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.young: Parts[int, Value] = in_parts()
        self.old: Parts[int, Value] = in_parts()
        self._num_young = 0
        self.leaving = Leaving()

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
        if self.leaving.tables:
            self.leaving.drop_some()

    def age(self) -> None:
        """Drop the old entries; the young ones are then the old ones."""
        self.leaving.add(self.old.values())
        self.old, self.young, self._num_young = self.young, in_parts(), 0
