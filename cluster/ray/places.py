"""Where the engines are that Ray Serve has started, and a fleet that follows them. Imports no Ray."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ...protocol.client import Client
from ...protocol.errors import PhloemError
from ..client import FleetClient
from ..supervisor import Replica

logger = logging.getLogger(__name__)

RETRY_S = 10.0  # after which an engine that was lost or not reached, and that Serve still has, is tried again


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """An engine's address and its public CurveZMQ key, as Serve keeps them with its replica.

    ``name``: the replica's. ``epoch``: the time of its start. ``pid``: its process.
    """

    name: str
    url: str
    public_key: str
    epoch: int
    model: str
    pid: int


class PlacesFollower:
    """Brings a fleet's engines to those that Serve has. One thread calls ``follow``; ``lose`` may be any.

    reported ──► ready ──no longer reported──► draining ──nothing runs there──► gone
                   └─────────its line has ended─────┴──────────────────────────► gone
    """

    def __init__(
        self,
        fleet: FleetClient,
        connect: Callable[[EnginePlace], Client],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._connect = connect
        self._now_s = now_s
        self._lost: SimpleQueue[tuple[str, PhloemError]] = SimpleQueue()
        self._views: dict[str, Replica] = {}
        self._not_before_s: dict[str, float] = {}
        self._num_lost = 0
        self.clients: dict[str, Client] = {}  # replaced as a whole, read on any thread
        self.draining: frozenset[str] = frozenset()
        self.refusal: PhloemError | None = None  # why the last engine that was reported could not be used

    def lose(self, engine: str, error: PhloemError) -> None:
        """The line to an engine has ended."""
        self._lost.put((engine, error))

    def follow(self, places: Mapping[str, EnginePlace]) -> None:
        """Remove engines that are lost, move programs off those that are no longer reported, and add the new ones.

        To be called again soon while some are ``draining``.
        """
        while True:
            try:
                name, error = self._lost.get_nowait()
            except Empty:
                break
            was_draining = name in self.draining
            if self._remove(name, error) and not was_draining:
                self._num_lost += 1
                logger.warning("replica %s: %s", name, error.message)
        self._not_before_s = {name: at for name, at in self._not_before_s.items() if name in places}
        for name in sorted(set(self.clients) - set(places)):
            self._drain(name)
        for name in sorted(set(places) - set(self.clients)):
            if self._now_s() >= self._not_before_s.get(name, 0.0):
                try:
                    self._add(places[name])
                except PhloemError as error:
                    self.refusal = error
                    self._not_before_s[name] = self._now_s() + RETRY_S
                    logger.warning("replica %s at %s: %s", name, places[name].url, error.message)

    def replicas(self) -> list[Replica]:
        return list(self._views.values())

    def _add(self, place: EnginePlace) -> None:
        client = self._connect(place)
        try:
            self._fleet.add(place.name, client)
        except BaseException:
            client.close()
            raise
        self.clients = {**self.clients, place.name: client}
        view = Replica(place.name, "ready", 1, place.pid, self._num_lost, time.time())
        self._views = {**self._views, place.name: view}
        logger.info("replica %s: its engine is ready at %s (pid %d)", place.name, place.url, place.pid)

    def _drain(self, name: str) -> None:
        """Serve has stopped the replica, which lives on until the calls of its programs have ended."""
        if name not in self.draining:
            self.draining |= {name}
            view = self._views[name]
            drained = Replica(name, "draining", view.epoch, view.pid, view.restarts, time.time())
            self._views = {**self._views, name: drained}
            logger.info("replica %s: its programs move to others", name)
        if self._fleet.drain(name, migrate=True):
            self._remove(name, PhloemError("the replica was stopped"))

    def _remove(self, name: str, error: PhloemError) -> bool:
        """False where it is gone already."""
        if name not in self.clients:
            return False
        self._fleet.remove(name, error)
        self._not_before_s[name] = self._now_s() + RETRY_S
        self.clients = {key: client for key, client in self.clients.items() if key != name}
        self._views = {key: view for key, view in self._views.items() if key != name}
        self.draining -= {name}
        return True
