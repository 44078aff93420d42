"""What Windows lacks has a twin: Linux's modules, sockets and files are hidden here from every process that a test
starts (``windows_site/sitecustomize.py``), and its calls do what Windows's do. No test has run on Windows.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import phloem
import pytest
from phloem.runtime.server.tenants import hash_of, new_key
from phloem.runtime.weights.pull import Progress, pull_alias
from phloem.tests.runtime.weights.test_pull import PARTS, Index, alias_of
from phloem.tests.runtime.wire import wait_until

PLAIN = "phloem.tests.runtime.process.engines:plain"
SITE = Path(__file__).parent / "windows_site"
# They look for Windows's DLLs where ``sys.platform`` has its name: those of a server, and of an engine.
LOADED = "uvicorn fastapi tokenizers httpx"
ENGINE_LOADED = "torch torch.distributed numba llvmlite.binding safetensors.torch tokenizers gguf"


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """A folder with a file for each process that had Linux hidden, named by its number."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    return folder


def environment(hidden: Path, *, loaded: str = "") -> dict[str, str]:
    own = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SITE), *([own] if own else [])]),
        "PHLOEM_TEST_HIDDEN": str(hidden),
        "PHLOEM_TEST_LOADED": loaded,
        "PHLOEM_TEST_ENGINE_LOADED": ENGINE_LOADED if loaded else "",
    }


def run(code: str, hidden: Path, *, loaded: str = "") -> subprocess.CompletedProcess[str]:
    variables = environment(hidden, loaded=loaded)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=variables)
    assert any(hidden.iterdir()), f"nothing was hidden: {done.stderr}"
    return done


def test_the_language_imports_and_a_program_is_written(hidden: Path) -> None:
    code = """
import phloem
@phloem.function
def ask(s, question):
    s += question + phloem.gen("answer")
assert callable(phloem.Runtime) and callable(phloem.connect)
print("written")
"""
    done = run(code, hidden)
    assert (done.returncode, done.stdout.strip()) == (0, "written"), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [("--help", "show what this machine can run"), ("serve --help", "--port"), ("doctor", "cores for this process")],
)
def test_help_and_doctor_run(words: str, said: str, hidden: Path) -> None:
    done = run(f"from phloem import cli\nraise SystemExit(cli.main({words.split()!r}))", hidden)
    assert done.returncode == 0 and said in done.stdout, done.stderr


def test_an_address_of_ipc_is_refused_with_the_way_out(hidden: Path) -> None:
    code = f"""
import phloem
url = "ipc:///tmp/some.sock"
for call in (lambda: phloem.connect(url), lambda: phloem.Runtime("none", url=url, engine_factory={PLAIN!r})):
    try:
        call()
    except phloem.Unsupported as error:
        print(error.message)
"""
    done = run(code, hidden)
    line = "url='ipc:///tmp/some.sock': this system, or its ZeroMQ, has no Unix sockets; use tcp://127.0.0.1:PORT"
    assert done.stdout.splitlines() == [line, line], done.stderr


def test_a_runtime_has_keys_of_its_own_and_one_at_an_address_takes_others(hidden: Path) -> None:
    code = f"""
import phloem
from phloem.protocol.client import Client
from phloem.protocol.errors import EngineLost
with phloem.Runtime("none", engine_factory={PLAIN!r}) as runtime:
    url = runtime.process.url
    print(url)
    print(runtime.generate("hello"))
    try:
        Client(url, connect_timeout_s=60.0)
    except EngineLost as error:
        print("refused:", error.message)
    process = runtime.process
print(process.death())
with phloem.Runtime("none", url="tcp://127.0.0.1:*", engine_factory={PLAIN!r}) as runtime:
    with phloem.connect(runtime.process.url) as other:
        print(other.generate("hello") == runtime.generate("hello"))
"""
    done = run(code, hidden)
    url, text, refused, end, is_same = done.stdout.splitlines() or [done.stderr] * 5
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", url) and text, done.stderr
    assert refused.startswith("refused:") and "keys" in refused
    assert "exited with code 0" in end, "it was asked to end, not killed"
    assert is_same == "True", done.stderr
    assert len(list(hidden.iterdir())) == 3, "both engines had Linux hidden, too"


def test_an_engine_ends_with_its_parent(hidden: Path) -> None:
    code = f"""
import os
from phloem.runtime.config import EngineConfig
from phloem.runtime.process import EngineProcess
process = EngineProcess(EngineConfig(model="none"), factory={PLAIN!r})
print(process.pid, flush=True)
os._exit(9)
"""
    done = run(code, hidden)
    pid = int(done.stdout)
    wait_until(lambda: not is_alive(pid))
    assert (hidden / str(pid)).exists()


