"""Steps from graphs give exactly the logits of eager steps, at fixed addresses, with harmless padding."""

import importlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.kernels.backend import CPU, triton_backend, using
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor import Executor
from phloem.runtime.executor.step_graphs import LEAST_WIDTH, ROWS, TOKENS, ladder
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.models.adapters import put_adapter
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.tests.gpu import choose_kernels
from phloem.tests.runtime.executor.stand_in import StandIn, traced
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.models.tiny import make_tiny_model

choose_kernels()
MAX_ROWS, MAX_LEN, NUM_SLOTS = 12, 1400, 2000


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> Model:
    return load_model(tiny_model_path, EngineConfig(model="tiny", precision="float32"))


class TwoWays:
    """Runs the same steps on the CPU's path and on the GPU's path."""

    def __init__(self, model: Model) -> None:
        self.device = StandIn()
        self.executors = []
        for device in (None, self.device):
            pool = KVPool.for_model(model.config, num_slots=NUM_SLOTS + 1, dtype=model.kv_dtype, device="cpu")
            executor = Executor(model, pool, max_rows=MAX_ROWS, max_len=MAX_LEN, accelerator=device)
            self.executors.append(executor)
        self.rng = np.random.default_rng(0)
        self.free = list(self.rng.permutation(NUM_SLOTS))
        self.slots: list[list[int]] = [[] for _ in range(MAX_ROWS)]
        self.adapters = [-1] * MAX_ROWS

    def step(
        self, counts: dict[int, int], *, stale_from: int | None = None, num_logits: int | None = 1
    ) -> torch.Tensor:
        """``num_logits``: of each row; None: of all its tokens, the last of which are a draft."""
        rows = []
        for row, count in counts.items():
            start = len(self.slots[row])
            self.slots[row] += [self.free.pop() for _ in range(count)]
            ids = self.rng.integers(0, 256, count).astype(np.int32)
            slots = np.array(self.slots[row], dtype=np.int32)
            stale = start if stale_from is None else stale_from
            wanted = count if num_logits is None else num_logits
            draft = count - 1 if num_logits is None else 0
            rows.append(PlanRow(row, row, start, ids, slots, stale, wanted, draft, adapter=self.adapters[row]))
        plan = StepPlan(0, tuple(rows))
        want, got = (executor.forward(plan).whole() for executor in self.executors)
        assert torch.allclose(got, want, atol=3e-5), (got - want).abs().max()  # sums of padded batches in another order
        return got


def test_logits_are_those_of_eager_steps(model: Model) -> None:
    both = TwoWays(model)
    with using(traced(CPU)):
        both.step({row: 3 + row for row in range(MAX_ROWS)})
        for size in (1, 2, 3, 5, 8, 11, 12, 3, 1):
            for _ in range(2):
                both.step(dict.fromkeys(range(size), 1))
    assert both.executors[1].graphs is not None
    assert both.executors[1].graphs.num_graphs == 5  # 1, 2, 4, 8 and 12 rows
    assert sum(graph.num_replays for graph in both.device.graphs) == 18


def test_a_wider_table_has_its_own_graph_and_prompts_have_none(model: Model) -> None:
    both = TwoWays(model)
    both.step({0: LEAST_WIDTH - 1})
    assert not both.device.graphs
    for _ in range(3):
        both.step({0: 1})
    assert len(both.device.graphs) == 2
    both.step({0: 1, 1: 4})
    assert len(both.device.graphs) == 2


@pytest.mark.parametrize("num_logits", [None, 0, 1])
def test_steps_with_prompts_and_drafts_have_a_graph_from_their_second_time_on(
    model: Model, num_logits: int | None
) -> None:
    both = TwoWays(model)
    graphs = both.executors[1].graphs
    assert graphs is not None
    with using(traced(CPU)):
        cold = []
        for counts in ({0: 9}, {0: 11}, {0: 3, 1: 4, 2: 1}, {1: 2, 0: 5, 3: 1}, {0: 8}, {4: 60, 1: 2}, {5: 50, 1: 1}):
            both.step(counts, num_logits=num_logits)
            cold.append(graphs.is_cold)
    # 9 and 11 tokens are padded to 16, 8 are not padded, and neither are the two that follow; 62 and 52 are 64.
    assert [graph.num_replays for graph in both.device.graphs] == [1, 2, 1] and graphs.num_graphs == 3
    assert cold == [True, True, True, True, False, True, True]
    assert both.device.log.count("wait") == 0


