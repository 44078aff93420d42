"""The least and the greatest values of sampling parameters: each is served, or refused with its limit."""

import math

import msgspec
import pytest
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.tests.runtime.engine.driver import generate

TINY = 5e-324
P = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
EXTREMES = [
    {"top_p": TINY},
    {"top_p": 1e-38, "temperature": 100.0},
    {"min_p": TINY},
    {"min_p": 1.0},
    {"temperature": TINY},
    {"top_k": 2**31 - 1, "top_p": 0.5},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 10.0, "frequency_penalty": -2.0, "presence_penalty": 2.0},
    {"logit_bias": dict.fromkeys(range(259), -10000.0)},
    {"logit_bias": {65: 10_000.0}, "top_k": 3},
    {"logprob_start_len": 2**62, "return_logprob": True, "top_logprobs_num": 100},
    {"seed": -(2**63)},
    {"stop": ("x" * 10_000,)},
]


@pytest.mark.parametrize("fields", EXTREMES, ids=str)
@pytest.mark.parametrize("others", [{}, {"top_k": 5}, {"presence_penalty": 0.5}], ids=["", "top_k", "penalty"])
def test_extreme_parameters_are_served(driver, fields, others):
    """A top_p and a repetition_penalty near zero ended the engine's process."""
    (text,), meta = generate(driver, "hello", msgspec.structs.replace(P, **{**others, **fields}))
    assert meta.candidates[0].completion_tokens == 5 and isinstance(text, str)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_k": 2**31}, "top_k=2147483648: must be -1 (off) or between 1 and 2147483647"),
        ({"top_k": 2**63 - 1}, "must be -1 (off) or between 1 and 2147483647"),
        ({"repetition_penalty": TINY}, "repetition_penalty=5e-324: must be between 0.01 and 10"),
        ({"logit_bias": {65: math.nan}}, "logit_bias={65: nan}: must be numbers between -10000 and 10000"),
        ({"logit_bias": dict.fromkeys(range(259), -1e39)}, "...: must be numbers between -10000 and 10000"),
        ({"temperature": math.nan}, "temperature=nan: must be between 0 and 100"),
        ({"top_p": math.nan}, "top_p=nan: must be in (0, 1]"),
    ],
    ids=str,
)
def test_what_a_sampler_cannot_hold_is_refused(driver, fields, said):
    """A top_k beyond 32 bits, and a bias that is no number, failed the step of every program."""
    outcome = driver.run([o.Gen(op=0, seq=0, params=msgspec.structs.replace(P, **fields))])
    assert outcome.rejected is not None
    assert said in outcome.rejected.errors[0].message and len(outcome.rejected.errors[0].message) < 300


def test_a_token_that_the_grammar_forces_and_the_bias_forbids_is_drawn(driver):
    """No token was left, and the step of every program failed."""
    grammar = o.GrammarSpec("regex", "a")
    params = SamplingParams(max_tokens=5, logit_bias={97: -10_000.0})
    (text,), _ = generate(driver, "hello", params, grammar=grammar)
    assert text == "a"
