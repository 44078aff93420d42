"""What one step computes, in integers.

tokens of a sequence:   [0, start) in the KV pool   [start, tokens_end) run in this step   [.., len) later
with a draft:           [0, start) in the KV pool   [start, len) run in this step, then ``num_draft`` draft tokens

An earlier row of the same step may write the KV of the last tokens before ``start``.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from .sequence import Sequence

MAX_DRAFT_TOKENS = 128  # of all drafts in a step


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guessed tokens that may follow a sequence. They are not part of it until accepted. ``source``: the drafter."""

    token_ids: np.ndarray  # int32 [k]
    source: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens."""
        return self if length >= len(self.token_ids) else Draft(self.token_ids[:length], self.source)


class PlanRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One sequence's part of a step.

    ``slot_ids`` (int32) covers positions [0, start + n); entries before ``stale_from`` are what the executor already
    holds for ``row_id``. Logits are wanted for the last ``num_logits`` of the n positions (0: a chunk inside a prompt).
    A token id of ``-1 - i`` stands for draw i of the step before, which is not known yet.
    The last ``num_draft`` of the n are draft tokens.
    A struct, because a step makes hundreds of rows and a frozen dataclass takes five times as long to make.
    """

    seq_id: int
    row_id: int
    start: int
    token_ids: np.ndarray  # int32 [n]
    slot_ids: np.ndarray  # int32 [start + n]
    stale_from: int
    num_logits: int
    num_draft: int = 0
    adapter: int = -1  # number of its tokens' adapter; a vectorised row keeps the one that its row had last

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def tokens_end(self) -> int:
        """Where the sequence's own tokens end in this step."""
        return self.start + len(self.token_ids) - self.num_draft


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows of one token each, whose logits are wanted, as arrays [R]; each stands for a ``PlanRow``.

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
    """The rows of ``vectorised`` come first in the step, then ``rows``."""

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
        """The whole step as arrays, if each of its rows has one token whose logits are wanted; else None."""
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


def plan_row(seq: Sequence, n: int) -> PlanRow:
    """The next ``n`` tokens of ``seq``, which has slots for them."""
    lease = seq.lease
    assert lease is not None
    start = seq.num_computed
    end = start + n
    stale_from = min(seq.table_len, lease.stale_from, start)
    seq.table_len = end
    lease.mark_fresh()
    num_logits = end - max(seq.logits_from, start)
    return PlanRow(
        seq.seq_id,
        seq.row_id,
        start,
        seq.tokens.span(start, end),
        lease.slot_ids[:end],
        stale_from,
        num_logits if num_logits > 0 else 0,
        adapter=seq.adapter,
    )


def drafted_row(row: PlanRow, seq: Sequence, draft: Draft) -> PlanRow:
    """``row`` with all of ``draft`` added; takes the slots that are missing."""
    lease = seq.lease
    assert lease is not None
    k, end = len(draft), row.end + len(draft)
    if lease.num_slots < end:
        lease.extend(end - lease.num_slots)
    seq.table_len = end
    stale_from = min(row.stale_from, lease.stale_from)
    lease.mark_fresh()
    return PlanRow(
        row.seq_id,
        row.row_id,
        row.start,
        np.concatenate((row.token_ids, draft.token_ids)),
        lease.slot_ids[:end],
        stale_from,
        row.num_logits + k,
        k,
        row.adapter,
    )
