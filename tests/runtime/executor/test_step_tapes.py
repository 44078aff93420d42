"""Steps with adapters run from tapes, give what they give call by call, and never read a table that has moved."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from phloem import kernels
from phloem.kernels.cpu.pool import has_pool
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor.step_tapes import StepTapes
from phloem.runtime.layers.batch import ForwardBatch
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.models.adapters import put_adapter
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model

pytestmark = pytest.mark.skipif(not has_pool(), reason="without a pool steps run on torch's threads, off the tape")

RANKS = {"poet": 4, "judge": 2, "cook": 7}
NUM_ROWS, MAX_LEN = 17, 700


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("tapes")
    sizes = make_tiny_model(at / "sizes", seed=0, num_layers=5)
    kinds = {"weight": "Q4_0"}
    base = make_tiny_gguf(at / "base.gguf", seed=1, kinds=kinds, num_layers=5, context_length=MAX_LEN)
    found = {"base": base}
    for seed, (name, rank) in enumerate(RANKS.items()):
        targets = {"targets": ("q_proj", "v_proj", "down_proj")} if name == "judge" else {}
        found[name] = make_adapter(at / name, sizes, seed=seed, rank=rank, **targets)
    return found


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest, every_core: None) -> Iterator[int]:
    kernels.set_kernel_threads(request.param)
    yield request.param
    kernels.set_threads(0)


def load(folders: dict[str, Path], *names: str) -> Model:
    adapters = {name: str(folders[name]) for name in names}
    return load_model(folders["base"], EngineConfig(model="tiny", adapters=adapters))


class TwoWays:
    """Runs the same steps from tapes and call by call, each on its own pool. A row keeps its adapter."""

    def __init__(self, model: Model, adapters: list[int]) -> None:
        self.model, self.adapters = model, adapters
        self.pools = [KVPool.for_model(model.config, num_slots=3000, dtype=model.kv_dtype) for _ in range(2)]
        self.table = np.zeros((NUM_ROWS, MAX_LEN), dtype=np.int32)
        self.rng = np.random.default_rng(0)
        self.slots: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.tapes = StepTapes(model, self.pools[0])
        self.num_slots = 0

    def step(self, counts: dict[int, int], *, num_logits: int = MAX_LEN) -> torch.Tensor:
        rows, ids = [], []
        for row, count in counts.items():
            start = len(self.slots[row])
            self.slots[row] += range(self.num_slots, self.num_slots + count)
            self.num_slots += count
            tokens = self.rng.integers(0, 96, count).astype(np.int32)
            slots = np.array(self.slots[row], dtype=np.int32)
            rows.append(PlanRow(row, row, start, tokens, slots, 0, min(count, num_logits)))
            ids += [self.adapters[row]] * count
        batch = ForwardBatch.from_plan(StepPlan(0, tuple(rows)), self.table)
        if max(ids) >= 0:
            batch = batch.with_adapters(torch.tensor(ids), len(self.model.adapters))
        with torch.inference_mode():
            got = self.tapes.forward(batch)
            expected = self.model.features(batch, self.pools[1])
        assert got is not None, "the step has no tape"
        assert torch.equal(got, expected)
        return expected


MIXES = [
    {0: 1},
    {1: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
    dict.fromkeys(range(16), 1),
    {0: 3, 2: 1, 3: 2},
    {4: 61},
    {1: 9, 5: 40},
]


@pytest.mark.parametrize("num_logits", [1, MAX_LEN])
def test_mixed_batches_equal_those_of_single_calls(folders: dict[str, Path], num_threads: int, num_logits: int) -> None:
    model = load(folders, "poet", "judge")
    both = TwoWays(model, [0, 1, -1, 0, 1, *[-1, 0, 1] * 4])
    for counts in MIXES * 2:
        both.step(counts, num_logits=num_logits)
    both.step({2: 1})
    assert list(both.tapes.plain.kept) == [(1, 1)]
    assert all(both.tapes.adapted.kept.values()) and (16, 16) in both.tapes.adapted.kept


def test_a_tape_reads_which_adapter_each_token_has(folders: dict[str, Path]) -> None:
    kernels.set_kernel_threads(1)
    both = TwoWays(load(folders, "poet", "judge"), [0, 1, -1])
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        both.step(dict.fromkeys(order, 1))
    assert both.tapes.adapted.num_tapes == 1
    kernels.set_threads(0)


def test_tables_that_stay_keep_their_tapes_and_moved_ones_drop_them(folders: dict[str, Path], num_threads: int) -> None:
    model = load(folders, "poet", "judge")
    both = TwoWays(model, [0, 1, -1])
    counts = {0: 1, 1: 1, 2: 1}
    both.step(counts)
    tapes = both.tapes.adapted

    put_adapter(model, 0, "", "")
    both.adapters[0] = -1
    both.step(counts)
    assert both.tapes.adapted is tapes  # freed in place
    put_adapter(model, 0, "judge too", str(folders["judge"]))
    both.adapters[0] = 0
    both.step(counts)
    assert both.tapes.adapted is tapes and model.adapters.names == ["judge too", "judge"]

    put_adapter(model, 0, "", "")
    put_adapter(model, 0, "cook", str(folders["cook"]))  # of a higher rank, so its tables are made anew
    both.step(counts)
    assert both.tapes.adapted is not tapes
    tapes = both.tapes.adapted
    put_adapter(model, 2, "poet", str(folders["poet"]))
    both.adapters[2] = 2
    both.step(counts)
    assert both.tapes.adapted is not tapes

    for number in range(3):
        put_adapter(model, number, "", "")
    assert len(model.adapters) == 0 and not any(linear.adapters for linear in model.layers[0].attention.linears)
    put_adapter(model, 0, "poet", str(folders["poet"]))
    both.adapters[:] = [0, -1, -1]
    both.step(counts)


def test_an_adapter_that_came_later_equals_one_that_was_there(folders: dict[str, Path]) -> None:
    kernels.set_kernel_threads(1)
    found = []
    for names in (("poet", "cook"), ("poet", "judge"), ("poet",), ()):
        model = load(folders, *names)
        if names == ("poet", "judge"):
            put_adapter(model, 1, "", "")
        elif not names:
            put_adapter(model, 0, "poet", str(folders["poet"]))
        if "cook" not in names:
            put_adapter(model, 1, "cook", str(folders["cook"]))
        both = TwoWays(model, [0, 1, -1])
        found.append([both.step({0: 4, 1: 2, 2: 1}), both.step(dict.fromkeys(range(3), 1))])
    for others in found[1:]:
        for mine, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    kernels.set_threads(0)


def test_a_failed_load_leaves_tables_and_tapes(folders: dict[str, Path], tmp_path: Path) -> None:
    kernels.set_kernel_threads(1)
    other = make_adapter(tmp_path / "x", make_tiny_model(tmp_path / "wide", seed=0, hidden_size=96), seed=0, rank=2)
    model = load(folders, "poet")
    both = TwoWays(model, [0, -1])
    both.step({0: 1, 1: 1})
    tapes = both.tapes.adapted
    with pytest.raises(Exception, match="it was made for another model"):
        put_adapter(model, 1, "x", str(other))
    both.step({0: 1, 1: 1})
    assert both.tapes.adapted is tapes and model.adapters.names == ["poet"]
    kernels.set_threads(0)