def test_no_padding_of_a_step_with_a_prompt_reaches_a_sequence_s_slot(model: Model) -> None:
    both = TwoWays(model)
    ahead = both.executors[1]
    both.step({0: 3, 1: 9})
    before = [k.clone() for k in ahead.kv.k]
    both.step({0: 4, 1: 5})
    assert len(both.device.graphs) == 1
    written = {*both.slots[0][-4:], *both.slots[1][-5:], NUM_SLOTS}
    for old, new in zip(before, ahead.kv.k, strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) == written


def test_graphs_of_usual_sizes_are_captured_before_a_step_has_them(model: Model) -> None:
    both = TwoWays(model)
    ahead, graphs = both.executors[1], both.executors[1].graphs
    assert graphs is not None
    both.step({0: 5, 1: 2})
    before = [k.clone() for k in ahead.kv.k]
    while ahead.record_ahead():
        pass
    assert all(torch.equal(old[:NUM_SLOTS], new[:NUM_SLOTS]) for old, new in zip(before, ahead.kv.k, strict=True))
    count = graphs.num_graphs
    assert count == len(ladder(MAX_ROWS)) + sum(size <= 64 for size in TOKENS)
    for counts in ({0: 1}, {0: 1, 1: 1, 2: 1}, {0: 2, 1: 1}, {2: 40}, dict.fromkeys(range(4), 1)):
        both.step(counts)
    assert graphs.num_graphs == count


