"""The engines of a Serve deployment behind one ``FleetClient``: followed, called and drained. Imports no Ray."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...protocol.address import ClientKeys
from ...protocol.client import Client
from ...protocol.errors import EngineLost, InvalidParams, PhloemError, Unsupported
from ...protocol.ops import AnyOp
from ..client import FleetClient
from ..limits import FleetLimits
from ..supervisor import Replica, ask_clients
from .calls import AFTER_S, Hold, ServeCalls
from .places import EnginePlace, PlacesFollower

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at what is lost, and at the state of the application
DRAIN_LOOK_S = 0.1  # while programs move off an engine
CONNECT_S = 10.0


class ServeFleet:
    """Has the face of ``cluster.supervisor.Supervisor``; ``client`` hands programs to the engines.

    ``handle``: of the deployment of ``EngineReplica``, whose router is ``ProgramRouter``. ``client_secret``: of the key
    that the engines admit. ``look`` is called while there is no engine, on the follower's thread, and returns why there
    will be none; ``on_failed`` gets that, once, if there was one before. ``call_after_s``: see ``ServeCalls``.
    """

    def __init__(
        self,
        handle: Any,
        *,
        client_secret: str,
        tokenize: Callable[[Sequence[AnyOp]], Sequence[int]],
        limits: FleetLimits | None = None,
        step_timeout_s: float = 60.0,
        look: Callable[[], PhloemError | None] = lambda: None,
        on_failed: Callable[[PhloemError], None] | None = None,
        call_after_s: float = AFTER_S,
    ) -> None:
        self._handle = handle
        self._secret = client_secret
        self._step_timeout_s = step_timeout_s
        self._look = look
        self._on_failed = on_failed
        self._places: dict[str, EnginePlace] = {}  # replaced as a whole
        self._has_news = threading.Event()
        self._is_over = False
        self._has_engine = threading.Event()
        self.failure: PhloemError | None = None
        self._calls = ServeCalls(self._begin, after_s=call_after_s)
        self.client = FleetClient(tokenize=tokenize, limits=limits, on_lost=self._engine_lost, watch=self._calls)
        self._follower = PlacesFollower(self.client, self._connect)
        self._greeting: Any = None  # the call that brings the router this board
        self._thread = threading.Thread(target=self._follow, name="phloem-ray", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether an engine is ready within ``timeout_s``. Raises why there will be none."""
        found = self._has_engine.wait(timeout_s)
        if self.failure is not None:
            raise self.failure
        return found

    def replicas(self) -> list[Replica]:
        return self._follower.replicas()

    def metrics(self, timeout_s: float = 10.0) -> dict[str, dict[str, Any]]:
        """The metrics of each replica whose engine answers within ``timeout_s``."""
        return self.ask("metrics", timeout_s)

    def ask(self, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """Each replica's answer to the query ``what``, where its engine answers within ``timeout_s``."""
        return ask_clients(self._follower.clients, what, timeout_s)

    def drain(self, replica: str, *, migrate: bool = False) -> Replica:
        """Raises Unsupported: Ray Serve keeps the number of replicas, and would start another one in its place."""
        text = f"replica {replica} is Ray Serve's, which would start another one"
        raise Unsupported(f"{text}; lower the number of replicas with serve deploy, or stop the server")

    def close(self) -> None:
        """End all programs and calls, and disconnect from the engines. A second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        self._has_news.set()
        self._thread.join(2 * CONNECT_S)
        self.client.give_up(EngineLost("this server ends; send the program again"))
        self.client.close()
        self._calls.close()

    # -- the board, on the router's thread ----------------------------------------------------------------------------

    def show(self, places: Mapping[str, EnginePlace]) -> None:
        self._places = dict(places)
        self._has_news.set()

    # -- on the fleet's thread ----------------------------------------------------------------------------------------

    def _engine_lost(self, engine: str, error: PhloemError) -> None:
        self._follower.lose(engine, error)
        self._has_news.set()

    # -- on the thread of the calls -----------------------------------------------------------------------------------

    def _begin(self, hold: Hold) -> Callable[[], None]:
        response = self._handle.hold.remote(hold)
        return lambda: response.cancel()

    # -- on the follower's thread -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._is_over:
            try:
                if self._greeting is None:
                    self._greeting = self._handle.hold.remote(Hold("", "", board=self))
                self._follower.follow(self._places)
                if self._follower.clients:
                    self._has_engine.set()
                elif self.failure is None:
                    self._look_for_failure()
            except Exception:  # of Ray, whose errors have no common class
                logger.exception("the engines on Ray could not be followed; they are looked at again")
            self._has_news.wait(DRAIN_LOOK_S if self._follower.draining else LOOK_S)
            self._has_news.clear()

    def _look_for_failure(self) -> None:
        refusal = self._follower.refusal
        error = refusal if isinstance(refusal, InvalidParams) else self._look()
        if error is not None:
            self.failure = error
            self.client.give_up(error)
            if self._has_engine.is_set() and self._on_failed is not None:
                self._on_failed(error)
            self._has_engine.set()

    def _connect(self, place: EnginePlace) -> Client:
        return Client(
            place.url,
            keys=ClientKeys(self._secret, place.public_key) if place.public_key else None,
            connect_timeout_s=CONNECT_S,
            engine_timeout_s=self._step_timeout_s,
        )
