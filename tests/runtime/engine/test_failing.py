"""Failed, cancelled and late ops on a tiny random model: errors are named, other programs go on, no slot is lost."""

import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import GREEDY, Driver

FORTY = SamplingParams(temperature=0.0, max_tokens=64)


def test_a_failed_op_fails_the_later_ops_of_its_program_only(driver):
    other = driver.submit([o.Text(op=0, seq=0, text="fine"), o.Gen(op=1, seq=0, params=GREEDY)])
    too_long = "x" * (driver.engine.context_len + 10)
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text=too_long),
            o.Gen(op=1, seq=0, params=GREEDY),
            o.Text(op=2, seq=0, text="later"),
            o.Close(op=3, seq=0),
        ]
    )
    assert outcome.failed[1].error.kind == "PromptTooLong" and "but the context is" in outcome.failed[1].error.message
    assert outcome.failed[2].error.kind == "DependencyFailed"
    assert set(outcome.ends.values()) == {1} and outcome.closed is not None
    assert len(other.value(1)[0]) > 0


@pytest.mark.parametrize(
    ("op", "kind", "says"),
    [
        (o.Gen(op=1, seq=0, params=SamplingParams(max_tokens=-1)), "InvalidParams", "max_tokens=-1: must be >= 0"),
        (o.Gen(op=1, seq=0, params=SamplingParams(top_p=1.5)), "InvalidParams", r"top_p=1.5: must be in (0, 1]"),
        (o.Gen(op=1, seq=0, n=0), "LimitExceeded", "n=0: must be between 1 and 128"),
        (o.Gen(op=0, seq=0), "InvalidRequest", "op id 0 is taken"),
        (o.Select(op=1, seq=0, choices=()), "InvalidParams", "must be non-empty strings"),
        (o.Ref(op=1, seq=0, source=9), "InvalidRequest", "source 9 is not an earlier op"),
        (o.Join(op=1, seq=0, children=(7,)), "InvalidRequest", "child 7 is not another sequence"),
        (o.Image(op=1, seq=0, hash="x"), "Unsupported", "takes no images"),
        (o.Rollback(op=1, seq=0, to=5), "InvalidRequest", "to 5 is not an earlier mark"),
    ],
)
def test_a_bad_submit_is_rejected_whole_with_the_reason(driver, op, kind, says):
    outcome = driver.run([o.Text(op=0, seq=0, text="a"), op])
    assert [error.kind for error in outcome.rejected.errors] == [kind]
    assert says in outcome.rejected.errors[0].message
    assert not outcome.ends and not driver.engine.programs.by_key


def test_a_bad_grammar_fails_its_op_alone(driver):
    good = driver.submit([o.Text(op=0, seq=0, text="a"), o.Gen(op=1, seq=0, params=GREEDY)])
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text="a"),
            o.Gen(op=1, seq=0, grammar=o.GrammarSpec("regex", "(unclosed")),
            o.Close(op=2, seq=0),
        ]
    )
    assert outcome.failed[1].error.kind == "InvalidGrammar"
    assert good.value(1)


def test_a_grammar_at_its_limit_fails_only_its_op_and_keeps_the_text(driver):
    good = driver.submit([o.Text(op=0, seq=0, text="a"), o.Gen(op=1, seq=0, params=GREEDY)])
    outcome = driver.submit(
        [
            o.Text(op=0, seq=0, text="a"),
            o.Gen(op=1, seq=0, n=3, params=FORTY, grammar=o.GrammarSpec("regex", "[a-z]{40}")),
            o.Close(op=2, seq=0),
        ]
    )

    def second() -> object:
        tags = [seq.tag for seq in driver.engine.programs.live.values()]
        return next((tag for tag in tags if getattr(tag, "index", 0) == 1 and tag.num_generated > 2), None)

    for _ in range(500):
        driver.step()
        if second() is not None:
            break
    second().matcher.error = "at position 3: too complex"
    driver.run()
    assert outcome.failed[1].error.kind == "InvalidGrammar" and "too complex" in outcome.failed[1].error.message
    assert len(outcome.failed[1].partial) == 3 and outcome.failed[1].partial[0]
    assert outcome.closed is not None and good.value(1)


