"""What rank 0 tells the other ranks, as integers: steps and products of the head.

    frame:   number | kind | bytes of the payload | payload
    a step:  numbers of rows R, tokens T, logits, earlier slots, tokens with adapters | the arrays of ``StepArrays`` in
             their order | of earlier slots: [E] rows, [E] first positions, [E] lengths, slots

Numbers are int64, payloads are int32. A step is sent as the arrays that rank 0 computes with too, so no rank goes
through its sequences one by one. Only slots that the executors do not hold yet are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..layers.batch import StepArrays

_ARRAYS = ("token_ids", "positions", "out_slots", "logits_rows", "row_ids", "query_starts", "kv_lens")
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
    rows, starts, slots = zip(*step.earlier, strict=True) if step.earlier else ((), (), ())
    head = (len(step.row_ids), step.num_tokens, len(step.logits_rows), len(slots), len(adapters))
    arrays = [getattr(step, name) for name in _ARRAYS]
    earlier = [rows, starts, [len(run) for run in slots], *slots]
    return np.concatenate([np.asarray(array, np.int32) for array in (head, *arrays, adapters, *earlier)])


def _decode_step(payload: np.ndarray) -> StepArrays:
    num_rows, num_tokens, num_logits, num_earlier, num_adapters = payload[:5].tolist()
    lengths = (num_tokens, num_tokens, num_tokens, num_logits, num_rows, num_rows + 1, num_rows)
    ends = 5 + np.cumsum((*lengths, num_adapters, 3 * num_earlier))
    *parts, adapters, heads, slots = np.split(payload[5:], ends - 5)
    rows, starts, counts = heads.reshape(3, num_earlier)
    stops = np.cumsum(counts).tolist()
    runs = (slots[first:stop] for first, stop in pairwise([0, *stops]))
    earlier = list(zip(rows.tolist(), starts.tolist(), runs, strict=True))
    arrays = dict(zip(_ARRAYS, parts, strict=True))
    return StepArrays(**arrays, earlier=earlier, adapters=adapters if num_adapters else None)
