"""Events for routers: which token blocks the cache and its tiers have stored and evicted. ``on_event`` sends them."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from .node import Namespace, RadixNode

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks; the first follows ``parent``. ``seq`` counts events: a gap means that one was lost.

    Events of the host and the disk tier have no namespace and no parent.
    """

    seq: int
    namespace: Namespace
    parent: bytes
    names: tuple[bytes, ...]
    tier: Tier = "device"


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks of which tokens were evicted. ``cause``: ``space``, ``flush``, or ``unsound`` (a broken file)."""

    seq: int
    namespace: Namespace
    names: tuple[bytes, ...]
    cause: str
    tier: Tier = "device"


Event = Stored | Evicted


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """The names of all blocks by tier. Later changes have events with numbers above ``seq``."""

    seq: int
    device: tuple[bytes, ...] = ()
    host: tuple[bytes, ...] = ()
    disk: tuple[bytes, ...] = ()


class BlockEvents:
    """A ``Follower`` that makes an event of each call.

    The tiers call ``kept`` and ``dropped`` on any thread, so ``on_event`` may be called on any thread, one at a time
    and in the order of the numbers. A change is made before its event is numbered: a reader that takes ``seq`` first
    and the blocks afterwards misses nothing.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._lock = Lock()
        self.seq = 0

    def stored(self, node: RadixNode, names: list[bytes], *, parent: bytes, first_end: int) -> None:
        with self._lock:
            self.seq += 1
            self._on_event(Stored(self.seq, node.namespace, parent, tuple(names)))

    def evicted(self, node: RadixNode, names: list[bytes], *, first_end: int, cause: str) -> None:
        with self._lock:
            self.seq += 1
            self._on_event(Evicted(self.seq, node.namespace, tuple(names), cause))

    def kept(self, tier: Tier, name: bytes) -> None:
        """A tier has a block now."""
        with self._lock:
            self.seq += 1
            self._on_event(Stored(self.seq, "", b"", (name,), tier))

    def dropped(self, tier: Tier, name: bytes, cause: str) -> None:
        """A tier does not have a block any more."""
        with self._lock:
            self.seq += 1
            self._on_event(Evicted(self.seq, "", (name,), cause, tier))
