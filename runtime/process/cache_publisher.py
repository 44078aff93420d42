"""The PUB socket on which an engine publishes its cache events. A slow subscriber loses events."""

from __future__ import annotations

from typing import Any

import zmq

from ...protocol.address import ServerKeys, check_url
from ...protocol.cache_events import CacheEvents, encode_cache_events
from ...protocol.errors import InvalidParams
from ..engine_socket import set_server_keys

SEND_QUEUE_FRAMES = 10_000


class CachePublisher:
    """Listens at ``url`` (loopback or ipc); ``self.url`` has the port that was taken. For one thread at a time.

    ``keys``: the engine's, whose ``EngineSocket`` in the same context then admits subscribers.
    """

    def __init__(self, url: str, *, context: zmq.Context[Any], keys: ServerKeys | None = None) -> None:
        check_url(url, has_keys=keys is not None)
        self._socket = context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        self._socket.set(zmq.LINGER, 0)
        if keys is not None:
            set_server_keys(self._socket, keys)
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            self._socket.close()
            raise InvalidParams(f"cache_events_url={url!r}: cannot listen there: {error}") from None
        self.url: str = self._socket.get_string(zmq.LAST_ENDPOINT)

    def publish(self, events: CacheEvents) -> None:
        self._socket.send(encode_cache_events(events), zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close()
