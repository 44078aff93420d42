"""What one step computes, in integers. Never holds a tensor and never changes once made.

tokens of a sequence:   [0, start) in the KV pool   [start, start + n) run in this step   [.., len) later
"""

from dataclasses import dataclass

import msgspec
import numpy as np


class PlanRow(msgspec.Struct, frozen=True, eq=False):
    """One sequence's part of a step.

    ``slot_ids`` (int32) covers positions [0, start + n); entries before ``stale_from`` are what the executor already
    holds for ``row_id``. Logits are wanted for the last ``num_logits`` of the n positions (0: a chunk inside a prompt).
    A struct because hundreds are made in each step: a frozen dataclass takes five times as long.
    """

    seq_id: int
    row_id: int
    start: int
    token_ids: np.ndarray  # int32 [n]
    slot_ids: np.ndarray  # int32 [start + n]
    stale_from: int
    num_logits: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    rows: tuple[PlanRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)