@contextlib.contextmanager
def serving(words: list[str], hidden: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "phloem", "serve", *words, "--port", "0", "--num-threads", "1"]
    variables = environment(hidden, loaded=LOADED)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if "http://" in line), "")
            found = re.search(r"http://[\d.:]+", line)
            assert found, "the server ended before it told its address"
            yield server, found[0]
        finally:
            server.kill()


def test_a_server_of_two_engines_answers_and_ends(tiny_model_path: Path, hidden: Path, tmp_path: Path) -> None:
    """Engines in processes, reached with keys over TCP, and so are their cache events; new keys; a drain; Ctrl-C."""
    old, new = new_key(), new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.old]\noperator = true\nkeys = ["{hash_of(old)}"]\n')
    words = [str(tiny_model_path), "--replicas", "2", "--key-file", str(keys)]
    with serving(words, hidden) as (server, url), httpx.Client(base_url=url, timeout=300) as client:
        client.headers["authorization"] = f"Bearer {old}"
        wait_until(lambda: [one["state"] for one in client.get("/fleet").json()["replicas"]] == ["ready", "ready"])
        pids = [one["pid"] for one in client.get("/fleet").json()["replicas"]]
        body = {"prompt": "a b c " * 40, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] > 0
        wait_until(lambda: client.get("/fleet").json()["known_blocks"] > 0)  # told by an engine's cache events

        late = {"authorization": f"Bearer {new}"}
        assert client.get("/usage", headers=late).status_code == 401
        keys.write_text(keys.read_text() + f'[tenants.new]\nkeys = ["{hash_of(new)}"]\n')
        wait_until(lambda: client.get("/usage", headers=late).status_code == 200)

        body = {"prompt": "d", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            assert client.post("/fleet/drain/0").status_code == 202
            server.send_signal(signal.SIGINT)  # a running answer may end
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(300) == 0
    wait_until(lambda: not any(map(is_alive, pids)))
    assert {path.name for path in hidden.iterdir()} >= {str(pid) for pid in (server.pid, *pids)}


def test_a_model_that_two_processes_share_says_the_same_and_they_end_together(
    tiny_model_path: Path, hidden: Path
) -> None:
    code = f"""
import phloem
with phloem.Runtime({str(tiny_model_path)!r}, tensor_parallel=2, num_threads=1) as runtime:
    print(runtime.generate("a b c", max_tokens=8, temperature=0.0).meta.candidates[0].token_ids)
    runtime.process.kill()
"""
    done = run(code, hidden, loaded=LOADED)
    with phloem.Engine(str(tiny_model_path), num_threads=1) as engine:
        alone = engine.generate("a b c", max_tokens=8, temperature=0.0)
    assert done.stdout.strip() == str(alone.meta.candidates[0].token_ids), done.stderr
    pids = [int(path.name) for path in hidden.iterdir()]
    assert len(pids) == 3, "the engine's process and that of its other rank had Linux hidden, too"
    wait_until(lambda: not any(map(is_alive, pids)))  # the rank ends with the engine, which was killed


def pull_a_toy(home: str, go_on: str) -> None:
    """Hold the lock until ``go_on`` is there, or make it where another pull is waited for. For a process without fcntl,
    in which the library's lock is a file; Windows's own lock asks for Windows's DLLs.
    """
    index = Index(PARTS)

    def say(word: str) -> None:
        sys.stdout.write(f"{word}\n")
        sys.stdout.flush()

    def fetch(requirement: str, folder: Path, progress: Progress) -> Path:
        say("fetching")
        wait_until(Path(go_on).exists)
        return index(requirement, folder, progress)

    def note(what: str, done: int, total: int) -> None:
        if what == "waiting for another pull of toy":
            say("waiting")
            Path(go_on).touch()

    path = pull_alias(alias_of(PARTS), home=Path(home), fetch=fetch, progress=note)
    say("whole" if path.read_bytes() == b"".join(PARTS) else "broken")


def test_of_two_pulls_without_fcntl_one_waits_for_the_other(tmp_path: Path, hidden: Path) -> None:
    home, go_on = str(tmp_path / "home"), str(tmp_path / "go-on")
    code = f"""
import sys
sys.platform = "linux"
from phloem.tests.test_windows import pull_a_toy
pull_a_toy({home!r}, {go_on!r})
"""
    command = [sys.executable, "-W", "ignore:only soft file lock", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(hidden)) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "fetching\n"
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(hidden))
        assert second.stdout.splitlines() == ["waiting", "whole"], second.stderr
        assert first.stdout.read().split() == ["fetching"] * (len(PARTS) - 1) + ["whole"]
    assert first.returncode == 0 and len(list(hidden.iterdir())) == 2


def test_triton_is_asked_for_on_linux_alone() -> None:
    settings = tomllib.loads((Path(phloem.__file__).parent / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [*settings["project"]["dependencies"], *settings["dependency-groups"]["dev"]]
    found = [line for line in asked if line.startswith("triton")]
    assert len(found) == 2 and all(line.endswith("; sys_platform == 'linux'") for line in found)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
