"""A step that the device is computing: its plan, its draws, and what to do with each result.

It keeps each row's sequence and tag as they were when the step was planned, because a sequence may end, or begin
another op, before the results are read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..executor import SampleRow
from ..scheduler import Draft, PlanRow, Sequence, StepPlan
from .generation import Candidate

if TYPE_CHECKING:
    import torch

    from ...radix_cache import Lease
    from ..executor import Readback, SampledToken, StepDraws, StepLogits


class Draw(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The draws of one candidate: its next token, and one after each of its draft tokens; [at, end) of the step."""

    candidate: Candidate
    row: PlanRow
    draft: Draft | None
    at: int
    lease: Lease | None  # that held the row's slots

    @property
    def end(self) -> int:
        return self.at + 1 + (len(self.draft) if self.draft is not None else 0)

    @property
    def has_slots(self) -> bool:
        """Whether the sequence still holds the slots that the row wrote; False once it was preempted."""
        seq = self.candidate.seq
        return seq.state == "running" and seq.lease is self.lease


@dataclass(frozen=True, slots=True)
class DeferredDraw:
    """A draw that is accepted once ``future`` is done: until then its grammar's masks are being made."""

    draw: Draw
    sampled: list[SampledToken]
    future: Future[None]


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class VectorDraws:
    """Tokens to be drawn for vectorised rows, int64 [R]. Draw ``ats[i]`` belongs to ``row_ids[i]`` if that row still
    belongs to sequence ``seq_ids[i]``.
    """

    row_ids: np.ndarray = field(default_factory=_none)
    seq_ids: np.ndarray = field(default_factory=_none)
    ats: np.ndarray = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.row_ids)

    def joined(self, other: VectorDraws) -> VectorDraws:
        parts = ((self.row_ids, other.row_ids), (self.seq_ids, other.seq_ids), (self.ats, other.ats))
        return VectorDraws(*map(np.concatenate, parts))


@dataclass(slots=True)
class StepInFlight:
    """``wants``: tensors to be read beside the draws, and who takes their values once ``readback`` has them."""

    plan: StepPlan
    drafts: dict[int, Draft]
    owners: list[tuple[Sequence, object]]  # each row's sequence and its tag
    logits: StepLogits
    start_s: float
    is_cold: bool = False  # the step takes longer than later steps of its shape
    draws: list[Draw] = field(default_factory=list)
    vectorised: VectorDraws = field(default_factory=VectorDraws)  # the draws that are not in ``draws``
    rows: list[SampleRow] = field(default_factory=list)
    drawn: StepDraws | None = None
    wants: list[tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], None]]] = field(default_factory=list)
    readback: Readback | None = None

    def want(self, tensors: list[torch.Tensor], take: Callable[[list[torch.Tensor]], None]) -> None:
        """Call ``take`` with the values of ``tensors`` when the step is read."""
        self.wants.append((tensors, take))

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that the host reads from this step."""
        drawn = self.drawn.tensors() if self.drawn is not None else []
        return [*drawn, *(tensor for tensors, _ in self.wants for tensor in tensors)]
