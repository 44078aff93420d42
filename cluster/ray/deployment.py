"""The deployment of engines, as Ray Serve gets it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from ...runtime.config import EngineConfig
from .gang import bundle_of
from .options import DRAIN_S
from .replica import EngineReplica
from .router import ProgramRouter
from .scaling import FleetScaler, settings_of

ENGINES = "EngineReplica"
HEALTH_S = 1.0  # between two checks of a replica's health
MAX_CALLS = 1_000_000  # open at one replica: the engine itself bounds its programs
REPORT_S = 2.0  # between two reports of a replica to the autoscaler


def bound_engines(
    config: EngineConfig,
    *,
    replicas: int,
    client_key: str,
    step_timeout_s: float,
    start_timeout_s: float,
    scaling: Mapping[str, float] | None = None,
    drain_s: float = DRAIN_S,
) -> serve.Application:
    """``config`` is that of each replica. ``client_key``: the public key of the clients that the engines admit.

    ``scaling``: fields of ``ScalingSettings``; the number of replicas then begins with ``replicas``. None: it is fixed.
    """
    number: dict[str, Any] = {"num_replicas": replicas}
    if scaling is not None:
        number = {"autoscaling_config": _autoscaling(scaling, replicas)}
    bundle, gang = bundle_of(config), dict[str, Any]()
    if config.nnodes > 1:
        gang = {"placement_group_bundles": [bundle] * config.nnodes, "placement_group_strategy": "PACK"}
    deployment = serve.deployment(
        EngineReplica,
        name=ENGINES,
        ray_actor_options={"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)},
        health_check_period_s=HEALTH_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_s,
        max_constructor_retry_count=3,
        max_ongoing_requests=MAX_CALLS,
        logging_config=LoggingConfig(enable_access_log=False),  # a line for each program
        request_router_config=RequestRouterConfig(request_router_class=ProgramRouter),
        **number,
        **gang,
    )
    return deployment.bind(
        msgspec.json.encode(config),
        client_key=client_key,
        step_timeout_s=step_timeout_s,
        start_timeout_s=start_timeout_s,
    )


def _autoscaling(scaling: Mapping[str, float], replicas: int) -> AutoscalingConfig:
    settings = settings_of(scaling)
    with warnings.catch_warnings():
        # Ray 2.60 deprecates it for variables of the environment, which would hold for all of Ray's applications.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=settings.min_replicas,
            initial_replicas=replicas,
            max_replicas=settings.max_replicas,
            metrics_interval_s=REPORT_S,
            upscale_delay_s=0.0,  # the policy has waited as long as it wants
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(policy_function=FleetScaler, policy_kwargs=dict(scaling)),
        )
