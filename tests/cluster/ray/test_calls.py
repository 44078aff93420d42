"""One call of Serve for each program, with a stand-in for Serve: what is counted, routed, drained, and left behind."""

import asyncio
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from phloem.cluster.ray.calls import Hold, Holds, ServeCalls, ranked
from phloem.cluster.ray.fleet import ServeFleet
from phloem.cluster.ray.options import read_options
from phloem.cluster.ray.places import EnginePlace
from phloem.protocol import messages as m
from phloem.protocol.errors import EngineLost, InvalidParams, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, Host
from phloem.tests.cluster.ray.test_places import stream
from phloem.tests.cluster.test_client import stream as endless
from phloem.tests.runtime.wire import wait_until


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=8192, num_threads=1)
    found = [EngineCore(config), EngineCore(config)]
    yield found
    for engine in found:
        engine.close()


class ServeStandIn:
    """What Serve does for the deployment of engines: it routes calls, counts them, and stops a replica without any."""

    def __init__(self, engines: list[EngineCore], folder: Path) -> None:
        self._engines, self._folder = list(engines), folder
        self.lock = threading.Lock()
        self._hosts: dict[str, Host] = {}
        self._board: Any = None
        self.calls: dict[str, list[str]] = {}  # programs whose calls are open, by replica
        self.most: dict[str, int] = {}

    def start(self, name: str, **options: Any) -> None:
        self._hosts[name] = Host(self._engines.pop(), f"ipc://{self._folder}/{name}", **options)
        self.calls[name], self.most[name] = [], 0
        self._tell()

    def stop(self, name: str) -> None:
        """As Serve does: no router has the replica any more, which ends once no call is open there."""
        host = self._hosts.pop(name)
        self._tell()
        wait_until(lambda: not self.calls[name])
        host.end()

    def end(self) -> None:
        for host in self._hosts.values():
            host.end()

    def _tell(self) -> None:
        if self._board is not None:
            self._board.show({n: EnginePlace(n, h.url, "", 1, "tiny", 1) for n, h in self._hosts.items()})

    # -- the face of a handle -----------------------------------------------------------------------------------------

    @property
    def hold(self) -> "ServeStandIn":
        return self

    def remote(self, hold: Hold) -> Any:
        if hold.board is not None:
            assert self._board is None, "the board is handed over twice"
            self._board = hold.board
            self._tell()
            return SimpleNamespace(done=lambda: True)
        arrived = pickle.loads(pickle.dumps(hold))
        (name, *_), *_ = [names for names in ranked(arrived.engine, list(self._hosts), str) if names]
        with self.lock:
            if name == arrived.engine:
                self.calls[name].append(arrived.program)
                self.most[name] = max(self.most[name], len(self.calls[name]))
        return Call(self, name, arrived.program)


class Call:
    def __init__(self, serve: ServeStandIn, name: str, program: str) -> None:
        self._calls, self._program, self._lock = serve.calls[name], program, serve.lock

    def cancel(self) -> None:
        with self._lock:
            if self._program in self._calls:
                self._calls.remove(self._program)


@pytest.fixture
def serve(engines: list[EngineCore], tmp_path: Path) -> Iterator[ServeStandIn]:
    found = ServeStandIn(engines, tmp_path)
    yield found
    found.end()


@pytest.fixture
def fleet(serve: ServeStandIn) -> Iterator[ServeFleet]:
    found = ServeFleet(serve, client_secret="", tokenize=lambda ops: [], call_after_s=0.0)
    yield found
    found.close()
    assert not any(serve.calls.values()), "a call without a program"


def ready(fleet: ServeFleet) -> list[str]:
    return sorted(replica.name for replica in fleet.replicas() if replica.state == "ready")


def test_a_program_has_one_open_call_at_its_replica_as_long_as_it_runs(serve, fleet):
    serve.start("a")
    assert fleet.wait(60)
    seen = []
    asked = Asked(fleet.client, stream("a prompt"), on_event=lambda event: seen.append(list(serve.calls["a"])))
    asked.result()
    assert serve.most["a"] == 1 and [asked.call.program] in seen
    wait_until(lambda: not serve.calls["a"])


def test_a_program_that_ends_before_its_call_is_due_has_none():
    attempt = SimpleNamespace(program="p", engine=SimpleNamespace(name="a"), is_over=True)
    begun: list[Hold] = []
    calls = ServeCalls(begun.append, after_s=0.0)
    calls.began(attempt)
    calls.left(attempt)
    calls.close()
    assert not begun


def test_scaling_from_one_replica_to_two_and_back_moves_programs_and_ends_none(serve, fleet):
    serve.start("a")
    assert fleet.wait(60)
    expected = [Asked(fleet.client, stream(f"prompt {i}")).result() for i in range(6)]

    first = [Asked(fleet.client, stream(f"prompt {i}")) for i in range(3)]
    serve.start("b")
    wait_until(lambda: ready(fleet) == ["a", "b"])
    begun = threading.Event()
    later = [Asked(fleet.client, stream(f"prompt {i}"), on_event=lambda event: begun.set()) for i in range(3, 6)]
    assert begun.wait(60)
    serve.stop("a")
    assert [asked.result() for asked in first + later] == expected
    assert ready(fleet) == ["b"]
    report = fleet.client.query("fleet")
    assert (report["engines_lost"], report["poisoned"]) == (0, 0)
    assert serve.most["b"] > 0


