"""When a lost engine is started again, and when no more. Pure: the caller says what time it is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..protocol.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """``step_timeout_s``: an engine that is silent for longer hangs, and is killed. ``max_restarts`` within
    ``window_s``: then the replica has failed. Waits between restarts double from ``backoff_s`` to ``max_backoff_s``;
    an engine that has served for ``max_backoff_s`` is restarted at once, and the waits begin anew.
    """

    step_timeout_s: float = 60.0
    max_restarts: int = 10
    window_s: float = 600.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("step_timeout_s", "window_s"):
            if not getattr(self, name) > 0:
                raise InvalidParams(f"{name}={getattr(self, name)}: it must be above 0 seconds", where=name)
        for name in ("max_restarts", "backoff_s", "max_backoff_s"):
            if not getattr(self, name) >= 0:
                raise InvalidParams(f"{name}={getattr(self, name)}: it must be 0 or above", where=name)


class Restarts:
    """The restarts of one replica."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.total = 0
        self._times: deque[float] = deque()  # of restarts within the window
        self._num_quick_losses = 0  # in a row

    def num_recent(self, now_s: float) -> int:
        """Restarts within the window."""
        while self._times and self._times[0] <= now_s - self.policy.window_s:
            self._times.popleft()
        return len(self._times)

    def after_loss(self, *, served_s: float, now_s: float) -> float | None:
        """The engine was lost after ``served_s`` seconds: how long to wait until the next one starts; None: no more.

        The caller then waits and calls ``started``.
        """
        policy = self.policy
        if self.num_recent(now_s) >= policy.max_restarts:
            return None
        if served_s >= policy.max_backoff_s:
            self._num_quick_losses = 0
        wait_s = policy.backoff_s * 2 ** min(self._num_quick_losses - 1, 60) if self._num_quick_losses else 0.0
        self._num_quick_losses += 1
        return min(wait_s, policy.max_backoff_s)

    def started(self, now_s: float) -> None:
        self.total += 1
        self._times.append(now_s)
