"""A model's tapes: those of steps whose tokens have adapters, and those of other steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...kernels.cpu.recording import Arena
from .replays import Replays

if TYPE_CHECKING:
    import torch

    from ..layers.batch import ForwardBatch, StepArrays
    from ..memory import KVPool
    from ..models import Model


class StepTapes:
    """Owns the tapes. They share one arena, as one of them runs at a time.

    A tape with adapters reads each token's adapter from a tensor, and the adapters' tables at the addresses at which
    they lay when it was recorded. So all of these tapes are dropped once tables are made anew.
    """

    def __init__(self, model: Model, kv: KVPool) -> None:
        self._model, self._kv = model, kv
        self._arena = Arena()
        self._last = self.plain = Replays(model, kv, self._arena)
        self._num_moves = 0
        self._adapted: Replays | None = None

    @property
    def is_cold(self) -> bool:
        """``Replays.is_cold``, of the last step."""
        return self._last.is_cold

    @property
    def adapted(self) -> Replays:
        """For steps with adapters, as their tables lie now."""
        num_moves = self._model.adapters.num_moves
        if self._adapted is None or self._num_moves != num_moves:
            self._adapted, self._num_moves = Replays(self._model, self._kv, self._arena), num_moves
        return self._adapted

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """``Replays.forward``."""
        self._last = self.plain if batch.adapters is None else self.adapted
        return self._last.forward(batch)

    def forward_decode(self, step: StepArrays) -> torch.Tensor | None:
        """``Replays.forward_decode``."""
        self._last = self.plain
        return self.plain.forward_decode(step)

    def record_ahead(self, slot_table: torch.Tensor) -> bool:
        """``Replays.record_ahead``, of steps without adapters."""
        return self.plain.record_ahead(slot_table)
