"""Responses kept for ``previous_response_id``: bounded in number, bytes and age; the oldest are dropped first."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..config import StoreLimits
from .written import Written


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``owner``: the digest of the key that may read it. ``messages``: the conversation, the answer included.

    ``written``: the tokens of that conversation, by which the next response of ``model`` finds them in the cache.
    """

    id: str
    owner: bytes
    model: str
    body: bytes
    messages: list[dict[str, Any]]
    written: Written

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(msgspec.json.encode(self.messages)) + self.written.size_bytes


class ResponseStore:
    """Used by the event loop and the thread of long requests."""

    def __init__(self, limits: StoreLimits, *, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, int, StoredResponse]] = {}  # by id, oldest first: its end, its size
        self._size_bytes = 0

    @property
    def keeps_any(self) -> bool:
        return self._limits.max_count > 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: StoredResponse) -> None:
        """Keep ``response``, unless it alone is larger than the store."""
        with self._lock:
            size_bytes = response.size_bytes
            self._kept[response.id] = self._now() + self._limits.lifetime_s, size_bytes, response
            self._size_bytes += size_bytes
            while len(self._kept) > self._limits.max_count or self._size_bytes > self._limits.max_bytes:
                self._drop(next(iter(self._kept)))
            self._drop_old()

    def get(self, id: str, owner: bytes) -> StoredResponse | None:
        with self._lock:
            self._drop_old()
            *_, found = self._kept.get(id, (None,))
            return found if found is not None and found.owner == owner else None

    def delete(self, id: str, owner: bytes) -> bool:
        """Whether there was one."""
        with self._lock:
            self._drop_old()
            *_, found = self._kept.get(id, (None,))
            if found is None or found.owner != owner:
                return False
            self._drop(id)
            return True

    def _drop_old(self) -> None:
        now = self._now()
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self._drop(next(iter(self._kept)))

    def _drop(self, id: str) -> None:
        _, size_bytes, _ = self._kept.pop(id)
        self._size_bytes -= size_bytes
