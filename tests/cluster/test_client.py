"""A fleet's client: programs outlive their engines, wait while there is none, and end exactly once."""

import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from phloem.cluster.limits import FleetLimits
from phloem.cluster.placer import Placed, Placer
from phloem.protocol import errors
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.ops import AnyOp, GrammarSpec
from phloem.protocol.program_call import SubmitRefused
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, Fleet, Host, fleet_of
from phloem.tests.runtime.wire import RawEngine, wait_until

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}'


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(
        model=str(tiny_model_path),
        precision="float32",
        num_slots=8192,
        num_threads=1,
        max_running=48,
        cache_events_url="tcp://127.0.0.1:*",
    )
    found = [EngineCore(config), EngineCore(config)]
    yield found
    for engine in found:
        engine.close()


def stream(text: str, *, max_tokens: int = 60) -> list[AnyOp]:
    """Without drafts, so that the engine takes at least ``max_tokens`` steps."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculative=False)
    return [
        o.Text(op=0, seq=0, text=text),
        o.Gen(op=1, seq=0, params=params, stream=True),
        o.Close(op=2, seq=0),
    ]


def forks(text: str) -> list[AnyOp]:
    """Two branches, one of them bound by a schema, joined and continued."""
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    return [
        o.Text(op=0, seq=0, text=text),
        o.Fork(op=1, seq=0, children=(1, 2)),
        o.Text(op=2, seq=1, text=" as JSON: "),
        o.Gen(op=3, seq=1, params=greedy, grammar=GrammarSpec("json_schema", SCHEMA), stream=True),
        o.Text(op=4, seq=2, text=" in words: "),
        o.Gen(op=5, seq=2, params=greedy, stream=True),
        o.Join(op=6, seq=0, children=(1, 2), mode="concate_and_append"),
        o.Select(op=7, seq=0, choices=("yes", "no")),
        o.Gen(op=8, seq=0, params=greedy),
        *(o.Close(op=9 + seq, seq=seq) for seq in range(3)),
    ]


def workload() -> list[list[AnyOp]]:
    return [stream(f"stream {i}: ") for i in range(32)] + [forks(f"program {i}:") for i in range(8)]


def undisturbed(engine: EngineCore, folder: Path, programs: list[list[AnyOp]]) -> list[dict[object, object]]:
    host = Host(engine, f"ipc://{folder}/alone")
    with host.connect() as client:
        found = [asked.result() for asked in [Asked(client, ops) for ops in programs]]
    host.end()
    return found


# -- an engine is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 20, 45])
def test_one_of_two_engines_is_lost_and_nobody_notices(
    engines: list[EngineCore], tmp_path: Path, num_steps: int
) -> None:
    want = undisturbed(engines[0], tmp_path, workload())
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add(num_steps=num_steps)
        fleet.add()
        found = [asked.result() for asked in [Asked(fleet.client, ops) for ops in workload()]]
        report = fleet.client.query("fleet")
    assert found == want
    assert fleet.lost == ["e1"] and report["engines_lost"] == 1
    assert report["replays"] > 5 or num_steps == 1  # then few were accepted


def test_the_only_engine_is_lost_again_and_again(engines: list[EngineCore], tmp_path: Path) -> None:
    want = undisturbed(engines[0], tmp_path, workload())
    with fleet_of(engines, tmp_path) as fleet:
        host = fleet.add(num_steps=15)
        asked = [Asked(fleet.client, ops) for ops in workload()]
        for num_steps in (15, 25, None):
            fleet.settle(host)
            host = fleet.add(num_steps=num_steps)
        assert [one.result() for one in asked] == want
    assert fleet.lost == ["e1", "e2", "e3"]


def test_a_seed_of_the_fleet_makes_a_replay_draw_the_same(engines: list[EngineCore], tmp_path: Path) -> None:
    ops = stream("random: ", max_tokens=40)
    ops[1] = msgspec.structs.replace(ops[1], params=SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True))
    found = []
    for num_steps in (None, 17):
        with fleet_of(engines, tmp_path, seed=5) as fleet:
            fleet.add(num_steps=num_steps)
            asked = [Asked(fleet.client, ops) for _ in range(4)]
            if num_steps is not None:
                fleet.add()
            found.append([one.result() for one in asked])
    assert found[0] == found[1] and len({str(one) for one in found[0]}) == 4


def test_a_program_goes_on_after_the_loss(engines: list[EngineCore], tmp_path: Path) -> None:
    """Ops that are sent while there is no engine, or after a replay, continue the sequence."""
    with fleet_of(engines, tmp_path) as fleet:
        host = fleet.add()
        asked = Asked(fleet.client, stream("one ", max_tokens=20)[:2])
        asked.events += asked.heard.until(m.Done)
        asked.events += asked.heard.until(m.Done)
        host.end()
        fleet.settle(host)
        wait_until(lambda: fleet.lost == ["e1"])
        second = o.Gen(op=4, seq=0, params=SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), stream=True)
        asked.call.submit([o.Text(op=3, seq=0, text=" two "), second])
        fleet.add()
        asked.events += asked.heard.until(m.Delta)
        asked.call.submit([o.Close(op=5, seq=0)])
        result = asked.result()
        assert result[5] == "one " + result[1][0] + " two " + result[4][0]
        assert asked.events[-1].stats.submits == 3


def test_the_programs_of_an_engine_that_is_stopped_move_to_another(engines: list[EngineCore], tmp_path: Path) -> None:
    """It ends every op as EngineLost before it goes."""
    want = undisturbed(engines[0], tmp_path, [stream("a"), stream("b")])
    engine = RawEngine(f"ipc://{tmp_path}/raw")
    with fleet_of(engines, tmp_path) as fleet:
        thread = threading.Thread(target=engine.welcome, kwargs=msgspec.structs.asdict(engines[0].welcome()))
        thread.start()
        fleet.client.add("raw", Client(engine.url))
        thread.join()
        first = Asked(fleet.client, stream("a"))
        program = engine.hear(m.Submit).program
        second = Asked(fleet.client, stream("b"))
        refused = engine.hear(m.Submit).program
        stopped = errors.EngineLost("the engine was stopped").info()
        engine.say(m.Accepted(program), m.Failed(program, 1, stopped), m.Failed(program, 2, stopped))
        engine.say(m.Rejected(refused, [stopped]), m.Closed(program, m.ProgramStats()))
        fleet.add()
        assert [first.result(), second.result()] == want
    engine.close()


# -- poison -----------------------------------------------------------------------------------------------------------


def test_a_program_that_ends_its_engine_twice_alone_is_failed_by_name(
    engines: list[EngineCore], tmp_path: Path
) -> None:
    with fleet_of(engines, tmp_path) as fleet:
        host = fleet.add(poison="boom")
        asked = Asked(fleet.client, stream("boom"))
        fleet.settle(host)
        fleet.settle(fleet.add(poison="boom"))
        result = asked.result()
        assert str(result[1]).startswith(f"InternalError: program {asked.call.program!r} was on 2 engines in a row")
        report = fleet.client.query("fleet")
        assert report["poisoned"] == 1 and list(report["poisoned_programs"]) == [asked.call.program]
        fleet.add()
        assert Asked(fleet.client, stream("fine")).result()[0] is None


def test_a_suspect_is_tried_alone_before_it_is_blamed(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path) as fleet:
        host = fleet.add(poison="boom")
        bad = Asked(fleet.client, stream("boom"))
        good = [Asked(fleet.client, stream(f"good {i}")) for i in range(5)]
        for _ in range(7):
            fleet.settle(host)
            wait_until(lambda: len(fleet.lost) == len(fleet.hosts))  # the client knows that it has ended
            host = fleet.add(poison="boom")
            if bad.call.is_over:
                break
        assert "it is not tried again" in str(bad.result()[1])
        if not fleet.client.num_ready:
            fleet.settle(host)
            fleet.add()
        results = [one.result() for one in good]
        assert all(isinstance(result[1], list) for result in results)
    assert len(fleet.lost) <= 4


# -- waiting ----------------------------------------------------------------------------------------------------------


def lose_the_only_engine(fleet: Fleet) -> None:
    host = fleet.add()
    host.end()
    fleet.settle(host)
    wait_until(lambda: bool(fleet.lost))


def test_programs_wait_for_an_engine_and_their_number_is_bounded(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path, limits=FleetLimits(max_waiting=2)) as fleet:
        with pytest.raises(errors.EngineLost, match="no engine has been ready yet"):
            Asked(fleet.client, stream("x"))
        lose_the_only_engine(fleet)
        asked = [Asked(fleet.client, stream(f"{i}", max_tokens=3)) for i in range(2)]
        wait_until(lambda: fleet.client.query("fleet")["waiting"] == 2)
        with pytest.raises(errors.Overloaded, match="no engine is ready, and 2 programs wait for one"):
            Asked(fleet.client, stream("x"))
        fleet.add()
        assert all(isinstance(one.result()[1], list) for one in asked)


def test_a_program_that_waits_too_long_fails(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path, limits=FleetLimits(max_wait_s=0.2)) as fleet:
        host = fleet.add(num_steps=3)
        begun = Asked(fleet.client, stream("begun"))
        fleet.settle(host)
        wait_until(lambda: bool(fleet.lost))
        new = Asked(fleet.client, stream("new"))
        assert re.match("EngineLost: program .* has waited 0.2 s for an engine$", str(new.result()[1]))
        assert "has waited 0.2 s for an engine: the engine closed the connection" in str(begun.result()[1])


def test_cancels_reach_a_program_that_waits(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path) as fleet:
        lose_the_only_engine(fleet)
        whole, op, seq = (Asked(fleet.client, forks(name)) for name in ("whole", "op", "seq"))
        whole.call.cancel()
        assert str(whole.result()[0]).startswith("Cancelled: program")
        op.call.cancel(op=5)
        seq.call.cancel(seq=1)
        fleet.add()
        assert op.result()[5] == "Cancelled: op 5 was cancelled"
        assert str(op.result)[0] and str(seq.result()[3]) == "Cancelled: sequence 1 was cancelled"


def test_give_up_and_close_end_every_program_once(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        asked = [Asked(fleet.client, stream("long", max_tokens=3000)) for _ in range(3)]
        fleet.client.give_up(errors.EngineLost("no engine can start: it is a test"))
        assert {one.result()[1] for one in asked} == {"EngineLost: no engine can start: it is a test"}
        with pytest.raises(errors.EngineLost, match="it is a test"):
            Asked(fleet.client, stream("x"))
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        one = Asked(fleet.client, stream("long", max_tokens=3000))
        fleet.client.close()
        assert one.result()[1] == "Cancelled: the client was closed"


def test_a_program_that_is_too_large_to_replay_fails_and_says_so(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path, limits=FleetLimits(max_journal_bytes=1_500)) as fleet:
        fleet.add(num_steps=30)
        asked = Asked(fleet.client, stream("long " * 300, max_tokens=500))
        text = str(asked.result()[1])
        assert text.startswith("EngineLost: program") and "more than 1,500 bytes to replay" in text


# -- engines come and go ----------------------------------------------------------------------------------------------


def test_draining_moves_what_runs(engines: list[EngineCore], tmp_path: Path) -> None:
    want = undisturbed(engines[0], tmp_path, [stream("moved", max_tokens=300)])
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        asked = Asked(fleet.client, stream("moved", max_tokens=300))
        asked.events += asked.heard.until(m.Delta)
        assert not fleet.client.drain("e1")  # there is no other engine
        fleet.add()
        assert fleet.client.drain("e1", timeout_s=30.0)
        fleet.client.remove("e1", errors.EngineLost("drained"))
        assert asked.result() == want[0]
        assert fleet.lost == []


@pytest.mark.parametrize("migrate", [True, False])
def test_draining_an_engine_with_32_running_programs_loses_none(
    engines: list[EngineCore], tmp_path: Path, migrate: bool
) -> None:
    programs = [stream(f"drained {i}: ", max_tokens=120) for i in range(32)]
    want = undisturbed(engines[0], tmp_path, programs)
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        asked = [Asked(fleet.client, ops) for ops in programs]
        for one in asked:
            one.events += one.heard.until(m.Delta)  # it runs
        fleet.add()
        assert not fleet.client.drain("e1", migrate=migrate)
        late = Asked(fleet.client, stream("a new program", max_tokens=5))
        assert fleet.client.drain("e1", migrate=migrate, timeout_s=300.0)
        fleet.client.remove("e1", errors.EngineLost("drained"))
        assert [one.result() for one in asked] == want
        assert late.result()
        report = fleet.client.query("fleet")
        assert (report["replays"] > 0) == migrate and report["engines_lost"] == 0 and fleet.lost == []


def test_an_engine_of_another_model_is_refused(engines: list[EngineCore], tmp_path: Path) -> None:
    engine = RawEngine(f"ipc://{tmp_path}/raw")
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        thread = threading.Thread(target=engine.welcome, kwargs={"model": "another"})
        thread.start()
        client = Client(engine.url)
        thread.join()
        with pytest.raises(errors.InvalidParams, match="engine 'x' has model 'another', but the fleet has"):
            fleet.client.add("x", client)
        client.close()
    engine.close()


def test_the_answers_of_several_engines_become_one(engines: list[EngineCore], tmp_path: Path) -> None:
    with fleet_of(engines, tmp_path) as fleet:
        with pytest.raises(errors.EngineLost, match="no engine is ready"):
            fleet.client.query("metrics")
        fleet.add()
        one = fleet.client.query("metrics")
        fleet.add()
        both = fleet.client.query("metrics")
        assert both["slots"]["total"] == 2 * one["slots"]["total"]
        assert both["queue_seconds"]["bounds"] == one["queue_seconds"]["bounds"]
        assert isinstance(fleet.client.query("flush_cache"), int)
        assert isinstance(fleet.client.query("cache_tree"), list)
        assert fleet.client.query("info")["num_slots"] == one["slots"]["total"]


# -- placing ----------------------------------------------------------------------------------------------------------


def test_with_one_engine_no_prompt_is_tokenized(engines: list[EngineCore], tmp_path: Path) -> None:
    def tokenize(ops: object) -> list[int]:
        raise AssertionError("it was called")

    with fleet_of(engines, tmp_path, tokenize=tokenize) as fleet:
        fleet.add()
        assert isinstance(Asked(fleet.client, stream("x", max_tokens=2)).result()[1], list)
        assert fleet.client.query("fleet")["placements"] == {"only": 1}


def test_a_program_goes_where_its_prompt_is_cached(engines: list[EngineCore], tmp_path: Path) -> None:
    prompt = "the same long beginning of many programs, " * 20

    def tokenize(ops: list[AnyOp]) -> list[int]:
        first = ops[0]
        assert isinstance(first, o.Text)
        return engines[0].tokenizer.encode(first.text, at_start=True)

    feed = engines[0].cache_feed
    assert feed is not None
    for engine in engines:
        engine.flush_cache()  # else the blocks of earlier tests are known too
    num_blocks = len(tokenize([o.Text(op=0, seq=0, text=prompt)])) // feed.block_len
    with fleet_of(engines, tmp_path, tokenize=tokenize) as fleet:
        for _ in range(2):
            fleet.add(events_url="tcp://127.0.0.1:*")
        Asked(fleet.client, stream(prompt, max_tokens=2)).result()
        wait_until(lambda: fleet.client.query("fleet")["known_blocks"] >= num_blocks > 10)
        for _ in range(4):
            Asked(fleet.client, stream(prompt, max_tokens=2)).result()
        assert fleet.client.query("fleet")["placements"] == {"load": 1, "prefix": 4}


def test_a_program_that_every_engine_rejects_is_refused(engines: list[EngineCore], tmp_path: Path) -> None:
    """Each engine is asked once; then the caller gets the refusal and can try again later."""
    raw = [RawEngine(f"ipc://{tmp_path}/raw{i}") for i in range(2)]
    with fleet_of(engines, tmp_path) as fleet:
        for i, engine in enumerate(raw):
            thread = threading.Thread(target=engine.welcome)
            thread.start()
            fleet.client.add(f"raw{i}", Client(engine.url))
            thread.join()
        asked = Asked(fleet.client, stream("x"))
        busy = errors.Overloaded("many wait", retry_after_s=3.0).info()
        submitted: queue.Queue[int] = queue.Queue()

        def reject(i: int) -> None:
            program = raw[i].hear(m.Submit).program
            submitted.put(i)
            raw[i].say(m.Rejected(program, [busy]))

        threads = [threading.Thread(target=reject, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (refused,) = asked.heard.until(SubmitRefused)
        assert isinstance(refused.error, errors.Overloaded) and refused.error.retry_after_s == 3.0
        assert submitted.qsize() == 2, "each engine was asked once"
    for engine in raw:
        engine.close()


def test_a_program_moves_between_its_turns_where_that_is_worth_it(
    engines: list[EngineCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next ops go to another engine, with the history. ``on_event`` submits them when the previous ops end."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def turn(number: int) -> list[AnyOp]:
        op = 2 * number
        return [
            o.Text(op=op, seq=0, text=f" turn {number}: "),
            o.Gen(op=op + 1, seq=0, params=params, stream=True),
        ]

    want = undisturbed(engines[0], tmp_path, [[*turn(0), *turn(1), *turn(2), o.Close(op=6, seq=0)]])
    with fleet_of(engines, tmp_path) as fleet:
        fleet.add()
        fleet.add()
        homes: list[str] = []

        def away(
            _: Placer, ops: object, name: str, history_tokens: int, home: str, names: list[str], now_s: float
        ) -> Placed:
            homes.append(home)
            assert history_tokens > 8 * len(homes)
            return Placed(next(name for name in names if name != home), "moved", None)

        monkeypatch.setattr(Placer, "replace", away)

        def go_on(event: object) -> None:
            if isinstance(event, m.Done) and event.op in (1, 3):
                asked.call.submit(turn((event.op + 1) // 2))
            elif isinstance(event, m.Done) and event.op == 5:
                asked.call.submit([o.Close(op=6, seq=0)])

        started = threading.Event()

        def on_event(event: object) -> None:
            assert started.wait(30.0)
            go_on(event)

        asked = Asked(fleet.client, turn(0), on_event=on_event)
        started.set()
        assert asked.result() == want[0]
        assert len(homes) == 3 and homes[0] != homes[1] and homes[0] == homes[2]
        assert fleet.client.query("fleet")["placements"]["moved"] == 3
