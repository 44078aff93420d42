"""Live migration: programs go on at another engine with their KV, and lose nothing where it cannot be copied.

``PHLOEM_SOAK_MOVES`` sets how many programs are moved under load: 12 by default, with ``make soak-fleet`` 200.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from phloem.cluster.client import FleetClient
from phloem.cluster.migrate import MAX_ROUNDS, Copy, Copying, Lend, Migrated, Switch
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import EngineLost, InvalidRequest
from phloem.protocol.journal import Journal
from phloem.protocol.ops import AnyOp
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, fleet_of
from phloem.tests.cluster.test_client import forks, stream, undisturbed
from phloem.tests.runtime.wire import WAIT_S

NUM_MOVES = int(os.environ.get("PHLOEM_SOAK_MOVES", "12"))


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(
        model=str(tiny_model_path), precision="float32", num_slots=16_384, num_threads=1, max_running=48
    )
    found = [EngineCore(config), EngineCore(config)]
    yield found
    for engine in found:
        engine.close()


# -- the steps --------------------------------------------------------------------------------------------------------


def grant(*names: bytes) -> m.Grant:
    return m.Grant("g", "", "", 64, 4096, b"", 5.0, [m.GrantedPrefix(b"", list(names))])


def test_rounds_of_copies_end_when_nothing_is_new() -> None:
    copying = Copying()
    assert copying.begin() == Lend("")
    assert copying.lent(grant(b"a", b"b")) == Copy(grant(b"a", b"b"))
    assert copying.copied(m.Imported(held=2, fetched=2)) == Lend("g")
    assert copying.lent(grant(b"a", b"b", b"c")) == Copy(grant(b"a", b"b", b"c"))
    assert copying.copied(m.Imported(held=3, fetched=1)) == Lend("g")
    assert copying.lent(grant(b"a", b"b", b"c")) == Switch("")
    assert (copying.num_rounds, copying.num_fetched) == (2, 3)


def test_a_program_without_a_whole_block_is_switched_at_once() -> None:
    assert Copying().lent(grant()) == Switch("")


def test_a_source_that_outruns_the_copies_is_switched_after_some_rounds() -> None:
    copying, names = Copying(), [b"0"]
    step = copying.lent(grant(*names))
    while isinstance(step, Copy):
        assert copying.copied(m.Imported(held=len(names), fetched=1)) == Lend("g")
        names.append(str(len(names)).encode())
        step = copying.lent(grant(*names))
    assert step == Switch("") and copying.num_rounds == MAX_ROUNDS


def test_what_ends_a_copy_early_is_named() -> None:
    copying = Copying()
    assert copying.copied(m.Imported(held=1, fetched=1, why="a block is corrupt")) == Switch("a block is corrupt")
    assert copying.failed(EngineLost("it was killed")) == Switch("it was killed")


# -- programs move ----------------------------------------------------------------------------------------------------


def answers_of(engines: list[EngineCore], folder: Path, programs: list[list[AnyOp]]) -> list[dict[object, object]]:
    """Those of an engine that nobody disturbs. The engines' caches are empty after that."""
    found = undisturbed(engines[0], folder, programs)
    for engine in engines:
        engine.cache.flush()
    return found


def hear_more(asked: Asked, kind: type = m.Delta) -> None:
    asked.events += asked.heard.until(kind)