def test_arrays_of_a_step_begin_at_multiples_of_16_bytes(model: Model) -> None:
    """Whatever their number: else a kernel would be built for each way they can lie."""
    inputs = TwoWays(model).executors[1].inputs
    assert inputs is not None
    static = torch.zeros(100_000, dtype=torch.uint8)
    for num_tokens, num_rows in ((1, 1), (2, 2), (12, 12), (2, 5), (24, 17)):
        views = inputs.graph_views(static, num_tokens=num_tokens, num_rows=num_rows)
        assert all((view.data_ptr() - static.data_ptr()) % 16 == 0 for view in views.values())
        assert [len(views[name]) for name in ("token_ids", "row_ids", "query_starts")] == [
            num_tokens,
            num_rows,
            num_rows + 1,
        ]
        ends = sorted((view.data_ptr(), view.data_ptr() + view.nbytes) for view in views.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert not set(TOKENS) & set(ROWS)


def test_changed_slots_of_earlier_positions_reach_the_table(model: Model) -> None:
    both = TwoWays(model)
    both.step({0: 20, 1: 9})
    for executor in both.executors:  # a sibling's slots, with equal contents, replace the row's own
        for k in (*executor.kv.k, *executor.kv.v):
            k[NUM_SLOTS - 5 : NUM_SLOTS] = k[torch.tensor(both.slots[0][3:8])]
            k[torch.tensor(both.slots[0][3:8])] = 1e3
    both.free = [slot for slot in both.free if slot < NUM_SLOTS - 5]
    both.slots[0][3:8] = range(NUM_SLOTS - 5, NUM_SLOTS)
    both.step({0: 1, 1: 1}, stale_from=3)


def test_padding_rows_write_only_to_the_spare_slot(model: Model) -> None:
    both = TwoWays(model)
    both.step(dict.fromkeys(range(3), 2))
    ahead = both.executors[1]
    before = [k.clone() for k in ahead.kv.k]
    both.step(dict.fromkeys(range(3), 1))
    written = {slots[-1] for slots in both.slots[:3]} | {NUM_SLOTS}
    for old, new in zip(before, ahead.kv.k, strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) == written


def test_the_next_step_uses_a_draw_without_the_host(model: Model) -> None:
    both = TwoWays(model)
    both.step({0: 4, 1: 6})
    ahead = both.executors[1]
    assert ahead.inputs is not None
    with torch.inference_mode():
        ahead.inputs.take_draws(torch.tensor([77, -1, 5]))
    rows = []
    for row, code in ((0, -3), (1, -1)):  # draws 2 and 0
        start = len(both.slots[row])
        slots = np.array([*both.slots[row], both.free.pop()], dtype=np.int32)
        rows.append(PlanRow(row, row, start, np.array([code], dtype=np.int32), slots, start, 1))
    known = [PlanRow(r.seq_id, r.row_id, r.start, np.array([i], dtype=np.int32), r.slot_ids, r.start, 1)
             for r, i in zip(rows, (5, 77), strict=True)]  # fmt: skip
    want = both.executors[0].forward(StepPlan(0, tuple(known))).whole()
    assert torch.allclose(ahead.forward(StepPlan(0, tuple(rows))).whole(), want, atol=1e-5)
    assert both.device.log.count("wait") == 0


def test_the_ladder_ends_at_max_rows_and_pads_little() -> None:
    assert ladder(1) == (1,)
    assert ladder(12) == (1, 2, 4, 8, 12)
    for most in (64, 100, 256, 600):
        sizes = ladder(most)
        assert sizes[-1] == most and sizes == tuple(sorted(set(sizes)))
        assert all(above - below <= max(below / 2, 8) for below, above in pairwise(sizes[3:]))


def test_the_stand_in_refuses_a_graph_whose_replay_differs_from_its_capture(model: Model) -> None:
    device = StandIn()
    held = [torch.zeros(3)]
    with using(traced(CPU)):
        graph, result = device.capture(lambda: held[0] + 1)
        graph.replay()
        held[0] = torch.ones(3)
        with pytest.raises(AssertionError, match="not do what was captured"):
            graph.replay()
    assert result.tolist() == [1, 1, 1]


def test_logits_of_draft_tokens_equal_those_of_the_cpu(model: Model) -> None:
    both = TwoWays(model)
    both.step({0: 7, 1: 3})
    rows = []
    for row, count in ((0, 6), (1, 2)):
        start = len(both.slots[row])
        slots = np.array([*both.slots[row], *(both.free.pop() for _ in range(count))], dtype=np.int32)
        ids = both.rng.integers(0, 256, count).astype(np.int32)
        rows.append(PlanRow(row, row, start, ids, slots, start, count, count - 1))
    plan = StepPlan(0, tuple(rows))
    want, got = (executor.forward(plan).whole() for executor in both.executors)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_drafts_of_rows_that_share_a_prefix_read_it_once_in_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = importlib.import_module("phloem.kernels.triton.config")
    table = config.CONFIGS[80].with_splits(32, block_n=32)
    monkeypatch.setitem(config.CONFIGS, 80, replace(table, shared_least_bytes=0))
    path = make_tiny_model(tmp_path / "model", seed=0, num_layers=1, num_heads=2, num_kv_heads=1)
    backend, model = triton_backend(), load_model(path, EngineConfig(model="tiny", precision="float32"))
    shared: list[int] = []
    inner = backend.shared_prefix_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        shared.append(len(args[0]))
        return inner(*args, **options)

    with using(traced(replace(backend, shared_prefix_attention=noted))):
        both = TwoWays(model)
        both.step({0: 40})
        both.slots[1] = list(both.slots[0])  # as a fork of it
        both.step({0: 3, 1: 2}, stale_from=0, num_logits=None)
        assert shared == [5] and not both.device.graphs  # eager: 5 tokens
        for counts in ({0: 3, 1: 2}, {0: 2, 1: 5}):
            both.step(counts, num_logits=None)
    assert set(shared[1:]) == {8} and [graph.num_replays for graph in both.device.graphs] == [2]
    assert both.device.log.count("wait") == 0


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_rows_with_adapters_have_graphs_that_read_the_tables_where_they_lie(backend: str, tmp_path: Path) -> None:
    """Triton's interpreter takes a second for each layer of a few steps, so it has one; the CPU has two."""
    size = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1} if backend == "triton" else {}
    base = make_tiny_model(tmp_path / "base", seed=0, **size)
    folders = {
        name: make_adapter(tmp_path / name, base, seed=rank, rank=rank)
        for name, rank in {"poet": 4, "judge": 2, "cook": 7}.items()
    }
    given = {name: str(folders[name]) for name in ("poet", "judge")}
    with using(traced(triton_backend() if backend == "triton" else CPU)):
        model = load_model(base, EngineConfig(model="tiny", precision="float32", adapters=given))
        both = TwoWays(model)
        graphs = both.executors[1].graphs
        assert graphs is not None
        both.adapters[:3] = [0, 1, -1]
        both.step(dict.fromkeys(range(3), 3))
        for rows in ((0, 1, 2), (2, 0, 1), (1, 0)):
            both.step(dict.fromkeys(rows, 1))
        both.step({2: 1})  # without an adapter
        assert [graph.num_replays for graph in both.device.graphs] == [2, 1, 1] and graphs.num_graphs == 3

        put_adapter(model, 1, "", "")
        put_adapter(model, 1, "judge too", str(folders["judge"]))  # in the tables' old place
        both.step(dict.fromkeys(range(3), 1))
        assert [graph.num_replays for graph in both.device.graphs] == [3, 1, 1]

        put_adapter(model, 2, "cook", str(folders["cook"]))  # in new tables
        both.adapters[2] = 2
        both.step(dict.fromkeys(range(3), 1))
        assert [graph.num_replays for graph in both.device.graphs] == [3, 1, 1, 1] and graphs.num_graphs == 2
    assert both.device.log.count("wait") == 0
