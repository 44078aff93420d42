"""Pins are made again on another engine when theirs is lost: with the same tokens, for the rest of their time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from phloem.cluster.pins import KeptPins, ops_of_pin
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import InternalError, Overloaded, PhloemError
from phloem.protocol.ops import AnyOp
from phloem.protocol.sampling import SamplingParams
from phloem.radix_cache import NodeSnapshot
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.hosts import Asked, fleet_of
from phloem.tests.runtime.wire import wait_until

NUM_SLOTS = 2048
PROMPT_ONLY = SamplingParams(max_tokens=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)
SALTED = m.ProgramSettings(cache_salt="a tenant")


def pinned(text: str, *, ttl_s: float = 600.0) -> list[AnyOp]:
    return [
        o.Text(op=0, seq=0, text=text),
        o.Gen(op=1, seq=0, params=PROMPT_ONLY),
        o.Pin(op=2, seq=0, ttl_s=ttl_s),
        o.Close(op=3, seq=0),
    ]


FORKED: list[AnyOp] = [
    o.Text(op=0, seq=0, text="Sap rises in "),
    o.Fork(op=1, seq=0, children=(1, 2)),
    o.Gen(op=2, seq=1, params=GREEDY),
    o.Text(op=3, seq=2, text="autumn"),
    o.Ref(op=4, seq=2, source=2),
    o.Gen(op=5, seq=2, params=PROMPT_ONLY),
    o.Pin(op=6, seq=2, ttl_s=600.0),
    o.Text(op=7, seq=2, text=" and"),
    o.Gen(op=8, seq=2, params=GREEDY),
    *(o.Close(op=9 + seq, seq=seq) for seq in range(3)),
]
GENERATED: list[AnyOp] = [
    o.Text(op=0, seq=0, text="The leaf turns"),
    o.Pin(op=1, seq=0, ttl_s=0.0),
    o.Gen(op=2, seq=0, params=GREEDY),
    o.Select(op=3, seq=0, choices=(" red", " brown")),
    o.Text(op=4, seq=0, text=". "),
    o.Gen(op=5, seq=0, params=GREEDY),
    o.Pin(op=6, seq=0, ttl_s=600.0),
    o.Close(op=7, seq=0),
]


@pytest.fixture
def engines(tiny_model_path: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=NUM_SLOTS, num_threads=1)
    found = [EngineCore(config) for _ in range(3)]
    yield found
    for engine in found:
        engine.close()


def pins_of(engine: EngineCore) -> list[tuple[int, ...]]:
    """The tokens of each path of the cache that is pinned to its end."""

    def paths(node: NodeSnapshot, before: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        assert len(node.first_tokens) == node.num_tokens
        tokens = before + node.first_tokens
        further = [child for child in node.children if child.is_pinned]
        if node.is_pinned and not further:
            yield tokens
        for child in further:
            yield from paths(child, tokens)

    roots = engine.cache.snapshot(num_first_tokens=NUM_SLOTS)
    return sorted(path for root in roots for path in paths(root, ()))


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "settings"), [(pinned("the bark "), None), (pinned("the bark "), SALTED), (FORKED, None), (GENERATED, None)]
)
def test_the_engine_that_follows_a_lost_one_has_its_pins(
    engines: list[EngineCore], tmp_path: Path, ops: list[AnyOp], settings: m.ProgramSettings | None
) -> None:
    first, second, third = engines
    with fleet_of([third, second, first], tmp_path) as fleet:
        host = fleet.add()
        Asked(fleet.client, ops, settings).result()
        (want,) = pins_of(first)
        assert len(want) > 8
        for engine in (second, third):
            host.end()
            host = fleet.add()
            wait_until(lambda: engine.cache.num_pinned >= len(want))  # noqa: B023
            (found,) = pins_of(engine)
            assert found[: len(want)] == want and len(found) <= len(want) + 1  # the last generated token has KV now


def test_another_engine_that_is_ready_takes_the_pins(engines: list[EngineCore], tmp_path: Path) -> None:
    first, second, _ = engines
    with fleet_of([second, first], tmp_path) as fleet:
        host = fleet.add()
        asked = [Asked(fleet.client, pinned(f"the ring of year {year}")) for year in range(5)]
        for one in asked:
            one.result()
        fleet.add()
        host.end()
        wait_until(lambda: second.cache.num_pinned >= first.cache.num_pinned)
        assert len(pins_of(second)) == 5 and pins_of(second) == pins_of(first)


def test_pins_that_were_ended_or_whose_time_is_over_are_not_made_again(
    engines: list[EngineCore], tmp_path: Path
) -> None:
    first, second, _ = engines
    with fleet_of([second, first], tmp_path) as fleet:
        host = fleet.add()
        for ops in (pinned("kept"), pinned("ended"), pinned("over", ttl_s=0.001), pinned("ended", ttl_s=0.0)):
            Asked(fleet.client, ops).result()
        host.end()
        fleet.add()
        wait_until(lambda: second.cache.num_pinned > 0)
        Asked(fleet.client, pinned("", ttl_s=0.0)[2:]).result()  # whatever was sent before it has run
        assert len(pins_of(second)) == 1 and second.cache.num_pinned == len("kept")


def test_a_program_that_goes_on_keeps_its_pin(engines: list[EngineCore], tmp_path: Path) -> None:
    first, second, _ = engines
    with fleet_of([second, first], tmp_path) as fleet:
        host = fleet.add()
        asked = Asked(fleet.client, GENERATED[:-1])
        while 6 not in {getattr(event, "op", None) for event in asked.events}:
            asked.events += asked.heard.until(m.Done)
        (want,) = pins_of(first)
        host.end()
        fleet.add()
        wait_until(lambda: second.cache.num_pinned >= len(want))
        asked.call.submit(GENERATED[-1:])
        assert asked.result()[7] and any(found[: len(want)] == want for found in pins_of(second))


# -- what is kept -----------------------------------------------------------------------------------------------------


class Kept(KeptPins):
    """With shorter calls; engine "e"."""

    def pin(self, *before: AnyOp, ttl_s: float = 10.0, now_s: float = 0.0, salt: str = "", size_bytes: int = 1) -> None:
        ops = [*before, o.Pin(op=99, seq=before[-1].seq, ttl_s=ttl_s)]
        settings = m.ProgramSettings(cache_salt=salt)
        self.note("p", ops, settings, num_tokens=3, size_bytes=size_bytes, engine="e", now_s=now_s)

    def left(self, now_s: float = 0.0) -> list[float]:
        """When those end that are to be made again."""
        return sorted(pin.ends_s for pin in self.to_restore(now_s))


def text(text: str) -> o.Text:
    return o.Text(op=0, seq=0, text=text)


def test_a_pin_on_equal_content_renews_and_an_unpin_ends_those_on_its_beginnings() -> None:
    kept = Kept(max_bytes=100)
    kept.pin(text("ab"), ttl_s=10.0)
    kept.pin(text("a"), text("b"), ttl_s=20.0)
    kept.pin(text("ab"), ttl_s=30.0, salt="other")
    kept.pin(text("abc"), ttl_s=40.0)
    kept.pin(text("ab"), o.Special(op=1, seq=0, ids=(7, 8)), ttl_s=50.0)
    kept.lose("e")
    assert kept.left() == [20.0, 30.0, 40.0, 50.0]
    kept.pin(text("ab"), o.Special(op=1, seq=0, ids=(7,)), ttl_s=0.0)
    assert kept.left() == [30.0, 40.0, 50.0]
    kept.pin(text("abcd"), ttl_s=0.0)
    assert kept.left() == [30.0, 50.0]
    assert kept.left(now_s=45.0) == [50.0] and len(kept) == 1


def test_pins_beyond_the_limit_of_bytes_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(max_bytes=100)
    for ttl_s in (30.0, 20.0, 10.0):
        kept.pin(text(f"{ttl_s}"), ttl_s=ttl_s, size_bytes=40)
    kept.lose("e")
    assert kept.left() == [20.0, 30.0] and "100 bytes" in caplog.text


@pytest.mark.parametrize(
    ("error", "again"), [(Overloaded("busy"), True), (None, True), (InternalError("it ends engines"), False)]
)
def test_a_pin_that_could_not_be_made_is_tried_again_unless_the_error_stays(
    error: PhloemError | None, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(max_bytes=100)
    kept.pin(text("a"))
    kept.lose("another")
    assert not kept.to_restore(0.0)
    kept.lose("e")
    (pin,) = kept.to_restore(0.0)
    kept.begin("again", pin)
    assert kept.is_restoring("again") and not kept.to_restore(0.0)
    kept.end("again", error)
    assert bool(kept.to_restore(0.0)) is again and ("it ends engines" in caplog.text) is not again


def test_a_pin_needs_the_ops_of_its_own_sequence_and_of_those_that_it_comes_from() -> None:
    ops: list[AnyOp] = [
        o.Text(op=0, seq=0, text="a"),
        o.Pin(op=1, seq=0, ttl_s=5.0),
        o.Text(op=2, seq=9, text="not needed"),
        o.Fork(op=3, seq=0, children=(1, 2, 3)),
        o.Text(op=4, seq=0, text="after the fork"),
        o.Text(op=5, seq=3, text="not joined"),
        o.Text(op=6, seq=2, text="b"),
        o.Join(op=7, seq=1, children=(2,), mode="concate_and_append"),
        o.Close(op=8, seq=2),
    ]
    pin = o.Pin(op=20, seq=1, ttl_s=9.0)
    assert ops_of_pin(pin, ops) == [
        ops[0],
        o.Fork(op=1, seq=0, children=()),
        o.Fork(op=3, seq=0, children=(1, 2)),
        ops[6],
        ops[7],
        pin,
    ]
