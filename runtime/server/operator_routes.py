"""For operators and their tools: health, the fleet of engines, usage and metrics."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import APIRouter, Response

from ...cluster.supervisor import Replica, Supervised
from ...protocol import errors
from . import answers as a
from .metrics import ServerMetrics, split_name
from .openapi import answers, texts
from .query import Switch
from .service import Service, json_response
from .tenants import sender_of_request

HEALTH_TIMEOUT_S = 5.0  # an engine that has not answered for longer is not ready
QUERY_TIMEOUT_S = 4.0  # a page shows the replicas that answer within it; Prometheus waits 10 s for a page


class Operated(Protocol):
    """What these routes show: the models of a server, or one, which is a ``Service``."""

    @property
    def model_name(self) -> str: ...
    @property
    def metrics(self) -> ServerMetrics: ...
    @property
    def supervisor(self) -> Supervised | None: ...
    @property
    def num_in_flight(self) -> int: ...
    def ask_client(self, what: str, *, timeout_s: float = 10.0) -> Any: ...


def operator_routes(service: Service) -> APIRouter:
    """Of a server of one model."""
    router = fleet_routes(service)

    @router.get("/cache_nodes", responses=answers(dict[str, Any]))
    async def cache_nodes(replica: str = "") -> Response:
        """One engine's radix tree as a list of nodes, each after its parent."""
        return json_response(await asyncio.to_thread(_cache_nodes, service, replica))

    return router


def fleet_routes(service: Operated) -> APIRouter:
    """Of all engines of a server. Where it has several models, replica 0 of ``small`` is ``small/0``."""
    router = APIRouter()

    @router.get(
        "/health",
        responses=answers(a.Health) | answers(a.Health, status=503, said="No engine answers; try again later."),
    )
    async def health() -> Response:
        """Readiness: 200 while at least one engine of each model answers, otherwise 503."""
        found = await _ready(service)
        is_ready = all(ready for ready, _ in found)
        replicas = {"ready": sum(ready for ready, _ in found), "total": sum(total for _, total in found)}
        body = {"status": "ok" if is_ready else "unavailable", "live": True, "ready": is_ready, "replicas": replicas}
        return json_response(body, status=200 if is_ready else 503)

    @router.get("/health/live", responses=answers(a.Live))
    async def live() -> Response:
        """Liveness: this process answers. It ends by itself when its engines cannot be kept alive."""
        return json_response({"live": True})

    @router.get("/fleet", responses=answers(dict[str, Any]))
    async def fleet() -> Response:
        """Each replica's state and load, and how programs were placed and replayed."""
        if service.supervisor is None:
            raise errors.Unsupported("this server's engine is not supervised here; /metrics has its numbers")
        return json_response(await asyncio.to_thread(_fleet_page, service, service.supervisor))

    @router.post("/fleet/drain/{replica:path}", status_code=202, responses=answers(dict[str, Any], status=202))
    async def drain(replica: str, migrate: Switch = False) -> Response:
        """Take a replica out of service: no new programs; its engine stops once those that run have ended, or moved."""
        if service.supervisor is None:
            raise errors.Unsupported("this server's engine is not supervised here; stop it where it was started")
        found = await asyncio.to_thread(service.supervisor.drain, replica, migrate=migrate)
        return json_response(asdict(found), status=202)

    @router.get("/engines", responses=answers(a.Engines))
    async def engines() -> Response:
        """Of each engine its metrics, its last steps and its sequences; null where it does not answer in time."""
        return json_response(await asyncio.to_thread(_engines, service))

    @router.get("/usage", responses=answers(a.KeyUsage))
    async def usage() -> Response:
        """What the caller's key may still use and has used, since this server started."""
        sender = sender_of_request()
        assert sender is not None  # the gate has named it
        return json_response(sender.account.report())

    @router.get("/metrics", response_class=Response, responses=texts("Prometheus text.", "text/plain"))
    async def metrics() -> Response:
        """The server's own numbers come even when every engine is lost."""
        text = await asyncio.to_thread(_metrics_text, service)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def is_ready(replica: Replica) -> bool:
    return replica.state == "ready" and replica.silent_s < HEALTH_TIMEOUT_S


