"""Greedy draws without logits are the draws from the logits, and where they cannot be, the logits are asked."""

import json
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from phloem import kernels
from phloem.kernels import SampleBatch
from phloem.kernels.cpu.likeliest import LikeliestOutputs
from phloem.kernels.cpu.pool import has_pool
from phloem.kernels.linear import PackedLinear, quantize_int8
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.executor import greedy_head
from phloem.runtime.executor.greedy_head import GreedyHead
from phloem.runtime.executor.step_logits import StepMasks
from phloem.runtime.layers.linear import Linear, LMHead
from phloem.tests.runtime.engine.driver import Driver

V = 20_000


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    kernels.set_kernel_threads(2 if has_pool() else 1)
    yield
    kernels.set_threads(count)


def head_of(*, cap: float = 0.0) -> tuple[LMHead, GreedyHead]:
    torch.manual_seed(1)
    part = PackedLinear(quantize_int8(torch.randn(V, 64)), precision="int16", out_dtype=torch.float32)
    head = LMHead(Linear([part], torch.float32), cap=cap)
    return head, GreedyHead(cast(Any, SimpleNamespace(head=head)), num_tokens=V - 5)


def drawn_from_logits(head: LMHead, x: torch.Tensor, masks: StepMasks | None) -> torch.Tensor:
    logits = head(x)
    logits[:, V - 5 :] = float("-inf")
    batch = SampleBatch.greedy(len(x))
    if masks is None:
        return kernels.sample(logits, batch).token_ids
    rows = torch.from_numpy(masks.rows)
    return kernels.sample(logits, batch, mask=masks.words, rows=rows, ids=masks.ids).token_ids


def test_draws_equal_those_from_logits_at_any_number_of_rows() -> None:
    head, greedy = head_of()
    greedy.prepare()
    rng = np.random.default_rng(0)
    words = np.packbits(rng.random((3, 32 * (V // 32))) < 0.5, axis=1, bitorder="little").view(np.uint32)
    for num_rows in (5, 16, 9, 16, 40, 5):
        x = torch.randn(num_rows, 64)
        assert torch.equal(greedy.draw(x, None), drawn_from_logits(head, x, None))
        rows = np.sort(rng.permutation(num_rows)[: num_rows // 2])
        masks = StepMasks(rows, rng.integers(0, 3, len(rows)), words)
        assert torch.equal(greedy.draw(x, masks), drawn_from_logits(head, x, masks))


def test_a_tape_owns_what_its_calls_write_to_whoever_prepares_the_head_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, greedy = head_of()
    is_asked, may_go_on = threading.Event(), threading.Event()
    make, made = head.likeliest, []

    def likeliest(num_tokens: int) -> LikeliestOutputs | None:
        if threading.current_thread() is other:
            is_asked.set()
            may_go_on.wait(60)
            return make(num_tokens)
        found = make(num_tokens)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(head, "likeliest", likeliest)
    other = threading.Thread(target=greedy.prepare)
    other.start()
    assert is_asked.wait(60)
    x = torch.randn(6, 64)
    greedy.draw(x, None)  # records its tape
    may_go_on.set()
    other.join(60)
    (used,) = made
    assert used() is not None
    assert torch.equal(greedy.draw(x, None), drawn_from_logits(head, x, None))


def test_draws_of_one_step_outlive_the_next() -> None:
    head, greedy = head_of()
    x = torch.randn(6, 64)
    first = greedy.draw(x, None)
    greedy.draw(torch.randn(6, 64), None)
    assert torch.equal(first, drawn_from_logits(head, x, None))


def test_few_rows_many_rows_and_masks_of_few_tokens_are_left_to_the_logits() -> None:
    _, greedy = head_of()
    assert greedy.draw(torch.randn(greedy_head.LEAST_ROWS - 1, 64), None) is None
    assert greedy.draw(torch.randn(greedy_head.MOST_ROWS + 1, 64), None) is None
    words = np.zeros((2, V // 32), np.uint32)
    words[0, 7], words[1] = 3, 0xFFFFFFFF
    for num_few, is_drawn in ((0, True), (3, True), (4, False)):
        ids = np.array([0] * num_few + [1] * (8 - num_few))
        found = greedy.draw(torch.randn(8, 64), StepMasks(np.arange(8), ids, words))
        assert (found is not None) is is_drawn, num_few


def test_a_row_that_allows_nothing_is_left_to_the_logits() -> None:
    _, greedy = head_of()
    masks = StepMasks(np.array([3]), np.array([0]), np.zeros((1, V // 32), np.uint32))
    assert greedy.draw(torch.randn(8, 64), masks) is None
    assert greedy.draw(torch.randn(8, 64), None) is not None


def test_a_head_with_a_cap_is_left_to_the_logits() -> None:
    _, greedy = head_of(cap=30.0)
    greedy.prepare()
    assert greedy.draw(torch.randn(8, 64), None) is None


@pytest.mark.model
def test_the_real_model_draws_the_same_with_it_and_without(smollm2_path, monkeypatch) -> None:
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}}})
    grammar = o.GrammarSpec("json_schema", schema)
    num_drawn = [0]
    draw = GreedyHead.draw

    def counted(self: GreedyHead, *args: Any) -> Any:
        found = draw(self, *args)
        num_drawn[0] += found is not None
        return found

    def texts() -> list[str]:
        engine = EngineCore(EngineConfig(model=str(smollm2_path), num_slots=2048, num_threads=2))
        engine.grammars.wait_until_ready()
        driver = Driver(engine, mask_budget_s=600.0)
        params = SamplingParams(temperature=0.0, max_tokens=24)
        outcomes = [
            driver.submit(
                [
                    o.Text(op=0, seq=0, text=f"{i}. An animal that people like is the"),
                    o.Gen(op=1, seq=0, params=params, grammar=grammar if i % 3 == 2 else None),
                    o.Close(op=2, seq=0),
                ]
            )
            for i in range(9)
        ]
        driver.run()
        engine.close()
        return [outcome.value(1)[0] for outcome in outcomes]

    monkeypatch.setattr(GreedyHead, "draw", counted)
    with_it = texts()
    assert num_drawn[0] >= 15
    monkeypatch.setattr(greedy_head, "LEAST_ROWS", 1 << 30)
    num_drawn[0] = 0
    assert texts() == with_it and num_drawn == [0]
