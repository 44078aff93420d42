"""Grammars in the engine: the end of a text, forced tokens, tags, preemption, forks and rollbacks."""

import json
import re
from typing import Any

import numpy as np
import pytest
from phloem.protocol import ops as o
from phloem.protocol.ops import GrammarSpec
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.engine import EngineCore

GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
DATE = GrammarSpec("regex", "on (the )?[0-9]{2}\\.[0-9]{2}\\.[0-9]{4} at noon")
CALLS = {
    "tags": [
        {
            "begin": '<call name="weather">',
            "schema": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Lima"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "end": "</call>",
        },
        {"begin": '<call name="wait">', "regex": "[0-9]{1,3}s", "end": "</call>"},
    ],
    "triggers": ["<call"],
}


def gen(grammar: GrammarSpec, *, params: SamplingParams = GREEDY, seq: int = 0, op: int = 1, n: int = 1) -> o.Gen:
    return o.Gen(op=op, seq=seq, params=params, grammar=grammar, n=n)


def ask(text: str, grammar: GrammarSpec, **options: Any) -> list[o.AnyOp]:
    return [o.Text(op=0, seq=0, text=text), gen(grammar, **options), o.Close(op=2, seq=0)]


def wish(monkeypatch: pytest.MonkeyPatch, engine: EngineCore, text: str) -> None:
    """Replace the engine's logits: the model now prefers ``text`` and then the end, as far as the grammar allows."""
    wanted = [*text.encode(), engine.tokenizer.vocabulary().eos]
    executor = engine.executor
    masks_of, constrain, drawn = executor.masks_of, executor.constrain, []

    def note(rows: Any, vectorised: Any) -> Any:
        drawn[:] = rows
        return masks_of(rows, vectorised)

    def wishful(logits: Any, masks: Any) -> None:
        for i, row in enumerate(drawn):
            logits[i, wanted[min(len(row.token_ids) - row.prompt_len, len(wanted) - 1)]] += 100.0
        constrain(logits, masks)

    monkeypatch.setattr(executor, "masks_of", note)
    monkeypatch.setattr(executor, "constrain", wishful)


@pytest.mark.parametrize("jump_forward", [True, False])
def test_a_text_that_can_only_end_needs_no_further_forward(start, jump_forward):
    driver = start(jump_forward=jump_forward, speculative="off")
    outcome = driver.run(ask("id: ", GrammarSpec("regex", "[0-9]{3}")))
    candidate = outcome.done[1].meta.candidates[0]
    assert (candidate.finish_reason, candidate.completion_tokens) == ("stop", 3)
    assert driver.engine.loop.counters.forward_rows == 3
    assert re.fullmatch("[0-9]{3}", outcome.value(1)[0])


def test_a_text_that_can_continue_needs_a_forward_to_end(monkeypatch, start):
    driver = start(speculative="off")
    wish(monkeypatch, driver.engine, "12")
    outcome = driver.run(ask("id: ", GrammarSpec("regex", "[0-9]{1,3}")))
    assert outcome.value(1) == ["12"] and driver.engine.loop.counters.forward_rows == 3


def test_jump_forward_gives_the_same_text_in_fewer_forwards(start):
    texts, forwards, forced = [], [], []
    for jump_forward in (True, False):
        driver = start(jump_forward=jump_forward, speculative="off")
        outcomes = [driver.submit(ask(f"The {i}th came ", DATE)) for i in range(4)]
        driver.run()
        texts.append([outcome.value(1) for outcome in outcomes])
        forwards.append(driver.engine.loop.counters.forward_rows)
        forced.append(sum(outcome.done[1].meta.candidates[0].forced_tokens for outcome in outcomes))
    assert texts[0] == texts[1]
    assert forwards[1] - forwards[0] == forced[0] >= 4 * len("n .. at noon") and forced[1] == 0


@pytest.mark.parametrize("jump_forward", [True, False])
def test_preempted_sequences_keep_their_grammar_state(start, jump_forward):
    schema = GrammarSpec("json_schema", json.dumps(CALLS["tags"][0]["schema"]))
    grammars = [DATE, schema, GrammarSpec("regex", "[ab]{60}")]
    values = []
    for num_slots in (128, 4096):
        driver = start(num_slots=num_slots, max_seq_len=120, jump_forward=jump_forward)
        outcomes = [driver.submit(ask(f"{'leaf ' * (3 + i)}{i}:", grammars[i % 3])) for i in range(6)]
        driver.run()
        values.append([outcome.value(1) for outcome in outcomes])
        assert (driver.engine.scheduler.num_preemptions > 0) == (num_slots == 128)
    assert values[0] == values[1]
    assert all(re.fullmatch("[ab]{60}", value[0]) for value in values[0][2::3])


