"""Probabilities of choices: exact, divided by a prior, at a fitted temperature."""

import math
import random

import phloem
import pytest
from phloem import Distribution, distribution, fit_temperature, function, gen
from phloem.lang.backend.base_backend import BaseBackend
from phloem.lang.choices import ChoicesDecision
from phloem.protocol import errors, ops

CHOICES = [" yes", " no", " perhaps not"]


@function
def mood(s, text):
    s += "Review: " + text + " Mood:" + distribution("mood", CHOICES) + gen("next", max_tokens=2, temperature=0)


def test_probabilities_are_the_products_over_the_tokens(engine):
    s = mood.run("fine", backend=engine)
    found = s["mood"]
    sums = [sum(row) for row in scored_one_by_one(engine, "Review: fine Mood:")]
    assert [found.logprobs[choice] for choice in CHOICES] == pytest.approx(sums, abs=1e-3)
    total = sum(math.exp(value) for value in sums)
    assert [found[choice] for choice in CHOICES] == pytest.approx([math.exp(v) / total for v in sums], rel=1e-3)
    assert found.best == max(CHOICES, key=found.__getitem__) and 0 < found.entropy < math.log(3)
    assert s.text() == "Review: fine Mood:" + s["next"] and s.stats()["messages"] == 1  # it appends nothing


def scored_one_by_one(engine, prompt):
    one = function(lambda s, choice: s.__iadd__(prompt + phloem.select("c", [choice])))
    for choice in CHOICES:
        meta = one.run(choice=choice, backend=engine).get_meta_info("c")
        yield [value for value, *_ in meta["input_token_logprobs"][0]]


def test_a_compiled_program_has_distributions_too(engine):
    compiled = mood.compile(backend=engine)
    a, b = (program.run(text="fine", backend=engine)["mood"] for program in (mood, compiled))
    assert dict(a) == pytest.approx(dict(b), rel=1e-4) and list(b) == CHOICES


def test_a_prior_removes_the_models_bias():
    blank, found = (Distribution({"a": math.log(p), "b": math.log(1 - p)}) for p in (0.8, 0.8))
    assert dict(found.calibrated(prior=blank)) == pytest.approx({"a": 0.5, "b": 0.5})
    assert dict(found.calibrated(prior={"a": 0.5, "b": 0.5})) == pytest.approx(dict(found))
    assert dict(found.calibrated(prior=blank).calibrated()) == pytest.approx({"a": 0.8, "b": 0.2})
    with pytest.raises(errors.InvalidRequest, match=r"has none for \['b'\]"):
        found.calibrated(prior={"a": 1.0})


def test_the_fitted_temperature_calibrates_an_overconfident_model():
    """The truth follows softmax(scores / 3), and the model says softmax(scores)."""
    draw = random.Random(0)
    said, answers = [], []
    for _ in range(2000):
        scores = {c: draw.gauss(0, 3) for c in "abc"}
        honest = Distribution(scores).calibrated(temperature=3.0)
        said.append(Distribution(scores))
        answers.append(draw.choices(list(honest), list(honest.values()))[0])
    temperature = fit_temperature(said, answers)
    assert temperature == pytest.approx(3.0, rel=0.1)
    assert abs(gap(said, answers, 1.0)) > 0.15 and abs(gap(said, answers, temperature)) < 0.03
    with pytest.raises(errors.InvalidRequest, match="2000 distributions and 1 answers"):
        fit_temperature(said, ["a"])


def gap(said, answers, temperature):
    """Mean confidence in the best choice minus accuracy."""
    sure = [d.calibrated(temperature=temperature) for d in said]
    return sum(d[d.best] - (d.best == answer) for d, answer in zip(sure, answers, strict=True)) / len(said)


def test_a_third_partys_backend_makes_distributions_from_its_own_scores():
    class Scoring(BaseBackend):
        def select(self, s, choices, temperature, choices_method=None):
            rows = [[(-1.0, 1, "x")] * len(choice) for choice in choices]
            return ChoicesDecision(choices[0], {"input_token_logprobs": rows})

        def generate(self, s, sampling_params):
            return f"<{s.text_}>", {}

    s = function(lambda s: s.__iadd__("q" + distribution("d", ["a", "bb"], temperature=2.0) + gen("x"))).run(
        backend=Scoring()
    )
    assert s["d"].logprobs == {"a": -1.0, "bb": -2.0} and s["d"]["a"] == pytest.approx(1 / (1 + math.exp(-0.5)))
    assert s["x"] == "<q>" and s.text() == "q<q>"

    class Silent(Scoring):
        def select(self, s, choices, temperature, choices_method=None):
            return ChoicesDecision(choices[0], {})

    with pytest.raises(errors.Unsupported, match="needs the log-probabilities of its choices"):
        function(lambda s: s.__iadd__(distribution("d", ["a", "b"]))).run(backend=Silent())["d"]


def test_a_distribution_is_sent_as_a_selection_that_appends_nothing(connect):
    backend = connect()
    function(lambda s: s.__iadd__(distribution("d", ["a", "b"]))).run(backend=backend).sync()
    (select,) = [op for op in backend.client.submits[0].ops if isinstance(op, ops.Select)]
    assert not select.append


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"choices": []}, "must be a list of non-empty strings"),
        ({"choices": ["a", "a"]}, "a choice is given twice"),
        ({"choices": ["a"], "temperature": 0}, "must be above 0"),
        ({"choices": ["a"], "prior": "flat"}, "must map each choice to a probability"),
    ],
)
def test_choices_that_cannot_be_scored_are_refused_when_they_are_written(given, message):
    with pytest.raises(errors.InvalidRequest, match=message):
        distribution("d", **given)
