"""The engine on SmolLM2-135M-Instruct: greedy tokens equal those of Hugging Face transformers."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.weights.aliases import ALIASES
from phloem.runtime.weights.pull import alias_path, is_pulled
from phloem.tests.runtime.engine.driver import Driver, Outcome
from phloem.tests.runtime.engine.greedy_reference import (
    GEMMA3_PROMPTS,
    GEMMA3_TOKENS,
    NUM_TOKENS,
    PROMPTS,
    Greedy,
    expected,
)

pytestmark = pytest.mark.model

NUM_LINES = 15  # of the prompts are a line or two
NUM_SHORT = 17  # have less than 500 tokens
MANY = (*range(NUM_LINES + 1), 18, 19)  # the last and longest begins as the one before it
GEMMA3_SHORT = 16  # tokens after most prompts; after the first four, all that are kept
NEAR_TIE = 1e-3  # float32 sums in another order can reverse smaller differences of logits


def submit(driver: Driver, prompt: str, max_tokens: int = NUM_TOKENS) -> Outcome:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return driver.submit([o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=params), o.Close(op=2, seq=0)])


def differing(outcomes: list[Outcome], model: str = "smollm2", chosen: Sequence[int] = range(20)) -> list[int]:
    """The prompts whose tokens differ from the reference's, up to the first near-tie of its logits; ``chosen`` were
    run.
    """
    every = expected(model)
    entries = [every[i] for i in chosen]

    def agrees(outcome: Outcome, wanted: Greedy) -> bool:
        made = outcome.done[1].meta.candidates[0].token_ids
        for token, reference, margin in zip(made, wanted.token_ids, wanted.margins, strict=model == "smollm2"):
            if token != reference:
                return margin < NEAR_TIE
        return True

    return [i for i, pair in zip(chosen, zip(outcomes, entries, strict=True), strict=True) if not agrees(*pair)]


@pytest.fixture(scope="module")
def packed_engine(smollm2_path) -> Iterator[EngineCore]:
    """An engine of the default precision."""
    engine = EngineCore(EngineConfig(model=str(smollm2_path), num_slots=24_000))
    yield engine
    engine.close()


def test_the_prompts_equal_the_reference_s_and_some_are_long(packed_engine):
    engine = packed_engine
    assert [engine.tokenizer.encode(prompt) for prompt in PROMPTS] == [entry.prompt_ids for entry in expected()]
    assert len(PROMPTS) == 20 and 1500 < max(len(entry.prompt_ids) for entry in expected()) <= 2000


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"prefix_cache": False}, [*([i] for i in range(3)), range(NUM_LINES + 1)]),
        ({"prefill_chunk": 64}, [MANY]),
    ],
    ids=["alone and in a batch of 16 without cache", "batch of 18 in chunks of 64"],
)
def test_greedy_tokens_are_those_of_transformers(smollm2_path, options, batches):
    options = {"num_threads": 1, "num_slots": 24_000, **options}
    engine = EngineCore(EngineConfig(model=str(smollm2_path), precision="float32", **options))
    driver = Driver(engine, check=False)

    def run(chosen: Sequence[int]) -> list[Outcome]:
        outcomes = [submit(driver, PROMPTS[i]) for i in chosen]
        driver.run()
        assert not differing(outcomes, chosen=chosen)
        return outcomes

    for chosen in batches:
        run(chosen)
    if engine.config.prefix_cache:
        again = run(batches[-1])  # with every prompt in the cache
        assert all(out.done[1].meta.cached_tokens == out.done[1].meta.prompt_tokens - 1 for out in again)
    engine.check()
    engine.close()


def test_the_default_precision_keeps_the_meaning(packed_engine):
    """4-bit weights with bfloat16 activations can reverse near-ties; most first tokens must stay."""
    driver = Driver(packed_engine, check=False)
    outcomes = [submit(driver, prompt) for prompt in PROMPTS[:NUM_SHORT]]
    driver.run()
    same = [
        out.done[1].meta.candidates[0].token_ids[0] == wanted.token_ids[0] or wanted.margins[0] < 0.2
        for out, wanted in zip(outcomes, expected(), strict=False)
    ]
    assert np.mean(same) >= 0.9


def test_gemma_3_writes_what_transformers_writes():
    """Twenty prompts, one longer than its window. Its licence has terms, so only those who pulled it run this."""
    alias = ALIASES["gemma3-270m"]
    if not is_pulled(alias):
        pytest.skip("gemma3-270m is not pulled: phloem pull gemma3-270m")
    engine = EngineCore(EngineConfig(model=str(alias_path(alias)), precision="float32", num_threads=1, num_slots=8000))
    bos = [engine.tokenizer.bos_id]
    encoded = [bos + engine.tokenizer.encode(prompt) for prompt in GEMMA3_PROMPTS]
    assert encoded == [entry.prompt_ids for entry in expected("gemma3-270m")]
    driver = Driver(engine, check=False)
    counts = [GEMMA3_TOKENS] * 4 + [GEMMA3_SHORT] * 16
    outcomes = [submit(driver, prompt, count) for prompt, count in zip(GEMMA3_PROMPTS, counts, strict=True)]
    driver.run()
    assert len(outcomes) == 20 and not differing(outcomes, "gemma3-270m")
    engine.close()
