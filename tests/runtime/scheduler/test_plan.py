"""A plan that is cut into micro-steps has the same tokens, slots and logits, in the same order."""

import numpy as np
import pytest
from phloem.runtime.layers.batch import StepArrays
from phloem.runtime.scheduler.plan import DecodePart, PlanRow, StepPlan, cut_plan


def some_plan(rng: np.random.Generator, num_vectorised: int, num_rows: int) -> StepPlan:
    rows = []
    for row_id in range(num_rows):
        start, count = int(rng.integers(0, 30)), int(rng.integers(1, 12))
        num_logits = int(rng.integers(0, count + 1))
        slots = rng.permutation(1 << 12)[: start + count].astype(np.int32)
        tokens = rng.integers(0, 500, count).astype(np.int32)
        stale_from, num_draft = int(rng.integers(0, start + 1)), max(0, num_logits - 1)
        rows.append(PlanRow(row_id, row_id, start, tokens, slots, stale_from, num_logits, num_draft, row_id % 3 - 1))
    part = None
    if num_vectorised:
        ids = np.arange(num_rows, num_rows + num_vectorised)
        ends = rng.integers(1, 30, num_vectorised)
        part = DecodePart(ids, ids, ends, *(rng.integers(0, 500, (2, num_vectorised)).astype(np.int32)))
    return StepPlan(5, tuple(rows), part)


def run(plans: list[StepPlan]) -> dict[str, list[int]]:
    """What an executor runs: of each token its row, position, slot and context, and which of them have logits."""
    table = np.full((64, 64), -1, np.int32)
    found: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "slots", "rows", "logits", "adapters")}
    for plan in plans:
        step = StepArrays.of(plan)
        lengths = np.diff(step.query_starts)
        found["logits"] += (step.logits_rows + len(found["tokens"])).tolist()
        found["tokens"] += step.token_ids.tolist()
        found["positions"] += step.positions.tolist()
        found["slots"] += step.out_slots.tolist()
        found["rows"] += np.repeat(step.row_ids, lengths).tolist()
        found["adapters"] += [row.adapter for row in plan.rows for _ in row.token_ids]
        for row_id, start, slots in step.changes:
            table[row_id, start : start + len(slots)] = slots
        for row_id, kv_len in zip(step.row_ids, step.kv_lens, strict=True):
            assert len(plan.rows) == 0 or kv_len <= 64, row_id
    return found | {"table": table.ravel().tolist()}


@pytest.mark.parametrize(("num_vectorised", "num_rows"), [(0, 1), (0, 9), (7, 0), (1, 1), (20, 6)])
def test_the_parts_of_a_plan_are_the_plan(num_vectorised: int, num_rows: int) -> None:
    rng = np.random.default_rng(num_vectorised + 100 * num_rows)
    for _ in range(20):
        plan = some_plan(rng, num_vectorised, num_rows)
        for count in (1, 2, 3, 8, plan.num_tokens):
            parts = cut_plan(plan, count)
            lengths = [part.num_tokens for part in parts]
            assert len(parts) == min(count, plan.num_tokens) and max(lengths) - min(lengths) <= 1
            assert run(parts) == run([plan])
            assert sum(part.num_logits for part in parts) == plan.num_logits
            assert sum(part.num_draft for part in parts) == plan.num_draft


def test_one_part_has_the_rows_themselves() -> None:
    plan = some_plan(np.random.default_rng(1), 3, 4)
    (same,) = cut_plan(plan, 1)
    assert same.rows == plan.rows
