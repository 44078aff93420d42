"""Masks that are made off the step's thread change no answer, hold no other sequence and leave nothing behind."""

import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from phloem.constrained import Matcher
from phloem.protocol import messages as m
from phloem.protocol.ops import AnyOp, Close, Fork, Gen, GrammarSpec, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.engine import EngineCore
from phloem.runtime.engine.mask_thread import MaskThread
from phloem.tests.runtime.engine.driver import CLIENT, GREEDY, Driver
from phloem.tests.runtime.engine.test_overlap import WORDS, engine_of, shown
from phloem.tests.runtime.executor.stand_in import StandIn

pytestmark = pytest.mark.usefixtures("kernels_as_one_call")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "uniqueItems": True, "maxItems": 2},
        "size": {"type": "integer", "minimum": 3, "maximum": 250},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
CALL = {"tags": [{"begin": "<call>", "schema": {"enum": ["one", "two"]}, "end": "</call>"}], "triggers": ["<call"]}
GRAMMARS = [
    GrammarSpec("json_schema", json.dumps(PERSON)),
    GrammarSpec("regex", "[a-z]{3,9} (is|was) [0-9]{2,4}"),
    GrammarSpec("ebnf", 'root ::= sum\nsum ::= num "+" sum | num\nnum ::= [0-9]{1,3}'),
    GrammarSpec("lark", 'start: "say " WORD ("," WORD)*\nWORD: /[a-z]{2,5}/'),
    GrammarSpec("choices", '["yes", "no", "yes and no"]'),
    GrammarSpec("json"),
    GrammarSpec("structural_tags", json.dumps(CALL)),
]
LETTERS = GrammarSpec("regex", "[a-z]{9,20}")
SHORT = SamplingParams(max_tokens=30, temperature=0.0, finish="cut")


def mixed(seed: int) -> list[list[AnyOp]]:
    programs: list[list[AnyOp]] = []
    for i in range(21):
        params = SamplingParams(
            max_tokens=(30, 45, 90)[i % 3],
            temperature=(0.0, 0.9)[i % 2],
            seed=seed + i,
            stop=("e",) if i % 5 == 4 else (),
            return_logprob=i % 6 == 5,
            finish="cut" if i % 7 == 3 else "closed",
            heal=i % 3 == 0,
        )
        gen = Gen(op=1, seq=0, params=params, grammar=GRAMMARS[i % 7], n=1 + i % 3, stream=i % 2 == 0)
        text = f"Of {WORDS[i % len(WORDS)]}, number {i}: "
        if i % 4 == 3:
            programs.append(
                [
                    Text(op=0, seq=0, text=text),
                    gen,
                    Fork(op=2, seq=0, children=(1, 2)),
                    *(Text(op=3 + k, seq=1 + k, text=" and") for k in range(2)),
                    *(Gen(op=5 + k, seq=1 + k, params=params, grammar=GRAMMARS[(i + k) % 7]) for k in range(2)),
                    *(Close(op=7 + k, seq=k) for k in range(3)),
                ]
            )
        else:
            after = Gen(op=3, seq=0, params=GREEDY)
            programs.append(
                [Text(op=0, seq=0, text=text), gen, Text(op=2, seq=0, text=" so "), after, Close(op=4, seq=0)]
            )
    return programs


def answers(engine: EngineCore, programs: list[list[AnyOp]], *, budget_s: float) -> tuple[list[object], int]:
    """What the programs got, and how many draws were deferred."""
    driver = Driver(engine, mask_budget_s=budget_s)
    outcomes = [driver.submit(ops) for ops in programs]
    driver.run()
    num_deferred = engine.metrics()["masks_deferred"]
    engine.close()
    return [shown(outcome, with_forced=False) for outcome in outcomes], num_deferred


OPTIONS: dict[str, dict[str, Any]] = {
    "drafts": {"max_running": 16},
    "no drafts, no jumps": {"max_running": 16, "speculative": "off", "jump_forward": False},
    "few slots": {"max_running": 16, "num_slots": 260},
}


@pytest.fixture(scope="module")
def wanted(tiny_model_path: Path) -> Callable[[str], list[object]]:
    """The answers by masks that are made on the step's thread, of an engine that does not run ahead."""

    @functools.cache
    def wanted(kind: str) -> list[object]:
        found, num_deferred = answers(engine_of(tiny_model_path, **OPTIONS[kind]), mixed(7), budget_s=600.0)
        assert not num_deferred
        return found

    return wanted


