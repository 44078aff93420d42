"""What an engine tells routers of its cache: events as frames, and all blocks at once."""

from __future__ import annotations

import secrets
from collections import deque

from ...protocol.cache_events import BlocksEvicted, BlocksStored, CacheEvent, CacheEvents, CacheSnapshot
from ...radix_cache import Event, RadixCache, Stored


class CacheFeed:
    """Gathers events until they are taken. ``note`` may be called on any thread, all else on the engine's.

    ``model``: a digest of vocabulary and weights. ``epoch`` is random, so a restarted engine has another one.
    """

    def __init__(self, *, block_len: int, model: str) -> None:
        self.block_len = block_len
        self.model = model
        self.epoch = 1 + secrets.randbits(62)
        self._events: deque[Event] = deque()

    def note(self, event: Event) -> None:
        self._events.append(event)

    def take(self) -> CacheEvents | None:
        """The events since the last call as one frame; None if there are none."""
        if not self._events:
            return None
        events = tuple(_message(self._events.popleft()) for _ in range(len(self._events)))
        return CacheEvents(self.block_len, events, self.epoch, self.model)

    def snapshot(self, cache: RadixCache) -> CacheSnapshot:
        """All blocks; events that were noted and not taken yet are in it, by their numbers."""
        blocks = cache.blocks()
        return CacheSnapshot(
            self.block_len, self.epoch, blocks.seq, self.model, blocks.device, blocks.host, blocks.disk
        )


def _message(event: Event) -> CacheEvent:
    if isinstance(event, Stored):
        return BlocksStored(event.seq, str(event.namespace), event.parent, event.names, event.tier)
    return BlocksEvicted(event.seq, str(event.namespace), event.names, event.cause, event.tier)
