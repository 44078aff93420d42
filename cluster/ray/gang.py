"""Ranks of one engine in several bundles of a placement group: the replica has bundle 0, an actor each of the others.

    bundle 0   EngineReplica ──owns──► engine process, rank 0, and its machine's other ranks
       │ owns                            ▲ meet at its address
    bundle 1   RanksOfBundle ──owns──► ranks that ``runtime.parallel.node`` runs

An actor ends with its replica, and its ranks with the actor.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...runtime.config import EngineConfig


class RanksOfBundle:
    """An actor."""

    def run(self, config: bytes) -> None:
        """Until the engine ends. ``config``: an ``EngineConfig`` as JSON, with the bundle's ``node_rank``."""
        from ...runtime.parallel.node import run_node

        run_node(msgspec.json.decode(config, type=EngineConfig))


def bundle_of(config: EngineConfig) -> dict[str, float]:
    """What the ranks of one machine ask Ray for."""
    num_ranks = max(config.num_ranks // max(config.nnodes, 1), 1)
    if config.device == "cuda":
        return {"GPU": num_ranks}
    return {"CPU": num_ranks * max(config.num_threads, 1)}


def with_address(config: EngineConfig, host: str) -> EngineConfig:
    """``config`` with a free port of ``host``, this machine, at which the ranks meet."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        port = taken.getsockname()[1]
    return msgspec.structs.replace(config, dist_init_addr=f"{f'[{host}]' if ':' in host else host}:{port}")


def start_bundles(config: EngineConfig) -> list[Any]:
    """Called by a replica: the actors of bundles 1, 2, ... of its placement group, which have begun to run."""
    group = ray.util.get_current_placement_group()
    bundle, actors = bundle_of(config), []
    for node in range(1, config.nnodes):
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=node)
        asks = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
        actor = ray.remote(RanksOfBundle).options(scheduling_strategy=place, **asks).remote()
        actor.run.remote(msgspec.json.encode(msgspec.structs.replace(config, node_rank=node)))
        actors.append(actor)
    return actors