@pytest.mark.parametrize(
    ("kind", "overlaps"),
    [("drafts", False), ("no drafts, no jumps", True), ("few slots", False), ("few slots", True)],
)
def test_deferred_masks_change_no_answer(
    tiny_model_path: Path, wanted: Callable[[str], list[object]], kind: str, overlaps: bool
) -> None:
    options = OPTIONS[kind]
    device = StandIn() if overlaps else None
    ahead = engine_of(tiny_model_path, device, **options)
    got, num_deferred = answers(ahead, mixed(7), budget_s=0.0)
    assert got == wanted(kind)
    assert num_deferred > 100
    assert (ahead.scheduler.num_preemptions > 0) is ("num_slots" in options)


@pytest.fixture
def engine(tiny_model_path: Path) -> Iterator[EngineCore]:
    engine = engine_of(tiny_model_path)
    engine.grammars.wait_until_ready()
    yield engine
    engine.close()


def story(text: str, params: SamplingParams, grammar: GrammarSpec | None = None) -> list[AnyOp]:
    gen = Gen(op=1, seq=0, params=params, grammar=grammar)
    return [Text(op=0, seq=0, text=text), gen, Close(op=2, seq=0)]


class Held:
    """One generation under ``LETTERS``, whose machine's lock is held after its grammar is compiled."""

    def __init__(self, engine: EngineCore) -> None:
        self.driver = Driver(engine, mask_budget_s=0.0)
        self.lock = engine.grammars.compile(LETTERS).result().machine.lock
        self.lock.acquire()
        self.outcome = self.driver.submit(story("A word: ", SHORT, LETTERS))
        while not engine.loop.deferred:
            self.driver.step()

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.lock.release()


def test_other_sequences_go_on_while_a_mask_is_made(engine: EngineCore) -> None:
    with Held(engine) as held:
        other = held.driver.submit(story("The sea ", GREEDY))
        while other.closed is None:
            held.driver.step()
        assert len(other.value(1)[0]) > 0
        assert 1 not in held.outcome.ends and len(engine.loop.deferred) == 1
    held.driver.run()
    assert held.outcome.value(1)[0].isalpha()


@pytest.mark.parametrize("how", ["cancel", "client"])
def test_an_abort_while_a_mask_is_made_leaves_no_slot_behind(engine: EngineCore, how: str) -> None:
    with Held(engine) as held:
        if how == "cancel":
            held.driver.say(m.Cancel("p1"))
            held.driver.step()
            assert held.outcome.failed[1].error.kind == "Cancelled"
        else:
            engine.drop_client(CLIENT)
            held.driver.step()
        assert not engine.loop.deferred and not engine.programs.live and not engine.has_work
        engine.check()
        assert engine.cache.num_locked == 0
    again = held.driver.run(story("A word: ", SHORT, LETTERS))
    assert again.value(1)[0].isalpha()


def test_a_sequence_preempted_while_a_mask_is_made_keeps_its_token(tiny_model_path: Path) -> None:
    (want,), _ = answers(engine_of(tiny_model_path), [story("A word: ", SHORT, LETTERS)], budget_s=600.0)
    engine = engine_of(tiny_model_path, num_slots=48, max_seq_len=48, speculative="off")
    engine.grammars.wait_until_ready()
    with Held(engine) as held:
        long = SamplingParams(max_tokens=38, temperature=0.0, ignore_eos=True)
        urgent = held.driver.submit(story("Another, ", long), settings=m.ProgramSettings(priority=-1))
        while urgent.closed is None:
            held.driver.step()
        assert engine.scheduler.num_preemptions == 1 and len(engine.loop.deferred) == 1
        for _ in range(4):  # it is admitted again, and its last token is computed again
            held.driver.step()
        assert len(engine.loop.deferred) == 1 and engine.scheduler.num_waiting == 0
    held.driver.run()
    engine.close()
    assert shown(held.outcome, with_forced=False) == want


def test_an_engine_closes_while_a_mask_is_made(tiny_model_path: Path) -> None:
    engine = engine_of(tiny_model_path)
    engine.grammars.wait_until_ready()
    with Held(engine) as held:
        future = engine.loop.deferred[0].future
        engine.close()
        assert not future.done() and 1 not in held.outcome.ends
    assert future.result() is None


