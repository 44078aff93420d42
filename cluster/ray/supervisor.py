"""Engines that Ray Serve starts, watches and starts again, behind the face of ``cluster.supervisor.Supervisor``.

this process: HTTP, FleetClient ◄──────tokens, ZeroMQ over TCP with keys──────► engine process
    │      ▲                                                                        │ owned by
    │      └─ProgramRouter: where engines are; a call for each program──► EngineReplica (Serve)
    └──── deploys the application
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import ray
from ray import serve

from ... import processor
from ...protocol.address import new_key_pair
from ...protocol.errors import EngineLost, InvalidParams, PhloemError
from ...protocol.ops import AnyOp
from ...runtime.config import EngineConfig, Progress
from ..client import FleetClient
from ..limits import FleetLimits
from ..restarts import RestartPolicy
from ..supervisor import Replica, ReplicaState
from .deployment import ENGINES, bound_engines
from .fleet import ServeFleet
from .options import config_of_one

OBJECTS_BYTES = 100 << 20  # of Ray's object store on one machine, which nothing of ours uses


class RaySupervisor:
    """``replicas`` engines on a Ray cluster, and ``fleet``, the client of those that are ready.

    The constructor returns when the first engine is ready. ``address``: of a running cluster; empty: one is started on
    this machine, which ends with ``close``. ``app``: the name of the application. The
    other arguments are those of ``Supervisor``; Ray Serve decides when and how often an engine is started again.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokenize: Callable[[Sequence[AnyOp]], Sequence[int]],
        replicas: int = 1,
        policy: RestartPolicy | None = None,
        limits: FleetLimits | None = None,
        start_timeout_s: float = 600.0,
        progress: Progress | None = None,
        on_failed: Callable[[PhloemError], None] | None = None,
        address: str = "",
        app: str = "phloem",
    ) -> None:
        policy = policy or RestartPolicy()
        self._app = app
        self._num_replicas = replicas
        self._since_s = time.time()
        self._is_closed = False
        self._fleet: ServeFleet | None = None
        one = config_of_one(config, replicas)
        client_key, client_secret = new_key_pair()
        self._connect_to_ray(address, replicas * max(one.num_threads, 1))
        try:
            engines = bound_engines(
                one,
                replicas=replicas,
                client_key=client_key,
                step_timeout_s=policy.step_timeout_s,
                start_timeout_s=start_timeout_s,
            )
            serve.start(proxy_location="Disabled")
            serve.run_many(
                [serve.RunTarget(engines, name=app, route_prefix=None)],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
            self._fleet = ServeFleet(
                serve.get_deployment_handle(ENGINES, app, _check_exists=False),
                client_secret=client_secret,
                tokenize=tokenize,
                limits=limits,
                step_timeout_s=policy.step_timeout_s,
                look=self._failure,
                on_failed=on_failed,
            )
            if not self._fleet.wait(start_timeout_s):
                raise EngineLost(f"Ray has started no engine within {start_timeout_s:g} s; {self._state()}")
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    @property
    def fleet(self) -> FleetClient:
        return self._served.client

    def replicas(self) -> list[Replica]:
        """Those that are ready, and one that is starting for each of the others: Ray Serve names it when it starts."""
        found = self._served.replicas()
        missing = range(self._num_replicas - len(found))
        state: ReplicaState = "starting" if self._served.failure is None else "failed"
        return found + [Replica(f"new {i + 1}", state, 0, 0, 0, self._since_s) for i in missing]

    def metrics(self, timeout_s: float = 10.0) -> dict[str, dict[str, Any]]:
        """As ``ServeFleet.metrics``."""
        return self._served.metrics(timeout_s)

    def ask(self, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """As ``ServeFleet.ask``."""
        return self._served.ask(what, timeout_s)

    def drain(self, replica: str, *, migrate: bool = False) -> Replica:
        """As ``ServeFleet.drain``."""
        return self._served.drain(replica, migrate=migrate)

    def close(self) -> None:
        """Delete the application, which ends every engine, and leave the cluster. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._fleet is not None:
            self._fleet.close()
        with contextlib.suppress(Exception):  # the cluster may have ended first
            serve.delete(self._app)
        ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _served(self) -> ServeFleet:
        assert self._fleet is not None, "the constructor has not returned"
        return self._fleet

    def _connect_to_ray(self, address: str, num_cpus: int) -> None:
        if ray.is_initialized():
            raise InvalidParams("this process uses Ray already; only one cluster can be used", where="address")
        local: dict[str, Any] = {
            "num_cpus": max(num_cpus, processor.num_cores()),
            "include_dashboard": False,
            "object_store_memory": OBJECTS_BYTES,
        }
        with _keep_signals():
            try:
                options: dict[str, Any] = {"address": address} if address else {"address": "local", **local}
                ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = f"the Ray cluster at {address!r} cannot be used" if address else "Ray cannot be started"
                raise InvalidParams(f"{where}: {error}; see --ray-address", where="address") from error
        logging.getLogger("ray.serve").setLevel(logging.WARNING)

    def _failure(self) -> PhloemError | None:
        """Where Ray Serve has given up."""
        found = serve.status().applications.get(self._app)
        if found is not None and found.status in ("DEPLOY_FAILED", "NOT_STARTED"):
            return EngineLost(f"Ray Serve could not start an engine: {self._state()}")
        return None

    def _state(self) -> str:
        found = serve.status().applications.get(self._app)
        if found is None:
            return f"it has no application {self._app!r}"
        parts = [f"{one.status.value}: {one.message}" for one in found.deployments.values()]
        return "; ".join([f"its application is {found.status.value} {found.message}".strip(), *parts])


@contextlib.contextmanager
def _keep_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; the caller's way to end is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
