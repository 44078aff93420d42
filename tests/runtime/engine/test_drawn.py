"""An op that starts on one engine and continues from its tokens on another gives the results of one engine."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.ops import AnyOp, Drawn, GrammarSpec
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore, vectorised_decode
from phloem.tests.runtime.engine.driver import Driver, Outcome, with_more
from phloem.tests.runtime.engine.test_overlap import engine_of
from phloem.tests.runtime.executor.stand_in import StandIn

pytestmark = pytest.mark.usefixtures("kernels_as_one_call")

PROMPT = "once upon a time there was a root"
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}'
PLAIN = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


def params(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(PLAIN, **changes)


OPS = {
    "greedy": o.Gen(op=1, seq=0, params=PLAIN),
    "seeded": o.Gen(op=1, seq=0, params=params(temperature=1.0, seed=7)),
    "until the end token": o.Gen(op=1, seq=0, params=params(temperature=1.5, seed=3, ignore_eos=False, max_tokens=40)),
    "penalties": o.Gen(
        op=1,
        seq=0,
        params=params(presence_penalty=0.9, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias={101: 2.0}),
    ),
    "narrow": o.Gen(op=1, seq=0, params=params(temperature=0.9, seed=5, top_k=20, top_p=0.9, min_p=0.01)),
    "least": o.Gen(op=1, seq=0, params=params(temperature=1.5, seed=11, ignore_eos=False, min_tokens=9)),
    "schema": o.Gen(op=1, seq=0, params=params(max_tokens=40), grammar=GrammarSpec("json_schema", SCHEMA)),
    "regex": o.Gen(
        op=1,
        seq=0,
        params=params(temperature=1.0, seed=2, max_tokens=40),
        grammar=GrammarSpec("regex", "the [a-f]{2,9} is a (maple|oak) of [0-9]{2}"),
    ),
    "stop": o.Gen(op=1, seq=0, params=params(temperature=1.0, seed=4, max_tokens=60, stop=("e", "th", "o a"))),
    "stop pattern": o.Gen(
        op=1, seq=0, params=params(temperature=1.0, seed=6, max_tokens=60, stop_regex=("[aeiou]{2}",))
    ),
    "stop token": o.Gen(op=1, seq=0, params=params(temperature=1.0, seed=8, max_tokens=60, stop_token_ids=(101, 97))),
    "healed": o.Gen(op=1, seq=0, params=params(heal=True)),
    "healed regex": o.Gen(
        op=1, seq=0, params=params(heal=True, temperature=1.0, seed=1), grammar=GrammarSpec("regex", "[a-z ]{5,10}")
    ),
    "candidates": o.Gen(op=1, seq=0, params=params(temperature=1.2, seed=9, ignore_eos=False, max_tokens=9), n=3),
    "several with a grammar": o.Gen(
        op=1,
        seq=0,
        params=params(temperature=1.0, seed=10, max_tokens=30),
        grammar=GrammarSpec("regex", "(yes|no): [a-z]{1,6}"),
        n=3,
    ),
    "logprobs": o.Gen(op=1, seq=0, params=params(temperature=1.0, seed=12, return_logprob=True, top_logprobs_num=2)),
}


def program(gen: o.Gen) -> list[AnyOp]:
    after = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return with_more(gen, prompt=PROMPT, text=" and", after=after)


def shown(outcome: Outcome) -> list[object]:
    """Values, tokens and how each candidate ended. How many forced tokens are drawn depends on what runs beside it."""
    found: list[object] = [outcome.value(op) for op in range(5)]
    for op in (1, 3):
        meta = outcome.done[op].meta
        assert isinstance(meta, m.GenMeta)
        found.append((meta.prompt_tokens, meta.healed))
        for c in meta.candidates:
            found.append((c.token_ids, c.finish_reason, c.matched_stop, c.completion_tokens))
    return found


def streamed(deltas: Sequence[m.Delta], n: int) -> list[tuple[str, tuple[int, ...]]]:
    """For each candidate the text and tokens that were streamed."""
    found = []
    for index in range(n):
        mine = [delta for delta in deltas if delta.index == index and delta.op == 1]
        found.append(("".join(d.text for d in mine), tuple(i for d in mine for i in d.token_ids)))
    return found


def check_all_cuts(driver: Driver, gen: o.Gen, *, most: int = 9) -> int:
    """Restart ``gen`` from each point of its stream, or from ``most`` of them; returns the number of points."""
    ops = program(gen)
    whole = driver.run(ops)
    deltas = [delta for delta in whole.deltas if delta.op == 1]
    cuts = range(0, len(deltas) + 1, 1 + len(deltas) // (most + 1))
    outcomes = []
    for cut in cuts:
        known = streamed(deltas[:cut], gen.n)
        drawn = tuple(Drawn(ids) for _, ids in known)
        again = [msgspec.structs.replace(op, drawn=drawn) if isinstance(op, o.Gen) and op.op == 1 else op for op in ops]
        outcomes.append((cut, known, driver.submit(again)))
    driver.run()
    for cut, known, outcome in outcomes:
        assert shown(outcome) == shown(whole), cut
        assert streamed(outcome.deltas, gen.n) == streamed(deltas, gen.n), cut
        for index, (text, ids) in enumerate(known):
            first = next((d for d in outcome.deltas if d.op == 1 and d.index == index), None)
            if ids:
                assert first is not None and first.text.startswith(text), (cut, "repeated in one delta")
        if gen.params.return_logprob:
            logprobs = [c.logprobs for c in whole.done[1].meta.candidates]
            begun = [tuple(p for d in deltas[:cut] if d.index == i for p in d.logprobs) for i in range(gen.n)]
            rest = [c.logprobs for c in outcome.done[1].meta.candidates]
            tokens = [[p.token_id for p in (*a, *b)] for a, b in zip(begun, rest, strict=True)]
            assert tokens == [[p.token_id for p in all_] for all_ in logprobs], cut
    return len(cuts)


@pytest.fixture(scope="module")
def driver(tiny_model_path: Path) -> Iterator[Driver]:
    engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=16_384))
    yield Driver(engine, check=False)
    engine.check()
    engine.close()


@pytest.mark.parametrize("name", list(OPS))
def test_a_stream_goes_on_from_every_point(driver: Driver, name: str) -> None:
    assert check_all_cuts(driver, OPS[name]) > 3


@pytest.mark.parametrize(
    ("ahead", "options"),
    [
        (True, {"speculative": "off"}),
        (True, {"jump_forward": False}),
        (False, {"speculative": "off", "jump_forward": False}),
        (False, {"num_slots": 500, "max_running": 4, "prefill_chunk": 16}),
    ],
    ids=str,
)
def test_it_goes_on_however_steps_are_made(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool, options: dict[str, object]
) -> None:
    monkeypatch.setattr(vectorised_decode, "MIN_ROWS", 1)
    engine = engine_of(tiny_model_path, StandIn() if ahead else None, **({"num_slots": 8000} | options))
    driver = Driver(engine)
    for name in ("seeded", "schema", "stop", "candidates"):
        check_all_cuts(driver, OPS[name], most=5)
    engine.check()
    engine.close()


@pytest.mark.parametrize("name", list(OPS))
def test_a_finished_op_is_not_computed_again(driver: Driver, name: str) -> None:
    ops = program(OPS[name])
    whole = driver.run(ops)
    meta, texts = whole.done[1].meta, whole.value(1)
    assert isinstance(meta, m.GenMeta) and isinstance(texts, list)
    drawn = tuple(Drawn(c.token_ids, text) for c, text in zip(meta.candidates, texts, strict=True))
    ops[1] = msgspec.structs.replace(OPS[name], drawn=drawn)
    outcome = driver.run(ops)
    assert [outcome.value(op) for op in range(5)] == [whole.value(op) for op in range(5)]
    assert outcome.done[3].meta.prompt_tokens == whole.done[3].meta.prompt_tokens
    assert outcome.done[3].meta.candidates[0].token_ids == whole.done[3].meta.candidates[0].token_ids
    assert outcome.closed is not None and outcome.closed.stats.generated_tokens == 3
    assert outcome.done[1].meta.healed == meta.healed


def test_tokens_that_cannot_have_been_drawn_fail_the_op_and_say_why(driver: Driver) -> None:
    regex = GrammarSpec("regex", "abc")
    cases = [
        (o.Gen(op=1, seq=0, params=PLAIN, grammar=regex, drawn=(Drawn((97, 97)),)), "refused at position 1"),
        (o.Gen(op=1, seq=0, params=PLAIN, grammar=regex, drawn=(Drawn((97, 98, 99, 100)),)), "ends after 3 of its 4"),
        (o.Gen(op=1, seq=0, params=params(stop=("b",)), drawn=(Drawn((97, 98, 99)),)), "ends after 2 of its 3"),
    ]
    for gen, reason in cases:
        outcome = driver.run([o.Text(op=0, seq=0, text=PROMPT), gen, o.Close(op=2, seq=0)])
        error = outcome.failed[1].error
        assert error.kind == "InvalidRequest" and error.message.startswith("drawn, candidate 0: ")
        assert reason in error.message and outcome.value(2) == PROMPT


def test_wrong_tokens_are_refused_by_name(driver: Driver) -> None:
    traced = m.ProgramSettings(trace=True)
    prompt = params(return_logprob=True, logprob_start_len=0)
    cases = [
        (o.Gen(op=0, seq=0, n=2, drawn=(Drawn((1,)),)), None, "drawn has 1 candidates, but n=2"),
        (o.Gen(op=0, seq=0, drawn=(Drawn((99_999,)),)), None, "drawn holds token id 99999, but the vocabulary has"),
        (o.Gen(op=0, seq=0, drawn=(Drawn((-1,), "a"),)), None, "drawn holds token id -1"),
        (o.Gen(op=0, seq=0, n=2, drawn=(Drawn((1,), "a"), Drawn((1,)))), None, "a text for 1 of 2 candidates"),
        (
            o.Gen(op=0, seq=0, params=PLAIN, drawn=(Drawn((97,) * 15),)),
            None,
            "15 tokens of a candidate, but max_tokens=14",
        ),
        (o.Gen(op=0, seq=0, drawn=(Drawn((97,)),)), traced, "the op has to return the trace"),
        (o.Gen(op=0, seq=0, params=prompt, drawn=(Drawn((97,)),)), None, "return the prompt's log-probabilities"),
    ]
    for gen, settings, reason in cases:
        outcome = driver.run([gen], settings=settings)
        assert outcome.rejected is not None and reason in outcome.rejected.errors[0].message


def test_ops_that_failed_elsewhere_fail_before_anything_runs(driver: Driver) -> None:
    why = m.ErrorInfo("Cancelled", "op 3 was cancelled")
    ops: list[AnyOp] = [
        o.Text(op=0, seq=0, text=PROMPT),
        o.Fork(op=1, seq=0, children=(1, 2)),
        o.Gen(op=2, seq=1, params=PLAIN),
        o.Gen(op=3, seq=2, params=PLAIN),
        o.Text(op=4, seq=2, text="x"),
        o.Join(op=5, seq=0, children=(1, 2), mode="concate_and_append"),
        o.Close(op=6, seq=0),
        o.Close(op=7, seq=1),
        o.Close(op=8, seq=2),
    ]
    outcome = driver.outcomes["failing"] = Outcome()
    driver.say(m.Submit("failing", ops, failed={3: why}))
    driver.run()
    assert outcome.failed[3].error == why and sorted(outcome.failed) == [3, 4, 5]
    assert outcome.failed[4].error.message == "an earlier op failed: op 3 was cancelled"
    assert outcome.closed is not None and len(outcome.value(2)[0]) > 0
    for wrong in (9, 6):
        refused = driver.outcomes[f"wrong {wrong}"] = Outcome()
        driver.say(m.Submit(f"wrong {wrong}", ops, failed={wrong: why}))
        driver.run()
        assert refused.rejected is not None
        assert f"failed names op {wrong}, which is not an op of it that can fail" in refused.rejected.errors[0].message
