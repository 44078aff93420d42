"""Engine processes that are kept alive: started, watched, ended when they hang, and started again.

Each replica has a thread, which lives through these states:

    starting ──► ready ──lost: its process ended, or it was silent──► waiting ──► starting ...
        └────────────┴──── too many restarts, or an error that stays ────► failed
    ready ──drain──► draining ──nothing runs there──► stopped        any ──stop──► stopped
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, Protocol, Self

import msgspec

from .. import processor
from ..protocol.client import Client
from ..protocol.errors import Cancelled, EngineLost, InternalError, InvalidParams, InvalidRequest, PhloemError
from ..protocol.ops import AnyOp
from ..runtime.config import EngineConfig, Progress
from ..runtime.process import EngineProcess, PythonProcess
from ..runtime.process.launcher import PRIVATE_URL
from .client import FleetClient
from .limits import FleetLimits
from .restarts import RestartPolicy, Restarts
from .roles import Role, roles_of

logger = logging.getLogger(__name__)

MAX_REPLICAS = 256
ReplicaState = Literal["starting", "ready", "waiting", "draining", "failed", "stopped"]
DRAIN_LOOK_S = 1.0  # between two tries to move what could not be moved off a draining engine


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as others see it. ``epoch`` counts its engines from 1, ``pid`` is 0 without a process.

    ``since_s``: when it came into its state, by ``time.time()``. ``silent_s``: for how long a ready engine has not
    answered. ``last_error`` is one line; the log has the rest. ``role``: see ``roles``.
    """

    name: str
    state: ReplicaState
    epoch: int
    pid: int
    restarts: int
    since_s: float
    silent_s: float = 0.0
    last_error: str = ""
    role: Role = "both"


class Supervised(Protocol):
    """What operators see of the engines."""

    def replicas(self) -> list[Replica]: ...
    def metrics(self, timeout_s: float = 10.0) -> dict[str, Any]: ...
    def ask(self, what: str, timeout_s: float = 10.0) -> dict[str, Any]: ...
    def drain(self, replica: str, *, migrate: bool = False) -> Replica: ...


class Supervising(Supervised, Protocol):
    """Keeps engines alive until its block ends; ``fleet`` is the client of those that are ready."""

    @property
    def fleet(self) -> FleetClient: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...


class Supervisor:
    """``replicas`` engines of one configuration, and ``fleet``, the client of those that are ready.

    The constructor returns when the first engine is ready, and raises its error where it cannot start; the others
    start after that, all at once. ``on_failed`` is called once, on a replica's thread, when every replica has failed;
    it must not call ``close``. ``tokenize`` and ``limits`` are those of ``FleetClient``; ``start_timeout_s``,
    ``factory`` and ``progress`` (of the first engine) those of ``EngineProcess``; ``first`` is the interpreter of the
    first engine. Several replicas share out the machine: see ``share``. ``roles``: of the first replicas; the others
    have ``both``.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokenize: Callable[[Sequence[AnyOp]], Sequence[int]],
        replicas: int = 1,
        roles: Sequence[Role] = (),
        policy: RestartPolicy | None = None,
        limits: FleetLimits | None = None,
        start_timeout_s: float = 600.0,
        factory: str = "",
        progress: Progress | None = None,
        on_failed: Callable[[PhloemError], None] | None = None,
        first: PythonProcess | None = None,
    ) -> None:
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._has_failed = False
        configs = share(config, replicas)
        roles = roles_of(replicas, roles)
        if factory:  # another engine than the real one publishes no events
            configs = [msgspec.structs.replace(one, cache_events_url="") for one in configs]
        self.fleet = FleetClient(tokenize=tokenize, limits=limits, on_lost=self._engine_lost)
        self._keepers = {
            str(i): _Keeper(
                str(i),
                partial(EngineProcess, one, start_timeout_s=start_timeout_s, factory=factory),
                self.fleet,
                policy or RestartPolicy(),
                role=roles[i],
                on_failed=self._replica_failed,
            )
            for i, one in enumerate(configs)
        }
        try:
            self._keepers["0"].launch(progress, first)
            for keeper in self._keepers.values():
                keeper.begin()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def replicas(self) -> list[Replica]:
        return [keeper.view() for keeper in self._keepers.values()]

    def metrics(self, timeout_s: float = 10.0) -> dict[str, dict[str, Any]]:
        """The metrics of each replica whose engine answers within ``timeout_s``."""
        return self.ask("metrics", timeout_s)

    def ask(self, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """Each replica's answer to the query ``what``, where its engine answers within ``timeout_s``."""
        clients = {name: client for name, keeper in self._keepers.items() if (client := keeper.client) is not None}
        return ask_clients(clients, what, timeout_s)

    def drain(self, replica: str, *, migrate: bool = False) -> Replica:
        """Take ``replica`` out of service for good: no new program comes, and its engine stops once nothing runs there.

        Returns at once. ``migrate``: programs do not end there, but are replayed on other replicas; one without a
        journal stays. A second call may ask for it. Raises InvalidRequest for a replica that is not there, and for the
        last one that is ready.
        """
        keeper = self._keepers.get(replica)
        if keeper is None:
            raise InvalidRequest(f"replica={replica!r} is not one of: {', '.join(self._keepers)}", where="replica")
        with self._lock:
            if not any(other is not keeper and other.view().state == "ready" for other in self._keepers.values()):
                text = f"replica {replica} cannot be drained: no other one is ready to take programs"
                raise InvalidRequest(f"{text}; wait until one is, or stop the server", where="replica")
            keeper.drain(migrate=migrate)
        return keeper.view()

    def close(self) -> None:
        """End every engine and close ``fleet``; leaves no process and no file. A second call does nothing."""
        for keeper in self._keepers.values():
            keeper.tell_to_stop()
        for keeper in self._keepers.values():
            keeper.join()
        self.fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _engine_lost(self, engine: str, error: PhloemError) -> None:
        self._keepers[engine].tell_of_loss(error)

    def _replica_failed(self, error: PhloemError) -> None:
        with self._lock:
            if self._has_failed or any(keeper.may_serve for keeper in self._keepers.values()):
                return
            self._has_failed = True
        self.fleet.give_up(error)
        if self._on_failed is not None:
            self._on_failed(error)


