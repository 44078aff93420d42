"""Long texts: refused before they are tokenized, or tokenized beside the steps of others."""

import threading

import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import PromptTooLong
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.engine import interpreter, score_ops
from phloem.tests.runtime.engine.driver import GREEDY

LONG_TEXT = 500  # in these tests
LONG = "abcd " * 150
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Gate:
    """Replaces a tokenizer's ``encode``: long texts wait until the gate opens."""

    def __init__(self, tokenizer, monkeypatch):
        self.opened, self.begun, self.lengths = threading.Event(), threading.Event(), []
        encode = tokenizer.encode

        def gated(text, **options):
            self.lengths.append(len(text))
            if len(text) > LONG_TEXT:
                self.begun.set()
                assert self.opened.wait(timeout=300)
            return encode(text, **options)

        monkeypatch.setattr(tokenizer, "encode", gated)


@pytest.fixture(autouse=True)
def short_long_texts(monkeypatch):
    """The tiny model's tokens are bytes, and its context is short."""
    for module in (interpreter, score_ops):
        monkeypatch.setattr(module, "LONG_TEXT", LONG_TEXT)


@pytest.mark.parametrize(
    "op", [o.Gen(op=1, seq=0, params=ONE), o.Fork(op=1, seq=0, children=(1,)), o.Pin(op=1, seq=0, ttl_s=1.0)]
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(engine, driver, monkeypatch, op):
    """15 MB of text were tokenized to 3.75 million tokens on the engine's thread before the context was looked at."""
    gate = Gate(engine.tokenizer, monkeypatch)
    limit = engine.context_len * engine.tokenizer.max_token_bytes
    outcome = driver.run([o.Text(op=0, seq=0, text="a" * (limit + 1)), op, o.Close(op=9, seq=0)])
    error = outcome.failed[1].error
    assert error.kind == "PromptTooLong" and f"give at most {limit:,}" in error.message
    assert not gate.lengths


def test_special_tokens_beyond_the_context_are_refused_before_they_are_decoded(engine, driver):
    ids = (min(engine.tokenizer.special_ids),) * (engine.context_len + 1)
    outcome = driver.run([o.Special(op=0, seq=0, ids=ids), o.Close(op=1, seq=0)])
    assert outcome.failed[0].error.kind == "PromptTooLong"


@pytest.mark.parametrize("kind", ["gen", "select", "fork", "join"])
def test_a_long_text_does_not_hold_other_programs(engine, driver, monkeypatch, kind):
    """The step loop stood still while it tokenized, and so did every stream."""
    begin = {
        "gen": [o.Text(op=0, seq=0, text=LONG), o.Gen(op=1, seq=0, params=ONE)],
        "select": [o.Text(op=0, seq=0, text=LONG), o.Select(op=1, seq=0, choices=("a", "b"))],
        "fork": [o.Text(op=0, seq=0, text=LONG), o.Fork(op=1, seq=0, children=(1,)), o.Close(op=2, seq=1)],
        "join": [
            o.Fork(op=0, seq=0, children=(1,)),
            o.Text(op=1, seq=1, text=LONG),
            o.Join(op=2, seq=0, children=(1,), mode="concate_and_append"),
            o.Gen(op=3, seq=0, params=ONE),
            o.Close(op=4, seq=1),
        ],
    }[kind]
    ops = [*begin, o.Close(op=9, seq=0)]
    expected = driver.run(ops)
    engine.cache.flush()
    gate = Gate(engine.tokenizer, monkeypatch)
    slow = driver.submit(ops)
    driver.step()
    assert gate.begun.wait(timeout=300)
    other = driver.submit([o.Text(op=0, seq=0, text="Once"), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)])
    for _ in range(100):
        driver.step()
    assert other.value(1) and slow.closed is None
    gate.opened.set()
    driver.run()
    assert {op: done.value for op, done in slow.done.items()} == {op: done.value for op, done in expected.done.items()}
    assert set(slow.done) == {op.op for op in ops} and not slow.failed


def test_a_cancelled_program_does_not_wait_for_its_tokens(engine, driver, monkeypatch):
    gate = Gate(engine.tokenizer, monkeypatch)
    outcome = driver.submit([o.Text(op=0, seq=0, text=LONG), o.Gen(op=1, seq=0, params=ONE), o.Close(op=2, seq=0)])
    driver.step()
    assert gate.begun.wait(timeout=300)
    driver.say(m.Cancel("p1"))
    driver.step()
    assert outcome.closed is not None and outcome.failed[1].error.kind == "Cancelled"
    assert not engine.has_work
    gate.opened.set()


def test_choices_are_tokenized_no_further_once_they_are_cancelled(engine, driver, monkeypatch):
    """A thousand choices after a long text are a thousand long texts."""
    gate = Gate(engine.tokenizer, monkeypatch)
    choices = tuple(f"{i}" + "b" * LONG_TEXT for i in range(50))
    driver.submit([o.Text(op=0, seq=0, text="a"), o.Select(op=1, seq=0, choices=choices), o.Close(op=2, seq=0)])
    driver.step()
    assert gate.begun.wait(timeout=300)
    driver.say(m.Cancel("p1"))
    driver.step()
    gate.opened.set()
    driver.run([o.Text(op=0, seq=0, text=LONG), o.Gen(op=1, seq=0, params=ONE), o.Close(op=2, seq=0)])
    assert sum(length > LONG_TEXT for length in gate.lengths) <= 3


def test_the_limit_is_the_context_times_the_longest_token(engine):
    tokenizer = engine.tokenizer
    limit = 7 * max(map(len, tokenizer.token_bytes))
    tokenizer.check_length(limit, 7)
    with pytest.raises(PromptTooLong, match=rf"{limit + 1:,} characters .* the context is 7 tokens"):
        tokenizer.check_length(limit + 1, 7)
