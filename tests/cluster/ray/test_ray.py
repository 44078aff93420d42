"""Real Ray on loopback: the parts of Ray Serve that are used, and streams through a replica that is killed."""

import os
import signal
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import httpx
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
        before = fleet(url)["replicas"]
        victim = max(before, key=lambda replica: replica["load"]["forward_tokens"])
        assert texts(url, partial(os.kill, victim["pid"], signal.SIGKILL)) == expected
        assert fleet(url)["engines_lost"] == 1
        wait_until(has_two)
        after = fleet(url)
        assert victim["name"] not in {replica["name"] for replica in after["replicas"]}
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
