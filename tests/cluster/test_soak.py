"""Engine processes are killed at random moments while programs run: each program ends once, with the expected results.

``PHLOEM_SOAK_KILLS`` sets their number: one by default, of the only engine; with ``make soak-fleet`` 200, of two,
with a line for each tenth.
"""

import logging
import os
import random
import signal
import threading
import time
from pathlib import Path

from phloem.cluster.restarts import RestartPolicy
from phloem.cluster.supervisor import Supervisor
from phloem.protocol.ops import AnyOp
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, Host
from phloem.tests.cluster.programs import RandomProgram
from phloem.tests.cluster.test_client import forks, stream
from phloem.tests.runtime.wire import WAIT_S, wait_until

NUM_KILLS = int(os.environ.get("PHLOEM_SOAK_KILLS", "1"))
NUM_REPLICAS = 1 if NUM_KILLS == 1 else 2
AT_ONCE = 40

log = logging.getLogger(__name__)


def programs() -> list[list[AnyOp]]:
    """32 streams, 8 forking programs with grammars, and 20 random ones."""
    found = [stream(f"stream {i}: ", max_tokens=150 + 10 * i) for i in range(32)]
    found += [forks(f"program {i}:") for i in range(8)]
    return found + [[op for part in RandomProgram(random.Random(i)).submits for op in part] for i in range(20)]


def is_settled(metrics: dict[str, dict[str, object]]) -> bool:
    return all(engine["programs"] == 0 for engine in metrics.values())


def test_kills_at_random_moments_lose_and_repeat_nothing(tiny_model_path: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=16_384, max_running=24)
    asked_for = programs()
    core = EngineCore(config)
    host = Host(core, f"ipc://{tmp_path}/alone")
    with host.connect() as client:
        want = [asked.result() for asked in [Asked(client, ops) for ops in asked_for]]
    host.end()
    core.close()

    rng = random.Random(7)
    events = threading.Semaphore(0)  # released once for each message that a caller hears
    policy = RestartPolicy(max_restarts=10 * NUM_KILLS + 10, backoff_s=0.0)
    running: dict[int, Asked] = {}
    wrong: dict[int, object] = {}
    killed: set[int] = set()
    num_run = num_kills = 0
    longest_pause_s = 0.0
    with Supervisor(config, tokenize=lambda ops: [], replicas=NUM_REPLICAS, policy=policy) as supervisor:
        fleet = supervisor.fleet
        wait_until(lambda: all(replica.state == "ready" for replica in supervisor.replicas()))
        began_s = time.monotonic()
        while num_kills < NUM_KILLS or running:
            while num_kills < NUM_KILLS and len(running) < AT_ONCE:
                running[num_run] = Asked(
                    fleet, asked_for[num_run % len(asked_for)], on_event=lambda _: events.release()
                )
                num_run += 1
            for _ in range(rng.randrange(1, 3000)):
                waited_s = time.monotonic()
                if not any(not one.call.is_over for one in running.values()):
                    break
                assert events.acquire(timeout=WAIT_S), "nothing comes any more"
                longest_pause_s = max(longest_pause_s, time.monotonic() - waited_s)
            ready = [one.pid for one in supervisor.replicas() if one.state == "ready" and one.pid not in killed]
            if num_kills < NUM_KILLS and ready:
                pid = rng.choice(ready)
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
                num_kills += 1
                if num_kills % 10 == 0:
                    log.info("%d kills, %d programs, %.0f s", num_kills, num_run, time.monotonic() - began_s)
            for number in [number for number, one in running.items() if one.call.is_over]:
                found, expected = running.pop(number).result(), want[number % len(want)]
                if found != expected:
                    keys = found.keys() | expected.keys()
                    wrong[number] = [
                        (key, found.get(key), expected.get(key)) for key in keys if found.get(key) != expected.get(key)
                    ]
                    log.error("program %d: found and expected: %s", number, wrong[number])
        report = fleet.query("fleet")
        wait_until(lambda: all(replica.state == "ready" for replica in supervisor.replicas()))
        wait_until(lambda: is_settled(supervisor.metrics()))
        for engine in supervisor.metrics().values():
            slots = engine["slots"]
            assert slots["leased"] == 0 and slots["free"] + slots["cached"] == slots["total"], slots
    took_s = time.monotonic() - began_s
    log.info("%s; %d programs, longest pause %.1f s, %.0f s", report, num_run, longest_pause_s, took_s)
    assert wrong == {} and num_run >= AT_ONCE
    assert report["poisoned"] == 0 and report["replays"] >= 1 and report["engines_lost"] >= NUM_KILLS
