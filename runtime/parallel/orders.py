"""What rank 0 tells the other ranks, as integers: step plans and products of the head.

    frame:   number | kind | bytes of the payload | payload
    a plan:  step | vectorised rows | other rows | draws | [4, V] row, start, token, slot | [R, 7] rows | tokens | slots

Numbers are int64, payloads are int32. A row carries only the slots that the executors do not hold yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..scheduler import DecodePart, PlanRow, StepPlan

_ROW = 7  # row, start, tokens, stale_from, logits, drafts, adapter
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Whole:
    """Compute all logits of the last step, which has ``num_rows`` of them."""

    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Likeliest:
    """Find the ``k`` likeliest tokens of each row of logits. ``words`` (uint32 [M, W]) are the masks of ``rows``."""

    k: int
    rows: np.ndarray  # int64 [M]
    words: np.ndarray


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Send rank 0 the head's input of the last step."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Rank 0 is idle and alive."""


@dataclass(frozen=True, slots=True)
class End:
    """No more orders follow."""


Order = StepPlan | Whole | Likeliest | HeadInput | Beat | End
_KINDS: tuple[type, ...] = (StepPlan, Whole, Likeliest, HeadInput, Beat, End)


def encode(order: Order) -> tuple[int, np.ndarray]:
    """The order's kind and its payload, int32."""
    match order:
        case StepPlan():
            payload = _encode_plan(order)
        case Whole(num_rows=num_rows):
            payload = np.array([num_rows], np.int32)
        case Likeliest(k=k, rows=rows, words=words):
            head = np.array([k, *words.shape], np.int32)
            payload = np.concatenate((head, rows.astype(np.int32), words.view(np.int32).reshape(-1)))
        case _:
            payload = _NONE
    return _KINDS.index(type(order)), payload


def decode(kind: int, payload: np.ndarray) -> Order:
    """The order of ``encode``. Sequences' ids and slots below ``stale_from`` are not sent and are 0."""
    match _KINDS[kind].__name__:
        case "StepPlan":
            return _decode_plan(payload)
        case "Whole":
            return Whole(int(payload[0]))
        case "Likeliest":
            k, num_masks, num_words = payload[:3].tolist()
            rows, words = np.split(payload[3:], [num_masks])
            return Likeliest(k, rows.astype(np.int64), words.view(np.uint32).reshape(num_masks, num_words))
        case "HeadInput":
            return HeadInput()
        case "Beat":
            return Beat()
    return End()


def _encode_plan(plan: StepPlan) -> np.ndarray:
    part, rows = plan.vectorised, plan.rows
    heads = [
        (row.row_id, row.start, len(row.token_ids), row.stale_from, row.num_logits, row.num_draft, row.adapter)
        for row in rows
    ]
    first = np.array([plan.step & 0x7FFFFFFF, plan.num_vectorised, len(rows)], np.int64)
    arrays = [first, np.array(heads, np.int64).reshape(-1)]
    if part is not None:
        arrays[1:1] = [part.row_ids, part.starts, part.token_ids, part.slot_ids]
    arrays += [row.token_ids for row in rows]
    arrays += [row.slot_ids[row.stale_from : row.end] for row in rows]
    return np.concatenate(arrays, dtype=np.int32, casting="same_kind")


def _decode_plan(payload: np.ndarray) -> StepPlan:
    step, num_vectorised, num_rows = payload[:3].tolist()
    at = 3 + 4 * num_vectorised
    vectorised = None
    if num_vectorised:
        row_ids, starts, token_ids, slot_ids = payload[3:at].reshape(4, num_vectorised)
        row_ids, starts = row_ids.astype(np.int64), starts.astype(np.int64)
        vectorised = DecodePart(np.zeros_like(row_ids), row_ids, starts, token_ids, slot_ids)
    heads = payload[at : at + _ROW * num_rows].reshape(num_rows, _ROW).tolist()
    at += _ROW * num_rows
    slots_at = at + sum(head[2] for head in heads)
    rows = []
    for row_id, start, num_tokens, stale_from, num_logits, num_draft, adapter in heads:
        token_ids = payload[at : at + num_tokens]
        end = start + num_tokens
        slot_ids = np.zeros(end, np.int32)
        slot_ids[stale_from:] = payload[slots_at : slots_at + end - stale_from]
        at, slots_at = at + num_tokens, slots_at + end - stale_from
        rows.append(PlanRow(0, row_id, start, token_ids, slot_ids, stale_from, num_logits, num_draft, adapter))
    return StepPlan(step, tuple(rows), vectorised)
