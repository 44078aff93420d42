"""What was put in last, by key. Never holds more than twice its capacity."""

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """What was put in last: at least ``capacity`` entries, at most twice as many."""

    __slots__ = ("_old", "capacity", "young")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        found = self.young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Key, value: Value) -> None:
        if len(self.young) >= self.capacity:
            self._old, self.young = self.young, {}
        self.young[key] = value