def ask_clients(clients: Mapping[str, Client], what: str, timeout_s: float) -> dict[str, Any]:
    """The answer of each client's engine to the query ``what``, of those that answer within ``timeout_s``."""
    found = {}
    with ThreadPoolExecutor(max(1, len(clients))) as pool:
        answers = {name: pool.submit(client.query, what, timeout_s) for name, client in clients.items()}
    for name, answer in answers.items():
        with contextlib.suppress(PhloemError):
            found[name] = answer.result()
    return found


def share(config: EngineConfig, replicas: int) -> list[EngineConfig]:
    """The configuration of each replica. ``device="cuda"``: replica i has ``cuda:i``; on a CPU each has its part of
    the cores. Several replicas publish their cache events, from which the fleet knows what each has cached.

    Raises InvalidParams where ``replicas`` is out of range or the configuration names what only one engine can have.
    """
    if not 1 <= replicas <= MAX_REPLICAS:
        raise InvalidParams(f"replicas={replicas}: it must be 1 to {MAX_REPLICAS}", where="replicas")
    if replicas == 1:
        return [config]
    if config.dist_init_addr:
        text = f"dist_init_addr={config.dist_init_addr!r}: {replicas} replicas cannot meet at one address"
        raise InvalidParams(f"{text}; start one server for each, with an address of its own", where="dist_init_addr")
    if config.cache_events_url:
        text = f"cache_events_url={config.cache_events_url!r}: {replicas} replicas cannot publish at one address"
        raise InvalidParams(f"{text}; leave it out", where="cache_events_url")
    config = msgspec.structs.replace(config, cache_events_url=PRIVATE_URL if config.prefix_cache else "")
    if config.device == "cuda":
        return [msgspec.structs.replace(config, device=f"cuda:{i}") for i in range(replicas)]
    if config.num_threads or not config.device.startswith("cpu"):
        return [config] * replicas
    num_threads = max(1, processor.num_cores() // (replicas * max(1, config.num_ranks)))
    return [msgspec.structs.replace(config, num_threads=num_threads)] * replicas


class _Keeper:
    """One replica: its thread starts engines, one after another, until it is told to stop or the replica fails."""

    def __init__(
        self,
        name: str,
        start: Callable[..., EngineProcess],
        fleet: FleetClient,
        policy: RestartPolicy,
        *,
        role: Role,
        on_failed: Callable[[PhloemError], None],
    ) -> None:
        self._start = start
        self._fleet = fleet
        self._restarts = Restarts(policy)
        self._on_failed = on_failed
        self._thread = threading.Thread(target=self._keep, name=f"phloem-replica-{name}", daemon=True)
        self._stopping = threading.Event()
        self._migrates = threading.Event()  # a drain moves programs
        self._drain: threading.Thread | None = None
        self._ends: SimpleQueue[PhloemError | None] = SimpleQueue()  # why the engine is lost; None: stop
        self._process: EngineProcess | None = None
        self.client: Client | None = None
        self._view = Replica(
            name, "starting", 0, 0, 0, time.time(), role=role
        )  # replaced as a whole, read on any thread

    def view(self) -> Replica:
        client, view = self.client, self._view
        return view if client is None else replace(view, silent_s=client.silent_s)

    def launch(self, progress: Progress | None = None, interpreter: PythonProcess | None = None) -> None:
        """Start the next engine and add it to the fleet. Before ``begin``, or on the replica's thread.

        Raises what ``EngineProcess`` and ``FleetClient.add`` raise; Cancelled when the keeper was told to stop.
        """
        self._show("starting", epoch=self._view.epoch + 1)
        process = self._start(progress=progress, is_cancelled=self._stopping.is_set, interpreter=interpreter)
        try:
            client = process.connect(engine_timeout_s=self._restarts.policy.step_timeout_s)
            try:
                self._fleet.add(self._view.name, client, role=self._view.role)
            except BaseException:
                client.close()
                raise
        except BaseException:
            process.kill()
            raise
        self._process, self.client = process, client
        self._show("ready", pid=process.pid)
        logger.info("replica %s: engine %d is ready (pid %d)", self._view.name, self._view.epoch, process.pid)

    def begin(self) -> None:
        self._thread.start()

    def tell_to_stop(self) -> None:
        self._stopping.set()
        self._ends.put(None)

    @property
    def may_serve(self) -> bool:
        """Whether its engine takes programs, or another one will."""
        return self._drain is None and self._view.state != "failed"

    def drain(self, *, migrate: bool) -> None:
        """Stop the engine once nothing runs there. Called by one thread at a time."""
        if migrate:
            self._migrates.set()
        if self._drain is None:
            self._drain = threading.Thread(target=self._leave, name=f"phloem-drain-{self._view.name}", daemon=True)
            self._show("draining", pid=self._view.pid)
            self._drain.start()

    def _leave(self) -> None:
        while not self._stopping.is_set():
            if self._fleet.drain(self._view.name, migrate=self._migrates.is_set(), timeout_s=DRAIN_LOOK_S):
                logger.info("replica %s is drained", self._view.name)
                self.tell_to_stop()

    def tell_of_loss(self, error: PhloemError) -> None:
        """The line to the engine has ended; said once for each engine."""
        self._ends.put(error)

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        else:  # it never began
            self._end(None)

    # -- on the replica's thread --------------------------------------------------------------------------------------

    def _keep(self) -> None:
        is_wanted = True
        while is_wanted:
            error: PhloemError | None
            try:
                if self._process is None:
                    self.launch()
                error = self._ends.get()
            except Cancelled:
                error = None
            except PhloemError as known:
                error = known
            except Exception as bug:
                logger.exception("replica %s: its engine could not be started", self._view.name)
                error = InternalError(f"an engine could not be started: {type(bug).__name__}: {bug}")
            self._end(error)
            is_wanted = error is not None and self._may_start_again(error)

    def _end(self, error: PhloemError | None) -> None:
        """End the engine, if there is one: at once where it is lost, otherwise as ``close`` asks for."""
        process, self._process, self.client = self._process, None, None
        if process is not None:
            try:
                self._fleet.remove(self._view.name, error or EngineLost("the engine was stopped"))
            finally:
                (process.stop if error is None else process.kill)()
        if error is None:
            self._show("stopped")

    def _may_start_again(self, error: PhloemError) -> bool:
        """Wait until the next engine may start. False where none may: the replica has failed or is to stop."""
        if self._drain is not None:  # its programs go on elsewhere
            self._show("stopped")
            return False
        name, restarts = self._view.name, self._restarts
        served_s = time.time() - self._view.since_s if self._view.state == "ready" else 0.0
        self._show("waiting", last_error=error.message.partition("\n")[0].removesuffix("; its log ends:"))
        logger.warning("replica %s: %s", name, error.message)
        if isinstance(error, InvalidRequest):  # another engine would fail in the same way
            return self._fail(error)
        wait_s = restarts.after_loss(served_s=served_s, now_s=time.monotonic())
        if wait_s is None:
            policy = restarts.policy
            limit = f"{policy.max_restarts} restarts within {policy.window_s:g} s (max_restarts)"
            return self._fail(EngineLost(f"replica {name} was lost again after {limit}: {error.message}"))
        if self._stopping.wait(wait_s):
            self._show("stopped")
            return False
        restarts.started(time.monotonic())
        self._show("starting", restarts=restarts.total)
        return True

    def _fail(self, error: PhloemError) -> Literal[False]:
        self._show("failed")
        logger.error("replica %s has failed: %s", self._view.name, error.message)
        self._on_failed(error)
        return False

    def _show(self, state: ReplicaState, *, pid: int = 0, **changes: Any) -> None:
        self._view = replace(self._view, state=state, pid=pid, since_s=time.time(), **changes)
