"""Programs on several models: named, chosen by a rule, run again after a failed check."""

import asyncio

import phloem
import pytest
from phloem import AnswerCheck, InvalidRequest, ModelRule, Models, Probe, Unsupported, When, function, gen
from phloem.lang.backend.base_backend import BaseBackend
from phloem.tests.runtime.models.tiny import make_tiny_model


@function
def answer(s, question):
    s += question
    s += gen("answer", max_tokens=4)


@function
async def answer_in_loop(s, question):
    s += question
    s += gen("answer", max_tokens=4)
    await s.get("answer")


def a_rule(**when):
    return {"auto": ModelRule(cheap="small", strong="large", when=When(**when))}


@pytest.fixture
def pair(connect):
    """Two models that say their names."""
    return {name: connect(reply=lambda prompt, op, name=name: f" {name}", model=name) for name in ("small", "large")}


def told(state):
    stats = state.stats()
    return state["answer"].strip(), stats["model"], stats["rule"], stats["reason"], stats["tries"]


def test_a_run_names_its_model(pair):
    models = Models(pair)
    assert told(answer.run("Hi", backend=models["large"])) == ("large", "large", "", "named", 1)
    assert told(answer.run("Hi", backend=models["small"])) == ("small", "small", "", "named", 1)


def test_a_run_on_one_backend_tells_of_no_model(pair):
    assert "model" not in answer.run("Hi", backend=pair["small"]).stats()


def test_the_texts_of_the_arguments_are_the_prompt_that_a_rule_measures(pair):
    models = Models(pair, a_rule(longer_than_chars=5))
    assert told(answer.run("12345", backend=models["auto"])) == ("small", "small", "auto", "cheap", 1)
    assert told(answer.run("123456", backend=models["auto"])) == ("large", "large", "auto", "length", 1)
    assert told(answer.run(question="123456", backend=models["auto"]))[3] == "length"
    assert told(answer.bind(question="123456").run(backend=models["auto"]))[3] == "length"

    @function
    def listed(s, questions):
        s += "".join(questions) + gen("answer", max_tokens=4)

    assert told(listed.run(["123", "456"], backend=models["auto"]))[3] == "length"


def test_a_tenant_gets_the_strong_model(pair):
    models = Models(pair, a_rule(tenants=("gold",)))
    assert told(answer.run("Hi", tenant="gold", backend=models["auto"]))[1:4] == ("large", "auto", "tenant")
    assert told(answer.run("Hi", tenant="iron", backend=models["auto"]))[1:4] == ("small", "auto", "cheap")


def test_a_run_that_fails_its_check_runs_again_on_the_strong_model(pair):
    seen = []

    def holds(state):
        seen.append(state["answer"])
        return "large" in state["answer"]

    models = Models(pair, a_rule(check=AnswerCheck(holds=holds)))
    assert told(answer.run("Hi", temperature=0.5, backend=models["auto"])) == ("large", "large", "auto", "check", 2)
    assert seen == [" small"]  # the strong model's answer is the last one
    submits = pair["large"].client.submits
    assert [op.params.temperature for op in submits[0].ops if hasattr(op, "params")] == [0.5]
    counts = models.report()["auto"]
    assert counts.answered == {("large", "check"): 1}
    assert (counts.cheap_tokens, counts.dropped_tokens) == (0, 1)


def test_a_run_that_meets_its_check_stays(pair):
    models = Models(pair, a_rule(check=AnswerCheck(holds=lambda s: "small" in s["answer"])))
    assert told(answer.run("Hi", backend=models["auto"])) == ("small", "small", "auto", "cheap", 1)
    assert pair["large"].client.submits == []


def test_an_answer_that_was_cut_fails_the_check_of_whole_answers(connect):
    pair = {"small": connect(reply=lambda p, op: " a b c d e f"), "large": connect(reply=lambda p, op: " yes")}
    models = Models(pair, a_rule(check=AnswerCheck(whole=True)))
    assert told(answer.run("Hi", backend=models["auto"])) == ("yes", "large", "auto", "check", 2)


def test_a_text_without_a_value_fails_the_check(connect):
    pair = {"small": connect(reply=lambda p, op: " many"), "large": connect(reply=lambda p, op: "7")}

    @function
    def count(s):
        s += "How many? " + gen("answer", max_tokens=4)

    def is_number(state):
        if not state["answer"].isdigit():
            raise phloem.ParseError(f"{state['answer']!r} is no number")
        return True

    models = Models(pair, a_rule(check=AnswerCheck(holds=is_number)))
    assert count.run(backend=models["auto"])["answer"] == "7"


def test_a_prompt_that_the_cheap_model_cannot_hold_fails_the_check(connect):
    pair = {"small": connect(context_len=8), "large": connect(reply=lambda p, op: " large")}
    models = Models(pair, a_rule(check=AnswerCheck(whole=True)))
    assert told(answer.run("word " * 50, backend=models["auto"]))[1:4] == ("large", "auto", "check")


def test_an_error_of_the_body_is_the_callers_and_no_failed_check(pair):
    @function
    def broken(s):
        s += gen("answer")
        raise ValueError("mine")

    models = Models(pair, a_rule(check=AnswerCheck(whole=True)))
    with pytest.raises(ValueError, match="mine"):
        broken.run(backend=models["auto"])
    assert pair["large"].client.submits == []


