"""Prompts are computed on prefill engines where that pays; texts are equal, also where either engine is killed.

``PHLOEM_SOAK_MOVES`` as in test_migrate.py: an engine is killed for each twelve of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from phloem.cluster.loads import Booking, Loads, Rates
from phloem.cluster.roles import CopyRate, HandOff, Prompt, best_hand_off, roles_of
from phloem.protocol import messages as m
from phloem.protocol.errors import InvalidParams
from phloem.protocol.ops import AnyOp
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, Fleet, fleet_of
from phloem.tests.cluster.test_client import forks, stream, undisturbed
from phloem.tests.cluster.test_migrate import NUM_MOVES
from phloem.tests.runtime.wire import wait_until

RATES = Rates(prefill_s_per_token=100e-6, step_s=10e-3, row_s=0.1e-3)

# -- the rule ---------------------------------------------------------------------------------------------------------


def loads_of(rows_at_home: int, *, queued_s: float = 0.0, rows_elsewhere: int = 0) -> Loads:
    loads = Loads()
    loads.add("prefill", rates=RATES, max_rows=16)
    loads.add("home", rates=RATES, max_rows=16)
    loads.book(Booking("home", rows_at_home, 0.0, 100.0, 0.0, 0.0, 0.01))
    loads.book(Booking("prefill", rows_elsewhere, queued_s, 0.0, 0.0, 0.0, 0.01))
    return loads


def gain_s(num_tokens: int, *, rows: int, copy_s: float = 10e-6, at_home: int = 0, **there: float) -> float:
    """Seconds that computing the prompt elsewhere saves; 0 where it does not pay."""
    prompt, loads = Prompt(num_tokens, "home", at_home), loads_of(rows, **there)  # type: ignore[arg-type]
    found = best_hand_off(prompt, loads, {"prefill": 0}, copy_s_per_token=copy_s, now_s=0.0)
    return 0.0 if found is None else found.gain_s


def test_a_long_prompt_is_computed_elsewhere_where_many_rows_would_wait_for_it() -> None:
    assert gain_s(4000, rows=8) == pytest.approx(4000 * 8 * 90e-6 - 2 * (10e-3 + 8 * 0.1e-3))
    assert gain_s(8000, rows=8) > gain_s(4000, rows=8) > gain_s(4000, rows=4) > 0


@pytest.mark.parametrize(
    "case",
    [
        {"num_tokens": 4000, "rows": 0},  # nobody waits
        {"num_tokens": 20, "rows": 8},  # the switch costs more
        {"num_tokens": 4000, "rows": 8, "copy_s": 100e-6},  # a copy is no faster than to compute
        {"num_tokens": 4000, "rows": 8, "at_home": 3990},  # it is cached there
        {"num_tokens": 4000, "rows": 8, "queued_s": 10.0},  # others wait for the prefill engine
        {"num_tokens": 4000, "rows": 4, "rows_elsewhere": 5},  # more rows decode there
    ],
)
def test_it_is_computed_at_home_where_that_is_no_worse(case: dict[str, float]) -> None:
    assert gain_s(**case) == 0.0


def test_the_copy_rate_is_learned_and_forgotten() -> None:
    rate = CopyRate()
    assert rate.s_per_token(100e-6, 0.0) == pytest.approx(25e-6)
    for i in range(20):
        num_tokens = 500 + 100 * i
        rate.note(num_tokens, 0.01 + 3e-6 * num_tokens, 1.0)
    assert rate.s_per_token(100e-6, 1.0) == pytest.approx(3e-6, rel=0.3)
    assert rate.s_per_token(100e-6, 1e4) == pytest.approx(25e-6, rel=0.01)


def test_roles_that_cannot_work_are_refused() -> None:
    assert roles_of(4, ("prefill", "decode")) == ("prefill", "decode", "both", "both")
    assert roles_of(2, ()) == ("both", "both")
    for replicas, roles, message in (
        (1, ("prefill", "decode"), "2 roles for 1 replicas"),
        (2, ("prefill",), "role='prefill' needs a replica with the role 'decode'"),
        (2, ("both", "decode"), "role='decode' needs a replica with the role 'prefill'"),
        (2, ("writer",), "role='writer' is not one of: both, prefill, decode"),
    ):
        with pytest.raises(InvalidParams, match=message):
            roles_of(replicas, roles)  # type: ignore[arg-type]


# -- on engines -------------------------------------------------------------------------------------------------------


class Clock:
    """Of the engines; ``ahead_s`` lets grants expire."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path, clock: Clock) -> Iterator[list[EngineCore]]:
    config = EngineConfig(
        model=str(tiny_model_path), precision="float32", num_slots=16_384, num_threads=1, max_running=48
    )
    found = [EngineCore(config, clock=clock), EngineCore(config, clock=clock)]
    yield found
    for engine in found:
        engine.close()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing a prompt elsewhere always pays."""
    monkeypatch.setattr(
        "phloem.cluster.placement.best_hand_off",
        lambda prompt, loads, prefill, **rates: HandOff(min(prefill), 1.0),
    )


def programs() -> list[list[AnyOp]]:
    found = [stream(f"a prompt of some length, number {i}: " * 8, max_tokens=60 + 5 * i) for i in range(8)]
    return found + [forks(f"forks of a program {i}: " * 12) for i in range(2)]


def add_both(fleet: Fleet) -> None:
    """e1 computes prompts, e2 generates."""
    for role in ("prefill", "decode"):
        name = f"e{len(fleet.hosts) + 1}"
        fleet.hosts[name] = fleet.host(name)
        fleet.client.add(name, fleet.hosts[name].connect(), role=role)  # type: ignore[arg-type]


@pytest.mark.usefixtures("always")
def test_programs_generate_on_the_decode_engine(engines: list[EngineCore], tmp_path: Path) -> None:
    want = undisturbed(engines[0], tmp_path, programs())
    for engine in engines:
        engine.cache.flush()
    with fleet_of(engines, tmp_path) as fleet:
        add_both(fleet)
        num_copied = fleet.hosts["e2"].engine.handoff.num_copied
        asked = [Asked(fleet.client, ops) for ops in programs()]
        assert [one.result() for one in asked] == want
        report = fleet.client.query("fleet")
        assert report["placements"]["prefill"] == len(want) and report["migrations"] >= len(want) - 2
        assert fleet.hosts["e2"].engine.handoff.num_copied - num_copied > 20


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("victim", ["e1", "e2"])
def test_an_engine_is_killed_at_any_moment_of_the_hand_off(
    engines: list[EngineCore], clock: Clock, tmp_path: Path, victim: str
) -> None:
    """Texts are equal, and once the grants have expired no slot of the other engine is kept for it."""
    want = undisturbed(engines[0], tmp_path, programs())
    rng = random.Random(victim)
    for number in range(max(1, NUM_MOVES // 24)):
        for engine in engines:
            engine.cache.flush()
        folder = tmp_path / str(number)
        folder.mkdir()
        with fleet_of(engines, folder) as fleet:
            add_both(fleet)
            asked = [Asked(fleet.client, ops) for ops in programs()]
            first = rng.choice(asked)
            for _ in range(rng.randrange(4)):
                first.events += first.heard.until(m.Delta)
            fleet.hosts[victim].end()
            assert [one.result() for one in asked] == want
            (survivor,) = [host.engine for name, host in fleet.hosts.items() if name != victim]
            wait_until(lambda: not survivor.has_work)  # noqa: B023
        clock.ahead_s += 5.0
        assert len(survivor.handoff.grants) == 0
        assert survivor.cache.num_evictable == survivor.cache.num_cached
        survivor.check()


def test_without_prefill_engines_nothing_moves(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        fleet.add()
        assert all(len(Asked(fleet.client, ops).result()) > 2 for ops in programs()[:3])
        assert fleet.client.query("fleet")["migrations"] == 0
