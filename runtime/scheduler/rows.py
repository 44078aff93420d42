"""A running sequence's part of a step, as a row of the plan. Decides nothing: slots and lengths are settled before."""

import numpy as np

from .draft import Draft
from .plan import PlanRow
from .sequence import Sequence


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
    """``row`` with all of ``draft`` run along; takes the slots that are missing."""
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
        draft.parents,
        row.adapter,
    )
