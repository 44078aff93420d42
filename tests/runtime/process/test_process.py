"""Engine processes start, answer, die and stop, and no client waits for ever."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from phloem.protocol import errors
from phloem.protocol import messages as m
from phloem.protocol.client import Client
from phloem.protocol.program_call import OpFailed
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess, PythonProcess
from phloem.tests.runtime.wire import Heard, ask, begin, wait_until

ENGINES = "phloem.tests.runtime.process.engines"
CONFIG = EngineConfig(model="none")


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
    begin(client, ask(), heard)
    messages = heard.until(m.Closed)
    assert isinstance(messages[0], m.Accepted)
    assert {message.op for message in messages if isinstance(message, m.Done)} == {0, 1, 2}


def test_a_killed_engine_fails_every_waiting_op_once_and_says_how_it_died(start):
    process, client = start("slow")
    heard = [Heard() for _ in range(3)]
    for i, handler in enumerate(heard):
        begin(client, ask(f"p{i}"), handler)
        handler.until(m.Done)
    os.kill(process.pid, signal.SIGKILL)
    for handler in heard:
        messages = handler.until(m.Closed)
        failed = [message for message in messages if isinstance(message, OpFailed)]
        assert [message.op for message in failed] == [1, 2]
        assert isinstance(failed[0].error, errors.EngineLost) and "SIGKILL" in failed[0].error.message
    with pytest.raises(errors.EngineLost, match="SIGKILL"):
        begin(client, ask("later"), Heard())
    with pytest.raises(errors.EngineLost, match="SIGKILL"):
        client.query("info")


def test_an_engine_that_exits_on_its_own_is_reported_with_its_code(start):
    _, client = start("dying")
    heard = Heard()
    begin(client, ask(), heard)
    failed = [message for message in heard.until(m.Closed) if isinstance(message, OpFailed)]
    assert "exited with code 7" in failed[0].error.message


def test_a_start_that_fails_raises_the_child_s_own_error():
    with pytest.raises(errors.UnknownModel, match="no model 'none'; try smollm2"):
        EngineProcess(CONFIG, factory=f"{ENGINES}:unstartable")
    with pytest.raises(errors.InternalError, match="RuntimeError: a fault while loading"):
        EngineProcess(CONFIG, factory=f"{ENGINES}:broken")


def test_a_start_tells_how_far_it_is(start):
    told = []
    _, client = start("compiling", progress=lambda *step: told.append(step))
    assert told == [("compiling", 1, 2), ("compiling", 2, 2)]
    assert client.welcome.model == "string"


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
    assert "exited with code 0" in process.death(), "it was asked, not killed"


def test_a_child_told_to_end_tells_its_clients_and_removes_its_socket(start):
    process, client = start("slow")
    heard = Heard()
    begin(client, ask(), heard)
    heard.until(m.Done)
    os.kill(process.pid, signal.SIGTERM)
    failed = [message for message in heard.until(m.Closed) if isinstance(message, OpFailed)]
    assert isinstance(failed[0].error, errors.EngineLost) and failed[0].error.message == "the engine was stopped"
    wait_until(lambda: process.death() is not None)
    assert "exited with code 0" in process.death()
    assert not Path(process.url.removeprefix("ipc://")).exists()


def test_stop_ends_a_step_that_hangs(start):
    process, client = start("hanging")
    heard = Heard()
    begin(client, ask(), heard)
    wait_until(lambda: "the step hangs" in process.log_tail())
    process.stop(timeout_s=0.3)
    assert "was ended by SIGKILL" in process.death()
    assert "SIGKILL" in heard.until(m.Closed)[0].error.message


def test_a_child_finds_modules_where_its_parent_does(tmp_path, monkeypatch):
    (tmp_path / "engine_of_mine.py").write_text(
        "from phloem.tests.runtime.string_engine import StringEngine\n\n\ndef make(config, progress):\n"
        "    print('a library prints')\n    return StringEngine(model='mine')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    process = EngineProcess(CONFIG, factory="engine_of_mine:make")
    with Client(process.url) as client:
        assert client.welcome.model == "mine"
    process.stop()


def test_what_python_s_start_prints_is_no_message_of_the_engine(start, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, client = start("plain")
    assert client.welcome.model == "string"


def test_a_child_ends_with_its_parent(tmp_path):
    script = f"""
import os, time
from phloem.protocol.program_call import OpFailed
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess, PythonProcess
process = EngineProcess(EngineConfig(model="none"), factory="{ENGINES}:plain")
if os.fork() == 0:  # a worker that holds all the parent held
    os.close(1)
    os.close(2)
    time.sleep(10)
    os._exit(0)
print(process.pid, process.url, flush=True)
os.kill(os.getpid(), 9)
"""
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    pid, url = made.stdout.split()
    wait_until(lambda: not is_running(pid))
    assert not Path(url.removeprefix("ipc://")).parent.exists()


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_cancel_ends_a_program_with_what_it_had(start):
    _, client = start("slow")
    heard = Heard()
    call = begin(client, ask(stream=True), heard)
    heard.until(m.Delta)
    call.cancel()
    failed = [message for message in heard.until(m.Closed) if isinstance(message, OpFailed)]
    assert isinstance(failed[0].error, errors.Cancelled) and failed[0].partial[0]


def test_tcp_on_loopback_takes_a_free_port_and_a_busy_one_is_named(start):
    process, client = start("plain", url="tcp://127.0.0.1:*")
    assert client.welcome.model and not process.url.endswith("*")
    with pytest.raises(errors.InvalidRequest, match="cannot listen at"):
        EngineProcess(CONFIG, url=process.url, factory=f"{ENGINES}:plain")


def test_an_interpreter_that_was_started_before_becomes_the_engine(start):
    early = PythonProcess(("fractions",))
    process, client = start("plain", interpreter=early)
    assert process.pid == early.process.pid and client.welcome.model == "string"
    early.discard()  # it is the engine's by now
    assert process.death() is None
    client.close()
    process.stop()
    assert not early.folder.exists()


def test_a_restricted_engine_gets_an_interpreter_that_has_loaded_nothing():
    early = PythonProcess(("fractions",))
    config = EngineConfig(model="none", cpu_isa="portable")
    with EngineProcess(config, factory=f"{ENGINES}:plain", interpreter=early) as process:
        assert process.pid != early.process.pid and early.process.poll() is not None
    assert not early.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's environment in /proc, which only Linux has")
@pytest.mark.parametrize("said", [None, "1"])
def test_an_engines_numpy_asks_for_no_huge_pages_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    monkeypatch.delenv("NUMPY_MADVISE_HUGEPAGE", raising=False)
    if said is not None:
        monkeypatch.setenv("NUMPY_MADVISE_HUGEPAGE", said)
    process = PythonProcess()
    environment = Path(f"/proc/{process.process.pid}/environ")
    wait_until(lambda: environment.read_text() != "")  # the kernel shows none until it has started the new program
    variables = environment.read_text().split("\0")
    process.discard()
    assert f"NUMPY_MADVISE_HUGEPAGE={said or 0}" in variables


def test_an_interpreter_without_an_order_leaves_nothing():
    discarded, orphan = PythonProcess(), PythonProcess()
    discarded.discard()
    assert discarded.process.poll() is not None and not discarded.folder.exists()
    orphan.take()
    orphan.process.stdin.close()  # as the parent's death does
    assert orphan.process.wait(60) == 0 and not orphan.folder.exists()
    assert orphan.lines.next(60) is None
