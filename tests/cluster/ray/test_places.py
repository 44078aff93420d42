"""A fleet that follows Ray's engines through losses and stops, without Ray."""

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import phloem
import pytest
from phloem import cli
from phloem.cluster.ray.places import RETRY_S, EnginePlace, PlacesFollower
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, Fleet, fleet_of
from phloem.tests.runtime.wire import wait_until

ROOT = Path(phloem.__file__).parent


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=8192, num_threads=1)
    found = [EngineCore(config), EngineCore(config)]
    yield found
    for engine in found:
        engine.close()


class Followed:
    """A follower of a fleet's hosts, whose places are told to it as Ray's replicas would."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.lost = threading.Event()
        self.now_s = 0.0
        self.follower = PlacesFollower(
            fleet.client,
            lambda place: Client(place.url, connect_timeout_s=0.2, engine_timeout_s=30.0),
            now_s=lambda: self.now_s,
        )
        fleet.client.on_lost = self._lose

    def _lose(self, engine: str, error: Exception) -> None:
        self.follower.lose(engine, error)
        self.lost.set()

    def place(self, name: str) -> EnginePlace:
        return EnginePlace(name, self.fleet.hosts[name].url, "", 1, "tiny", 1)

    def follow_until_moved(self, places: dict[str, EnginePlace]) -> None:
        wait_until(lambda: self.follower.follow(places) or not self.follower.draining)

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
        followed.follower.follow({"e2": second})
        expected = Asked(fleet.client, stream("a prompt")).result()
        followed.follow_until_moved({"e1": first})
        assert [replica.name for replica in followed.follower.replicas()] == ["e1"]

        begun = threading.Event()
        asked = Asked(fleet.client, stream("a prompt"), on_event=lambda event: begun.set())
        assert begun.wait(60)
        if how == "lost":
            assert followed.lost.wait(60)
            followed.now_s += 1.0
            followed.follower.follow({"e1": first})
            assert not followed.follower.clients, "a place that is lost is not tried at once"
        followed.now_s += RETRY_S
        followed.follower.follow({"e1": first, "e2": second} if how == "stopped" else {"e2": second})
        followed.follow_until_moved({"e2": second})
        (replica,) = followed.follower.replicas()
        assert (replica.name, replica.state) == ("e2", "ready")
        assert asked.result() == expected
        report = fleet.client.query("fleet")
        assert (report["replays"], report["engines_lost"]) == (1, 1 if how == "lost" else 0)
        for host in fleet.hosts.values():
            host.end()


def test_a_stopped_engine_keeps_its_programs_until_another_one_is_there(engines, tmp_path):
    with fleet_of(engines, tmp_path) as fleet:
        followed = Followed(fleet)
        first, second = followed.add_host(), followed.add_host()
        followed.follower.follow({"e1": first})
        begun, goes_on = threading.Event(), threading.Event()

        def wait_there(event: object) -> None:
            begun.set()
            assert goes_on.wait(60)

        asked = Asked(fleet.client, stream("a prompt"), on_event=wait_there)
        assert begun.wait(60)
        followed.follower.follow({})
        (replica,) = followed.follower.replicas()
        assert (replica.name, replica.state) == ("e1", "draining")
        goes_on.set()
        followed.follow_until_moved({"e2": second})
        assert asked.result()[1]
        assert [replica.name for replica in followed.follower.replicas()] == ["e2"]
        for host in fleet.hosts.values():
            host.end()


def test_an_engine_that_was_not_reached_is_tried_again_later(engines, tmp_path):
    with fleet_of(engines, tmp_path) as fleet:
        followed = Followed(fleet)
        followed.follower.follow({"e1": EnginePlace("e1", f"ipc://{tmp_path}/e1", "", 1, "tiny", 1)})
        assert followed.follower.refusal is not None and not followed.follower.clients
        place = followed.add_host()
        followed.follower.follow({"e1": place})
        assert not followed.follower.clients
        followed.now_s += RETRY_S
        followed.follower.follow({"e1": place})
        assert fleet.client.num_ready == 1


def test_ray_is_imported_by_its_own_folder_alone():
    importers = set()
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).parts
        if parts[0].startswith(".") or parts[0] in ("build", "tests", "benchmarks"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(name.split(".")[0] == "ray" for name in names):
                importers.add("/".join(parts))
    assert importers == {
        f"cluster/ray/{name}.py" for name in ("app", "deployment", "front", "gang", "replica", "router", "supervisor")
    }


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
