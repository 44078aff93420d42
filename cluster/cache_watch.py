"""Follows the cache events of engines over their PUB sockets, and asks for a snapshot where some are missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..protocol.cache_events import decode_cache_events, decode_cache_snapshot
from ..protocol.channel import set_client_keys
from ..protocol.client import Client
from ..protocol.errors import PhloemError
from .placer import Placer

logger = logging.getLogger(__name__)

FRAMES_PER_TURN = 1_000
MAX_FRAMES = 100_000  # that ZeroMQ keeps for a slow reader; it drops later ones, which is noticed as a gap


class CacheWatch:
    """Of several engines, for ``placer``. One thread uses it; ``post`` hands a call to that thread.

    ``poller`` wakes when there is something to ``read``; it may hold other sockets, too.
    """

    def __init__(self, placer: Placer, post: Callable[[Callable[[], None]], None]) -> None:
        self._placer = placer
        self._post = post
        self.poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._clients: dict[str, Client] = {}
        self._asked: set[str] = set()  # engines whose snapshot is under way

    def follow(self, engine: str, client: Client) -> None:
        """Subscribe to an engine that publishes events, if that was not done."""
        url = client.welcome.cache_events_url
        if not url or engine in self._sockets or _is_elsewhere(url):
            return
        subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, MAX_FRAMES)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        if client.welcome.cache_events_keys and client.keys is not None:
            set_client_keys(subscriber, client.keys)
        subscriber.connect(url)
        self.poller.register(subscriber, zmq.POLLIN)
        self._sockets[engine], self._clients[engine] = subscriber, client
        self._ask(engine)

    def leave(self, engine: str) -> None:
        subscriber = self._sockets.pop(engine, None)
        if subscriber is not None:
            self.poller.unregister(subscriber)
            subscriber.close(linger=0)
            del self._clients[engine]
            self._asked.discard(engine)

    def close(self) -> None:
        for engine in list(self._sockets):
            self.leave(engine)

    def read(self) -> None:
        """Take all frames that have come."""
        for engine, subscriber in list(self._sockets.items()):
            for _ in range(FRAMES_PER_TURN):
                try:
                    frame = subscriber.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    applied = self._placer.apply(engine, decode_cache_events(frame))
                except (msgspec.MsgspecError, PhloemError) as error:
                    logger.error("the cache events of engine %s are not understood: %s", engine, error)
                    self.leave(engine)
                    break
                if applied != "ok":
                    self._ask(engine)

    def _ask(self, engine: str) -> None:
        if engine in self._asked:
            return
        client = self._clients[engine]
        try:
            answer = client.ask("cache_blocks")
        except PhloemError:
            return  # the engine has just ended
        self._asked.add(engine)
        answer.add_done_callback(lambda done: self._post(lambda: self._restore(engine, client, done)))

    def _restore(self, engine: str, client: Client, answer: Future[Any]) -> None:
        if self._clients.get(engine) is not client:
            return  # another engine of that name
        self._asked.discard(engine)
        if answer.exception() is not None:
            logger.warning("engine %s has not told its cached blocks: %s", engine, answer.exception())
            return
        try:
            applied = self._placer.restore(engine, decode_cache_snapshot(answer.result()))
        except (msgspec.MsgspecError, PhloemError) as error:
            logger.error("the cached blocks of engine %s are not understood: %s", engine, error)
            self.leave(engine)
            return
        if applied != "ok":
            self._ask(engine)


def _is_elsewhere(url: str) -> bool:
    """Whether ``url`` is a socket file of another machine: an engine publishes only where it runs."""
    return url.startswith("ipc://") and not Path(url.removeprefix("ipc://")).exists()
