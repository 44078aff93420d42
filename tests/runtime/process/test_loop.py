"""The loop: a step that fails, an engine that cannot continue, a stop. Every client gets an answer."""

import logging
import threading
from collections.abc import Iterator

import pytest
from phloem.protocol import errors
from phloem.protocol import messages as m
from phloem.runtime.engine_socket import EngineSocket, Inbox, Outbox
from phloem.runtime.process.loop import EngineBroken, serve_engine
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import RawClient, ask


def failures(messages: list[m.RuntimeMessage]) -> dict[int, str]:
    return {one.op: one.error.kind for one in messages if isinstance(one, m.Failed)}


class Fragile(StringEngine):
    """An engine whose step fails at a program named ``bad``: before it accepts it, after, or at every later step."""

    def __init__(self, when: str) -> None:
        super().__init__(reply=lambda prompt, op: " word" * (3 if prompt == "short" else 40_000))
        self.when = when
        self.is_broken = False

    def step(self, inbox: Inbox) -> Outbox:
        is_bad = any(isinstance(one, m.Submit) and one.program == "bad" for _, one in inbox)
        if (is_bad and self.when == "before") or self.is_broken:
            raise ValueError("boom")
        out = super().step(inbox)
        if is_bad:
            self.is_broken = self.when == "for ever"
            raise ValueError("boom")
        return out

    def fail_all(self, error: errors.PhloemError) -> Outbox:
        if self.when == "for good":
            raise KeyError("worse")
        return super().fail_all(error)


class Loop:
    def __init__(self, engine: StringEngine, url: str) -> None:
        self.socket = EngineSocket(url, engine.welcome())
        self.failure: Exception | None = None
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(engine,))
        self.thread.start()
        self.client = RawClient(url)
        self.client.say(m.Hello(version=m.PROTOCOL_VERSION))
        assert isinstance(self.client.hear()[0], m.Welcome)

    def _run(self, engine: StringEngine) -> None:
        try:
            serve_engine(engine, self.socket, self._stopping.is_set)
        except Exception as error:
            self.failure = error

    def stop(self) -> None:
        self._stopping.set()
        self.thread.join(20.0)
        assert not self.thread.is_alive()

    def until_closed(self, *programs: str) -> list[m.RuntimeMessage]:
        found: list[m.RuntimeMessage] = []
        while set(programs) - {one.program for one in found if isinstance(one, m.Closed)}:
            found += self.client.hear()
        return found


@pytest.fixture
def loop(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Loop]:
    with caplog.at_level(logging.CRITICAL):
        loop = Loop(Fragile(request.param), f"inproc://{request.node.name}")
        yield loop
        loop.stop()
    loop.client.close()
    loop.socket.close()


@pytest.mark.parametrize("loop", ["after"], indirect=True)
def test_a_failed_step_ends_every_program_and_the_engine_goes_on(loop):
    loop.client.say(ask("good"))
    assert isinstance(loop.client.hear()[0], m.Accepted)
    loop.client.say(ask("bad"))
    heard = loop.until_closed("good", "bad")
    failed = [one for one in heard if isinstance(one, m.Failed)]
    assert {(one.program, one.op) for one in failed} == {("good", 1), ("good", 2), ("bad", 1), ("bad", 2)}
    assert failed[0].error.kind == "InternalError" and "ValueError: boom" in failed[0].error.message
    for _ in range(5):  # never three in a row
        loop.client.say(ask("bad", text="short"))
        loop.until_closed("bad")
        loop.client.say(ask("good", text="short"))
        assert failures(loop.until_closed("good")) == {}
    assert loop.failure is None


@pytest.mark.parametrize("loop", ["before"], indirect=True)
def test_what_a_failed_step_had_read_and_not_taken_is_answered(loop):
    loop.client.say(ask("bad"), m.Query(id=5, what="info"))
    heard = loop.client.hear()
    (rejected,) = [one for one in heard if isinstance(one, m.Rejected)]
    assert rejected.program == "bad" and "boom" in rejected.errors[0].message
    answer = next((one for one in heard if isinstance(one, m.Answer)), None) or loop.client.hear()[0]
    assert answer.id == 5


@pytest.mark.parametrize("loop", ["for ever"], indirect=True)
def test_an_engine_whose_steps_all_fail_gives_up_after_telling_everyone(loop):
    loop.client.say(ask("bad"))
    heard = loop.until_closed("bad")
    assert failures(heard) == {1: "InternalError", 2: "InternalError"}
    loop.thread.join(20.0)
    assert isinstance(loop.failure, EngineBroken) and "3 steps in a row failed: ValueError: boom" in str(loop.failure)


@pytest.mark.parametrize("loop", ["for good"], indirect=True)
def test_an_engine_that_cannot_end_its_programs_gives_up_at_once(loop):
    loop.client.say(ask("bad"))
    loop.thread.join(20.0)
    assert isinstance(loop.failure, EngineBroken) and "boom" in str(loop.failure) and "worse" in str(loop.failure)


@pytest.mark.parametrize("loop", ["never"], indirect=True)
def test_a_stop_tells_who_waits(loop):
    loop.client.say(ask("long"))
    assert isinstance(loop.client.hear()[0], m.Accepted)
    loop.stop()
    failed = [one for one in loop.until_closed("long") if isinstance(one, m.Failed)]
    assert {one.error.kind for one in failed} == {"EngineLost"}
    assert failed[0].error.message == "the engine was stopped"
