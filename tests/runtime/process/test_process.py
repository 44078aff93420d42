"""Engine processes: they start, answer, die and end, and nobody waits for ever."""

import os
import queue
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess
from phloem.runtime.protocol import errors
from phloem.runtime.protocol import messages as m
from phloem.runtime.protocol import ops as o
from phloem.runtime.protocol.client import Client
from phloem.runtime.protocol.sampling import SamplingParams

ENGINES = "phloem.tests.runtime.process.engines"
CONFIG = EngineConfig(model="none")
WAIT_S = 20.0


class Heard:
    """A handler that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[m.RuntimeMessage] = queue.SimpleQueue()

    def __call__(self, message: m.RuntimeMessage) -> None:
        self.messages.put(message)

    def until(self, kind: type, *, within_s: float = WAIT_S) -> list[m.RuntimeMessage]:
        heard = []
        end_s = time.monotonic() + within_s
        while True:
            heard.append(self.messages.get(timeout=max(0.01, end_s - time.monotonic())))
            if isinstance(heard[-1], kind):
                return heard


def say_hello(program: str = "p", *, stream: bool = False) -> m.Submit:
    long = SamplingParams(max_tokens=50_000)
    ops = [o.Text(op=0, seq=0, text="hello"), o.Gen(op=1, seq=0, params=long, stream=stream), o.Close(op=2, seq=0)]
    return m.Submit(program, ops)


@pytest.fixture
def start() -> Iterator:
    processes: list[EngineProcess] = []
    clients: list[Client] = []

    def start(factory: str, **options) -> tuple[EngineProcess, Client]:
        process = EngineProcess(CONFIG, factory=f"{ENGINES}:{factory}", **options)
        processes.append(process)
        client = Client(process.url, engine_alive=process.death)
        clients.append(client)
        return process, client

    yield start
    for client in clients:
        client.close()
    for process in processes:
        process.stop()


def test_a_program_runs_and_closes(start):
    _, client = start("plain")
    heard = Heard()
    client.submit(say_hello(), heard)
    messages = heard.until(m.Closed)
    assert isinstance(messages[0], m.Accepted)
    assert {message.op for message in messages if isinstance(message, m.Done)} == {0, 1, 2}


def test_a_killed_engine_fails_every_waiting_op_once_and_says_how_it_died(start):
    process, client = start("slow")
    heard = [Heard() for _ in range(3)]
    for i, handler in enumerate(heard):
        client.submit(say_hello(f"p{i}"), handler)
        handler.until(m.Done)
    os.kill(process.pid, signal.SIGKILL)
    began_s = time.monotonic()
    for handler in heard:
        messages = handler.until(m.Closed)
        failed = [message for message in messages if isinstance(message, m.Failed)]
        assert [message.op for message in failed] == [1, 2]
        assert failed[0].error.kind == "EngineLost" and "SIGKILL" in failed[0].error.message
    assert time.monotonic() - began_s < 5.0
    with pytest.raises(errors.EngineLost, match="SIGKILL"):
        client.submit(say_hello("later"), Heard())
    with pytest.raises(errors.EngineLost, match="SIGKILL"):
        client.query("info")


def test_an_engine_that_exits_on_its_own_is_reported_with_its_code(start):
    _, client = start("dying")
    heard = Heard()
    client.submit(say_hello(), heard)
    failed = [message for message in heard.until(m.Closed) if isinstance(message, m.Failed)]
    assert "exited with code 7" in failed[0].error.message


def test_a_start_that_fails_raises_the_child_s_own_error():
    with pytest.raises(errors.UnknownModel, match="no model 'none'; try smollm2"):
        EngineProcess(CONFIG, factory=f"{ENGINES}:unstartable")
    with pytest.raises(errors.InternalError, match="RuntimeError: a fault while loading"):
        EngineProcess(CONFIG, factory=f"{ENGINES}:broken")


def test_a_start_that_takes_too_long_is_ended():
    with pytest.raises(errors.EngineLost, match="not ready within 0.01 s"):
        EngineProcess(CONFIG, factory=f"{ENGINES}:plain", start_timeout_s=0.01)


def test_stop_leaves_no_process_and_no_file(start):
    process, client = start("plain")
    folder = Path(process.url.removeprefix("ipc://")).parent
    assert stat.S_IMODE(Path(process.url.removeprefix("ipc://")).stat().st_mode) & 0o077 == 0
    client.close()
    process.stop()
    assert not folder.exists() and not Path(f"/proc/{process.pid}").exists()


def test_a_child_ends_with_its_parent(tmp_path):
    script = f"""
