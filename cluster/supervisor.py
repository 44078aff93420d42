"""Engine processes that are kept alive: started, watched, ended when they hang, and started again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..protocol.errors import PhloemError
from ..runtime.config import EngineConfig, Progress
from .client import FleetClient

ReplicaState = Literal["starting", "ready", "waiting", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """``step_timeout_s``: an engine that is silent for longer hangs, and is killed. ``max_restarts`` within
    ``window_s``: then the replica has failed. Waits between restarts double from ``backoff_s`` to ``max_backoff_s``;
    the first restart after a while of service waits for nothing.
    """

    step_timeout_s: float = 60.0
    max_restarts: int = 10
    window_s: float = 600.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as others see it. ``epoch`` counts its engines from 1."""

    name: str
    state: ReplicaState
    epoch: int
    pid: int
    restarts: int
    last_error: str
    ready_s: float  # since when, by time.time()


class Supervisor:
    """``replicas`` engines of one configuration, whose clients it adds to ``fleet`` and removes.

    The constructor returns when the first engine is ready, and raises its error where it cannot start; the others
    start one after another. ``on_failed`` is called once when every replica has failed. With several replicas the
    CPU's cores are shared out (``num_threads``) unless the configuration says otherwise.
    """

    def __init__(
        self,
        config: EngineConfig,
        fleet: FleetClient,
        *,
        replicas: int = 1,
        policy: RestartPolicy | None = None,
        factory: str = "",
        progress: Progress | None = None,
        on_failed: Callable[[PhloemError], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def replicas(self) -> list[Replica]:
        raise NotImplementedError

    def stop(self) -> None:
        """End every engine; leaves no process and no file."""
        raise NotImplementedError