def test_a_probe_asks_the_cheap_model_and_decides_by_its_scores(connect):
    cheap = connect(reply=lambda p, op: " small", select=lambda prompt, op: 1 if "why" in prompt else 0)
    pair = {"small": cheap, "large": connect(reply=lambda p, op: " large")}
    models = Models(pair, a_rule(probe=Probe(question="Q: {prompt}\nThis is")))
    assert told(answer.run("Tell me why", backend=models["auto"]))[1:4] == ("large", "auto", "probe")
    assert told(answer.run("Tell me", backend=models["auto"]))[1:4] == ("small", "auto", "cheap")
    assert [op.text for op in cheap.client.submits[0].ops if hasattr(op, "text")] == ["Q: Tell me why\nThis is"]
    careful = Models(pair, a_rule(probe=Probe(question="Q: {prompt}\nThis is", limit=0.9)))  # the scores: 0.73
    assert told(answer.run("Tell me why", backend=careful["auto"]))[1:4] == ("small", "auto", "cheap")


def test_a_batch_decides_for_each_item(pair):
    models = Models(pair, a_rule(longer_than_chars=5, check=AnswerCheck(holds=lambda s: "again" not in s.text())))
    items = [{"question": text} for text in ("a", "a long one", "again")]
    for options in ({}, {"num_threads": 2}):
        states = answer.run_batch(items, backend=models["auto"], **options)
        assert [told(state)[1:] for state in states] == [
            ("small", "auto", "cheap", 1),
            ("large", "auto", "length", 1),
            ("large", "auto", "check", 2),
        ]


def test_an_async_program_decides_in_its_loop(connect):
    cheap = connect(reply=lambda p, op: " small", select=lambda prompt, op: 1 if "why" in prompt else 0)
    pair = {"small": cheap, "large": connect(reply=lambda p, op: " large")}
    when = {"probe": Probe(question="{prompt}"), "check": AnswerCheck(holds=lambda s: "again" not in s.text())}
    backend = Models(pair, a_rule(**when))["auto"]
    questions = ("Hi", "why", "again")

    async def run_all():
        one_by_one = [await answer_in_loop.run(question, backend=backend) for question in questions]
        items = [{"question": question} for question in questions]
        return one_by_one + await answer_in_loop.run_batch_async(items, backend=backend)

    states = asyncio.run(run_all())
    assert [told(state)[3] for state in states] == ["cheap", "probe", "check"] * 2


def test_a_stream_takes_every_rule_but_one_with_a_check(pair):
    models = Models(pair, a_rule(longer_than_chars=5))
    state = answer.run("a long one", stream=True, backend=models["auto"])
    assert "".join(state.text_iter()) == "a long one large"
    assert state.stats()["reason"] == "length"
    checked = Models(pair, a_rule(check=AnswerCheck(whole=True)))
    with pytest.raises(Unsupported, match="rule 'auto' has a check, which needs the whole answer"):
        answer.run("Hi", stream=True, backend=checked["auto"])


def test_a_compiled_program_and_a_fork_run_on_the_chosen_model(pair):
    models = Models(pair, a_rule(longer_than_chars=5))
    assert told(answer.compile().run(question="a long one", backend=models["auto"]))[1:4] == ("large", "auto", "length")

    @function
    def forked(s, question):
        s += question
        forks = s.fork(2)
        forks += gen("x", max_tokens=4)
        forks.join()

    state = forked.run("a long one", backend=models["auto"])
    assert state["x"] == [" large", " large"]
    assert pair["small"].client.submits == []


def test_counts_are_by_model_and_reason(pair):
    models = Models(pair, a_rule(longer_than_chars=5))
    for question in ("a", "b", "a long one"):
        answer.run(question, backend=models["auto"]).stats()
    answer.run("a", backend=models["large"]).stats()
    counts = models.report()["auto"]
    assert counts.answered == {("small", "cheap"): 2, ("large", "length"): 1}
    assert counts.cheap_tokens == 2
    assert counts.saved_s is not None  # both have generated


def test_what_is_no_model_is_refused_with_the_names_there_are(pair):
    models = Models(pair, a_rule(longer_than_chars=5))
    assert list(models) == ["small", "large", "auto"]
    with pytest.raises(KeyError, match="'huge' is none of the models and rules: small, large, auto"):
        models["huge"]
    with pytest.raises(InvalidRequest, match=r"backend=models\['small'\]"):
        answer.run("Hi", backend=models)
    with pytest.raises(Unsupported, match=r"rule 'auto', when.check.regex: .* use holds="):
        Models(pair, a_rule(check=AnswerCheck(regex="a")))
    with pytest.raises(InvalidRequest, match="'small' is the cheap model too"):
        Models(pair, {"auto": ModelRule(cheap="small", strong="small", when=When(longer_than_chars=1))})


def test_any_backend_can_be_a_model(pair):
    class Loud(BaseBackend):
        def generate(self, s, sampling_params):
            return " LOUD", {"completion_tokens": 1, "finish_reason": "length"}

    models = Models({"small": Loud(), "large": pair["large"]}, a_rule(check=AnswerCheck(whole=True)))
    assert answer.run("Hi", backend=models["small"])["answer"] == " LOUD"
    assert told(answer.run("Hi", backend=models["auto"]))[1:4] == ("large", "auto", "check")


def test_two_real_engines_answer_as_each_alone(engine, tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    with phloem.Engine(model=str(path), precision="float32", num_slots=2048) as other:
        probe = Probe(question="{prompt}")
        models = Models({"small": engine, "large": other}, a_rule(longer_than_chars=20, probe=probe))
        alone = {name: answer.run("Hi", temperature=0, backend=models[name])["answer"] for name in ("small", "large")}
        assert alone["small"] != alone["large"]
        state = answer.run("Hi", temperature=0, backend=models["auto"])
        assert state["answer"] == alone[state.stats()["model"]]
        long = answer.run("Hi" * 20, temperature=0, backend=models["auto"])
        assert long["answer"] == answer.run("Hi" * 20, temperature=0, backend=other)["answer"]
