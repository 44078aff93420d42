"""If a grammar allows few tokens, the head computes only these, and every draw stays the same."""

import msgspec
import numpy as np
import pytest
import torch
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor import Executor, SampledToken, SampleRow, StepLogits, step_logits
from phloem.runtime.memory import KVPool
from phloem.runtime.models import load_model
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.tests.runtime.models.tiny import make_tiny_gguf

NUM_WORDS = 3  # of 96 tokens


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    path = make_tiny_gguf(tmp_path_factory.mktemp("head") / "tiny.gguf", seed=3, kinds={"weight": "Q4_0"})
    model = load_model(path, EngineConfig(model="tiny", max_seq_len=64))
    kv = KVPool.for_model(model.config, num_slots=64, dtype=model.kv_dtype)
    return Executor(model, kv, max_rows=4, max_len=64)


@pytest.fixture
def two_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the head read its weights once for two rows, so that rows of free text are worth setting apart."""
    monkeypatch.setattr(step_logits, "ROWS_AT_ONCE", 2)


def step(executor: Executor, num_rows: int) -> StepLogits:
    """A step of 5 tokens a row, logits for the last."""
    rows = []
    for row in range(num_rows):
        ids = np.arange(10 * row, 10 * row + 5, dtype=np.int32)
        rows.append(PlanRow(row, row, 0, ids, np.arange(5 * row, 5 * row + 5, dtype=np.int32), 0, 1))
    return executor.forward(StepPlan(0, tuple(rows)))


def sample_row(row: int, allowed: list[int] | None, **params: object) -> SampleRow:
    mask = None
    if allowed is not None:
        mask = np.zeros(NUM_WORDS, dtype=np.uint32)
        for token in allowed:
            mask[token // 32] |= np.uint32(1 << token % 32)
    given = msgspec.structs.replace(SamplingParams(return_logprob=True, top_logprobs_num=3), **params)
    return SampleRow(row, given, 7 + row, np.array([1, 2, 70, 3], dtype=np.int32), 2, mask=mask)


def drawn(executor: Executor, rows: list[SampleRow], *, whole: bool) -> list[SampledToken]:
    logits = step(executor, len(rows))
    if whole:
        logits.whole()
    return executor.sample(logits, rows)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.3, "top_k": 5}, {"frequency_penalty": 1.0}])
def test_draws_and_logprobs_equal_those_of_the_whole_head(executor: Executor, params: dict[str, float]) -> None:
    allowed = [[70, 71, 78], [65], [79, 64]]
    rows = [sample_row(i, tokens, **params) for i, tokens in enumerate(allowed)]
    few = drawn(executor, rows, whole=False)
    assert few == drawn(executor, rows, whole=True)
    assert all(token.token_id in tokens for token, tokens in zip(few, allowed, strict=True))
    assert few[1].logprob == pytest.approx(0.0, abs=1e-6)


@pytest.mark.usefixtures("two_rows_at_once")
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9}])
@pytest.mark.parametrize(
    "allowed",
    [
        [None, [70], None, [71, 65]],
        [[70], list(range(90)), [71], [70]],
        [list(range(96)), None, None, [65]],
        [[65], None, None, None],
    ],
)
def test_rows_with_and_without_a_mask_are_drawn_in_one_step(
    executor: Executor, allowed: list[list[int] | None], params: dict[str, float]
) -> None:
    rows = [sample_row(i, tokens, top_logprobs_num=0, **params) for i, tokens in enumerate(allowed)]
    assert drawn(executor, rows, whole=False) == drawn(executor, rows, whole=True)


@pytest.mark.usefixtures("two_rows_at_once")
@pytest.mark.parametrize(
    ("allowed", "params", "asked"),  # (rows, blocks or None for all)
    [
        ([[70]], {}, [(1, 1)]),
        ([[70, 79], [64, 77]], {}, [(2, 1)]),
        ([[70], [80]], {}, [(2, None)]),  # a third of the head
        ([None, None], {}, [(2, None)]),
        ([None, [70], list(range(96)), [71]], {"top_logprobs_num": 0}, [(2, None), (2, 1)]),
        ([[70], [70], [71], None], {"top_logprobs_num": 0}, [(1, None), (3, 1)]),
        (
            [[70], None, None, None],
            {"top_logprobs_num": 0},
            [(4, None)],
        ),  # three rows read the weights as often as four
        ([[70], None, [70]], {}, [(3, None)]),  # in order: the likeliest tokens are wanted too
        ([[70], None, [70]], {"top_logprobs_num": 0, "frequency_penalty": 1.0}, [(3, None)]),
    ],
)
def test_the_head_computes_only_blocks_with_allowed_tokens(
    executor: Executor,
    monkeypatch: pytest.MonkeyPatch,
    allowed: list[list[int] | None],
    params: dict[str, float],
    asked: list[tuple[int, int | None]],
) -> None:
    found: list[tuple[int, int | None]] = []
    head = executor.head

    def counted(features: torch.Tensor, blocks: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        found.append((len(features), None if blocks is None else len(blocks)))
        return head(features, blocks, out)

    monkeypatch.setattr(executor, "head", counted)
    executor.sample(step(executor, len(allowed)), [sample_row(i, tokens, **params) for i, tokens in enumerate(allowed)])
    assert found == asked
