"""Engines that Ray Serve starts, watches and starts again, behind the face of ``cluster.supervisor.Supervisor``.

this process: HTTP, FleetClient ◄──────tokens, ZeroMQ over TCP with keys──────► engine process
    │      ▲                                                                        │ owned by
    │      └─where engines are── Places (actor) ◄──reports── EngineReplica (Serve) ─┘
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

import msgspec
import ray
from ray import serve

from ... import processor
from ...protocol.address import ClientKeys, new_key_pair
from ...protocol.client import Client
from ...protocol.errors import EngineLost, InvalidParams, PhloemError, Unsupported
from ...protocol.ops import AnyOp
from ...runtime.config import EngineConfig, Progress
from ..client import FleetClient, FleetLimits
from ..restarts import RestartPolicy
from ..supervisor import Replica, ReplicaState, ask_clients, share
from .places import EnginePlace, Places, PlacesFollower
from .replica import EngineReplica

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the state of the application
CONNECT_S = 10.0
HEALTH_S = 1.0  # between two checks of a replica's health
STOP_S = 20.0
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
        self._policy = policy or RestartPolicy()
        self._on_failed = on_failed
        self._app = app
        self._num_replicas = replicas
        self._since_s = time.time()
        self._client_key, self._client_secret = new_key_pair()
        self._stopping = threading.Event()
        self._has_engine = threading.Event()
        self._failure: PhloemError | None = None
        # Cache events are published on the engine's machine alone, so engines elsewhere are placed by load.
        one = msgspec.structs.replace(share(config, replicas)[0], device=config.device)
        if address:
            one = msgspec.structs.replace(one, cache_events_url="")
        self._connect_to_ray(address, replicas * max(one.num_threads, 1))
        self.fleet = FleetClient(tokenize=tokenize, limits=limits, on_lost=self._engine_lost)
        self._follower = PlacesFollower(self.fleet, self._connect)
        self._thread = threading.Thread(target=self._watch, name="phloem-ray", daemon=True)
        try:
            # It keeps its place through a restart of its process, and then hears of every engine again.
            self._places = ray.remote(Places).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
            self._deploy(one, replicas, start_timeout_s)
            self._thread.start()
            if not self._has_engine.wait(start_timeout_s):
                raise EngineLost(f"Ray has started no engine within {start_timeout_s:g} s; {self._state()}")
            if self._failure is not None:
                raise self._failure
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def replicas(self) -> list[Replica]:
        """Those that are ready, and one that is starting for each of the others: Ray Serve names it when it starts."""
        found = self._follower.replicas()
        missing = range(self._num_replicas - len(found))
        state: ReplicaState = "starting" if self._failure is None else "failed"
        return found + [Replica(f"new {i + 1}", state, 0, 0, 0, self._since_s) for i in missing]

    def metrics(self, timeout_s: float = 10.0) -> dict[str, dict[str, Any]]:
        """The metrics of each replica whose engine answers within ``timeout_s``."""
        return self.ask("metrics", timeout_s)

    def ask(self, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """Each replica's answer to the query ``what``, where its engine answers within ``timeout_s``."""
        return ask_clients(self._follower.clients, what, timeout_s)

    def drain(self, replica: str, *, migrate: bool = False) -> Replica:
        """Raises Unsupported: Ray Serve keeps the number of replicas, and would start another one in its place."""
        raise Unsupported(f"replica {replica} is Ray Serve's, which would start another one; stop the server instead")

    def close(self) -> None:
        """Delete the application, which ends every engine, and leave the cluster. A second call does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        self.fleet.close()
        with contextlib.suppress(Exception):  # the cluster may have ended first
            serve.delete(self._app)
        ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

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

    def _deploy(self, config: EngineConfig, replicas: int, start_timeout_s: float) -> None:
        resources = {"num_gpus": 1} if config.device == "cuda" else {"num_cpus": max(config.num_threads, 1)}
        deployment = serve.deployment(
            EngineReplica,
            name="EngineReplica",
            num_replicas=replicas,
            ray_actor_options=resources,
            health_check_period_s=HEALTH_S,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=STOP_S,
            max_constructor_retry_count=3,
        )
        target = deployment.bind(
            msgspec.json.encode(config),
            client_key=self._client_key,
            places=self._places,
            step_timeout_s=self._policy.step_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        serve.start(proxy_location="Disabled")
        serve.run_many(
            [serve.RunTarget(target, name=self._app, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _connect(self, place: EnginePlace) -> Client:
        return Client(
            place.url,
            keys=ClientKeys(self._client_secret, place.public_key),
            connect_timeout_s=CONNECT_S,
            engine_timeout_s=self._policy.step_timeout_s,
        )

    def _engine_lost(self, engine: str, error: PhloemError) -> None:
        self._follower.lose(engine, error)
        self._places.forget.remote(engine)  # wakes the thread

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen = 0
        while not self._stopping.is_set() and self._failure is None:
            try:
                seen, places = ray.get(self._places.changed.remote(seen, LOOK_S))
                for name in self._follower.follow(places):
                    self._places.forget.remote(name)
                if self._follower.clients:
                    self._has_engine.set()
                else:
                    self._look_for_failure()
            except Exception:  # of Ray, whose errors have no common class; the engines go on without its word
                if not self._stopping.is_set():
                    logger.exception("Ray did not say where the engines are; it is asked again")
                    self._stopping.wait(LOOK_S)
                    seen = 0

    def _look_for_failure(self) -> None:
        """Raise nothing; where Ray Serve has given up, end the fleet."""
        if isinstance(self._follower.refusal, InvalidParams):
            self._fail(self._follower.refusal)
        found = serve.status().applications.get(self._app)
        if found is not None and found.status in ("DEPLOY_FAILED", "NOT_STARTED"):
            self._fail(EngineLost(f"Ray Serve could not start an engine: {self._state()}"))

    def _fail(self, error: PhloemError) -> None:
        self._failure = error
        self.fleet.give_up(error)
        if self._has_engine.is_set() and self._on_failed is not None:
            self._on_failed(error)
        self._has_engine.set()

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