def move(fleet: FleetClient, asked: Asked, engine: str) -> Migrated:
    return fleet.migrate(asked.call.program, engine).result(WAIT_S)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Tokens of each stream that its last engine was given, by program."""
    found: dict[str, int] = {}
    replay = Journal.replay

    def note(journal: Journal, **options: Any) -> list[m.Submit | m.Cancel]:
        messages = replay(journal, **options)
        gens = [op for message in messages if isinstance(message, m.Submit) for op in message.ops if op.op == 1]
        found[messages[0].program] = sum(len(one.token_ids) for op in gens for one in getattr(op, "drawn", ()))
        return messages

    monkeypatch.setattr(Journal, "replay", note)
    return found


def pause_of(asked: Asked, repeated: dict[str, int]) -> int:
    """Steps that the last engine took for a stream until it drew the first token of its own."""
    stats = asked.events[-1].stats
    num_drawn = stats.generated_tokens - repeated[asked.call.program]
    return stats.forwards - num_drawn + 1 if num_drawn else 0


@pytest.mark.parametrize("num_tokens", [240, 1440])
def test_a_pause_is_two_steps_whatever_the_length(
    engines: list[EngineCore], tmp_path: Path, repeated: dict[str, int], num_tokens: int
) -> None:
    """The last engine computes what is no whole block, in one step, and then a token in each."""
    ops = stream(f"stream of some {num_tokens:04} " * (num_tokens // 20), max_tokens=400)
    want = answers_of(engines, tmp_path, [ops])
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        asked = Asked(fleet.client, ops)
        hear_more(asked)
        fleet.add()
        found = move(fleet.client, asked, "e2")
        assert found.engine == "e2" and found.why == "" and found.blocks >= num_tokens // 64
        assert asked.result() == want[0]
        assert asked.events[-1].stats.prefilled_tokens < 64 + 2 * 16, "what was no whole block at the switch"
        assert pause_of(asked, repeated) in (1, 2)
        assert fleet.client.query("fleet")["migrations"] == 1


def test_a_generation_that_does_not_stream_goes_on_from_its_tokens(
    engines: list[EngineCore], tmp_path: Path, repeated: dict[str, int]
) -> None:
    """Beside a stream of the same program, from which the test knows how far it is. One of them returns log-probs."""
    text, gen, _ = stream("in silence " * 12, max_tokens=300)
    silent = msgspec.structs.replace(gen, stream=False)
    told = msgspec.structs.replace(
        silent, op=3, seq=2, params=msgspec.structs.replace(gen.params, return_logprob=True, max_tokens=20)
    )
    ops = [
        text,
        o.Fork(op=7, seq=0, children=(1, 2)),
        silent,
        told,
        msgspec.structs.replace(gen, op=4, seq=1),
        *(o.Close(op=20 + seq, seq=seq) for seq in range(3)),
    ]
    want = answers_of(engines, tmp_path, [ops])
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        asked = Asked(fleet.client, ops)
        for _ in range(60):
            hear_more(asked)
        fleet.add()
        assert move(fleet.client, asked, "e2").why == ""
        assert repeated[asked.call.program] >= 50
        found = asked.result()
        assert found == want[0]
        (done,) = [event for event in asked.events if isinstance(event, m.Done) and event.op == 3]
        assert len(done.meta.candidates[0].logprobs) == 20


def test_programs_under_load_move_both_ways_and_their_texts_are_equal(
    engines: list[EngineCore], tmp_path: Path, repeated: dict[str, int]
) -> None:
    """Streams and forking programs with grammars, some of which end on their way."""
    asked_for = [stream(f"stream {i}: " * (1 + i % 7), max_tokens=100 + 10 * i) for i in range(24)]
    asked_for += [forks(f"program {i}:") for i in range(6)]
    want = answers_of(engines, tmp_path, asked_for)
    rng, pauses = random.Random(3), list[int]()

    def check(number: int, asked: Asked) -> None:
        assert asked.result() == want[number % len(want)]
        if number % len(want) < 24 and asked.call.program in repeated:
            pauses.append(pause_of(asked, repeated))

    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        fleet.add()
        running: dict[int, Asked] = {}
        num_begun = num_moved = 0
        while num_moved < NUM_MOVES:
            while len(running) < 20:
                running[num_begun] = Asked(fleet.client, asked_for[num_begun % len(asked_for)])
                num_begun += 1
            number = rng.choice(list(running))
            asked = running[number]
            try:
                found = move(fleet.client, asked, rng.choice(("e1", "e2")))
            except InvalidRequest:  # it has just ended
                found = Migrated("", 0, 0, "ended")
            num_moved += not found.why
            for over in [number for number, asked in running.items() if asked.call.is_over]:
                check(over, running.pop(over))
        assert fleet.client.query("fleet")["migrations"] == num_moved
        for number, asked in running.items():
            check(number, asked)
    assert num_moved >= NUM_MOVES
    assert len(pauses) >= NUM_MOVES // 3 and max(pauses) <= 2, pauses
    for engine in engines:
        engine.check()


@pytest.mark.parametrize("victim", ["source", "target"])
def test_an_engine_that_ends_during_a_move_costs_the_copy_alone(
    engines: list[EngineCore], tmp_path: Path, victim: str
) -> None:
    ops = stream("a stream that is on its way " * 20, max_tokens=300)
    want = answers_of(engines, tmp_path, [ops])
    with fleet_of(engines, tmp_path) as fleet:
        source = fleet.add()
        asked = Asked(fleet.client, ops)
        hear_more(asked)
        target = fleet.add()
        ended = fleet.client.migrate(asked.call.program, "e2")
        (source if victim == "source" else target).end()
        ended.result(WAIT_S)
        assert asked.result() == want[0]
        assert fleet.lost == ["e1" if victim == "source" else "e2"]


def test_a_program_stays_where_its_kv_cannot_be_copied(
    engines: list[EngineCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was asked to move. A drain replays it without its KV."""
    ops = stream("a stream that is on its way " * 20, max_tokens=300)
    want = answers_of(engines, tmp_path, [ops])
    monkeypatch.setattr("phloem.runtime.engine.handoff.seal", lambda block, **options: bytes(10))
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        asked = Asked(fleet.client, ops)
        hear_more(asked)
        fleet.add()
        found = move(fleet.client, asked, "e2")
        assert found.engine == "e1" and found.blocks == 0 and "block" in found.why
        assert fleet.client.drain("e1", timeout_s=WAIT_S)
        assert asked.result() == want[0]
        report = fleet.client.query("fleet")
        assert (report["migrations"], report["replays"]) == (0, 1)


def test_a_move_that_cannot_be_is_refused_by_name(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        with pytest.raises(InvalidRequest, match="program 'nobody' is on no engine"):
            fleet.client.migrate("nobody", "e1")
        asked = Asked(fleet.client, stream("x", max_tokens=300))
        with pytest.raises(InvalidRequest, match="engine 'e9' is not one of those that take programs: e1"):
            fleet.client.migrate(asked.call.program, "e9")
        assert move(fleet.client, asked, "e1").why == "no other engine is ready for it"
        asked.call.cancel()
