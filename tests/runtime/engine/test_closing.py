"""Texts under a grammar end within ``max_tokens``: in batches, with drafts, forced tokens, forks and replays."""

import json
from typing import Any

import jsonschema
import pytest
from phloem.constrained import compile
from phloem.protocol import ops as o
from phloem.protocol.messages import CandidateMeta, GenMeta
from phloem.protocol.ops import Drawn, GrammarSpec
from phloem.protocol.sampling import SamplingParams
from phloem.tests.runtime.engine.driver import Driver, Outcome

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "next": {"$ref": "#"},
    },
    "required": ["id"],
    "additionalProperties": False,
}
THING = GrammarSpec("json_schema", json.dumps(SCHEMA), {"whitespace": "compact"})
SUM = GrammarSpec("ebnf", 'root ::= sum\nsum ::= num "+" sum | num | "(" sum ")"\nnum ::= [0-9]+')
CALL = GrammarSpec("structural_tags", json.dumps({"tags": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}))
LINE = GrammarSpec("regex", "([a-z]+ ){2,}[a-z]{3}[.]")
LIST = GrammarSpec("lark", 'start: "say " WORD ("," WORD)*\nWORD: /[a-z]+/')
TOOL = GrammarSpec(
    "structural_tags",
    json.dumps(
        {
            "tags": [{"begin": '<call name="f">', "schema": SCHEMA, "end": "</call>"}],
            "triggers": ["<call"],
            "at_least_one": True,
        }
    ),
)


def params(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **fields})


def ask(text: str, grammar: GrammarSpec, sampling: SamplingParams, *, n: int = 1) -> list[o.AnyOp]:
    return [
        o.Text(op=0, seq=0, text=text),
        o.Gen(op=1, seq=0, params=sampling, grammar=grammar, n=n),
        o.Close(op=2, seq=0),
    ]


def candidates(outcome: Outcome) -> list[CandidateMeta]:
    meta = outcome.done[1].meta
    assert isinstance(meta, GenMeta)
    return list(meta.candidates)


def check(grammar: GrammarSpec, text: str, driver: Driver) -> None:
    if grammar is THING:
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
        return
    vocabulary = driver.engine.tokenizer.vocabulary()
    compiled = compile(grammar.kind, grammar.text, vocabulary, **grammar.options)
    end = compiled.machine.advance_bytes(compiled.start, text.encode())
    assert end >= 0 and compiled.machine.may_end(end), text


@pytest.mark.parametrize("speculative", ["off", "auto"])
@pytest.mark.parametrize("jump_forward", [True, False])
def test_every_answer_is_complete_within_max_tokens(start, jump_forward, speculative):
    driver = start(jump_forward=jump_forward, speculative=speculative)
    asked = []
    for i in range(24):
        grammar = (THING, SUM, CALL, LINE, LIST, TOOL)[i % 6]
        sampling = params(9 + 2 * i + 22 * (grammar is TOOL), temperature=(i % 2) * 1.0, seed=i)
        asked.append((grammar, sampling, driver.submit(ask(f"thing {i}: ", grammar, sampling))))
    driver.run()
    num_closed = 0
    for grammar, sampling, outcome in asked:
        (text,) = outcome.value(1)
        (meta,) = candidates(outcome)
        check(grammar, text, driver)
        assert meta.completion_tokens <= sampling.max_tokens
        assert meta.finish_reason == "stop" or grammar in (SUM, CALL)
        num_closed += meta.closed_by_budget
    assert num_closed > 12


@pytest.mark.parametrize("options", [{"speculative": "off"}, {"jump_forward": False}, {"max_running": 1}])
def test_drafts_forced_tokens_and_batches_change_no_answer(start, options):
    texts = []
    for driver in (start(), start(**options)):
        outcomes = [
            driver.submit(ask(f"thing {i}: ", THING, params(12 + 3 * i, temperature=(i % 3) / 2, seed=i)))
            for i in range(20)
        ]
        driver.run()
        texts.append([(outcome.value(1), candidates(outcome)[0].closed_by_budget) for outcome in outcomes])
    assert texts[0] == texts[1]
    assert any(is_closed for _, is_closed in texts[0])


