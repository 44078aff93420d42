"""One step on its way: what was given to the device and what is to be done with each result once it is read.

The tags of the rows are kept as they were when the step was planned: meanwhile a sequence may have ended, or begun
something else. Never reads anything itself.
"""

from __future__ import annotations

from collections.abc import Callable
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
    from ..executor import Drawn, Readback, StepLogits


class Draw(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A token to be drawn for ``candidate``, and one after each token of its draft: draws [at, at + 1 + drafted)."""

    candidate: Candidate
    row: PlanRow
    draft: Draft | None
    at: int
    lease: Lease | None  # whose slots the row's keys and values went to

    @property
    def end(self) -> int:
        return self.at + 1 + (len(self.draft) if self.draft is not None else 0)

    @property
    def has_slots(self) -> bool:
        """Whether what the row computed is still its sequence's: it may have been preempted."""
        seq = self.candidate.seq
        return seq.state == "running" and seq.lease is self.lease


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
class Flight:
    """``logits`` are there at once as far as the host is told; ``wants`` take what ``readback`` gives."""

    plan: StepPlan
    drafts: dict[int, Draft]
    owners: list[tuple[Sequence, object]]  # of each row: the sequence and its tag
    logits: StepLogits
    features: torch.Tensor  # what they were made from, on a CPU
    start_s: float
    is_cold: bool = False  # it takes longer than others of its shape will
    draws: list[Draw] = field(default_factory=list)
    vectorised: VectorDraws = field(default_factory=VectorDraws)  # the draws that are not in ``draws``
    rows: list[SampleRow] = field(default_factory=list)
    drawn: Drawn | None = None
    wants: list[tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], None]]] = field(default_factory=list)
    readback: Readback | None = None

    def want(self, tensors: list[torch.Tensor], take: Callable[[list[torch.Tensor]], None]) -> None:
        """``take`` will be called with the values of ``tensors``."""
        self.wants.append((tensors, take))

    def tensors(self) -> list[torch.Tensor]:
        """All that is to be read."""
        drawn = self.drawn.tensors() if self.drawn is not None else []
        return [*drawn, *(tensor for tensors, _ in self.wants for tensor in tensors)]