def test_a_grammar_that_fails_off_the_step_fails_its_op_alone(engine: EngineCore, monkeypatch: Any) -> None:
    with Held(engine) as held:
        monkeypatch.setattr("phloem.constrained.machine.masks.MASK_WORK", -1)  # from now on every mask is too much
        other = held.driver.submit(story("The sea ", GREEDY))
    held.driver.run()
    assert held.outcome.failed[1].error.kind == "InvalidGrammar"
    assert "takes more than" in held.outcome.failed[1].error.message
    assert len(other.value(1)[0]) > 0


def test_what_follows_at_once_is_derived_on_the_steps_thread_until_its_time_is_over(engine: EngineCore) -> None:
    masks = MaskThread(budget_s=600.0)
    masks.close()  # whoever asks its thread fails
    masks.begin_step()
    grammar = engine.grammars.compile(GrammarSpec("json_schema", '{"type": "string", "maxLength": 20}')).result()
    first, other = grammar.matcher(), grammar.matcher()
    tokens = grammar.machine.vocabulary.tokens
    quote, token = (next(i for i, text in enumerate(tokens) if text == byte) for byte in (b'"', b"q"))
    first.clone().prepare((quote,))
    assert first.accept(quote) and other.accept(quote)
    assert not first.knows((token,))
    assert masks.prepare(first, (token,)) is None and first.knows((token,))
    assert masks.counters.wait_s > 0.0
    spent = MaskThread(budget_s=0.0)
    spent.begin_step()
    assert spent.step_at_once(first.grammar, first.state, token) is None
    step = masks.step_at_once(first.grammar, first.state, token)
    assert step is not None and other.accept(token)
    assert step.state == other.state and (step.mask == other.mask()).all() and step.only_token == -1
    spent.close()


class Recorded(Matcher):
    """A matcher that knows nothing and notes on which thread it is prepared."""

    __slots__ = ("threads",)

    def knows(self, token_ids: Any) -> bool:
        return False

    def prepare_at_once(self, token_ids: Any) -> bool:
        return False

    def clone(self) -> "Recorded":
        return self

    def prepare(self, token_ids: Any) -> None:
        self.threads.append((threading.current_thread().name, *token_ids))


def test_matchers_are_prepared_on_one_thread_in_the_order_of_asking(engine: EngineCore) -> None:
    matcher = Recorded(engine.grammars.compile(LETTERS).result())
    matcher.threads = []
    masks = MaskThread(budget_s=600.0)
    masks.begin_step()
    assert masks.prepare(matcher, (1, 2)) is None and masks.is_ready(matcher, (3,))
    masks.budget_s = 0.0
    masks.begin_step()
    futures = [masks.prepare(matcher, (i,)) for i in range(4, 8)]
    assert not masks.is_ready(matcher, (8,))
    for future in futures:
        assert future is not None
        future.result()
    masks.close()
    assert [tokens for _, *tokens in matcher.threads] == [[1, 2], [3], [4], [5], [6], [7]]
    assert {name for name, *_ in matcher.threads} == {"masks_0"}
    assert masks.counters.wait_s > 0.0


def test_matchers_that_are_asked_together_are_waited_for_together(engine: EngineCore) -> None:
    matchers = [Recorded(engine.grammars.compile(grammar).result()) for grammar in GRAMMARS[:3]]
    seen: list[Any] = []
    for matcher in matchers:
        matcher.threads = seen
    masks = MaskThread(budget_s=600.0)
    masks.begin_step()
    assert masks.prepare_all([(matcher, (i,)) for i, matcher in enumerate(matchers)]) == [None] * 3
    assert seen == [("masks_0", 0), ("masks_0", 1), ("masks_0", 2)]
    masks.budget_s = 0.0
    masks.begin_step()
    (future,) = masks.prepare_all([(matchers[0], (7,))])
    assert future is not None
    future.result()
    assert seen[3:] == [("masks_0", 7)]
    futures = masks.prepare_all([(matcher, (i,)) for i, matcher in enumerate(matchers)])
    for future in futures:
        assert future is not None, "each is awaited by itself"
        future.result()
    masks.close()
