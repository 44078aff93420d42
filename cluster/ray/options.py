"""The arguments of the Ray Serve application, as a configuration file gives them. Imports no Ray."""

from __future__ import annotations

from typing import Any

import msgspec

from ...protocol.errors import InvalidParams, InvalidRequest
from ...runtime.config import EngineConfig
from ...runtime.server.remote_images import AllowedHosts
from ..limits import FleetLimits
from ..restarts import RestartPolicy
from ..supervisor import share
from .scaling import settings_of

DRAIN_S = 120.0


class AppOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``args`` of the file.

    ``engine``: fields of ``EngineConfig``, for each replica. ``autoscaling``: fields of ``ScalingSettings``; then
    ``replicas`` is the number at the start. ``fronts``: HTTP servers, each of which places its own programs.
    ``max_rebalanced``: as in ``FleetLimits``. ``key_file``: API keys, a file that is on every node; without it only
    requests to ``hosts`` are answered, by default those to loopback. ``allow_image_hosts``: from which the fronts fetch
    images, as in ``AllowedHosts``. ``drain_s``: the time that programs without a
    journal have to end on a replica that is stopped.
    """

    model: str
    replicas: int = 1
    fronts: int = 1
    engine: dict[str, Any] = {}
    autoscaling: dict[str, int | float] | None = None
    model_name: str = ""
    key_file: str = ""
    hosts: list[str] = []
    allow_image_hosts: list[str] = []
    max_concurrent: int = 0
    max_rebalanced: int = FleetLimits().max_rebalanced
    step_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    drain_s: float = DRAIN_S

    def replica_config(self) -> EngineConfig:
        """Of each engine. On a CPU the most replicas that there may be share out the cores of this machine."""
        config = _read({"model": self.model, **self.engine}, EngineConfig, "args.engine")
        most = self.replicas if self.autoscaling is None else settings_of(self.autoscaling).max_replicas
        return config_of_one(config, most)


def config_of_one(config: EngineConfig, replicas: int) -> EngineConfig:
    """The configuration of each of ``replicas`` engines. Ray hands out GPUs: every engine sees its own as the first.

    Raises what ``share`` raises, and InvalidParams for what each replica finds itself.
    """
    for name in ("node_rank", "dist_init_addr"):
        if value := getattr(config, name):
            raise InvalidParams(
                f"{name}={value!r}: on Ray each replica finds its machines; set nnodes alone", where=name
            )
    if config.nnodes < 1 or config.num_ranks % config.nnodes:
        text = f"nnodes={config.nnodes}: it must divide the {config.num_ranks} ranks of the model"
        raise InvalidParams(text, where="nnodes")
    return msgspec.structs.replace(share(config, replicas)[0], device=config.device)


def read_options(args: dict[str, Any]) -> AppOptions:
    """Raises InvalidParams that names the argument."""
    options: AppOptions = _read(args, AppOptions, "args")
    if "model" in options.engine:
        raise InvalidParams("args.engine.model: the model is args.model; leave it out", where="engine.model")
    if options.fronts < 1:
        raise InvalidParams(f"args.fronts={options.fronts}: it must be 1 or more", where="fronts")
    for name in ("start_timeout_s", "drain_s"):
        if not getattr(options, name) > 0:
            raise InvalidParams(f"args.{name}={getattr(options, name)}: it must be above 0 seconds", where=name)
    FleetLimits(max_rebalanced=options.max_rebalanced)
    try:
        AllowedHosts(options.allow_image_hosts)
    except InvalidRequest as error:
        text = error.message.removeprefix("--allow-image-hosts ")
        raise InvalidParams(f"args.allow_image_hosts: {text}", where="allow_image_hosts") from None
    RestartPolicy(step_timeout_s=options.step_timeout_s)  # refuses a wrong one
    if options.autoscaling is not None:
        settings = settings_of(options.autoscaling)
        if not settings.min_replicas <= options.replicas <= settings.max_replicas:
            text = f"args.replicas={options.replicas}: with autoscaling it is the number at the start, and must be"
            raise InvalidParams(f"{text} {settings.min_replicas} to {settings.max_replicas}", where="replicas")
    options.replica_config()  # refuses what is wrong in it
    return options


def _read(given: dict[str, Any], kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(given, kind, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidParams(f"{where}: {error}", where=where) from None
