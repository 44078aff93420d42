"""The three rules over given log-probabilities, and selections that Python decides."""

from collections import Counter

import pytest
from phloem import (
    function,
    gen,
    greedy_token_selection,
    select,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from phloem.lang.backend.base_backend import BaseBackend
from phloem.lang.choices import ChoicesDecision, ChoicesSamplingMethod, draw, mean_logprob
from phloem.protocol import errors


def decide(method, rows, alone=None):
    return method(
        choices=[f"c{i}" for i in range(len(rows))],
        normalized_prompt_logprobs=[mean_logprob(row) for row in rows],
        input_token_logprobs=rows,
        output_token_logprobs=[[] for _ in rows],
        unconditional_token_logprobs=alone,
    )


def test_token_length_normalized_takes_the_best_mean():
    decision = decide(token_length_normalized, [[-2.0], [-1.0, -1.5, -1.4], [-9.0]])
    assert decision.decision == "c1" and set(decision.meta_info) == {
        "normalized_prompt_logprobs",
        "input_token_logprobs",
        "output_token_logprobs",
    }


def test_a_certain_token_counts_like_any_other():
    """An exact 0.0 is a log-probability, and a choice of nothing else is the best."""
    assert mean_logprob([0.0, -2.0]) == -1.0 and mean_logprob([None, -2.0]) == -2.0 and mean_logprob([0.0]) == 0.0
    assert decide(token_length_normalized, [[-0.1], [0.0, 0.0]]).decision == "c1"


def test_greedy_token_selection_compares_token_by_token_and_pads_a_short_choice_with_its_mean():
    decision = decide(greedy_token_selection, [[-1.0, -3.0], [-1.0], [-2.0, 0.0]])
    assert decision.decision == "c1"  # c2 loses at once, then -3 against the mean -1
    assert decision.meta_info["greedy_logprob_matrix"] == [[-1.0, -3.0], [-1.0, -1.0], [-2.0, 0.0]]
    assert decide(greedy_token_selection, [[-1.0], [-1.0]]).decision == "c0"


def test_unconditional_likelihood_takes_the_choice_that_the_prompt_made_likelier():
    decision = decide(unconditional_likelihood_normalized, [[-1.0, -1.0], [-2.0]], alone=[[None, -1.0], [-9.0]])
    assert decision.decision == "c1"
    assert decision.meta_info["normalized_unconditional_prompt_logprobs"] == [-0.5, 7.0]
    assert unconditional_likelihood_normalized.requires_unconditional_logprobs
    with pytest.raises(ValueError, match="without a prompt"):
        decide(unconditional_likelihood_normalized, [[-1.0]])


def test_a_draw_follows_its_probabilities():
    from random import Random

    random = Random(0)
    drawn = Counter(draw([-1.0, -2.0, -50.0], 1.0, random)[0] for _ in range(4000))
    _, probabilities = draw([-1.0, -2.0, -50.0], 1.0, random)
    assert probabilities == pytest.approx([0.7311, 0.2689, 0.0], abs=1e-3)
    assert drawn[0] / 4000 == pytest.approx(0.7311, abs=0.03) and drawn[2] == 0
    assert draw([-1.0, -2.0], 1e-6, random)[1] == [1.0, 0.0]


@function
def pick(s, word):
    s += word + select("c", [" red", " green", " blue"], temperature=1.0) + "!" + gen("next")


def test_a_selection_with_a_temperature_is_drawn_on_the_compiled_path_too(connect):
    backend = connect(select=lambda prompt, op: 0, reply=lambda prompt, op: f" <{prompt.split()[-1]}>")
    states = pick.run_batch([{"word": str(i)} for i in range(60)], backend=backend)
    drawn = Counter(s["c"] for s in states)
    assert len(drawn) == 3
    for s in states:
        info = s.get_meta_info("c")
        assert sum(info["probabilities"]) == pytest.approx(1.0)
        assert [" red", " green", " blue"][info["index"]] == s["c"]
        assert s["next"] == f" <{s['c'].strip()}!>" and s.stats()["messages"] == 2
    seeded = [pick.run(word="a", backend=backend, seed=7)["c"] for _ in range(5)]
    assert len(set(seeded)) == 1
    compiled = pick.compile(backend=backend)
    assert len({s["c"] for s in compiled.run_batch([{"word": str(i)} for i in range(60)], backend=backend)}) == 3
    assert compiled.run(word="a", backend=backend, seed=7)["c"] == compiled.run(word="a", backend=backend, seed=7)["c"]


class Last(ChoicesSamplingMethod):
    def __call__(self, *, choices, **scores):
        return ChoicesDecision(choices[-1], {"rule": "last"})


def test_a_users_rule_decides_on_the_compiled_path_too(connect):
    @function
    def body(s):
        s += "x" + select("c", [" a", " b"], choices_method=Last()) + gen("d")

    backend = connect(select=lambda prompt, op: 0)
    for program in (body, body.compile(backend=backend)):
        s = program.run(backend=backend)
        assert s["c"] == " b" and s.text().startswith("x b") and s.get_meta_info("c")["rule"] == "last"


def test_a_rule_that_fails_is_an_error_where_its_value_is_read(connect):
    class Broken(ChoicesSamplingMethod):
        def __call__(self, **scores):
            raise RuntimeError("no idea")

    s = function(lambda s: s.__iadd__("x" + select("c", ["a", "b"], choices_method=Broken()))).run(backend=connect())
    with pytest.raises(RuntimeError, match="no idea"):
        s["c"]


def test_an_invalid_temperature_is_refused_when_the_select_is_written():
    with pytest.raises(errors.InvalidRequest, match="must be between 0 and 100"):
        select("c", ["a"], temperature=-1.0)
    with pytest.raises(errors.InvalidRequest, match="greedy_token_selection has no scores to draw by"):
        select("c", ["a"], 0.5, greedy_token_selection)
    with pytest.raises(errors.InvalidRequest, match="Last has no scores"):
        select("c", ["a"], 0.5, Last())


def test_a_third_partys_backend_gets_the_temperature():
    seen = []

    class Backend(BaseBackend):
        def select(self, s, choices, temperature, choices_method=None):
            seen.append((choices, temperature, choices_method))
            return ChoicesDecision(choices[1])

    s = function(lambda s: s.__iadd__("x" + select("c", ["a", "b"], 0.7))).run(backend=Backend())
    assert s["c"] == "b" and seen == [(["a", "b"], 0.7, token_length_normalized)]
