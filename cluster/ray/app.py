"""``build``: the Ray Serve application that a configuration file of ``serve deploy`` or ``serve run`` names.

applications:
  - name: phloem
    import_path: phloem.cluster.ray.app:build
    args: {model: smollm2, replicas: 2}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve.schema import LoggingConfig

from ...protocol.address import new_key_pair
from ...protocol.errors import Unsupported
from ...runtime.encoder.config import is_encoder
from ...runtime.weights.resolve import resolve_model
from .deployment import bound_engines
from .front import Front, FrontConfig
from .options import read_options

MAX_REQUESTS = 1_000_000  # open at one front; ``max_concurrent`` bounds them with an answer that says so


def build(args: dict[str, Any]) -> serve.Application:
    """Called by Serve, on a node of the cluster. It makes the key of the fronts, the only clients of the engines.

    Raises what ``read_options`` raises, and Unsupported for a model that is an encoder.
    """
    options = read_options(args)
    path = resolve_model(options.model)
    if is_encoder(path):
        raise Unsupported(f"args.model={options.model!r} is an encoder, which phloem serve serves", where="model")
    client_key, client_secret = new_key_pair()
    engines = bound_engines(
        options.replica_config(),
        replicas=options.replicas,
        client_key=client_key,
        step_timeout_s=options.step_timeout_s,
        start_timeout_s=options.start_timeout_s,
        scaling=options.autoscaling,
        drain_s=options.drain_s,
    )
    front = FrontConfig(
        model=options.model,
        model_name=options.model_name or (Path(options.model).name if os.path.exists(options.model) else options.model),
        key_file=options.key_file,
        hosts=options.hosts,
        allow_image_hosts=options.allow_image_hosts,
        max_concurrent=options.max_concurrent,
        max_rebalanced=options.max_rebalanced,
        step_timeout_s=options.step_timeout_s,
        start_timeout_s=options.start_timeout_s,
    )
    deployment = serve.deployment(
        Front,
        name="Front",
        num_replicas=options.fronts,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
        max_ongoing_requests=MAX_REQUESTS,
        logging_config=LoggingConfig(enable_access_log=False),  # phloem logs requests itself
    )
    return deployment.bind(engines, msgspec.json.encode(front), client_secret=client_secret)