def test_each_fork_has_a_grammar_of_its_own(start):
    driver = start()
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text="a date: "),
            gen(DATE),
            o.Fork(op=2, seq=0, children=(1, 2)),
            o.Text(op=3, seq=1, text=" id "),
            gen(GrammarSpec("regex", "[0-9]{4}"), seq=1, op=4),
            o.Text(op=5, seq=2, text=" call "),
            gen(GrammarSpec("choices", '["yes", "no", "yes and no"]'), seq=2, op=6, n=4),
            *(o.Close(op=7 + i, seq=i) for i in range(3)),
        ]
    )
    assert re.fullmatch(DATE.text, outcome.value(1)[0])
    assert re.fullmatch("[0-9]{4}", outcome.value(4)[0])
    assert set(outcome.value(6)) <= {"yes", "no", "yes and no"}
    assert outcome.value(8) == f"a date: {outcome.value(1)[0]} id {outcome.value(4)[0]}"


def test_after_a_rollback_the_grammar_starts_again(start):
    driver = start()
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text="a date: "),
            o.Mark(op=1, seq=0),
            gen(DATE, op=2),
            o.Rollback(op=3, seq=0, to=1),
            gen(DATE, op=4),
            o.Rollback(op=5, seq=0, to=1),
            gen(GrammarSpec("regex", "[a-f]{5}"), op=6),
            o.Close(op=7, seq=0),
        ]
    )
    assert outcome.value(2) == outcome.value(4)
    assert outcome.value(7) == f"a date: {outcome.value(6)[0]}" and re.fullmatch("[a-f]{5}", outcome.value(6)[0])


@pytest.mark.parametrize("options", [{}, {"jump_forward": False}, {"speculative": "off", "prefill_chunk": 8}])
def test_free_text_then_calls_then_free_text_again(monkeypatch, start, options):
    driver = start(**options)
    said = 'It < rains. <call name="weather">{"city":"Lima"}</call><call name="wait">12s</call> Done <b>.'
    wish(monkeypatch, driver.engine, said)
    outcome = driver.run(ask("How is it?", GrammarSpec("structural_tags", json.dumps(CALLS))))
    assert outcome.value(1) == [said]
    assert outcome.done[1].meta.candidates[0].finish_reason == "stop"
    if options.get("jump_forward", True):
        forced = outcome.done[1].meta.candidates[0].forced_tokens
        assert forced >= 2 * len(' name="') + 2 * len("</call>")


def test_the_grammar_restricts_text_inside_a_tag_and_not_outside(monkeypatch, start):
    driver = start()
    wish(monkeypatch, driver.engine, '<call name="wait">soon, in 7 s</call> </think>')
    text = driver.run(ask("When?", GrammarSpec("structural_tags", json.dumps(CALLS)))).value(1)[0]
    begin, _, rest = text.partition(">")
    assert begin == '<call name="wait"' and re.match("[0-9]{1,3}s</call>", rest), text


def test_calls_are_held_to_their_schemas_only_after_the_thinking(monkeypatch, start):
    driver = start()
    said = 'Perhaps <call name="wait">soon</call>?</think>Yes: <call name="wait">5s</call>'
    wish(monkeypatch, driver.engine, said)
    tags = GrammarSpec("structural_tags", json.dumps({**CALLS, "start_after": "</think>"}))
    assert driver.run(ask("Wait?", tags)).value(1) == [said]


def test_sampled_answers_in_a_batch_equal_those_alone(start):
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=5)
    grammar = GrammarSpec(
        "json_schema", json.dumps({"type": "array", "items": {"enum": ["a", "ab", 12]}, "maxItems": 4})
    )
    alone = [start().run(ask(f"list {i}", grammar, params=params)).value(1)[0] for i in range(3)]
    driver = start()
    outcomes = [driver.submit(ask(f"list {i % 3}", grammar, params=params)) for i in range(12)]
    driver.run()
    assert [outcome.value(1)[0] for outcome in outcomes] == alone * 4
    assert all(set(np.unique(json.loads(text))) <= {"a", "ab", "12"} or json.loads(text) == [] for text in alone)
