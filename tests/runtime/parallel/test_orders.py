"""Orders come out of a frame as they went in; a gap in their numbers ends the gang."""

import dataclasses

import numpy as np
import pytest
import torch
from phloem.runtime.layers.batch import StepArrays
from phloem.runtime.parallel.lost import GangLost
from phloem.runtime.parallel.order_line import FRAME_BYTES, OrderLine
from phloem.runtime.parallel.orders import Beat, End, Likeliest, Order, ReviewExperts, Whole, decode, encode
from phloem.runtime.scheduler import DecodePart, PlanRow, StepPlan
from phloem.tests.runtime.parallel.virtual import VirtualGroup, run_all


def row(rng: np.random.Generator, row_id: int) -> PlanRow:
    start, count = int(rng.integers(0, 40)), int(rng.integers(1, 9))
    stale_from = int(rng.integers(0, start + 1))
    slots = rng.integers(0, 1 << 30, start + count).astype(np.int32)
    tokens = rng.integers(-5, 150_000, count).astype(np.int32)
    return PlanRow(7, row_id, start, tokens, slots, stale_from, int(rng.integers(0, count + 1)), 0, row_id % 3 - 1)


def vectorised(rng: np.random.Generator, count: int) -> DecodePart:
    wide = [rng.integers(0, 1 << 20, count) for _ in range(3)]
    return DecodePart(*wide, *(rng.integers(0, 1 << 20, count).astype(np.int32) for _ in range(2)))


def some_step(rng: np.random.Generator, num_vectorised: int, num_rows: int) -> StepArrays:
    part = vectorised(rng, num_vectorised) if num_vectorised else None
    step = StepArrays.of(StepPlan(12, tuple(row(rng, i) for i in range(num_rows)), part))
    adapters = rng.integers(-1, 3, step.num_tokens)
    return dataclasses.replace(step, adapters=adapters if num_rows % 2 else None)


def same_step(one: StepArrays, other: StepArrays) -> bool:
    for field in dataclasses.fields(StepArrays):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "earlier":
            if not all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.__slots__):
                return False
        elif not np.array_equal(a, b):
            return False
    return True


@pytest.mark.parametrize("num_vectorised", [0, 1, 300])
@pytest.mark.parametrize("num_rows", [0, 1, 40])
def test_every_rank_gets_the_same_step(num_vectorised: int, num_rows: int) -> None:
    rng = np.random.default_rng(num_vectorised + num_rows)
    for _ in range(5 if num_vectorised or num_rows else 0):
        step = some_step(rng, num_vectorised, num_rows)
        found = decode(*encode(step))
        assert isinstance(found, StepArrays) and same_step(step, found)


@pytest.mark.parametrize("num_tokens", [1, 31, 32])
@pytest.mark.parametrize("vocab_size", [1 << 16, 150_000])
@pytest.mark.parametrize("num_cached", [0, 200])
def test_prompts_after_cached_tokens_arrive_in_one_message(num_tokens: int, vocab_size: int, num_cached: int) -> None:
    rng = np.random.default_rng(num_tokens)
    rows, end = [], num_cached + num_tokens
    for i in range(256):
        slots = np.arange(i * end, (i + 1) * end, dtype=np.int32)
        if i % 5 == 0:
            slots[end // 2 :] += 7  # two runs
        tokens = rng.integers(0, vocab_size, num_tokens).astype(np.int32)
        rows.append(PlanRow(i, i, num_cached, tokens, slots, 0, 1))
    step = StepArrays.of(StepPlan(0, tuple(rows)))
    kind, payload = encode(step)
    found = decode(kind, payload)
    assert isinstance(found, StepArrays) and same_step(step, found)
    num_ints = 256 * (2 * num_tokens + num_cached + 4 + 3 * bool(num_cached))
    assert payload.nbytes <= 4 * (num_ints + 7) <= FRAME_BYTES - 24
    if num_tokens == 1 and not num_cached:
        assert payload.nbytes == 4 * (1 + 4 * 256)


def test_an_order_is_made_in_the_room_that_it_fits_in() -> None:
    step = some_step(np.random.default_rng(3), 40, 2)
    kind, payload = encode(step)
    room = np.zeros(len(payload) + 5, np.int32)
    assert np.shares_memory(encode(step, room)[1], room)
    assert not np.shares_memory(encode(step, room[:9])[1], room)
    found = decode(kind, room[: len(payload)])
    assert isinstance(found, StepArrays) and same_step(step, found)


def test_other_orders_come_out_as_they_went_in() -> None:
    words = np.array([[1, 2**32 - 1], [5, 6]], np.uint32)
    listed = decode(*encode(Likeliest(4, np.array([0, 3]), words)))
    assert isinstance(listed, Likeliest) and listed.k == 4 and listed.rows.tolist() == [0, 3]
    assert listed.words.dtype == np.uint32 and np.array_equal(listed.words, words)
    for order in (Whole(3), ReviewExperts(), Beat(), End()):
        assert decode(*encode(order)) == order


def test_long_and_short_orders_arrive_in_order_over_one_line() -> None:
    rng = np.random.default_rng(0)
    long = some_step(rng, FRAME_BYTES // 8, 1)
    orders: list[Order] = [Beat(), long, Whole(2), End()]

    def body(group: VirtualGroup) -> list[Order]:
        line = OrderLine(group)
        if group.rank:
            return [line.receive() for _ in orders]
        for order in orders:
            line.send(order)
        return orders

    for found in run_all(3, body)[1:]:
        assert found[0] == Beat() and found[2:] == [Whole(2), End()]
        assert isinstance(found[1], StepArrays) and same_step(found[1], long)


def test_a_lost_order_ends_the_gang() -> None:
    def body(group: VirtualGroup) -> None:
        if group.rank:
            OrderLine(group).receive()
            return
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        frame.view(torch.int64)[0] = 1
        group.broadcast(frame)

    with pytest.raises(GangLost, match="rank 1 received order 1 and expected 0"):
        run_all(2, body)
