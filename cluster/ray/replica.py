"""A replica of Ray Serve that owns one engine process, and says where that listens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from typing import Any

import msgspec
import ray
from ray import serve

from ...protocol.address import ClientKeys, ServerKeys, new_key_pair
from ...protocol.errors import PhloemError
from ...runtime.config import EngineConfig
from ...runtime.process import EngineProcess
from .calls import Hold, Holds
from .gang import start_bundles, with_address
from .places import EnginePlace
from .scaling import LoadReport

ANSWER_S = 0.5  # how long a check of health waits for the engine's numbers


class EngineReplica:
    """The constructor returns when the engine listens. Its tokens never pass through this process or through Ray.

    ``client_key``: the public key of the clients that the engine admits. ``config``: an ``EngineConfig`` as JSON.
    """

    def __init__(self, config: bytes, *, client_key: str, step_timeout_s: float, start_timeout_s: float) -> None:
        own_public, own_secret = new_key_pair()
        public, secret = new_key_pair()
        started_s = time.monotonic()
        engine = msgspec.json.decode(config, type=EngineConfig)
        host = ray.util.get_node_ip_address()
        if engine.nnodes > 1:
            engine = with_address(engine, host)
        bundles = start_bundles(engine)
        try:
            self._process = EngineProcess(
                engine,
                url=f"tcp://{_bracketed(host)}:*",
                keys=ServerKeys(secret, frozenset((client_key, own_public))),
                start_timeout_s=start_timeout_s,
            )
        except BaseException:
            for actor in bundles:
                ray.kill(actor)
            raise
        self._bundles = bundles  # they end with their handles
        try:
            self._client = self._process.connect(keys=ClientKeys(own_secret, public), engine_timeout_s=step_timeout_s)
            name = serve.get_replica_context().replica_id.unique_id
            model = self._client.welcome.model
            self._place = EnginePlace(name, self._process.url, public, time.time_ns(), model, self._process.pid)
        except BaseException:
            self._process.kill()
            raise
        self._holds = Holds()
        self._load = LoadReport(start_s=time.monotonic() - started_s, max_rows=engine.max_running)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Asked by Serve once, which tells it the routers."""
        return asdict(self._place)

    async def hold(self, hold: Hold) -> None:
        """Until the caller cancels: a program of its runs at the engine."""
        if hold.engine == self._place.name:
            await self._holds.hold()

    async def check_health(self) -> None:
        """Called by Serve again and again, which starts another replica where this raises."""
        if self._client.lost is not None:
            raise RuntimeError(self._client.lost)
        with contextlib.suppress(PhloemError, TimeoutError):  # the engine may be in a long step
            metrics = await asyncio.wait_for(asyncio.wrap_future(self._client.ask("metrics")), ANSWER_S)
            self._holds.keep(metrics["programs"])
            self._load.note(metrics)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve again and again, for ``scaling.FleetScaler``."""
        return self._load.numbers

    def __del__(self) -> None:
        """Called by Serve once no call is open, or its time is over: the engine ends."""
        if hasattr(self, "_load"):
            self._client.close()
            self._process.stop()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
