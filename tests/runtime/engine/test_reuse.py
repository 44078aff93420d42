"""The engine on SmolLM2-135M-Instruct computes no prefix twice, and the cache changes no answer."""

from itertools import pairwise

import pytest
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import Driver

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
STEM = (
    "You are a careful assistant for a botanical garden. Answer in one short sentence, name the plant first, and never "
    "guess: where you do not know, say so. The garden has oaks, beeches, maples, two ginkgos and a tulip tree.\n"
)
QUESTIONS = ("Which tree is the oldest?", "Which leaves turn red?", "Where does sap rise?", "What is bark for?")
TURNS = (
    "Which tree gives syrup?",
    "When is it tapped?",
    "How much sap makes one litre?",
    "Does that harm the tree?",
    "Who found out first?",
    "Thank you. Sum up in a line.",
)


@pytest.fixture(scope="module")
def engine(smollm2_path):
    # Without drafts the engine runs prompts, and one token a sequence and step.
    engine = EngineCore(EngineConfig(model=str(smollm2_path), num_slots=8192, speculative="off"))
    yield engine
    engine.close()


@pytest.fixture
def driver(engine):
    engine.cache.flush()
    yield Driver(engine, check=False)
    engine.check()


def ask(prompt: str) -> list[o.AnyOp]:
    return [o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)]


def num_distinct_prefixes(prompts: list[list[int]]) -> int:
    """The size of a tree of all prompts without their last tokens, which are run for their logits."""
    return len({tuple(ids[: n + 1]) for ids in prompts for n in range(len(ids) - 1)})


def test_each_distinct_prefix_token_is_computed_exactly_once(driver):
    engine = driver.engine
    prompts = [STEM + question for question in QUESTIONS for _ in range(3)]
    before = engine.loop.counters.forward_tokens
    outcomes = [driver.submit(ask(prompt)) for prompt in prompts]
    driver.run()
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    computed = sum(outcome.closed.stats.prefilled_tokens for outcome in outcomes)
    assert computed == num_distinct_prefixes(ids) + len(prompts)
    # The engine's count agrees: it also ran each answer's tokens except the last.
    assert engine.loop.counters.forward_tokens - before == computed + len(prompts) * (GREEDY.max_tokens - 1)


def test_32_equal_requests_at_once_compute_their_prompt_once(driver):
    engine = driver.engine
    before = engine.loop.counters.forward_tokens
    outcomes = [driver.submit(ask(STEM + QUESTIONS[0])) for _ in range(32)]
    driver.run()
    length = len(engine.tokenizer.encode(STEM + QUESTIONS[0]))
    assert sum(outcome.closed.stats.prefilled_tokens for outcome in outcomes) == length - 1 + 32
    assert engine.loop.counters.forward_tokens - before == length - 1 + 32 + 32 * (GREEDY.max_tokens - 1)


def test_a_chat_of_six_turns_in_one_program_computes_no_history_again(driver):
    ops: list[o.AnyOp] = [o.Text(op=0, seq=0, text=STEM)]
    for turn in TURNS:
        ops.append(o.Text(op=len(ops), seq=0, text=f"\nUser: {turn}\nAssistant:"))
        ops.append(o.Gen(op=len(ops), seq=0, params=GREEDY))
    outcome = driver.run([*ops, o.Close(op=len(ops), seq=0)])
    metas = [outcome.done[op.op].meta for op in ops if isinstance(op, o.Gen)]
    for before, meta in pairwise(metas):
        history = before.prompt_tokens + before.candidates[0].completion_tokens
        assert meta.cached_tokens == history - 1  # the last generated token was never run, because nothing followed it
    last = metas[-2]
    assert metas[-1].cached_tokens >= 0.95 * (last.prompt_tokens + last.candidates[0].completion_tokens)


def test_a_chat_of_six_stateless_requests_reuses_its_history_generated_tokens_included(driver):
    text, history = STEM, 0
    found = asked = 0
    for turn in TURNS:
        text += f"\nUser: {turn}\nAssistant:"
        outcome = driver.run(ask(text))
        meta = outcome.done[1].meta
        found += min(meta.cached_tokens, history)
        asked += history
        history = meta.prompt_tokens + meta.candidates[0].completion_tokens
        text += outcome.value(1)[0]
    assert found >= 0.95 * asked


def test_cold_and_warm_answers_are_equal(smollm2_path):
    """In float32; in other precisions another batch size can reverse a near-tie."""
    engine = EngineCore(EngineConfig(model=str(smollm2_path), precision="float32", num_slots=2048))
    driver = Driver(engine)
    cold = driver.run(ask(STEM + QUESTIONS[0])).done[1].meta
    other = driver.run(ask(STEM + QUESTIONS[1])).done[1].meta
    warm = driver.run(ask(STEM + QUESTIONS[0])).done[1].meta
    engine.cache.flush()
    other_cold = driver.run(ask(STEM + QUESTIONS[1])).done[1].meta
    assert (cold.cached_tokens, other_cold.cached_tokens) == (0, 0)
    assert warm.cached_tokens == warm.prompt_tokens - 1 and other.cached_tokens > 50
    assert warm.candidates[0].token_ids == cold.candidates[0].token_ids
    assert other.candidates[0].token_ids == other_cold.candidates[0].token_ids
    engine.close()
