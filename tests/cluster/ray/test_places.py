"""Where Ray's engines are, without Ray: reports, waits, and a fleet that follows them through losses."""

import ast
import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import phloem
import pytest
from phloem import cli
from phloem.cluster.ray.places import EnginePlace, Places, PlacesFollower
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, Fleet, fleet_of

ROOT = Path(phloem.__file__).parent
HERE = EnginePlace("a", "tcp://127.0.0.1:5", "key", 1, "tiny", 10)


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=8192, num_threads=1)
    found = [EngineCore(config), EngineCore(config)]
    yield found
    for engine in found:
        engine.close()


def test_a_report_wakes_who_waits_and_the_same_report_does_not():
    async def run() -> None:
        places = Places()
        waiting = asyncio.create_task(places.changed(0, 60.0))
        await asyncio.sleep(0)
        await places.report(HERE)
        version, found = await waiting
        assert (version, found) == (1, {"a": HERE})
        await places.report(HERE)
        assert await places.changed(1, 0.0) == (1, {"a": HERE})
        await places.report(replace(HERE, pid=11))
        assert (await places.changed(1, 60.0))[1]["a"].pid == 11
        await places.forget("a")
        await places.forget("a")
        assert await places.changed(2, 60.0) == (3, {})

    asyncio.run(run())


class Followed:
    """A follower of a fleet's hosts, whose places are told to it as Ray's replicas would."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.lost = threading.Event()
        self.follower = PlacesFollower(
            fleet.client, lambda place: Client(place.url, connect_timeout_s=0.2, engine_timeout_s=30.0)
        )
        fleet.client.on_lost = self._lose

    def _lose(self, engine: str, error: Exception) -> None:
        self.follower.lose(engine, error)
        self.lost.set()

    def place(self, name: str) -> EnginePlace:
        return EnginePlace(name, self.fleet.hosts[name].url, "", 1, "tiny", 1)

    def add_host(self, **options: object) -> EnginePlace:
        name = f"e{len(self.fleet.hosts) + 1}"
        self.fleet.hosts[name] = self.fleet.host(name, **options)
        return self.place(name)


def stream(text: str) -> list[o.AnyOp]:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True, speculative=False)
    return [
        o.Text(op=0, seq=0, text=text),
        o.Gen(op=1, seq=0, params=params, stream=True),
        o.Close(op=2, seq=0),
    ]


@pytest.mark.parametrize("how", ["lost", "stopped"])
def test_programs_of_an_engine_that_is_lost_or_stopped_go_on_at_the_next_place(engines, tmp_path, how):
    with fleet_of(engines, tmp_path) as fleet:
        followed = Followed(fleet)
        first = followed.add_host(num_steps=25 if how == "lost" else None)
        second = followed.add_host()
        assert followed.follower.follow({"e2": second}) == []
        expected = Asked(fleet.client, stream("a prompt")).result()
        assert followed.follower.follow({"e1": first}) == []
        assert [replica.name for replica in followed.follower.replicas()] == ["e1"]

        begun = threading.Event()
        asked = Asked(fleet.client, stream("a prompt"), on_event=lambda event: begun.set())
        assert begun.wait(60)
        if how == "lost":
            assert followed.lost.wait(60)
            assert followed.follower.follow({"e1": first, "e2": second}) == ["e1"], "reported, but not there any more"
        else:
            assert followed.follower.follow({"e2": second}) == []
        (replica,) = followed.follower.replicas()
        assert replica.name == "e2"
        assert asked.result() == expected
        for host in fleet.hosts.values():
            host.end()


def test_an_engine_that_was_not_reached_is_added_when_it_is_reported_again(engines, tmp_path):
    with fleet_of(engines, tmp_path) as fleet:
        followed = Followed(fleet)
        place = EnginePlace("e1", f"ipc://{tmp_path}/e1", "", 1, "tiny", 1)
        assert followed.follower.follow({"e1": place}) == ["e1"]
        assert followed.follower.refusal is not None and not followed.follower.clients
        assert followed.follower.follow({"e1": followed.add_host()}) == []
        assert fleet.client.num_ready == 1


def test_ray_is_imported_by_its_own_folder_alone():
    importers = set()
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).parts
        if parts[0].startswith(".") or parts[0] in ("build", "tests"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(name.split(".")[0] == "ray" for name in names):
                importers.add("/".join(parts))
    assert importers == {"cluster/ray/replica.py", "cluster/ray/supervisor.py"}


def test_without_ray_the_command_says_how_to_install_it(tiny_model_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "phloem.cluster.ray.supervisor", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    assert cli.main(["serve", str(tiny_model_path), "--on", "ray"]) == 2
    assert "install it with: pip install 'phloem[ray]'" in capsys.readouterr().err


def test_a_ray_address_without_ray_is_refused(tiny_model_path, capsys):
    assert cli.main(["serve", str(tiny_model_path), "--ray-address", "host:6379"]) == 2
    assert "--ray-address host:6379: it is for --on ray" in capsys.readouterr().err


def test_a_number_of_restarts_is_refused_as_ray_decides_about_them(tiny_model_path, capsys):
    assert cli.main(["serve", str(tiny_model_path), "--on", "ray", "--max-restarts", "3"]) == 2
    assert "--max-restarts 3: with --on ray, Ray Serve decides about restarts" in capsys.readouterr().err
