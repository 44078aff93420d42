"""KV blocks in host memory, by name, up to a number of bytes.

The engine's thread and the tiers' worker both use it, so every call takes the lock.
"""

from collections import OrderedDict
from threading import Lock

from .events import BlockEvents


class HostTier:
    """Drops the least recently used blocks first. ``events``, if set, is told of each block."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: the host tier needs room for at least 1 byte")
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self.events: BlockEvents | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        with self._lock:
            return name in self._blocks

    def names(self) -> tuple[bytes, ...]:
        with self._lock:
            return tuple(self._blocks)

    def get(self, name: bytes) -> bytes | None:
        with self._lock:
            block = self._blocks.get(name)
            if block is not None:
                self._blocks.move_to_end(name)
            return block

    def put(self, name: bytes, block: bytes) -> None:
        """Keep ``block``, unless it is larger than the whole tier."""
        with self._lock:
            old = self._blocks.pop(name, None)
            if old is not None:
                self.size_bytes -= len(old)
            if len(block) > self.max_bytes:
                if old is not None:
                    self._note_dropped(name)
                return
            self._blocks[name] = block
            self.size_bytes += len(block)
            if old is None and self.events is not None:
                self.events.kept("host", name)
            while self.size_bytes > self.max_bytes:
                first, block = self._blocks.popitem(last=False)
                self.size_bytes -= len(block)
                self._note_dropped(first)

    def _note_dropped(self, name: bytes) -> None:
        if self.events is not None:
            self.events.dropped("host", name, "space")
