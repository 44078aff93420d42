"""Where a grammar allows few tokens, the head is run for these alone, and nothing that is drawn is another for it."""

import numpy as np
import pytest
import torch
from phloem.kernels.cpu.integer import has_integer_products
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor import Executor, SampledToken, SampleRow, StepLogits
from phloem.runtime.memory import KVPool
from phloem.runtime.models import load_model
from phloem.runtime.protocol.sampling import SamplingParams
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.tests.runtime.models.tiny import make_tiny_gguf

pytestmark = pytest.mark.skipif(not has_integer_products(), reason="this machine's head is torch's")
NUM_WORDS = 3  # of 96 tokens


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    path = make_tiny_gguf(tmp_path_factory.mktemp("head") / "tiny.gguf", seed=3, kinds={"weight": "Q4_0"})
    model = load_model(path, EngineConfig(model="tiny", max_seq_len=64))
    kv = KVPool.for_model(model.config, num_slots=64, dtype=model.kv_dtype)
    return Executor(model, kv, max_rows=4, max_len=64)


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
    given = SamplingParams(return_logprob=True, top_logprobs_num=3, **params)  # type: ignore[arg-type]
    return SampleRow(row, given, 7 + row, np.array([1, 2, 70, 3], dtype=np.int32), 2, mask=mask)


def drawn(executor: Executor, rows: list[SampleRow], *, whole: bool) -> list[SampledToken]:
    logits = step(executor, len(rows))
    if whole:
        logits.whole()
    return executor.sample(logits, rows)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.3, "top_k": 5}, {"frequency_penalty": 1.0}])
def test_draws_and_logprobs_are_those_of_the_whole_head(executor: Executor, params: dict[str, float]) -> None:
    allowed = [[70, 71, 78], [65], [79, 64]]
    rows = [sample_row(i, tokens, **params) for i, tokens in enumerate(allowed)]
    few = drawn(executor, rows, whole=False)
    assert few == drawn(executor, rows, whole=True)
    assert all(token.token_id in tokens for token, tokens in zip(few, allowed, strict=True))
    assert few[1].logprob == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("allowed", "num_blocks"),
    [
        ([[70]], 1),
        ([[70, 79], [64, 77]], 1),
        ([[70], [80]], None),  # a third of the head
        ([[70], None], None),  # the second may draw everything
        ([None, None], None),
    ],
)
def test_only_blocks_with_allowed_tokens_are_computed(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, allowed: list[list[int] | None], num_blocks: int | None
) -> None:
    asked: list[int | None] = []
    head = executor._head

    def counted(features: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
        asked.append(None if blocks is None else len(blocks))
        return head(features, blocks)

    monkeypatch.setattr(executor, "_head", counted)
    executor.sample(step(executor, len(allowed)), [sample_row(i, tokens) for i, tokens in enumerate(allowed)])
    assert asked == [num_blocks]
