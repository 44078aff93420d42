"""The PUB socket on which an engine publishes its cache events. A slow subscriber loses events."""

from __future__ import annotations

from typing import Any

import zmq

from ...protocol.address import check_url
from ...protocol.cache_events import BlocksEvicted, BlocksStored, CacheEvent, CacheEvents, encode_cache_events
from ...protocol.errors import InvalidParams
from ...radix_cache import Event, Stored

SEND_QUEUE_FRAMES = 10_000


class CachePublisher:
    """Listens at ``url`` (loopback or ipc); ``self.url`` has the port that was taken. For one thread at a time."""

    def __init__(self, url: str, *, block_len: int, context: zmq.Context[Any]) -> None:
        check_url(url, has_keys=False)
        self.block_len = block_len
        self._socket = context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            self._socket.close()
            raise InvalidParams(f"cache_events_url={url!r}: cannot listen there: {error}") from None
        self.url: str = self._socket.get_string(zmq.LAST_ENDPOINT)

    def publish(self, events: list[Event]) -> None:
        """Send ``events`` as one frame, and empty the list."""
        if events:
            frame = CacheEvents(self.block_len, tuple(map(_message, events)))
            events.clear()
            self._socket.send(encode_cache_events(frame), zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close()


def _message(event: Event) -> CacheEvent:
    if isinstance(event, Stored):
        return BlocksStored(event.seq, str(event.namespace), event.parent, event.names)
    return BlocksEvicted(event.seq, str(event.namespace), event.names, event.cause)
