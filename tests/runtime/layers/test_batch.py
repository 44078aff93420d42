"""A ForwardBatch holds for each token what its step plan holds for each row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from phloem.runtime.layers.batch import ForwardBatch
from phloem.runtime.scheduler.plan import PlanRow, StepPlan

MAX_LEN = 40


def random_row(rng: np.random.Generator, row_id: int, start: int, count: int, num_logits: int) -> PlanRow:
    return PlanRow(
        seq_id=row_id + 50,
        row_id=row_id,
        start=start,
        token_ids=rng.integers(0, 1000, count).astype(np.int32),
        slot_ids=rng.permutation(500)[: start + count].astype(np.int32),
        stale_from=0,
        num_logits=num_logits,
    )


@given(
    shapes=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(0, 3)), max_size=6),
    seed=st.integers(0, 1000),
)
def test_a_batch_is_its_plan(shapes: list[tuple[int, int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    row_ids = rng.permutation(8)[: len(shapes)]
    rows = tuple(
        random_row(rng, int(row_id), start, count, min(count, logits))
        for row_id, (start, count, logits) in zip(row_ids, shapes, strict=True)
    )
    table = np.full((8, MAX_LEN), -1, dtype=np.int32)
    batch = ForwardBatch.from_plan(StepPlan(step=1, rows=rows), table)

    positions, slots, tokens, wanted = [], [], [], []
    for row in rows:
        for i in range(row.start, row.end):
            if i >= row.end - row.num_logits:
                wanted.append(len(tokens))
            positions.append(i)
            slots.append(int(row.slot_ids[i]))
            tokens.append(int(row.token_ids[i - row.start]))
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.out_slots.tolist() == slots
    assert batch.logits_rows.tolist() == wanted
    assert batch.kv_lens.tolist() == [row.end for row in rows]
    starts = batch.query_starts.tolist()
    assert starts == [0, *np.cumsum([len(row.token_ids) for row in rows])]
    for r, row in enumerate(rows):
        held = batch.slot_table[int(batch.row_ids[r]), : row.end]
        assert held.tolist() == row.slot_ids.tolist()
    assert (batch.num_tokens, batch.num_logits) == (len(tokens), len(wanted))


def test_integer_types_are_the_kernels_own() -> None:
    batch = ForwardBatch.from_plan(StepPlan(step=0, rows=()), np.zeros((2, 4), dtype=np.int32))
    for name in ("token_ids", "positions", "out_slots", "logits_rows"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("row_ids", "query_starts", "kv_lens", "slot_table"):
        assert getattr(batch, name).dtype == torch.int32, name


def test_slots_before_stale_from_are_left_as_held() -> None:
    table = np.full((1, MAX_LEN), 77, dtype=np.int32)
    row = PlanRow(
        seq_id=0,
        row_id=0,
        start=5,
        token_ids=np.array([1, 2], dtype=np.int32),
        slot_ids=np.arange(7, dtype=np.int32),
        stale_from=3,
        num_logits=1,
    )
    ForwardBatch.from_plan(StepPlan(step=0, rows=(row,)), table)
    assert table[0, :8].tolist() == [77, 77, 77, 3, 4, 5, 6, 77]


def test_another_device_gets_no_more_of_the_table_than_the_step_reads() -> None:
    rng = np.random.default_rng(0)
    rows = (random_row(rng, 6, 3, 4, 1), random_row(rng, 2, 0, 9, 2))
    batch = ForwardBatch.from_plan(StepPlan(step=0, rows=rows), np.zeros((8, MAX_LEN), dtype=np.int32), "meta")
    assert batch.slot_table.shape == (2, 9)
    assert (batch.num_tokens, batch.num_logits) == (13, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; its twin is the test above, on meta")
def test_a_gpu_gets_the_rows_of_the_step() -> None:
    rng = np.random.default_rng(0)
    table = np.full((8, MAX_LEN), -1, dtype=np.int32)
    rows = (random_row(rng, 6, 3, 4, 1), random_row(rng, 2, 0, 9, 2))
    here = ForwardBatch.from_plan(StepPlan(step=0, rows=rows), table.copy())
    there = ForwardBatch.from_plan(StepPlan(step=0, rows=rows), table, "cuda")
    for name in ("token_ids", "positions", "out_slots", "query_starts", "kv_lens", "logits_rows"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name
    for r, row in enumerate(rows):
        assert there.slot_table[int(there.row_ids[r]), : row.end].tolist() == row.slot_ids.tolist()
