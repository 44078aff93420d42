"""The index against a slow model: lost, late and repeated events, restarts, snapshots; and the index's bounds."""

import random
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from phloem.cluster.index import MAX_PENDING, MAX_RETIRED, TIERS, CacheIndex, Match
from phloem.protocol.cache_events import BlocksEvicted, BlocksStored, CacheEvent, CacheEvents, CacheSnapshot
from phloem.protocol.errors import InvalidParams
from phloem.radix_cache import RadixCache, block_names
from phloem.runtime.engine.cache_feed import CacheFeed

BLOCK_LEN = 4
NAMES = [b"%016d" % i for i in range(60)]


def frame(*events: CacheEvent, epoch: int = 1, model: str = "m") -> CacheEvents:
    return CacheEvents(BLOCK_LEN, events, epoch, model)


def stored(seq: int, *names: bytes, tier: str = "device") -> BlocksStored:
    return BlocksStored(seq, "", b"", names, tier)


def evicted(seq: int, *names: bytes, tier: str = "device") -> BlocksEvicted:
    return BlocksEvicted(seq, "", names, "space", tier)


@dataclass
class Engine:
    """The blocks that an engine holds, and every event of its present epoch."""

    rng: random.Random
    epoch: int = 0
    held: dict[str, set[bytes]] = field(default_factory=dict)
    log: list[CacheEvent] = field(default_factory=list)

    def start(self) -> None:
        self.epoch = self.rng.getrandbits(40) + 1
        self.held, self.log = {tier: set() for tier in TIERS}, []

    def change(self) -> CacheEvents:
        events = []
        for _ in range(self.rng.randint(1, 3)):
            tier = self.rng.choice(list(TIERS))
            names = self.rng.sample(NAMES, self.rng.randint(1, 6))
            if self.rng.random() < 0.6:
                self.held[tier].update(names)
                events.append(stored(len(self.log) + 1, *names, tier=tier))
            else:
                self.held[tier].difference_update(names)
                events.append(evicted(len(self.log) + 1, *names, tier=tier))
            self.log.append(events[-1])
        return frame(*events, epoch=self.epoch)

    def snapshot(self) -> CacheSnapshot:
        return CacheSnapshot(BLOCK_LEN, self.epoch, len(self.log), "m", *(tuple(self.held[tier]) for tier in TIERS))


