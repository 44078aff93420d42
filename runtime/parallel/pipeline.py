"""Pipeline parallelism: each stage has some of the layers, and a step's micro-steps follow each other through them.

    stage 0 │ 1 │ 2 │ 3 │ 4 │            M micro-steps on P stages take M + P - 1 turns, so each stage waits
    stage 1     │ 1 │ 2 │ 3 │ 4 │        (P - 1) / (M + P - 1) of the time: here 1 of 5

(GPipe: Huang et al., 2019.) A micro-step runs some tokens of the step, in the plan's order, so that a token's keys
and values are in every layer's slots before a later micro-step reads them.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from .group import Group
from .links import Wait
from .sizes import GPU_READ_TOKENS, READ_TOKENS, num_micro_steps


class PipelineStage:
    """One rank's ``models.decoder.Stage``. A rank exchanges with that of its own tensor rank in the next stage.

    ``group`` has all ranks; ``before`` and ``after`` are ranks of it, None at the ends.
    """

    def __init__(
        self,
        group: Group,
        *,
        num_stages: int,
        before: int | None,
        after: int | None,
        width: int,
        device: torch.device,
    ) -> None:
        self.is_first, self.is_last = before is None, after is None
        self._group, self._num_stages, self._device = group, num_stages, device
        self._read_tokens = READ_TOKENS if device.type == "cpu" else GPU_READ_TOKENS
        self._before, self._after, self._width = before, after, width
        self._coming: deque[tuple[Wait, Tensor]] = deque()
        self._going: deque[Wait] = deque()

    def num_micro_steps(self, num_tokens: int) -> int:
        return num_micro_steps(self._num_stages, num_tokens, read_tokens=self._read_tokens)

    def begin(self, num_tokens: list[int]) -> None:
        assert not self._coming, "the step before has ended"
        while self._going:  # of the step before, whose results rank 0 has
            self._going.popleft()()
        if self._before is None:
            return
        for count in num_tokens:  # all at once, so that a transfer runs beside the micro-steps before it
            into = torch.empty((count, self._width), dtype=torch.float32, device=self._device)
            self._coming.append((self._group.start_receive(into, self._before), into))

    def receive(self) -> Tensor:
        wait, residual = self._coming.popleft()
        wait()
        return residual

    def send(self, residual: Tensor) -> None:
        assert self._after is not None
        self._going.append(self._group.start_send(residual, self._after))
