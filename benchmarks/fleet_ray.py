"""The cost of Ray Serve: the time to start, and what it adds to the tokens of an engine that it has started.

The same requests go to one engine in turns: through a ``Client`` of its own, and through the ``ServeFleet`` that makes
a call of Serve for each program. Ray's processes are on the same machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from phloem.cluster.ray.options import config_of_one
from phloem.cluster.ray.places import EnginePlace
from phloem.protocol.address import ClientKeys, new_key_pair
from phloem.protocol.client import Client
from phloem.runtime.config import EngineConfig

from .fleet_overhead import compared, in_turns

FIRST_TOKEN_BAR_S = 5e-3
START_BAR_S = 20.0
APP = "phloem-benchmark"


def measure_ray(model: str, rounds: int) -> dict[str, Any]:
    """Start Ray and two replicas, then one; print a table."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    from phloem.cluster.ray.deployment import ENGINES, bound_engines
    from phloem.cluster.ray.fleet import ServeFleet
    from ray import serve

    class Fleet(ServeFleet):
        """Keeps what Serve says."""

        places: Mapping[str, EnginePlace] = {}

        def show(self, places: Mapping[str, EnginePlace]) -> None:
            self.places = places
            super().show(places)

    made: dict[str, Any] = {"model": model}
    public, secret = new_key_pair()
    config = config_of_one(EngineConfig(model=model, num_threads=1), 2)
    begin_s = time.perf_counter()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    made["init_s"] = time.perf_counter() - begin_s
    serve.start(proxy_location="Disabled")
    try:
        for replicas in (2, 1):
            begin_s = time.perf_counter()
            bound = bound_engines(
                config, replicas=replicas, client_key=public, step_timeout_s=60.0, start_timeout_s=600.0
            )
            serve.run(bound, name=APP, route_prefix=None)
            made[f"start_{replicas}_s"] = time.perf_counter() - begin_s
            if replicas > 1:
                serve.delete(APP)
        fleet = Fleet(serve.get_deployment_handle(ENGINES, APP), client_secret=secret, tokenize=lambda ops: [])
        assert fleet.wait(60.0), "no engine"
        (place,) = fleet.places.values()
        client = Client(place.url, keys=ClientKeys(secret, place.public_key))
        found = in_turns({"client": client, "ray": fleet.client}, rounds)
        client.close()
        fleet.close()
        made |= compared(found, "ray")
    finally:
        serve.delete(APP)
        ray.shutdown()
    print(f"Ray: {made['init_s']:.1f} s; then two replicas: {made['start_2_s']:.1f} s (bar: {START_BAR_S:g} s)")
    print(f"bar: {1e3 * FIRST_TOKEN_BAR_S:g} ms to the first token")
    return made
