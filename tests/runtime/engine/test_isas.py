"""Greedy float32 texts are transformers' own under every instruction set that this machine can run.

``make test-isas`` runs it; the first time, each set is compiled. ``test_real_model``, its twin, runs the best set.
"""

import os

import pytest
from phloem import Runtime, cpu_isa
from phloem.cpu_isa import Isa
from phloem.tests.runtime.engine.greedy_reference import NUM_TOKENS, PROMPTS, expected
from phloem.tests.runtime.engine.test_real_model import NEAR_TIE


@pytest.mark.model
@pytest.mark.parametrize("one", cpu_isa.available(), ids=lambda one: one.name)
def test_greedy_tokens_are_those_of_transformers(one: Isa, smollm2_path) -> None:
    if "PHLOEM_TEST_ISAS" not in os.environ:
        pytest.skip("PHLOEM_TEST_ISAS is not set")
    with Runtime(model=str(smollm2_path), precision="float32", cpu_isa=one.name) as runtime:
        assert runtime.info()["cpu_isa"] == one.name
        answers = runtime.generate(PROMPTS, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        found = [answer["output_ids"] for answer in answers]
    num_equal = 0
    for tokens, wanted in zip(found, expected(), strict=True):
        for token, reference, margin in zip(tokens, wanted.token_ids, wanted.margins, strict=True):
            if token != reference:
                assert margin < NEAR_TIE
                break
            num_equal += 1
    assert num_equal >= 0.98 * NUM_TOKENS * len(PROMPTS)
