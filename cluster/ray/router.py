"""Serve's router for the calls of programs: each goes where ``cluster.placement`` has placed its program."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .calls import Board, Hold, ranked
from .places import EnginePlace


class ProgramRouter(RequestRouter):
    """Runs in the process that makes the calls, on a thread of Serve's. The fleet of that process decides by
    ``cluster.placement``, in which every engine's cache, load and speed count, before the call is made.

    What Serve tells it of the replicas, it shows on the board of the first call.
    """

    def initialize_state(self, **options: Any) -> None:
        self._board: Board | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        hold = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(hold, Hold):
            return [candidate_replicas]
        if hold.board is not None and hold.board is not self._board:
            self._board = hold.board
            self._show(list(self.curr_replicas.values()))
        return ranked(hold.engine, candidate_replicas, lambda replica: replica.replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._show(replicas)

    def _show(self, replicas: list[RunningReplica]) -> None:
        if self._board is not None:
            places = (EnginePlace(**replica.replica_metadata) for replica in replicas if replica.replica_metadata)
            self._board.show({place.name: place for place in places})
