"""Events for routers: which token blocks the cache has stored and evicted. ``on_event`` sends them."""

from collections.abc import Callable
from dataclasses import dataclass

from .node import Namespace, RadixNode


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks; the first follows ``parent``. ``seq`` counts events: a gap means that one was lost."""

    seq: int
    namespace: Namespace
    parent: bytes
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks of which tokens were evicted. ``cause``: ``space`` or ``flush``."""

    seq: int
    namespace: Namespace
    names: tuple[bytes, ...]
    cause: str


Event = Stored | Evicted


class BlockEvents:
    """A ``Follower`` that makes an event of each call."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._seq = 0

    def stored(self, node: RadixNode, names: list[bytes], *, parent: bytes, first_end: int) -> None:
        self._seq += 1
        self._on_event(Stored(self._seq, node.namespace, parent, tuple(names)))

    def evicted(self, node: RadixNode, names: list[bytes], *, first_end: int, cause: str) -> None:
        self._seq += 1
        self._on_event(Evicted(self._seq, node.namespace, tuple(names), cause))
