"""Real Ray on loopback: the parts of Ray Serve that are used, and programs through kills, scaling and drains."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import phloem
import pytest
from phloem.tests.runtime.server.test_serve import address, fleet, is_alive, running, texts
from phloem.tests.runtime.wire import wait_until

# By its distribution: where the checkout's folder is called ray, the module of that name is ours.
IS_INSTALLED = next(metadata.distributions(name="ray"), None) is not None
pytestmark = [pytest.mark.ray, pytest.mark.skipif(not IS_INSTALLED, reason="phloem[ray] is not installed")]


def test_ray_has_the_parts_that_are_used():
    code = "from phloem.tests.cluster.ray.contract import missing; print(missing())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd="/")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="finds a parent in /proc, which only Linux has")
def test_two_replicas_on_ray_lose_no_stream_when_one_is_killed_and_then_there_are_two_again(tiny_model_path):
    command = ["serve", str(tiny_model_path), "--port", "0", "--replicas", "2", "--num-threads", "1", "--on", "ray"]
    with running([sys.executable, "-m", "phloem", *command]) as started:
        url = address(started, timeout_s=180.0).split(" at ")[1].split(",")[0]

        def has_two() -> bool:
            return httpx.get(f"{url}/health", timeout=300).json()["replicas"] == {"ready": 2, "total": 2}

        wait_until(has_two)
        expected = texts(url)
        victims = []

        def kill_busiest() -> None:
            victims.append(max(fleet(url)["replicas"], key=lambda replica: replica["load"]["programs"]))
            os.kill(victims[0]["pid"], signal.SIGKILL)

        assert texts(url, kill_busiest) == expected
        assert fleet(url)["engines_lost"] == 1
        wait_until(has_two)
        after = fleet(url)
        assert victims[0]["name"] not in {replica["name"] for replica in after["replicas"]}
        assert after["replays"] > 0 and after["poisoned"] == 0

        # A worker of Ray takes its engine with it.
        worker = parent(after["replicas"][0]["pid"])
        assert texts(url, partial(os.kill, worker, signal.SIGKILL)) == expected
        wait_until(has_two)
        after = fleet(url)
        assert after["engines_lost"] == 2 and after["poisoned"] == 0

        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=300) == 0
        wait_until(lambda: not any(is_alive(replica["pid"]) for replica in after["replicas"]))


# What `serve run` does with a file whose import path is `phloem.cluster.ray.app:build`.
APPLICATION = """
import json, os, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
import ray
from ray import serve
from phloem.cluster.ray.app import build
name, port, args = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
serve.run(build(args), name=name, route_prefix="/")
print("ready", flush=True)
sys.stdin.read()
serve.delete(name)
ray.shutdown()
"""


@dataclass(frozen=True)
class Application:
    name: str
    url: str

    def ready(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=300).json()["replicas"]["ready"]

    def process_of(self, deployment: str) -> int:
        """The process of a replica of ``deployment``."""
        title = f"ray::ServeReplica:{self.name}:{deployment}".encode()
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(title):
                    return int(folder.name)
        raise AssertionError(f"no process is called {title!r}")

    def answer(self, seed: int, *, max_tokens: int = 60) -> str:
        """Of a client that tries again where the server or the connection ends, as clients of OpenAI do."""
        body = {"prompt": "A tree", "seed": seed, "temperature": 0.9, "max_tokens": max_tokens, "ignore_eos": True}
        for _ in range(600):
            try:
                answer = httpx.post(f"{self.url}/v1/completions", json=body | {"model": "tiny"}, timeout=300)
            except httpx.TransportError:
                continue
            if answer.status_code < 500:
                return answer.json()["choices"][0]["text"]
            threading.Event().wait(0.1)
        raise AssertionError(f"no answer: {answer.status_code} {answer.text}")


@contextlib.contextmanager
def application(model: Path, **args: Any) -> Iterator[Application]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    name = f"phloem{os.getpid()}"
    options = {"model": str(model), "model_name": "tiny", **args}
    command = [sys.executable, "-c", APPLICATION, name, str(port), json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as started:
        try:
            assert address(started, timeout_s=300.0) == "ready"
            yield Application(name, f"http://127.0.0.1:{port}")
        finally:
            started.stdin.close()
            assert started.wait(timeout=300) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc, which only Linux has")
def test_the_application_answers_through_the_end_of_an_engine_a_replica_and_its_front(tiny_model_path):
    engine = {"num_threads": 1, "precision": "float32"}
    with application(tiny_model_path, replicas=2, engine=engine) as app, ThreadPoolExecutor(6) as pool:
        assert app.ready() == 2
        expected = list(pool.map(app.answer, range(6)))

        def under_load(kill: Any) -> None:
            """``kill`` while programs run; each of twelve answers is that of a program that nothing disturbed."""
            answers = [pool.submit(app.answer, i % 6) for i in range(12)]
            wait_until(lambda: fleet(app.url)["programs"] > 0)
            kill()
            assert [answer.result() for answer in answers] == expected * 2

        victim = fleet(app.url)["replicas"][0]
        under_load(partial(os.kill, victim["pid"], signal.SIGKILL))
        wait_until(lambda: app.ready() == 2)
        under_load(lambda: os.kill(app.process_of("EngineReplica"), signal.SIGKILL))
        wait_until(lambda: app.ready() == 2)
        after = fleet(app.url)
        assert after["engines_lost"] == 2 and after["poisoned"] == 0
        front = app.process_of("Front")
        under_load(partial(os.kill, front, signal.SIGKILL))
        assert app.process_of("Front") != front
        wait_until(lambda: app.ready() == 2)
        assert fleet(app.url)["engines_lost"] == 0, "the new front found both engines"


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc, which only Linux has")
def test_a_gang_in_two_bundles_answers_and_another_one_follows_a_lost_rank(tiny_model_path):
    engine = {"num_threads": 1, "precision": "float32", "num_slots": 2048, "rank_timeout_s": 20.0}
    with application(tiny_model_path, engine=engine) as app:
        expected = app.answer(1)
    with application(tiny_model_path, engine=engine | {"tensor_parallel": 2, "nnodes": 2}) as app:
        assert app.answer(1) == expected
        before, victim = fleet(app.url)["replicas"][0], rank_of_bundle()
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not is_alive(before["pid"]))
        assert app.answer(1) == expected
        assert fleet(app.url)["replicas"][0]["name"] != before["name"]
        last = rank_of_bundle()
    wait_until(lambda: not is_alive(last))


def rank_of_bundle() -> int:
    """The process of the only rank that an actor of a bundle has started."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"ray::RanksOfBundle"):
                for tasks in (folder / "task").iterdir():
                    found += map(int, (tasks / "children").read_text().split())
    (rank,) = {pid for pid in found if b"rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()}
    return rank


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc, which only Linux has")
def test_programs_at_a_front_that_is_killed_go_on_and_nobody_asks_again(tiny_model_path):
    batch = [{"seed": seed} for seed in range(8)]
    with (
        application(tiny_model_path, engine={"num_threads": 1, "precision": "float32"}) as app,
        endpoint(app) as backend,
    ):
        expected = [s["b"] for s in two_texts.run_batch(batch, backend=backend)]
        front = app.process_of("Front")
        with ThreadPoolExecutor(1) as later:
            running = later.submit(two_texts.run_batch, batch, backend=backend)
            wait_until(lambda: fleet(app.url)["programs"] > 0)
            os.kill(front, signal.SIGKILL)
            assert [s["b"] for s in running.result()] == expected
        assert app.process_of("Front") != front


@contextlib.contextmanager
def endpoint(app: Application) -> Iterator[Any]:
    backend = phloem.RuntimeEndpoint(app.url, reconnect_s=300.0)
    try:
        yield backend
    finally:
        backend.shutdown()


@phloem.function
def two_texts(s: Any, seed: int) -> None:
    s += "A tree " + phloem.gen("a", seed=seed, max_tokens=200, temperature=0.9, ignore_eos=True)
    s += "and " + str(len(s["a"])) + phloem.gen("b", seed=seed, max_tokens=200, temperature=0.9, ignore_eos=True)


def test_autoscaling_goes_from_one_replica_to_two_and_back_and_ends_no_program(tiny_model_path):
    engine = {"num_threads": 1, "precision": "float32", "max_running": 1, "speculative": "off"}
    scaling = {"max_replicas": 2, "goal_s": 0.2, "window_s": 36, "calm_s": 8}
    with application(tiny_model_path, engine=engine, autoscaling=scaling) as app, ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(app.answer, range(8)))
        is_busy, is_over = threading.Event(), threading.Event()
        is_busy.set()

        def client(seed: int) -> int:
            """Asks again and again: all clients while the load is high, one of them after that."""
            num_asked = 0
            while not is_over.is_set() and (seed == 0 or is_busy.is_set()):
                assert app.answer(seed) == expected[seed]
                num_asked += 1
            return num_asked

        clients = [pool.submit(client, seed) for seed in range(8)]
        wait_until(lambda: app.ready() == 2)
        is_busy.clear()
        wait_until(lambda: app.ready() == 1)
        is_over.set()
        assert all(one.result() > 0 for one in clients)
        after = fleet(app.url)
        assert (after["engines_lost"], after["poisoned"]) == (0, 0)
