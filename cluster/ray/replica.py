"""A replica of Ray Serve that owns one engine process, and says where that listens."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import Any

import msgspec
import ray
from ray import serve

from ...protocol.address import ClientKeys, ServerKeys, new_key_pair
from ...runtime.config import EngineConfig
from ...runtime.process import EngineProcess
from .places import EnginePlace


class EngineReplica:
    """The constructor returns when the engine listens. Its tokens never pass through this process or through Ray.

    ``client_key``: the public key of the client that the engine admits. ``places``: the actor that is told where the
    engine is. ``config``: an ``EngineConfig`` as JSON.
    """

    def __init__(
        self, config: bytes, *, client_key: str, places: Any, step_timeout_s: float, start_timeout_s: float
    ) -> None:
        own_public, own_secret = new_key_pair()
        public, secret = new_key_pair()
        self._places = places
        self._process = EngineProcess(
            msgspec.json.decode(config, type=EngineConfig),
            url=f"tcp://{_bracketed(ray.util.get_node_ip_address())}:*",
            keys=ServerKeys(secret, frozenset((client_key, own_public))),
            start_timeout_s=start_timeout_s,
        )
        try:
            self._client = self._process.connect(keys=ClientKeys(own_secret, public), engine_timeout_s=step_timeout_s)
            name = serve.get_replica_context().replica_id.unique_id
            model = self._client.welcome.model
            self._place = EnginePlace(name, self._process.url, public, time.time_ns(), model, self._process.pid)
            ray.get(places.report.remote(self._place))
        except BaseException:
            self._process.kill()
            raise

    def check_health(self) -> None:
        """Called by Serve again and again, which starts another replica where this raises."""
        if self._client.lost is not None:
            raise RuntimeError(self._client.lost)
        self._places.report.remote(self._place)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Asked by Serve once, for routers that want it."""
        return asdict(self._place)

    def __call__(self) -> dict[str, Any]:
        return asdict(self._place)

    def __del__(self) -> None:
        """Called by Serve when the replica is to end: its programs go on elsewhere, and then the engine ends."""
        if hasattr(self, "_place"):
            with contextlib.suppress(Exception):  # the front, whose actor this is, may have ended first
                ray.get(self._places.forget.remote(self._place.name), timeout=1.0)
            self._client.close()
            self._process.stop()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