class Slow:
    """The knowledge about one engine: the last snapshot of the newest epoch, and the events received after it."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.snapshot: CacheSnapshot | None = None
        self.taken: list[CacheEvent] = []

    def _is_past(self, epoch: int) -> bool:
        if self.epochs and epoch != self.epochs[-1]:
            if epoch in self.epochs:
                return True
            self.snapshot, self.taken = None, []
        if epoch not in self.epochs:
            self.epochs.append(epoch)
        return False

    def apply(self, events: CacheEvents) -> None:
        if not self._is_past(events.epoch):
            last = max([event.seq for event in self.taken] + [self.snapshot.seq if self.snapshot else 0])
            self.taken += [event for event in events.events if event.seq > last]

    def restore(self, snapshot: CacheSnapshot) -> None:
        if not self._is_past(snapshot.epoch) and (self.snapshot is None or snapshot.seq >= self.snapshot.seq):
            self.snapshot = snapshot
            self.taken = [event for event in self.taken if event.seq > snapshot.seq]

    def blocks(self) -> dict[str, set[bytes]]:
        held = {tier: set(getattr(self.snapshot, tier)) if self.snapshot else set() for tier in TIERS}
        for event in self.taken:
            if isinstance(event, BlocksStored):
                held[event.tier] |= set(event.names)
            else:
                held[event.tier] -= set(event.names)
        return held


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_lost_late_or_doubled_the_index_knows_what_can_be_known(seed):
    rng = random.Random(seed)
    index = CacheIndex()
    engines = {f"e{i}": Engine(rng) for i in range(3)}
    slow: dict[str, Slow] = {}
    late: list[tuple[str, CacheEvents | CacheSnapshot]] = []
    num_gaps = num_whole = 0
    for engine in engines.values():
        engine.start()
    for step in range(400):
        name = rng.choice(list(engines))
        engine = engines[name]
        kind = rng.random()
        messages: list[tuple[str, CacheEvents | CacheSnapshot]] = []
        if kind < 0.70:
            message = engine.change()
            fate = rng.random()
            if fate < 0.08:
                late.append((name, message))
            elif fate < 0.16:
                messages += [(name, message)] * 2
            elif fate > 0.06 + 0.16:
                messages.append((name, message))
        elif kind < 0.75 and late:
            messages.append(late.pop(rng.randrange(len(late))))
        elif kind < 0.90:
            snapshot = engine.snapshot()
            if rng.random() < 0.4:
                late.append((name, snapshot))
            else:
                messages.append((name, snapshot))
        elif kind < 0.92:
            engine.start()
        elif kind < 0.93:
            index.remove(name)
            slow.pop(name, None)
            late = [(other, message) for other, message in late if other != name]
        for receiver, message in messages:
            model = slow.setdefault(receiver, Slow())
            if isinstance(message, CacheEvents):
                state = index.apply(receiver, message)
                model.apply(message)
            else:
                was_newest = message.seq == len(engines[receiver].log) and message.epoch == engines[receiver].epoch
                state = index.restore(receiver, message)
                model.restore(message)
                assert state == "ok" or not was_newest, "a snapshot of this moment leaves no gap"
            num_gaps += state == "gap"
            truth = engines[receiver]
            if state == "ok" and index.seen(receiver) == (truth.epoch, len(truth.log)):
                num_whole += 1
                assert index.claims()[receiver] == truth.held, step
        if step % 5 == 0:
            assert index.claims() == {engine: model.blocks() for engine, model in slow.items()}, step
    assert num_gaps > 10 and num_whole > 10


def test_names_beyond_the_limit_are_forgotten_and_never_made_up():
    rng = random.Random(1)
    index, engine, model = CacheIndex(max_names=20), Engine(rng), Slow()
    engine.start()
    for _ in range(300):
        events = engine.change()
        index.apply("e", events)
        model.apply(events)
        assert len(index) <= 21
        known = model.blocks()
        assert all(names <= known[tier] for tier, names in index.claims()["e"].items())


def test_names_that_are_matched_outlive_names_that_are_not():
    index = CacheIndex(max_names=40)
    hot = [b"hot%013d" % i for i in range(5)]
    index.apply("e", frame(stored(1, *hot)))
    for seq in range(2, 500):
        index.apply("e", frame(stored(seq, b"%016d" % seq)))
        assert index.match(hot) == {"e": Match(5 * BLOCK_LEN, 5 * BLOCK_LEN)}


def test_match_stops_at_the_first_hole_and_tells_tiers_apart():
    index = CacheIndex()
    assert index.match(NAMES) == {}
    index.apply("a", frame(stored(1, *NAMES[:6])))
    index.apply("b", frame(stored(1, *NAMES[:2]), stored(2, *NAMES[1:4], tier="host")))
    index.apply("c", frame(stored(1, *NAMES[1:8])))
    index.apply("d", frame(stored(1, *NAMES[:3], tier="disk")))
    index.apply("a", frame(evicted(2, NAMES[4])))
    assert index.match(NAMES[:8]) == {"a": Match(16, 16), "b": Match(16, 8), "d": Match(12, 0)}
    assert index.match(NAMES[:1]) == {"a": Match(4, 4), "b": Match(4, 4), "d": Match(4, 0)}
    assert index.match([]) == {}


def test_match_of_many_engines_is_that_of_each_alone():
    rng = random.Random(5)
    index = CacheIndex()
    lengths = {f"engine {i}": rng.choice([0, 1, 1, 7, 12, rng.randrange(15)]) for i in range(300)}
    for engine, length in lengths.items():
        index.apply(engine, frame(stored(1, *NAMES[:length]), stored(2, NAMES[50])))
    for engine in list(lengths)[::7]:
        index.remove(engine)
        del lengths[engine]
    expected = {engine: Match(4 * n, 4 * n) for engine, n in lengths.items() if n}
    assert index.match(NAMES[:15]) == expected


def test_engines_that_come_and_go_leave_nothing_behind():
    index = CacheIndex()
    index.apply("stays", frame(stored(1, NAMES[0])))
    assert index.restore("stays", CacheSnapshot(BLOCK_LEN, 1, 1, "m", (NAMES[0],))) == "ok"
    sizes = []
    for i in range(6 * MAX_RETIRED):
        index.apply("stays", frame(stored(i + 2, NAMES[i % 60])))
        index.apply(f"goes {i}", frame(stored(1, *NAMES)))
        assert index.match(NAMES[i % 60 : i % 60 + 1]).keys() == {"stays", f"goes {i}"}
        index.remove(f"goes {i}")
        sizes.append(index.num_bytes)
    half = len(sizes) // 2
    assert max(sizes[half:]) <= max(sizes[:half]) and index.engines == ("stays",)


def test_a_gap_longer_than_what_is_kept_asks_for_another_snapshot():
    index = CacheIndex()
    assert index.apply("e", frame(stored(1, NAMES[0]))) == "restarted"
    early = CacheSnapshot(BLOCK_LEN, 1, 1, "m", (NAMES[0],))
    many = tuple(b"%016d" % i for i in range(MAX_PENDING + 1))
    assert index.apply("e", frame(evicted(2, NAMES[0]), stored(3, *many))) == "restarted"
    assert index.restore("e", early) == "gap"
    assert index.restore("e", CacheSnapshot(BLOCK_LEN, 1, 3, "m", many)) == "ok"
    assert index.claims()["e"]["device"] == set(many)
    assert index.apply("e", frame(stored(5, NAMES[1]))) == "gap"
    assert index.apply("e", frame(stored(6, NAMES[2]))) == "gap"


def test_num_bytes_is_an_upper_bound_of_what_is_allocated():
    for num_engines in (1, 40):
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        index = CacheIndex(max_names=20_000)
        for i in range(num_engines):
            events = [stored(1, *(b"%016d" % (name + i) for name in range(600)))]
            index.apply(f"e{i}", frame(*events))
            index.restore(f"e{i}", CacheSnapshot(BLOCK_LEN, 1, 1, "m", events[0].names))
            del events
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert 0.3 * index.num_bytes < taken <= index.num_bytes, (num_engines, taken, index.num_bytes)


def test_engines_of_another_model_or_block_length_are_refused_by_name():
    index = CacheIndex()
    index.apply("a", frame(stored(1, NAMES[0])))
    with pytest.raises(InvalidParams, match=r"engine 'b' has blocks of 4 tokens of the model 'other'"):
        index.apply("b", frame(stored(1, NAMES[0]), model="other"))
    with pytest.raises(InvalidParams, match=r"blocks of 64 tokens"):
        index.restore("b", CacheSnapshot(64, 1, 1, "m"))
    index.remove("a")
    index.apply("b", frame(stored(1, NAMES[0]), model="other"))
    assert index.model == "other" and index.engines == ("b",)
    with pytest.raises(InvalidParams, match="max_names=1"):
        CacheIndex(max_names=1)


def test_the_index_finds_what_a_cache_would_find():
    feed = CacheFeed(block_len=BLOCK_LEN, model="m")
    cache, index, rng = RadixCache(120, on_event=feed.note, block_len=BLOCK_LEN), CacheIndex(), random.Random(2)
    for _ in range(200):
        stem = rng.randrange(5)
        tokens = np.r_[np.full(rng.randrange(1, 20), stem), rng.choices(range(3), k=rng.randrange(1, 12))].astype(
            np.int32
        )
        lease = cache.acquire(tokens)
        lease.extend(len(tokens) - lease.num_cached)
        lease.commit(tokens)
        lease.release()
        events = feed.take()
        if events is not None:
            index.apply("e", events)
        found = index.match(block_names(tokens, block_len=BLOCK_LEN)).get("e", Match(0, 0))
        assert found.tokens == cache.peek(tokens) // BLOCK_LEN * BLOCK_LEN
