"""Ranks of two machines: two commands on loopback in place of them, and what is refused."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from phloem.protocol.errors import InvalidParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.parallel.devices import on_device
from phloem.runtime.parallel.gang import LocalGang, refuse_combinations
from phloem.runtime.parallel.nodes import ranks_of_node
from phloem.tests.runtime.engine.driver import Driver, generate
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.server.test_serve import address, is_alive, running
from phloem.tests.runtime.wire import wait_until

TWO = {"tensor_parallel": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000"}


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="tiny", **options)


def test_machines_have_equal_runs_of_ranks_and_each_its_own_gpus() -> None:
    four = config(**TWO, device="cuda")
    assert [list(ranks_of_node(four, node)) for node in range(2)] == [[0, 1], [2, 3]]
    assert [on_device(four, rank).device for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    refuse_combinations(config(**TWO))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "nnodes=2: each machine has as many ranks, .* is 3; set"),
        ({"nnodes": 0}, "nnodes=0: "),
        ({"node_rank": 2}, "node_rank=2: it must be 0 to 1, as nnodes=2"),
        ({"dist_init_addr": ""}, r"dist_init_addr='': with nnodes=2 it must be HOST:PORT of the first machine"),
        ({"dist_init_addr": "host:0"}, r"dist_init_addr='host:0': with nnodes=2 it must be HOST:PORT"),
        ({"nnodes": 1}, r"dist_init_addr='127.0.0.1:5000' with nnodes=1: one machine needs none"),
        ({"nnodes": 1, "dist_init_addr": "", "node_rank": 1}, "node_rank=1: it must be 0 to 0, as nnodes=1"),
    ],
)
def test_wrong_machines_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        refuse_combinations(config(**(TWO | options)))


def test_an_engine_is_on_machine_0_and_listens_at_its_address() -> None:
    with pytest.raises(InvalidParams, match="node_rank=1: the engine is on machine 0; `phloem serve` with this number"):
        LocalGang(config(**TWO, node_rank=1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidParams, match=r"this machine cannot listen there: Address already in use"):
            LocalGang(config(**(TWO | {"dist_init_addr": address})))


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def command(path: Path, address: str, node: int, *more: str) -> list[str]:
    split = ["--tensor-parallel", "2", "--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", address]
    engine = ["--precision", "float32", "--num-threads", "1", "--num-slots", "2048", "--rank-timeout-s", "10"]
    return [sys.executable, "-m", "phloem", "serve", str(path), *split, *engine, "--port", "0", *more]


def ranks_of(pid: int) -> list[int]:
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (tasks / "children").read_text().split())
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc, which only Linux has")
def test_two_commands_answer_as_one_and_a_killed_rank_is_followed_by_another_gang(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", seed=1)
    at = free_address()
    body = {"prompt": "木 leaf", "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    engine = EngineCore(EngineConfig(model=str(path), precision="float32", num_threads=1, num_slots=2048))
    expected = generate(Driver(engine), "木 leaf")[0][0]
    engine.close()
    with running(command(path, at, 1)) as node, running(command(path, at, 0)) as server:
        assert address(node).startswith(f"phloem runs machine 1 of 2 for {at}")
        url = address(server).split(" at ")[1].split(",")[0]

        def answer() -> str:
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
            return found.json()["choices"][0]["text"] if found.status_code == 200 else str(found.status_code)

        assert answer() == expected
        (victim,) = ranks_of(node.pid)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: answer() == expected)
        (after,) = ranks_of(node.pid)
        assert after != victim
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0
        assert node.wait(timeout=120) == 0, node.stderr.read()
        assert not is_alive(after)


def test_other_options_than_those_of_machine_0_are_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", seed=1)
    at = free_address()
    with running(command(path, at, 0)), running(command(path, at, 1, "--max-running", "3")) as node:
        assert node.wait(timeout=120) != 0
        assert "max_running=3 on machine 1, but " in node.stderr.read()