def test_a_grammar_that_exceeds_its_work_limit_fails_only_its_op(driver, monkeypatch):
    good = driver.submit([o.Text(op=0, seq=0, text="a"), o.Gen(op=1, seq=0, params=GREEDY)])
    items = '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true, "minItems": 9}'
    long = SamplingParams(temperature=1.0, seed=3, max_tokens=80)
    outcome = driver.submit(
        [o.Text(op=0, seq=0, text="a"), o.Gen(op=1, seq=0, params=long, grammar=o.GrammarSpec("json_schema", items))]
    )
    monkeypatch.setattr("phloem.constrained.machine.machine.MASK_WORK", 1)
    driver.run()
    assert outcome.failed[1].error.kind == "InvalidGrammar" and "more than 1 steps" in outcome.failed[1].error.message
    assert good.value(1)


def test_a_candidate_that_runs_out_of_slots_takes_its_sibling_out_of_the_step(tiny_model_path):
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=120, num_threads=1)
    driver = Driver(EngineCore(config))
    long = SamplingParams(temperature=1.0, seed=1, max_tokens=100, ignore_eos=True)
    outcome = driver.run(
        [o.Text(op=0, seq=0, text="x" * 90), o.Gen(op=1, seq=0, n=2, params=long), o.Close(op=2, seq=0)]
    )
    assert outcome.failed[1].error.kind == "PromptTooLong" and set(outcome.ends.values()) == {1}


def test_candidates_that_are_each_too_long_for_the_slots_fail_their_op_once(tiny_model_path):
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=64, num_threads=1)
    driver = Driver(EngineCore(config))
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text="x" * 90),
            o.Gen(op=1, seq=0, n=3, params=GREEDY),
            o.Gen(op=2, seq=0, params=GREEDY),
            o.Close(op=3, seq=0),
        ]
    )
    assert {op: failed.error.kind for op, failed in outcome.failed.items()} == {
        1: "PromptTooLong",
        2: "DependencyFailed",
    }
    assert "the pool has 64" in outcome.failed[1].error.message and outcome.closed is not None
    after = driver.run([o.Text(op=0, seq=0, text="fine"), o.Gen(op=1, seq=0, params=GREEDY)])
    assert after.value(1) and driver.engine.cache.num_leased == 0
    driver.engine.close()


def test_cancel_keeps_what_was_generated_and_frees_everything(driver):
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    outcome = driver.submit(
        [o.Text(op=0, seq=0, text="go"), o.Gen(op=1, seq=0, params=long), o.Close(op=2, seq=0)], program="doomed"
    )
    for _ in range(8):
        driver.step()
    driver.say(m.Cancel("doomed"))
    driver.run()
    assert outcome.failed[1].error.kind == "Cancelled" and outcome.failed[1].partial[0]
    assert outcome.failed[2].error.kind == "Cancelled" and outcome.closed is not None
    assert driver.engine.cache.num_leased == 0 and not driver.engine.programs.live


def test_a_cancelled_op_fails_later_ops_and_no_earlier_one(driver):
    outcome = driver.submit(
        [
            o.Text(op=0, seq=0, text="go"),
            o.Gen(op=1, seq=0, params=GREEDY),
            o.Text(op=2, seq=0, text="on"),
            o.Gen(op=3, seq=0, params=GREEDY),
            o.Gen(op=4, seq=0, params=GREEDY),
            o.Close(op=5, seq=0),
        ],
        program="half",
    )
    driver.step()
    driver.say(m.Cancel("half", op=3))
    driver.run()
    assert set(outcome.done) == {0, 1, 2, 5} and outcome.done[1].meta.candidates[0].finish_reason == "length"
    assert {op: failed.error.kind for op, failed in outcome.failed.items()} == {3: "Cancelled", 4: "DependencyFailed"}


def test_a_close_is_not_cancelled_so_that_its_program_ends(driver):
    outcome = driver.submit(
        [o.Text(op=0, seq=0, text="go"), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)], program="closing"
    )
    driver.step()
    driver.say(m.Cancel("closing", op=2))
    driver.run()
    assert set(outcome.done) == {0, 1, 2} and outcome.closed is not None


def test_a_deadline_ends_a_program(tiny_model_path):
    now = [0.0]
    engine = EngineCore(
        EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=2048), clock=lambda: now[0]
    )
    driver = Driver(engine)
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    outcome = driver.submit(
        [o.Text(op=0, seq=0, text="go"), o.Gen(op=1, seq=0, params=long)], settings=m.ProgramSettings(deadline_s=5.0)
    )
    driver.step()
    now[0] = 5.1
    driver.run()
    assert outcome.failed[1].error.kind == "DeadlineExceeded"
    engine.close()