def test_where_the_budget_takes_no_token_away_the_answer_is_that_of_a_cut_one(start):
    driver = start()
    outcomes = {
        finish: [
            driver.submit(ask(f"sum {i}: ", SUM, params(60 + i, temperature=1.0, seed=i, finish=finish)))
            for i in range(20)
        ]
        for finish in ("closed", "cut")
    }
    driver.run()
    num_equal = 0
    for closed, cut in zip(*outcomes.values(), strict=True):
        if not candidates(closed)[0].closed_by_budget:
            num_equal += 1
            assert closed.value(1) == cut.value(1)
        assert not candidates(cut)[0].closed_by_budget
    assert num_equal > 3


def test_an_answer_whose_end_is_all_that_the_limit_leaves_is_closed_by_it(start):
    """After three digits one token is left: what may follow needs two, so the text ends without an end token."""
    driver = start()
    grammar = GrammarSpec("regex", "[0-9]{3}(e[0-9]+)?")
    for max_tokens, is_closed in ((4, True), (3, False)):
        (meta,) = candidates(driver.run(ask("a number: ", grammar, params(max_tokens))))
        assert (meta.finish_reason, meta.completion_tokens) == ("stop" if is_closed else "length", 3)
        assert meta.closed_by_budget == is_closed
    stopped = params(4, stop=("1", "2", "3", "4", "5", "6", "7", "8", "9", "0"))
    (meta,) = candidates(driver.run(ask("a number: ", grammar, stopped)))
    assert meta.finish_reason == "stop" and not meta.closed_by_budget


def test_finish_cut_cuts_the_answer(start):
    driver = start()
    outcome = driver.run(ask("thing: ", THING, params(10, finish="cut")))
    (meta,) = candidates(outcome)
    assert (meta.finish_reason, meta.completion_tokens, meta.closed_by_budget) == ("length", 10, False)


def test_a_budget_below_the_shortest_answer_is_refused(start):
    driver = start()
    outcome = driver.run(ask("thing: ", THING, params(7)))
    error = outcome.failed[1].error
    assert error.kind == "InvalidParams"
    assert error.message == (
        'max_tokens=7: the shortest text of the grammar has 9 tokens; give at least so many, or finish="cut"'
    )
    assert driver.run(ask("thing: ", THING, params(9))).value(1) == ['{"id":""}']


def test_what_is_left_of_the_context_is_a_budget_too(start):
    driver = start(max_seq_len=64)
    outcome = driver.run(ask("x" * 30, THING, params(400)))
    (meta,) = candidates(outcome)
    check(THING, outcome.value(1)[0], driver)
    assert meta.closed_by_budget and meta.finish_reason == "stop"
    outcome = driver.run(ask("x" * 60, THING, params(400)))
    assert outcome.failed[1].error.kind == "PromptTooLong" and "at least 9 to come" in outcome.failed[1].error.message


def test_each_candidate_and_each_fork_is_closed(start):
    driver = start()
    outcome = driver.run(ask("things: ", THING, params(16, temperature=1.0, seed=5), n=4))
    for text, meta in zip(outcome.value(1), candidates(outcome), strict=True):
        check(THING, text, driver)
        assert meta.completion_tokens <= 16
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text="things: "),
            o.Fork(op=1, seq=0, children=(1, 2)),
            *[o.Gen(op=1 + i, seq=i, params=params(10 + i), grammar=THING) for i in (1, 2)],
            o.Close(op=4, seq=0),
        ]
    )
    for i in (2, 3):
        check(THING, outcome.value(i)[0], driver)


def test_a_prompt_that_is_healed_leaves_the_whole_budget(start):
    driver = start()
    outcome = driver.run(ask("the thing is ", THING, params(9, heal=True)))
    assert outcome.value(1) == ['{"id":""}']


def test_a_replayed_answer_goes_on_as_it_would_have(start):
    driver = start()
    sampling = params(30, temperature=1.0, seed=3)
    whole = driver.run(ask("thing: ", THING, sampling))
    (meta,) = candidates(whole)
    assert meta.closed_by_budget
    for count in (1, 10, meta.completion_tokens - 2):
        drawn = (Drawn(token_ids=meta.token_ids[:count]),)
        ops = ask("thing: ", THING, sampling)
        ops[1] = o.Gen(op=1, seq=0, params=sampling, grammar=THING, drawn=drawn)
        again = driver.run(ops)
        assert again.value(1) == whole.value(1) and candidates(again)[0].closed_by_budget
