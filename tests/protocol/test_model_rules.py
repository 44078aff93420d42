import msgspec
import pytest
from phloem.protocol.errors import InvalidRequest
from phloem.protocol.model_rules import AnswerCheck, ModelRule, Probe, Savings, When, check_rules

PROBE = Probe(question="{prompt}\nThis is")


def a_rule(**when):
    return ModelRule(cheap="small", strong="large", when=When(**when))


@pytest.mark.parametrize(
    ("tenant", "prompt_chars", "reason"),
    [("", 10, None), ("gold", 10, "tenant"), ("", 11, "length"), ("gold", 11, "tenant"), ("silver", 0, None)],
)
def test_a_tenant_or_a_long_prompt_meets_a_rule(tenant, prompt_chars, reason):
    when = When(tenants=("gold",), longer_than_chars=10)
    assert when.met(tenant=tenant, prompt_chars=prompt_chars) == reason


def test_a_caller_without_a_tenant_meets_no_condition_of_tenants():
    assert When(tenants=("gold",)).met(tenant="", prompt_chars=10**6) is None


@pytest.mark.parametrize(
    ("scores", "limit", "is_hard"),
    [
        ((-1.0, -1.0), 0.5, False),
        ((-1.1, -1.0), 0.5, True),
        ((-1.0, -1.1), 0.5, False),
        ((-1.0, 0.0), 0.74, False),  # p(hard) = 0.731
        ((-1.0, 0.0), 0.73, True),
        ((0.0, -5000.0), 0.01, False),
        ((-5000.0, 0.0), 0.99, True),
    ],
)
def test_a_prompt_is_hard_where_the_probability_is_above_the_limit(scores, limit, is_hard):
    assert msgspec.structs.replace(PROBE, limit=limit).is_hard(scores) is is_hard


def test_a_probe_inserts_a_prompt_that_has_braces():
    assert PROBE.text("{x} {prompt}") == "{x} {prompt}\nThis is"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"small": a_rule(longer_than_chars=9)}, "rule 'small': this is the name of a model as well"),
        (
            {"auto": ModelRule(cheap="tiny", strong="large", when=When(longer_than_chars=9))},
            "rule 'auto', cheap: 'tiny' is not served; there are 'small', 'large'",
        ),
        (
            {"auto": ModelRule(cheap="small", strong="small", when=When(longer_than_chars=9))},
            "rule 'auto', strong: 'small' is the cheap model too",
        ),
        ({"auto": a_rule()}, "rule 'auto', when: no condition is given"),
        ({"auto": a_rule(longer_than_chars=0)}, "rule 'auto', when.longer_than_chars: 0 must be 1 or more"),
        ({"auto": a_rule(probe=Probe(question="hard?"))}, "rule 'auto', when.probe.question: it has no {prompt}"),
        (
            {"auto": a_rule(probe=Probe(question="{prompt}", limit=1.0))},
            "rule 'auto', when.probe.limit: 1 must be between 0 and 1",
        ),
        ({"auto": a_rule(probe=Probe(question="{prompt}", easy="a", hard="a"))}, "must be two texts that differ"),
        ({"auto": a_rule(check=AnswerCheck())}, "rule 'auto', when.check: it checks nothing"),
        ({"auto": a_rule(check=AnswerCheck(regex="("))}, "rule 'auto', when.check.regex: '(': missing )"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_by_name(rules, message):
    with pytest.raises(InvalidRequest) as caught:
        check_rules(rules, ["small", "large"])
    assert message in str(caught.value)


def test_rules_are_read_from_toml_and_unknown_conditions_refused():
    text = '[auto]\ncheap = "small"\nstrong = "large"\nwhen = {longer_than_chars = 9, check = {whole = true}}'
    expected = a_rule(longer_than_chars=9, check=AnswerCheck(whole=True))
    assert msgspec.toml.decode(text, type=dict[str, ModelRule]) == {"auto": expected}
    with pytest.raises(msgspec.ValidationError, match="longer_than"):
        msgspec.toml.decode(text.replace("longer_than_chars", "longer_than"), type=dict[str, ModelRule])


def test_what_was_saved_is_the_difference_of_the_tokens_times_minus_the_dropped_answers():
    savings = Savings({"auto": a_rule(check=AnswerCheck(whole=True))})
    savings.add_answer("auto", "small", "cheap", tokens=100)
    savings.add_answer("auto", "large", "check", tokens=50)
    savings.add_dropped("auto", tokens=10)
    savings.add_speed("small", tokens=200, seconds=2.0)
    assert savings.report()["auto"].saved_s is None  # the strong model's speed is not known yet
    savings.add_speed("large", tokens=10, seconds=0.5)
    counts = savings.report()["auto"]
    assert counts.answered == {("small", "cheap"): 1, ("large", "check"): 1}
    assert (counts.cheap_tokens, counts.dropped_tokens) == (100, 10)
    assert counts.saved_s == pytest.approx(100 * (0.05 - 0.01) - 10 * 0.01)
