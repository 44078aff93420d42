"""A cache of bounded size that keeps what was put in most recently."""

from typing import Generic, TypeVar

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