async def _ready(service: Operated) -> list[tuple[int, int]]:
    """Of each model the replicas that answer, and all."""
    if service.supervisor is not None:
        found: dict[str, tuple[int, int]] = {}
        for replica in service.supervisor.replicas():
            model, _ = split_name(replica.name)
            ready, total = found.get(model, (0, 0))
            found[model] = ready + is_ready(replica), total + 1
        return list(found.values())
    try:
        await asyncio.to_thread(service.ask_client, "info", timeout_s=HEALTH_TIMEOUT_S)
    except errors.PhloemError:
        return [(0, 1)]
    return [(1, 1)]


def _fleet_page(service: Operated, supervisor: Supervised) -> dict[str, Any]:
    engines = supervisor.metrics(timeout_s=QUERY_TIMEOUT_S)
    report = service.ask_client("fleet", timeout_s=QUERY_TIMEOUT_S)
    replicas = [
        asdict(replica) | {"is_ready": is_ready(replica), "load": _load(engines.get(replica.name))}
        for replica in supervisor.replicas()
    ]
    return {"model": service.model_name, **report, "replicas": replicas, "now_s": time.time()}


def _ask(service: Operated, what: str) -> dict[str, Any]:
    """The answers of the engines that answer in time, by replica."""
    if service.supervisor is not None:
        return service.supervisor.ask(what, timeout_s=QUERY_TIMEOUT_S)
    try:
        return {"0": service.ask_client(what, timeout_s=QUERY_TIMEOUT_S)}
    except errors.EngineLost:
        return {}


def _engines(service: Operated) -> dict[str, Any]:
    metrics, batches = _ask(service, "metrics"), _ask(service, "batch")
    replicas = [] if service.supervisor is None else service.supervisor.replicas()
    names = [replica.name for replica in replicas] or ["0"]
    return {
        "engines": {
            name: {"metrics": metrics[name], "batch": batches[name]} if name in metrics and name in batches else None
            for name in names
        },
        "replicas": [asdict(replica) | {"load": _load(metrics.get(replica.name))} for replica in replicas],
        "requests_in_flight": service.num_in_flight,
        "now_s": time.time(),
    }


def _cache_nodes(service: Service, replica: str) -> dict[str, Any]:
    """``nodes``: [id, parent's id, tokens, locks, is pinned, hits, time of last use, beginning, names of users]."""
    names = ["0"] if service.supervisor is None else [found.name for found in service.supervisor.replicas()]
    if replica and replica not in names:
        raise errors.InvalidRequest(f"replica={replica!r} is not one of: {', '.join(names)}", where="replica")
    replica = replica or names[0]
    found = _ask(service, "cache_nodes").get(replica)
    if found is None:
        raise errors.Overloaded(f"engine {replica} has not answered within {QUERY_TIMEOUT_S:g} s; try again")
    named = found.pop("programs")
    for node in found["nodes"]:
        node[7] = service.tokenizer.decode(list(node[7]), skip_special=False)
        node[8] = sorted({named[key] for key in node[8]} - {""})
    return {"replica": replica, "replicas": names, **found}


def _load(engine: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The numbers that matter of an engine's metrics; None where it has not answered."""
    if engine is None:
        return None
    slots = engine.get("slots", {})
    return {
        **{name: engine.get(name, 0) for name in ("programs", "running", "waiting", "forward_tokens")},
        "cache_hit_rate": engine.get("cache_hit_rate", 0.0),
        "slots_used": slots.get("locked", 0) + slots.get("leased", 0),
        "slots_cached": slots.get("cached", 0),
        "slots_total": slots.get("total", 0),
    }


def _metrics_text(service: Operated) -> bytes:
    supervisor = service.supervisor
    if supervisor is None:
        try:
            return service.metrics.text({"0": service.ask_client("metrics")})
        except errors.PhloemError:
            return service.metrics.text({"0": None})
    replicas = supervisor.replicas()
    engines: dict[str, Any] = {replica.name: None for replica in replicas}
    engines |= supervisor.metrics(timeout_s=QUERY_TIMEOUT_S)
    report = service.ask_client("fleet", timeout_s=QUERY_TIMEOUT_S)
    return service.metrics.text(engines, replicas=replicas, fleet=report)
