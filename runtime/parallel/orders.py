"""What rank 0 tells the other ranks, as integers: steps and products of the head.

    frame:   number | kind | bytes of the payload | payload
    a step:  numbers of rows R, tokens T, logits L, earlier runs E, tokens with adapters A, bytes of a token's id
             [R] rows, tokens, ends | [L] logits | [E] rows, first positions, lengths | [A] adapters | ids | slots
    slots:   of earlier positions, then of the tokens: number of runs, 0 for none | first slots, lengths | or all slots

Numbers are int64, payloads are int32. A step is sent as the arrays that rank 0 computes with too, so no rank goes
through its sequences one by one. Positions follow from the rows. Only slots that the executors do not hold yet are
sent, and neighbours as runs: the cache gives slots in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ..layers.batch import NO_RUNS, SlotRuns, StepArrays

_HEAD_LEN = 6
_NONE, _ZERO = np.zeros(0, np.int32), np.zeros(1, np.int32)


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
class ReviewExperts:
    """Copy experts that are chosen often, as the counts of the steps so far say."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Rank 0 is idle and alive."""


@dataclass(frozen=True, slots=True)
class End:
    """No more orders follow."""


Order = StepArrays | Whole | Likeliest | HeadInput | ReviewExperts | Beat | End
_KINDS: tuple[type, ...] = (StepArrays, Whole, Likeliest, HeadInput, ReviewExperts, Beat, End)


def encode(order: Order) -> tuple[int, np.ndarray]:
    """The order's kind and its payload, int32."""
    match order:
        case StepArrays():
            payload = _encode_step(order)
        case Whole(num_rows=num_rows):
            payload = np.array([num_rows], np.int32)
        case Likeliest(k=k, rows=rows, words=words):
            head = np.array([k, *words.shape], np.int32)
            payload = np.concatenate((head, rows.astype(np.int32), words.view(np.int32).reshape(-1)))
        case _:
            payload = _NONE
    return _KINDS.index(type(order)), payload


def decode(kind: int, payload: np.ndarray) -> Order:
    """The order of ``encode``."""
    match _KINDS[kind].__name__:
        case "StepArrays":
            return _decode_step(payload)
        case "Whole":
            return Whole(int(payload[0]))
        case "Likeliest":
            k, num_masks, num_words = payload[:3].tolist()
            rows, words = np.split(payload[3:], [num_masks])
            return Likeliest(k, rows.astype(np.int64), words.view(np.uint32).reshape(num_masks, num_words))
        case "HeadInput":
            return HeadInput()
        case "ReviewExperts":
            return ReviewExperts()
        case "Beat":
            return Beat()
    return End()


def _encode_step(step: StepArrays) -> np.ndarray:
    adapters = _NONE if step.adapters is None else step.adapters
    earlier, ids = step.earlier, np.asarray(step.token_ids, np.int32)
    is_short = len(ids) > 0 and ids.min() >= 0 and ids.max() < 1 << 16
    packed = _padded(ids.astype(np.uint16)).view(np.int32) if is_short else ids
    head = (len(step.row_ids), len(ids), len(step.logits_rows), len(earlier), len(adapters), 2 if is_short else 4)
    rows = (step.row_ids, np.diff(step.query_starts), step.kv_lens, step.logits_rows)
    slots = np.concatenate((earlier.slots, step.out_slots), dtype=np.int32, casting="unsafe")
    parts = (head, *rows, earlier.rows, earlier.starts, earlier.lengths, adapters, packed, *_encode_slots(slots))
    return np.concatenate(parts, dtype=np.int32, casting="unsafe")


def _decode_step(payload: np.ndarray) -> StepArrays:
    num_rows, num_tokens, num_logits, num_earlier, num_adapters, id_bytes = payload[:_HEAD_LEN].tolist()
    num_packed = num_tokens if id_bytes == 4 else -(-num_tokens // 2)
    lengths = (*[num_rows] * 3, num_logits, *[num_earlier] * 3, num_adapters, num_packed)
    ends = [*accumulate(lengths, initial=_HEAD_LEN), len(payload)]
    parts = [payload[first:end] for first, end in pairwise(ends)]
    row_ids, counts, kv_lens, logits_rows, rows, starts, run_lens, adapters, ids, packed = parts
    if id_bytes == 2:
        ids = ids.view(np.uint16)[:num_tokens].astype(np.int32)
    query_starts = np.concatenate((_ZERO, np.cumsum(counts, dtype=np.int32)))
    # Token t of row r: position = kv_lens[r] - n_r + (t - query_starts[r]).
    positions = np.repeat(kv_lens - query_starts[1:], counts)
    positions += np.arange(num_tokens, dtype=np.int32)
    num_before = int(run_lens.sum())
    slots = _decode_slots(packed, num_tokens + num_before)
    return StepArrays(
        ids,
        positions,
        slots[len(slots) - num_tokens :],
        logits_rows,
        row_ids,
        query_starts,
        kv_lens,
        earlier=SlotRuns(rows, starts, run_lens, slots[:num_before]) if num_earlier else NO_RUNS,
        adapters=adapters if num_adapters else None,
    )


def _encode_slots(slots: np.ndarray) -> tuple[np.ndarray, ...]:
    """Runs of neighbouring slots, or all slots where these are shorter."""
    firsts = np.flatnonzero(np.diff(slots, prepend=slots[:1] - 2) != 1)
    if 2 * len(firsts) >= len(slots):
        return _ZERO, slots
    return np.array([len(firsts)], np.int32), slots[firsts], np.diff(firsts, append=len(slots))


def _decode_slots(packed: np.ndarray, num_slots: int) -> np.ndarray:
    num_runs = int(packed[0])
    if not num_runs:
        return packed[1:]
    slots, lengths = packed[1:].reshape(2, num_runs)
    firsts = np.cumsum(lengths, dtype=np.int32) - lengths
    found = np.repeat(slots - firsts, lengths)
    found += np.arange(num_slots, dtype=np.int32)
    return found


def _padded(ids: np.ndarray) -> np.ndarray:
    """An even number of them."""
    return np.append(ids, ids[:1]) if len(ids) % 2 else ids
