"""Where the engines are that Ray has started: reported by each replica, and followed by the fleet. Imports no Ray."""

from __future__ import annotations

import asyncio
import contextlib
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


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """An engine's address and its public CurveZMQ key. ``epoch`` is the time of its start; ``pid`` its process."""

    name: str
    url: str
    public_key: str
    epoch: int
    model: str
    pid: int


class Places:
    """The places of all engines that run, in an actor of its own. Its methods run on one event loop."""

    def __init__(self) -> None:
        self._places: dict[str, EnginePlace] = {}
        self._version = 0
        self._has_changed = asyncio.Condition()

    async def report(self, place: EnginePlace) -> None:
        """Said at the start and at each check of health, so a new actor learns all places again."""
        if self._places.get(place.name) != place:
            await self._change({**self._places, place.name: place})

    async def forget(self, name: str) -> None:
        """The engine ends, or was lost. A replica whose engine is well reports it again."""
        if name in self._places:
            await self._change({key: place for key, place in self._places.items() if key != name})

    async def changed(self, seen: int, timeout_s: float) -> tuple[int, dict[str, EnginePlace]]:
        """The version and the places, as soon as the version is another than ``seen``, or after ``timeout_s``."""
        async with self._has_changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_changed.wait_for(lambda: self._version != seen), timeout_s)
            return self._version, self._places

    async def _change(self, places: dict[str, EnginePlace]) -> None:
        async with self._has_changed:
            self._places, self._version = places, self._version + 1
            self._has_changed.notify_all()


class PlacesFollower:
    """Brings a fleet's engines to the places that are reported. One thread calls ``follow``; ``lose`` may be any."""

    def __init__(self, fleet: FleetClient, connect: Callable[[EnginePlace], Client]) -> None:
        self._fleet = fleet
        self._connect = connect
        self._lost: SimpleQueue[tuple[str, PhloemError]] = SimpleQueue()
        self._views: dict[str, Replica] = {}
        self._num_lost = 0
        self.clients: dict[str, Client] = {}  # replaced as a whole, read on any thread
        self.refusal: PhloemError | None = None  # why the last engine that was reported could not be used

    def lose(self, engine: str, error: PhloemError) -> None:
        """The line to an engine has ended."""
        self._lost.put((engine, error))

    def follow(self, places: Mapping[str, EnginePlace]) -> list[str]:
        """Remove the engines that are lost or no longer reported, and add the new ones.

        Returns the reported ones that could not be reached: their places are to be forgotten.
        """
        unreached = []
        while True:
            try:
                name, error = self._lost.get_nowait()
            except Empty:
                break
            self._remove(name, error)
            logger.warning("replica %s: %s", name, error.message)
        for name in set(self.clients) - set(places):
            self._remove(name, PhloemError("the replica was stopped"))
        for name in sorted(set(places) - set(self.clients)):
            try:
                self._add(places[name])
            except PhloemError as error:
                self.refusal = error
                logger.warning("replica %s at %s: %s", name, places[name].url, error.message)
                unreached.append(name)
        return unreached

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

    def _remove(self, name: str, error: PhloemError) -> None:
        if name in self.clients:
            self._num_lost += 1
            self._fleet.remove(name, error)
            self.clients = {key: client for key, client in self.clients.items() if key != name}
            self._views = {key: view for key, view in self._views.items() if key != name}
