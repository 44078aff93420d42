"""What rank 0 tells the other ranks, as integers: steps and products of the head.

    frame:     number | kind | bytes of the payload | payload
    decoding:  0 | [4, R] rows, ends, ids, slots: each row has one token, whose logits are wanted
    a step:    1 | numbers of rows R, tokens T, logits L, earlier runs E, tokens with adapters A
               [R] rows, ends | [R + 1] starts of queries | [L] logits | [E] rows, first positions, lengths
               [A] adapters | [T] ids, slots | earlier slots

Numbers are int64, payloads are int32. A step is sent as the arrays that rank 0 computes with too, so no rank goes
through its sequences one by one. Positions follow from the rows, and only slots that the executors do not hold yet are
sent. Nothing is packed further: to find runs of slots took longer than to send all of them over loopback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ..layers.batch import NO_RUNS, SlotRuns, StepArrays

_HEAD_LEN = 6
_NONE, _ZERO = np.zeros(0, np.int32), np.zeros(1, np.int32)
_DECODING = 0


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
Ints = Sequence[int] | np.ndarray
_KINDS: tuple[type, ...] = (StepArrays, Whole, Likeliest, HeadInput, ReviewExperts, Beat, End)


def encode(order: Order, room: np.ndarray = _NONE) -> tuple[int, np.ndarray]:
    """The order's kind and its payload, int32. The payload is made in ``room`` (int32) where it fits."""
    match order:
        case StepArrays():
            parts = _parts_of_step(order)
        case Whole(num_rows=num_rows):
            parts = ([num_rows],)
        case Likeliest(k=k, rows=rows, words=words):
            parts = ([k, *words.shape], rows, words.view(np.int32).reshape(-1))
        case _:
            parts = ()
    return _KINDS.index(type(order)), _joined(parts, room)


def decode(kind: int, payload: np.ndarray) -> Order:
    """The order of ``encode``. Arrays of a step are views of ``payload``."""
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


def _parts_of_step(step: StepArrays) -> tuple[Ints, ...]:
    earlier = step.earlier
    adapters = _NONE if step.adapters is None else step.adapters
    if step.is_decode and not earlier and not len(adapters):
        return ([_DECODING], step.row_ids, step.kv_lens, step.token_ids, step.out_slots)
    counts = [1, len(step.row_ids), len(step.token_ids), len(step.logits_rows), len(earlier), len(adapters)]
    rows = (step.row_ids, step.kv_lens, step.query_starts, step.logits_rows)
    runs = (earlier.rows, earlier.starts, earlier.lengths)
    return (counts, *rows, *runs, adapters, step.token_ids, step.out_slots, earlier.slots)


def _joined(parts: Sequence[Ints], room: np.ndarray) -> np.ndarray:
    count = sum(map(len, parts))
    if not count:
        return _NONE
    out = room[:count] if count <= len(room) else np.empty(count, np.int32)
    return np.concatenate(parts, out=out, casting="unsafe")


def _decode_step(payload: np.ndarray) -> StepArrays:
    if payload[0] == _DECODING:
        return _decode_decoding(*payload[1:].reshape(4, -1))
    _, num_rows, num_tokens, num_logits, num_earlier, num_adapters = payload[:_HEAD_LEN].tolist()
    lengths = (num_rows, num_rows, num_rows + 1, num_logits, *[num_earlier] * 3, num_adapters, num_tokens, num_tokens)
    ends = [*accumulate(lengths, initial=_HEAD_LEN), len(payload)]
    parts = [payload[first:end] for first, end in pairwise(ends)]
    row_ids, kv_lens, query_starts, logits_rows, rows, starts, run_lens, adapters, ids, slots, earlier_slots = parts
    # Token t of row r: position = kv_lens[r] - n_r + (t - query_starts[r]).
    positions = np.repeat(kv_lens - query_starts[1:], query_starts[1:] - query_starts[:-1])
    positions += np.arange(num_tokens, dtype=np.int32)
    earlier = SlotRuns(rows, starts, run_lens, earlier_slots) if num_earlier else NO_RUNS
    given = adapters if num_adapters else None
    return StepArrays(ids, positions, slots, logits_rows, row_ids, query_starts, kv_lens, earlier, given)


def _decode_decoding(row_ids: np.ndarray, ends: np.ndarray, ids: np.ndarray, slots: np.ndarray) -> StepArrays:
    steps = np.arange(len(row_ids) + 1, dtype=np.int32)
    return StepArrays(ids, ends - 1, slots, steps[:-1], row_ids, steps, ends, earlier=NO_RUNS)
