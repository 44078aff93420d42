"""A step that is cut into micro-steps has the same tokens, slots and logits, in the same order."""

from dataclasses import replace

import numpy as np
import pytest
from phloem.runtime.layers.batch import ForwardBatch, StepArrays
from phloem.runtime.scheduler.plan import DecodePart, PlanRow, StepPlan


def some_step(rng: np.random.Generator, num_vectorised: int, num_rows: int) -> StepArrays:
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
    step = StepArrays.of(StepPlan(5, tuple(rows), part))
    return replace(step, adapters=rng.integers(-1, 2, step.num_tokens) if num_rows else None)


def run(steps: list[StepArrays]) -> dict[str, list[int]]:
    """What an executor runs: of each token its row, position, slot and context, and which of them have logits."""
    table = np.full((64, 64), -1, np.int32)
    found: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "slots", "rows", "logits", "adapters")}
    for step in steps:
        lengths = np.diff(step.query_starts)
        found["logits"] += (step.logits_rows + len(found["tokens"])).tolist()
        found["tokens"] += step.token_ids.tolist()
        found["positions"] += step.positions.tolist()
        found["slots"] += step.out_slots.tolist()
        found["rows"] += np.repeat(step.row_ids, lengths).tolist()
        found["adapters"] += [] if step.adapters is None else step.adapters.tolist()
        batch = ForwardBatch.from_arrays(step, table)
        assert batch.num_logits == len(step.logits_rows)
        ends = step.query_starts[1:] - 1
        assert (step.positions[ends] + 1 == step.kv_lens).all() and step.query_starts[0] == 0
    return found | {"table": table.ravel().tolist()}


@pytest.mark.parametrize(("num_vectorised", "num_rows"), [(0, 1), (0, 9), (7, 0), (1, 1), (20, 6)])
def test_the_parts_of_a_step_are_the_step(num_vectorised: int, num_rows: int) -> None:
    rng = np.random.default_rng(num_vectorised + 100 * num_rows)
    for _ in range(20):
        step = some_step(rng, num_vectorised, num_rows)
        for count in (1, 2, 3, 8, step.num_tokens):
            parts = step.cut(count)
            lengths = [part.num_tokens for part in parts]
            assert len(parts) == min(count, step.num_tokens) and max(lengths) - min(lengths) <= 1
            assert run(parts) == run([step])
