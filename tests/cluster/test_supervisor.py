"""Engines that are kept alive: real processes that are killed, stopped and cannot start."""

import os
import queue
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from phloem import processor
from phloem.cluster.restarts import RestartPolicy
from phloem.cluster.supervisor import Supervisor, share
from phloem.protocol import messages as m
from phloem.protocol.errors import EngineLost, InvalidParams, InvalidRequest, PhloemError, UnknownModel
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import PythonProcess
from phloem.tests.runtime.wire import WAIT_S, Heard, ask, begin, failures, wait_until

ENGINES = "phloem.tests.runtime.process.engines"
AT_ONCE = RestartPolicy(backoff_s=0.0)


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    started: list[Supervisor] = []

    def start(factory: str = f"{ENGINES}:plain", **options) -> Supervisor:
        started.append(Supervisor(EngineConfig(model="none"), tokenize=no_tokens, factory=factory, **options))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.close()


def test_the_first_engine_takes_the_interpreter_that_waits_for_it(supervise: Callable[..., Supervisor]) -> None:
    first = PythonProcess()
    supervisor = supervise(replicas=2, first=first)
    wait_until(lambda: states(supervisor) == ["ready", "ready"])
    one, other = (replica.pid for replica in supervisor.replicas())
    assert one == first.process.pid != other


def no_tokens(ops: object) -> list[int]:
    return []


def states(supervisor: Supervisor) -> list[str]:
    return [replica.state for replica in supervisor.replicas()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_hangs_is_started_again(supervise, number):
    policy = RestartPolicy(backoff_s=0.0, step_timeout_s=60.0 if number == signal.SIGKILL else 3.0)
    supervisor = supervise(policy=policy)
    (before,) = supervisor.replicas()
    assert (before.state, before.epoch, before.restarts) == ("ready", 1, 0)
    os.kill(before.pid, number)
    # A machine that is busy for so long makes the next engine look silent too.
    wait_until(lambda: supervisor.replicas()[0].epoch >= 2 and states(supervisor) == ["ready"])
    (after,) = supervisor.replicas()
    assert after.restarts == after.epoch - 1 and after.pid != before.pid and not is_running(before.pid)
    assert ("SIGKILL" if number == signal.SIGKILL else "has been silent for") in after.last_error
    assert supervisor.fleet.query("info")["model"] == "string"
    supervisor.close()
    assert states(supervisor) == ["stopped"] and not is_running(after.pid)
    with pytest.raises(EngineLost, match="the client was closed"):
        begin(supervisor.fleet, ask(), Heard())


def test_a_replica_that_is_lost_leaves_the_others_alone(supervise):
    supervisor = supervise(replicas=2, policy=RestartPolicy(max_restarts=0))
    wait_until(lambda: states(supervisor) == ["ready", "ready"])
    first, second = supervisor.replicas()
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: states(supervisor)[0] == "failed")
    assert supervisor.replicas()[1].pid == second.pid and list(supervisor.metrics()) == ["1"]
    heard = Heard()
    begin(supervisor.fleet, ask(), heard)
    assert not failures(heard.until(m.Closed))


def test_a_drained_replica_moves_its_programs_and_stops(supervise):
    supervisor = supervise(f"{ENGINES}:slow", replicas=2)
    wait_until(lambda: states(supervisor) == ["ready", "ready"])
    running = [Heard() for _ in range(8)]
    calls = [begin(supervisor.fleet, ask(f"p{i}", stream=True), heard) for i, heard in enumerate(running)]
    for heard in running:
        heard.until(m.Delta)
    first = supervisor.replicas()[0]
    assert supervisor.drain("0").state == "draining"
    assert not supervisor.fleet.drain("0", migrate=False), "programs run there, and may end there"
    assert states(supervisor) == ["draining", "ready"]
    supervisor.drain("0", migrate=True)
    wait_until(lambda: states(supervisor) == ["stopped", "ready"])
    assert not is_running(first.pid) and supervisor.replicas()[0].restarts == 0
    report = supervisor.fleet.query("fleet")
    assert report["programs"] == 8 and report["engines_lost"] == 0 and report["replays"] > 0
    for call, heard in zip(calls, running, strict=True):
        call.cancel()
        assert failures(heard.until(m.Closed)) == {1: "Cancelled", 2: "Cancelled"}


def test_a_replica_that_cannot_be_drained_is_refused_by_name(supervise):
    supervisor = supervise(replicas=2, policy=RestartPolicy(max_restarts=0))
    wait_until(lambda: states(supervisor) == ["ready", "ready"])
    with pytest.raises(InvalidRequest, match="replica='7' is not one of: 0, 1"):
        supervisor.drain("7")
    supervisor.drain("0")
    wait_until(lambda: states(supervisor) == ["stopped", "ready"])
    assert supervisor.drain("0").state == "stopped"
    with pytest.raises(InvalidRequest, match="replica 1 cannot be drained: no other one is ready"):
        supervisor.drain("1")


