"""What one step computes, in integers. Never holds a tensor and never changes once made.

tokens of a sequence:   [0, start) in the KV pool   [start, tokens_end) run in this step   [.., len) later
with a draft:           [0, start) in the KV pool   [start, len) run in this step, then ``num_draft`` guesses
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np


class PlanRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One sequence's part of a step.

    ``slot_ids`` (int32) covers positions [0, start + n); entries before ``stale_from`` are what the executor already
    holds for ``row_id``. Logits are wanted for the last ``num_logits`` of the n positions (0: a chunk inside a prompt).
    A token id below 0 is one that the step before is drawing: ``-1 - i`` for its draw i.
    The last ``num_draft`` of the n are guesses of what follows the sequence; draft token i comes after draft token
    ``draft_parents[i]`` (< i; -1: after the sequence's last), or after i - 1 where there are no parents given. Trees
    lie in preorder.
    A struct because hundreds are made in each step: a frozen dataclass takes five times as long.
    """

    seq_id: int
    row_id: int
    start: int
    token_ids: np.ndarray  # int32 [n]
    slot_ids: np.ndarray  # int32 [start + n]
    stale_from: int
    num_logits: int
    num_draft: int = 0
    draft_parents: np.ndarray | None = None  # int32 [num_draft]
    adapter: int = -1  # of its tokens, by number; a vectorised row has the one that its row had last

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def tokens_end(self) -> int:
        """Where the sequence's own tokens end in this step."""
        return self.start + len(self.token_ids) - self.num_draft


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows of one token each that want its logits, as arrays [R]: each is what the ``PlanRow`` of that row would say.

    The executor already holds the slots of the positions before ``starts``.
    """

    seq_ids: np.ndarray  # int64
    row_ids: np.ndarray  # int64
    starts: np.ndarray  # int64
    token_ids: np.ndarray  # int32
    slot_ids: np.ndarray  # int32: of the position ``starts``

    def __len__(self) -> int:
        return len(self.row_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """In the step the rows of ``vectorised`` come first, then ``rows``."""

    step: int
    rows: tuple[PlanRow, ...]
    vectorised: DecodePart | None = None

    @property
    def num_vectorised(self) -> int:
        return 0 if self.vectorised is None else len(self.vectorised)

    @property
    def num_tokens(self) -> int:
        return self.num_vectorised + sum(len(row.token_ids) for row in self.rows)

    @property
    def num_logits(self) -> int:
        return self.num_vectorised + sum(row.num_logits for row in self.rows)

    @property
    def num_draft(self) -> int:
        return sum(row.num_draft for row in self.rows)

    def decodes(self) -> DecodePart | None:
        """The whole step as arrays, if each of its rows is of one token that wants its logits."""
        rows = self.rows
        if not rows:
            return self.vectorised
        if any(len(row.token_ids) != 1 or row.num_logits != 1 for row in rows):
            return None
        part = DecodePart(
            np.array([row.seq_id for row in rows], np.int64),
            np.array([row.row_id for row in rows], np.int64),
            np.array([row.start for row in rows], np.int64),
            np.array([row.token_ids.item(0) for row in rows], np.int32),
            np.array([row.slot_ids.item(row.start) for row in rows], np.int32),
        )
        return part if self.vectorised is None else joined(self.vectorised, part)


def joined(first: DecodePart, second: DecodePart) -> DecodePart:
    return DecodePart(
        np.concatenate((first.seq_ids, second.seq_ids)),
        np.concatenate((first.row_ids, second.row_ids)),
        np.concatenate((first.starts, second.starts)),
        np.concatenate((first.token_ids, second.token_ids)),
        np.concatenate((first.slot_ids, second.slot_ids)),
    )