import os, sys
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess
process = EngineProcess(EngineConfig(model="none"), factory="{ENGINES}:plain")
print(process.pid, process.url, flush=True)
os._exit(0)
"""
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    pid, url = made.stdout.split()
    end_s = time.monotonic() + WAIT_S
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end_s, "the child outlives its parent"
        time.sleep(0.05)
    Path(url.removeprefix("ipc://")).unlink(missing_ok=True)


def test_two_clients_do_not_see_each_other_s_programs(start):
    process, first = start("plain")
    second = Client(process.url)
    heard = Heard(), Heard()
    first.submit(say_hello("same name"), heard[0])
    second.submit(say_hello("same name"), heard[1])
    for handler in heard:
        messages = handler.until(m.Closed)
        assert sum(isinstance(message, m.Done) for message in messages) == 3
    second.close()


def test_cancel_ends_a_program_with_what_it_had(start):
    _, client = start("slow")
    heard = Heard()
    client.submit(say_hello(stream=True), heard)
    heard.until(m.Delta)
    client.cancel("p")
    failed = [message for message in heard.until(m.Closed) if isinstance(message, m.Failed)]
    assert failed[0].error.kind == "Cancelled" and failed[0].partial[0]


def test_frames_that_are_not_of_the_protocol_are_answered_and_cost_nothing_else(start):
    process, client = start("plain")
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(process.url)
    decode = msgspec.msgpack.Decoder(list[m.RuntimeMessage]).decode
    for frame in (b"", b"\x00garbage", msgspec.msgpack.encode({"m": "nonsense"}), os.urandom(500)):
        raw.send(frame)
        assert raw.poll(10_000)
        (fault,) = decode(raw.recv())
        assert isinstance(fault, m.ProtocolFault) and "was not understood" in fault.error.message
    raw.send(msgspec.msgpack.encode(m.Hello(version=99)))
    assert raw.poll(10_000)
    (fault,) = decode(raw.recv())
    assert "protocol version 99" in fault.error.message
    raw.close(0)
    heard = Heard()
    client.submit(say_hello(), heard)
    heard.until(m.Closed)


def test_deltas_beyond_a_client_s_credit_merge_and_lose_nothing(start):
    process, _ = start("slow")
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(process.url)
    decode = msgspec.msgpack.Decoder(list[m.RuntimeMessage]).decode
    raw.send(msgspec.msgpack.encode(m.Hello(version=m.PROTOCOL_VERSION)))
    assert raw.poll(10_000) and isinstance(decode(raw.recv())[0], m.Welcome)
    raw.send(msgspec.msgpack.encode(m.Credit(2)))
    raw.send(msgspec.msgpack.encode(say_hello(stream=True)))
    time.sleep(0.5)
    raw.send(msgspec.msgpack.encode(m.Cancel("p")))
    messages: list[m.RuntimeMessage] = []
    while not messages or not isinstance(messages[-1], m.Closed):
        assert raw.poll(10_000)
        messages += decode(raw.recv())
    deltas = [message for message in messages if isinstance(message, m.Delta)]
    (failed,) = [message for message in messages if isinstance(message, m.Failed) and message.op == 1]
    assert len(deltas) == 3, "two by credit, and the rest as one before the end"
    assert "".join(delta.text for delta in deltas) == failed.partial[0]
    raw.close(0)


def test_a_plain_tcp_address_that_others_can_reach_is_refused():
    with pytest.raises(errors.InvalidRequest, match="needs CurveZMQ keys"):
        EngineProcess(CONFIG, url="tcp://0.0.0.0:0", factory=f"{ENGINES}:plain")


def test_tcp_on_loopback_takes_a_free_port_and_a_busy_one_is_named(start):
    process, client = start("plain", url="tcp://127.0.0.1:*")
    assert client.welcome.model and not process.url.endswith("*")
    with pytest.raises(errors.InvalidRequest, match="cannot listen at"):
        EngineProcess(CONFIG, url=process.url, factory=f"{ENGINES}:plain")


def test_nobody_at_an_address_is_an_error_not_a_wait(tmp_path):
    with pytest.raises(errors.EngineLost, match="nothing answers"):
        Client(f"ipc://{tmp_path}/nobody", connect_timeout_s=0.2)


def test_a_closed_client_says_so():
    process = EngineProcess(CONFIG, factory=f"{ENGINES}:plain")
    client = Client(process.url)
    client.close()
    client.close()
    with pytest.raises(errors.EngineLost, match="closed"):
        client.submit(say_hello(), Heard())
    process.stop()


def test_a_rejected_program_is_forgotten(start):
    _, client = start("plain")
    heard = Heard()
    client.submit(m.Submit("p", [o.Ref(op=0, seq=0, source=9)]), heard)
    heard.until(m.Rejected)
    heard = Heard()
    client.submit(say_hello("p"), heard)
    heard.until(m.Closed)
    assert not client._programs