def test_when_the_last_replica_fails_after_a_drain_the_owner_is_told(supervise):
    told: queue.SimpleQueue[PhloemError] = queue.SimpleQueue()
    supervisor = supervise(replicas=2, policy=RestartPolicy(max_restarts=0), on_failed=told.put)
    wait_until(lambda: states(supervisor) == ["ready", "ready"])
    supervisor.drain("0")
    os.kill(supervisor.replicas()[1].pid, signal.SIGKILL)
    assert "SIGKILL" in told.get(timeout=WAIT_S).message


def test_when_all_replicas_have_failed_every_program_fails_and_the_owner_is_told_once(supervise):
    told: queue.SimpleQueue[PhloemError] = queue.SimpleQueue()
    policy = RestartPolicy(max_restarts=1, backoff_s=0.0)
    supervisor = supervise(replicas=2, policy=policy, on_failed=told.put)
    for replica in range(2):
        for epoch in (1, 2):
            wait_until(lambda r=replica, e=epoch: (v := supervisor.replicas()[r]).state == "ready" and v.epoch == e)
            os.kill(supervisor.replicas()[replica].pid, signal.SIGKILL)
    error = told.get(timeout=WAIT_S)
    assert isinstance(error, EngineLost) and "SIGKILL" in error.message
    assert "replica 1 was lost again after 1 restarts within 600 s (max_restarts)" in error.message
    assert states(supervisor) == ["failed", "failed"] and told.empty()
    with pytest.raises(EngineLost, match="no engine: replica 1 was lost again"):
        begin(supervisor.fleet, ask(), Heard())


def test_a_first_engine_that_cannot_start_is_its_own_error(supervise):
    with pytest.raises(UnknownModel, match="no model 'none'"):
        supervise(f"{ENGINES}:unstartable", policy=AT_ONCE)


def test_an_error_that_stays_is_not_tried_again(supervise, tmp_path, monkeypatch):
    """The model's files go away while the engine runs."""
    (tmp_path / "engine_for_once.py").write_text(
        "from pathlib import Path\nfrom phloem.protocol.errors import UnknownModel\n"
        "from phloem.tests.runtime.string_engine import StringEngine\n\n\ndef make(config, progress):\n"
        f"    flag = Path({str(tmp_path)!r}) / 'started'\n"
        "    if flag.exists():\n        raise UnknownModel('the model has gone')\n"
        "    flag.touch()\n    return StringEngine()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    told: queue.SimpleQueue[PhloemError] = queue.SimpleQueue()
    supervisor = supervise("engine_for_once:make", policy=AT_ONCE, on_failed=told.put)
    os.kill(supervisor.replicas()[0].pid, signal.SIGKILL)
    assert isinstance(told.get(timeout=WAIT_S), UnknownModel) and supervisor.replicas()[0].restarts == 1


def test_close_does_not_wait_for_an_engine_that_starts_nor_for_a_backoff(supervise):
    supervisor = supervise(policy=RestartPolicy(backoff_s=1e6, max_backoff_s=1e6))
    for epoch in (1, 2):
        wait_until(lambda e=epoch: states(supervisor) == ["ready"] and supervisor.replicas()[0].epoch == e)
        os.kill(supervisor.replicas()[0].pid, signal.SIGKILL)
    wait_until(lambda: states(supervisor) == ["waiting"])
    supervisor.close()
    assert states(supervisor) == ["stopped"]

    supervisor = supervise(policy=AT_ONCE)
    os.kill(supervisor.replicas()[0].pid, signal.SIGKILL)
    wait_until(lambda: states(supervisor) == ["starting"])
    supervisor.close()
    assert states(supervisor) == ["stopped"]


def test_replicas_share_out_the_machine():
    cores = processor.num_cores()
    assert share(EngineConfig("m"), 1) == [EngineConfig("m")]
    assert [c.num_threads for c in share(EngineConfig("m"), 2)] == [max(1, cores // 2)] * 2
    assert [c.num_threads for c in share(EngineConfig("m"), cores + 1)] == [1] * (cores + 1)
    assert [c.num_threads for c in share(EngineConfig("m", num_threads=3), 2)] == [3, 3]
    assert [c.device for c in share(EngineConfig("m", device="cuda"), 2)] == ["cuda:0", "cuda:1"]
    assert [c.device for c in share(EngineConfig("m", device="cuda:1"), 2)] == ["cuda:1", "cuda:1"]
    with pytest.raises(InvalidParams, match="replicas=0: it must be 1 to 256"):
        share(EngineConfig("m"), 0)
    with pytest.raises(InvalidParams, match="2 replicas cannot publish at one address; leave it out"):
        share(EngineConfig("m", cache_events_url="tcp://127.0.0.1:5000"), 2)
