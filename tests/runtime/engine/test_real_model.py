"""The engine on SmolLM2-135M-Instruct: greedy tokens are Hugging Face transformers', however they are computed."""

import numpy as np
import pytest
import torch
from phloem.benchmarks.prose import DOCUMENT
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import Engine
from phloem.runtime.protocol import ops as o
from phloem.runtime.protocol.sampling import SamplingParams
from phloem.tests.runtime.engine.driver import Driver, Outcome
from phloem.tests.runtime.models.hf_reference import hf_from_gguf

pytestmark = pytest.mark.model

NUM_TOKENS = 12
NEAR_TIE = 1e-3  # float32 sums in another order may turn a smaller difference of logits round
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Q: How many days are there in a leap year?\nA:",
    "Translate to French: Good morning.\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "born": 1815, "field":',
    "Ingredients:\n- 200 g flour\n- 2 eggs\n-",
    "Water boils at a temperature of",
    "Die Hauptstadt von Deutschland ist",
    "import numpy as np\n\nx = np.",
    "Summary of the text above:",
    DOCUMENT[:1200] + "\n\nQuestion: who planted the orchard?\nAnswer:",
    DOCUMENT[800:2600] + "\n\nIn one sentence:",
    DOCUMENT[2000:5000] + "\n\nThe main idea is",
    DOCUMENT[:6000],
    (DOCUMENT + DOCUMENT)[:8200],
]


@pytest.fixture(scope="module")
def expected(smollm2_path) -> list[tuple[list[int], list[float]]]:
    """Of each prompt the reference's greedy tokens, and by how much each beat the runner-up."""
    reference = hf_from_gguf(smollm2_path)
    engine = Engine(EngineConfig(model=str(smollm2_path), precision="float32", num_slots=2048))
    made = []
    for prompt in PROMPTS:
        ids = engine.tokenizer.encode(prompt)
        assert len(ids) <= 2000
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([ids]),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        margins = [float(top[0] - top[1]) for top in (step[0].topk(2).values for step in out.logits)]
        made.append((out.sequences[0, len(ids) :].tolist(), margins))
    engine.close()
    assert max(len(engine.tokenizer.encode(prompt)) for prompt in PROMPTS) > 1500
    return made


def submit(driver: Driver, prompt: str) -> Outcome:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return driver.submit([o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=params), o.Close(op=2, seq=0)])


def agrees(outcome: Outcome, expected: tuple[list[int], list[float]]) -> bool:
    """Equal tokens, up to a near-tie of the reference's own logits."""
    tokens, margins = expected
    for token, wanted, margin in zip(outcome.done[1].meta.candidates[0].token_ids, tokens, margins, strict=True):
        if token != wanted:
            return margin < NEAR_TIE
    return True


@pytest.mark.parametrize(
    ("options", "at_once"),
    [
        ({}, 1),
        ({"prefix_cache": False}, 16),
        ({"prefill_chunk": 64}, 16),
    ],
    ids=["alone", "batch of 16 without cache", "batch of 16 in chunks of 64"],
)
def test_greedy_tokens_are_those_of_transformers(smollm2_path, expected, options, at_once):
    engine = Engine(EngineConfig(model=str(smollm2_path), precision="float32", num_slots=24_000, **options))
    driver = Driver(engine, check=False)
    outcomes = []
    for start in range(0, len(PROMPTS), at_once):
        outcomes += [submit(driver, prompt) for prompt in PROMPTS[start : start + at_once]]
        driver.run()
    wrong = [i for i, (out, want) in enumerate(zip(outcomes, expected, strict=True)) if not agrees(out, want)]
    assert not wrong
    if engine.config.prefix_cache:
        # Once more, now with every prompt in the cache.
        again = [submit(driver, prompt) for prompt in PROMPTS]
        driver.run()
        assert not [i for i, (out, want) in enumerate(zip(again, expected, strict=True)) if not agrees(out, want)]
        cached = sum(out.done[1].meta.cached_tokens for out in again)
        assert cached == sum(out.done[1].meta.prompt_tokens - 1 for out in again)
    engine.check()
    engine.close()


def test_the_default_precision_keeps_the_meaning(smollm2_path, expected):
    """Four-bit weights with bfloat16 activations may turn close calls; most first tokens must stay."""
    engine = Engine(EngineConfig(model=str(smollm2_path), num_slots=24_000))
    driver = Driver(engine, check=False)
    outcomes = [submit(driver, prompt) for prompt in PROMPTS]
    driver.run()
    same = [
        out.done[1].meta.candidates[0].token_ids[0] == tokens[0] or margins[0] < 0.2
        for out, (tokens, margins) in zip(outcomes, expected, strict=True)
    ]
    assert np.mean(same) >= 0.9
    engine.close()
