"""Steps from a tape give exactly the logits of steps run call by call, at any context length."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem import kernels
from phloem.kernels.cpu.pool import has_pool
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor import replays
from phloem.runtime.executor.replays import Replays
from phloem.runtime.executor.tape_shapes import FEW_KEYS, MAX_ROWS, MAX_TOKENS, StepShape, tape_shape
from phloem.runtime.layers.batch import ForwardBatch, StepArrays
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.tests.runtime.models.tiny import make_tiny_gguf

pytestmark = pytest.mark.skipif(not has_pool(), reason="without a pool steps run on torch's threads, off the tape")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_tiny_gguf(
        tmp_path_factory.mktemp("replays") / "tiny.gguf", seed=1, kinds={"weight": "Q4_0"}, context_length=1300
    )
    return load_model(path, EngineConfig(model="tiny", max_seq_len=1300))


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest, every_core: None) -> Iterator[int]:
    kernels.set_kernel_threads(request.param)
    yield request.param
    kernels.set_threads(0)


class TwoWays:
    """Runs the same steps with tapes and without, each on its own pool."""

    def __init__(self, model: Model, *, num_rows: int, num_slots: int = 3000) -> None:
        self.model = model
        self.pools = [
            KVPool.for_model(model.config, num_slots=num_slots, dtype=model.kv_dtype, device=model.device)
            for _ in range(2)
        ]
        self.table = np.full((num_rows, 1300), -1, dtype=np.int32)
        self.rng = np.random.default_rng(0)
        self.free = list(self.rng.permutation(num_slots))
        self.slots: list[list[int]] = [[] for _ in range(num_rows)]
        self.replays = Replays(model, self.pools[0])
        self.num_replayed = 0
        self.num_decodes: int | None = None  # steps that ran from their integers alone; None: none are to

    def step(self, counts: dict[int, int], *, num_logits: int = MAX_TOKENS + 1) -> None:
        """Run ``counts[row]`` random tokens of each row, logits for the last ones, and compare both ways."""
        rows = []
        for row, count in counts.items():
            start = len(self.slots[row])
            self.slots[row] += [self.free.pop() for _ in range(count)]
            ids = self.rng.integers(0, self.model.config.vocab_size, count).astype(np.int32)
            slots = np.array(self.slots[row], dtype=np.int32)
            rows.append(PlanRow(row, row, start, ids, slots, 0, min(count, num_logits)))
        plan = StepPlan(0, tuple(rows))
        batch = ForwardBatch.from_plan(plan, self.table)
        step, got = StepArrays.of(plan), None
        if step.is_decode and self.num_decodes is not None:
            got = self.replays.forward_decode(step)  # as the executor does, outside of inference mode
            self.num_decodes += got is not None
        with torch.inference_mode():
            got = self.replays.forward(batch) if got is None else got
            features = self.model.features(batch, self.pools[1])
            if got is None:
                self.model.features(batch, self.pools[0])
            else:
                self.num_replayed += 1
                assert torch.equal(got, features)


def test_logits_from_a_tape_equal_those_of_single_calls(model: Model, num_threads: int) -> None:
    both = TwoWays(model, num_rows=4)
    both.step({0: 5, 1: 505, 2: 1100}, num_logits=0)  # 505: the next steps cross from one chunk of keys to two
    assert both.num_replayed == 0
    for i in range(12):
        both.step({0: 1, 1: 1, 2: 1})
        both.step({1: 1})
        both.step({2: 1 + i % 3, 0: 2})
    assert both.num_replayed == 36


def test_steps_of_one_token_a_row_run_from_their_integers_once_there_is_a_tape(model: Model, num_threads: int) -> None:
    both = TwoWays(model, num_rows=4)
    both.step({0: 5, 1: 505, 2: 1100, 3: 2}, num_logits=0)
    both.num_decodes = 0
    for i in range(6):
        both.step({0: 1, 1: 1, 2: 1})
        both.step({i % 4: 1})
        both.step({2: 2, 0: 1})
        both.step({3: 1, 0: 1, 2: 1})
    assert both.num_replayed == 24
    assert both.num_decodes == 16, "all but the first of each shape, and those of two tokens"


def test_8_bit_keys_and_values_are_written_and_read_from_a_tape(model: Model, num_threads: int) -> None:
    both = TwoWays(replace(model, kv_dtype=torch.int8), num_rows=4)
    both.step({0: 5, 1: 505, 2: 520}, num_logits=0)
    for i in range(4):
        both.step({0: 1, 1: 1, 2: 1})
        both.step({2: 1 + i % 3, 0: 2})
    both.step({3: 61})
    assert both.num_replayed == 9
    for one, other in zip(*(pool.k for pool in both.pools), strict=True):
        assert torch.equal(one, other)


def test_a_sequence_s_first_tokens_can_run_from_a_tape(model: Model) -> None:
    kernels.set_kernel_threads(2)
    both = TwoWays(model, num_rows=2)
    for count in (7, 3, 7, 1, 1):
        both.step({0: count})
        both.step({1: count})
    assert both.num_replayed == 10
    kernels.set_threads(0)


@pytest.mark.parametrize(("context", "num_tapes"), [(20, 2), (FEW_KEYS, 3)])
def test_steps_with_forced_tokens_share_few_tapes(model: Model, num_threads: int, context: int, num_tapes: int) -> None:
    both = TwoWays(model, num_rows=5)
    both.step({0: context, 1: 3, 2: 2, 3: 2, 4: 2}, num_logits=0)
    both.replays.kept.clear()
    both.num_replayed = 0
    for i in range(8):
        both.step({0: 1, 1: 1 + i % 3, 2: 5 - i % 3}, num_logits=1)
        both.step(dict.fromkeys(range(i % 5), 1) | {i % 5: 7 - i % 5}, num_logits=1)
    assert both.num_replayed == 16
    assert {tokens for _, tokens in both.replays.kept} == {7} and len(both.replays.kept) == num_tapes


@pytest.mark.parametrize("num_logits", [0, 1, MAX_ROWS])
def test_one_row_has_one_shape_for_each_number_of_tokens(model: Model, num_threads: int, num_logits: int) -> None:
    both = TwoWays(model, num_rows=2)
    both.step({0: 3 * FEW_KEYS // 2}, num_logits=0)  # without a tape
    counts = (2, 5, 8, 9, 17, 24, 31)
    for count in counts:
        both.step({0: count}, num_logits=num_logits)
        both.step({1: count}, num_logits=num_logits)
    assert list(both.replays.kept) == [(1, count) for count in counts]
    assert both.num_replayed == 2 * len(counts)


def test_tokens_of_a_row_that_read_many_keys_read_them_together(model: Model, num_threads: int) -> None:
    both = TwoWays(model, num_rows=4)
    both.step({0: 200, 1: 30, 2: 30, 3: 600}, num_logits=0)  # without a tape
    for counts in ({0: 2, 1: 1}, {0: 16, 1: 1}, {1: 4, 2: 4}, {1: 8, 2: 8, 0: 8}, {3: 2, 1: 1}):
        both.step(counts, num_logits=1)
    assert list(both.replays.kept) == [(3, 3), (2, 17), (8, 8), (17, 24), (2, 3)]
    assert both.num_replayed == 5


def test_larger_steps_and_many_rows_of_many_tokens_have_no_tape(model: Model, num_threads: int) -> None:
    both = TwoWays(model, num_rows=MAX_ROWS + 1)
    both.step({0: MAX_TOKENS + 1})
    both.step(dict.fromkeys(range(MAX_ROWS), 1) | {MAX_ROWS: 2})
    assert both.num_replayed == 0


@pytest.mark.parametrize("num_logits", [0, 1, MAX_TOKENS])
def test_prompts_and_drafts_run_from_few_tapes_with_copies_of_a_token(
    model: Model, num_threads: int, num_logits: int
) -> None:
    both = TwoWays(model, num_rows=8)
    both.step({0: 600, 1: 3}, num_logits=0)  # without a tape
    for counts in ({0: 61}, {2: 64}, {1: 58}, {0: 1, 3: 60}, {3: 1, 2: 62}):
        both.step(counts, num_logits=num_logits)
    for i in range(6):
        both.step(dict.fromkeys(range(8), 4 + i % 2), num_logits=num_logits)
    both.step({5: MAX_TOKENS}, num_logits=num_logits)
    both.step({6: 263, 0: 2}, num_logits=num_logits)
    assert both.num_replayed == 13
    assert set(both.replays.kept) == {(1, 64), (4, 64), (8, 64), (8, 40), (29, 32), (1, MAX_TOKENS), (16, 272)}
    # The last layer's feed-forward is in the tapes of small steps alone.
    lengths = {shape: len(recorded.tape) for shape, recorded in both.replays.kept.items() if recorded is not None}
    small = lengths.pop((29, 32))
    assert len(set(lengths.values())) == 1 and 0 < lengths[1, 64] < small


def test_tapes_can_be_recorded_before_their_first_step(model: Model, num_threads: int) -> None:
    both = TwoWays(model, num_rows=5)
    both.step({0: 1, 1: 1})
    table = both.table.copy()
    pools = [pool.k[0].clone() for pool in both.pools]
    num_recorded = 0
    while both.replays.record_ahead(torch.from_numpy(both.table)):
        num_recorded += 1
    small = {shape for shape in both.replays.kept if shape[1] <= MAX_ROWS}
    assert small >= {(n, n) for n in range(1, 6)} | {(1, n) for n in range(1, MAX_ROWS + 1)} and (6, 6) not in small
    assert num_recorded + 1 == len(both.replays.kept) == len(small) + 5 * (28 + 16)
    assert {shape for shape in both.replays.kept if shape[1] > MAX_ROWS} == {
        (num_rows, n) for num_rows in (1, 2, 4, 8, 16) for n in (*range(40, 257, 8), *range(272, MAX_TOKENS + 1, 16))
    }
    assert (both.table == table).all() and all(torch.equal(a, b.k[0]) for a, b in zip(pools, both.pools, strict=True))
    for num_rows in (5, 3, 1, 4, 2):
        both.step(dict.fromkeys(range(num_rows), 1))
        assert not both.replays.is_cold
    both.step({4: 3, 0: 1})  # padded to as many rows as tokens
    assert not both.replays.is_cold
    for counts in ({2: 61}, {0: 1, 1: 1, 3: 90}, {4: MAX_TOKENS}):
        both.step(counts)
        assert not both.replays.is_cold
    for counts in ({1: 17}, {4: 17}, {4: 2, 2: 1}, {4: 14, 0: 1, 1: 1, 2: 1}, {4: 6, 0: 2}, {2: 31, 1: 1}):
        both.step(counts, num_logits=1)
        assert not both.replays.is_cold
    assert both.num_replayed == 16


def test_no_tape_is_dropped_for_one_that_is_recorded_ahead(
    model: Model, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "MAX_KEPT", 3)
    both = TwoWays(model, num_rows=5)
    both.step({0: 1, 1: 2})
    while both.replays.record_ahead(torch.from_numpy(both.table)):
        pass
    assert set(both.replays.kept) == {(3, 3), (1, 1), (2, 2)}


def test_a_shape_is_recorded_at_its_first_step(model: Model, num_threads: int) -> None:
    both = TwoWays(model, num_rows=2)
    for is_cold in (True, False, False):
        both.step({0: 1})
        assert both.replays.is_cold == is_cold
    assert both.num_replayed == 3 and list(both.replays.kept) == [(1, 1)]


def test_tape_shape_says_which_steps_share_a_tape(model: Model) -> None:
    kernels.set_kernel_threads(1)
    both = TwoWays(model, num_rows=MAX_ROWS + 1)
    rng = random.Random(3)
    shapes: set[StepShape] = set()
    for i in range(60):
        rows = rng.sample(range(MAX_ROWS + 1), rng.choice((1, 1, 2, 3, 8, 31)))
        counts = dict.fromkeys(rows, 1)
        counts[rows[0]] = rng.choice((1, 2, 5, 17, 40, 90, 257)) if i < 50 else 1
        if sum(map(len, both.slots)) + sum(counts.values()) > 2900:
            break
        before = both.num_replayed
        both.step(counts, num_logits=1)
        context = max(len(both.slots[row]) for row in rows)
        shape = tape_shape(len(rows), sum(counts.values()), longest=max(counts.values()), context=context)
        assert (shape is not None) == (both.num_replayed > before)
        shapes |= {shape} - {None}
        assert both.replays.num_tapes == len(shapes)
    assert len(shapes) > 10
    kernels.set_threads(0)


@pytest.mark.parametrize("other", ["none", "blk.6", "blk.9"])
def test_layers_that_repeat_are_not_recorded_again(
    other: str, tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer ``other`` has weights of another format, so other kernels."""
    kinds = {"weight": "Q4_0", f"{other}.": "Q8_0"}
    path = make_tiny_gguf(tmp_path / "deep.gguf", seed=2, kinds=kinds, context_length=1300, num_layers=14)
    both = TwoWays(load_model(path, EngineConfig(model="tiny", max_seq_len=1300)), num_rows=3)
    recorded = list[int]()
    count = Model.run_to_last

    def counted(model: Model, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        recorded.append(len(model.layers))
        return count(model, *args, **kwargs)

    both.step({0: 40, 1: 600}, num_logits=0)
    both.step({0: 1})
    monkeypatch.setattr(Model, "run_to_last", counted)
    for counts in ({0: 1, 1: 1}, {2: 5}, {2: 2}, {0: 61}, {0: 17, 2: 30}, {0: 5, 1: 17}):
        recorded.clear()
        both.step(counts)
        assert min(recorded) < 14 and max(recorded) == 14  # the tape's layers, and those that it is compared with
        both.step(counts)
    assert both.num_replayed == 13


def test_steps_of_any_shape_follow_from_the_largest(model: Model, num_threads: int) -> None:
    both = TwoWays(model, num_rows=MAX_ROWS, num_slots=6000)
    shapes = ((1, 1), (3, 3), (5, 21), (32, 32), (1, 40), (8, 72), (32, 136), (16, MAX_TOKENS), (2, 250), (31, 31))
    for num_rows, num_tokens in shapes:
        both.step(dict.fromkeys(range(1, num_rows), 1) | {0: num_tokens - num_rows + 1})
    assert both.num_replayed == len(shapes) == both.replays.num_tapes
    assert both.replays.num_patterns == 1


def test_a_step_with_another_library_s_products_has_no_tape(tiny_model_path: Path, num_threads: int) -> None:
    model = load_model(tiny_model_path, EngineConfig(model="tiny", precision="float32"))
    both = TwoWays(model, num_rows=1, num_slots=100)
    both.step({0: 3})
    both.step({0: 3})
    assert both.num_replayed == 0
    assert list(both.replays.kept.values()) == [None]


def test_at_most_max_kept_tapes_are_kept_in_one_arena(
    model: Model, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "MAX_KEPT", 16)
    both = TwoWays(model, num_rows=8)
    both.step({0: MAX_ROWS})
    both.step({0: MAX_ROWS - 7, **dict.fromkeys(range(1, 8), 1)})
    most = both.replays.arena.num_bytes
    for tokens in range(1, 18):
        for rows in range(1, 9):
            both.step({row: tokens if row == 0 else 1 for row in range(rows)})
    assert len(both.replays.kept) == 16
    assert both.replays.arena.num_bytes == most


def test_a_step_of_drafts_shares_the_tape_of_as_many_rows(model: Model, num_threads: int) -> None:
    both = TwoWays(model, num_rows=6)
    for counts in ({0: 4, 1: 1, 2: 1}, {0: 1, 1: 2, 2: 2, 3: 1}, dict.fromkeys(range(6), 1)):
        both.step(counts)
    assert both.num_replayed == 3 and list(both.replays.kept) == [(6, 6)]