def test_programs_of_a_killed_engine_go_on_and_their_calls_move(serve, fleet):
    serve.start("a")
    assert fleet.wait(60)
    expected = [Asked(fleet.client, stream(f"prompt {i}")).result() for i in range(3)]
    serve.start("b", num_steps=20)
    wait_until(lambda: ready(fleet) == ["a", "b"])
    asked = [Asked(fleet.client, stream(f"prompt {i}")) for i in range(3)]
    assert [one.result() for one in asked] == expected
    wait_until(lambda: not any(serve.calls.values()))


def test_a_fleet_says_why_it_has_no_engine(serve):
    failed = []
    error = EngineLost("Ray Serve could not start an engine")
    fleet = ServeFleet(serve, client_secret="", tokenize=lambda ops: [], look=lambda: error, on_failed=failed.append)
    with pytest.raises(EngineLost, match="could not start an engine"):
        fleet.wait(60)
    assert not failed, "said by wait alone"
    with pytest.raises(Unsupported, match="replica a is Ray Serve's.* lower the number of replicas"):
        fleet.drain("a")
    fleet.close()


def test_programs_of_a_fleet_that_is_closed_fail_as_those_of_a_lost_server_do(serve):
    """So a client that keeps a journal sends them again, to the next server."""
    fleet = ServeFleet(serve, client_secret="", tokenize=lambda ops: [])
    serve.start("a")
    assert fleet.wait(60)
    asked = Asked(fleet.client, endless("a prompt", max_tokens=2000))
    asked.events += asked.heard.until(m.Delta)
    fleet.close()
    assert "EngineLost: this server ends; send the program again" in str(asked.result()[1])


def test_a_call_of_a_replica_that_is_gone_goes_to_another_which_answers_at_once():
    assert ranked("b", ["a", "b", "c"], str) == [["b"], ["a", "c"]]
    assert ranked("gone", ["a", "b"], str) == [[], ["a", "b"]]


def test_calls_whose_caller_was_killed_end_when_the_engine_has_fewer_programs():
    async def run() -> None:
        holds = Holds()
        calls = [asyncio.create_task(holds.hold()) for _ in range(3)]
        await asyncio.sleep(0)
        holds.keep(1)
        await asyncio.sleep(0)
        assert len(holds) == 3, "they have just begun: their programs may be under way"
        late = asyncio.create_task(holds.hold())
        await asyncio.sleep(0)
        holds.keep(2)
        await asyncio.gather(*calls[:2])
        assert len(holds) == 2 and not calls[2].done() and not late.done()
        calls[2].cancel()
        await asyncio.gather(calls[2], return_exceptions=True)
        assert len(holds) == 1
        holds.keep(0)
        await late
        assert not len(holds)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "args: Object missing required field `model`"),
        ({"model": "m", "replica": 2}, "args: Object contains unknown field `replica`"),
        ({"model": "m", "replicas": 0}, "replicas=0: it must be 1 to 256"),
        ({"model": "m", "fronts": 0}, "args.fronts=0: it must be 1 or more"),
        ({"model": "m", "max_rebalanced": 9}, "max_rebalanced=9: it must be 0 to 8"),
        ({"model": "m", "engine": {"model": "n"}}, "args.engine.model: the model is args.model"),
        ({"model": "m", "engine": {"slots": 4}}, "args.engine: Object contains unknown field `slots`"),
        ({"model": "m", "engine": {"nnodes": 2}}, "nnodes=2: it must divide the 1 ranks of the model"),
        ({"model": "m", "engine": {"node_rank": 1}}, "node_rank=1: on Ray each replica finds its machines"),
        ({"model": "m", "drain_s": 0}, "args.drain_s=0.*: it must be above 0 seconds"),
        ({"model": "m", "step_timeout_s": 0}, "step_timeout_s=0.*: it must be above 0 seconds"),
        ({"model": "m", "autoscaling": {"target": 4}}, "autoscaling.target: it is not one of start_s, goal_s"),
        ({"model": "m", "autoscaling": {"max_replicas": 2.5}}, "max_replicas=2.5: it must be a whole number"),
        ({"model": "m", "replicas": 3, "autoscaling": {"max_replicas": 2}}, "args.replicas=3: .* must be 1 to 2"),
        ({"model": "m", "allow_image_hosts": ["a b"]}, "args.allow_image_hosts: 'a b' is not a host"),
    ],
)
def test_wrong_arguments_of_the_application_are_refused_by_name(args, message):
    with pytest.raises(InvalidParams, match=message):
        read_options(args)


def test_the_replicas_share_out_the_cores_as_many_as_there_may_be():
    options = read_options({"model": "m", "engine": {"device": "cuda"}, "autoscaling": {"max_replicas": 4}})
    assert options.replica_config().device == "cuda", "Ray gives each replica its own GPU"
    assert options.replica_config().cache_events_url, "with several replicas, each tells what it has cached"
