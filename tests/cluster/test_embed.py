"""Embeddings of a fleet: the least busy engine is asked, and another one where it is lost."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from phloem.cluster.client import FleetClient
from phloem.protocol.errors import EngineLost, InvalidRequest, PhloemError
from phloem.protocol.messages import Embedded
from phloem.tests.runtime.string_engine import StringEngine

FOUND = Embedded([b"\0\0\0\0"], [3])


class Member:
    """A client of an engine that answers when a test says so."""

    lost = None

    def __init__(self) -> None:
        self.welcome = msgspec.structs.replace(StringEngine().welcome(), capabilities=("embed",))
        self.answers: list[Future[Embedded]] = []

    def embed(self, inputs: object, *, truncate: bool = True) -> Future[Embedded]:
        self.answers.append(Future())
        return self.answers[-1]

    def ask(self, what: str) -> Future[Any]:
        return Future()

    def when_ended(self, tell: Callable[[PhloemError], None]) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def members() -> list[Member]:
    return [Member(), Member()]


@pytest.fixture
def fleet(members: list[Member]) -> Iterator[FleetClient]:
    fleet = FleetClient(tokenize=lambda ops: [])
    for i, member in enumerate(members):
        fleet.add(str(i), member)
    yield fleet
    fleet.close()


def test_the_engine_with_the_fewest_open_calls_is_asked(fleet: FleetClient, members: list[Member]) -> None:
    calls = [fleet.embed(["a"]) for _ in range(4)]
    assert [len(member.answers) for member in members] == [2, 2]
    for answer in members[1].answers:
        answer.set_result(FOUND)
    calls += [fleet.embed(["a"]) for _ in range(2)]
    assert [len(member.answers) for member in members] == [2, 4]
    assert sum(call.done() for call in calls) == 2


def test_another_engine_is_asked_where_one_is_lost(fleet: FleetClient, members: list[Member]) -> None:
    call = fleet.embed(["a"])
    members[0].answers[0].set_exception(EngineLost("gone"))
    assert not call.done()
    members[1].answers[0].set_result(FOUND)
    assert call.result(0) == FOUND


def test_a_call_fails_where_every_engine_is_lost(fleet: FleetClient, members: list[Member]) -> None:
    call = fleet.embed(["a"])
    for member in members:
        member.answers[0].set_exception(EngineLost("gone"))
    with pytest.raises(EngineLost, match="gone"):
        call.result(0)


def test_an_error_of_the_request_is_not_tried_elsewhere(fleet: FleetClient, members: list[Member]) -> None:
    call = fleet.embed(["a"])
    members[0].answers[0].set_exception(InvalidRequest("wrong"))
    with pytest.raises(InvalidRequest, match="wrong"):
        call.result(0)
    assert members[1].answers == []


def test_a_cancelled_call_is_cancelled_at_its_engine(fleet: FleetClient, members: list[Member]) -> None:
    assert fleet.embed(["a"]).cancel() and members[0].answers[0].cancelled()
