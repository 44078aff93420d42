"""An engine's cache events describe the cache's contents: events alone, and a snapshot with later events."""

import random

import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.cache_events import BlocksStored, CacheEvents, CacheSnapshot, decode_cache_snapshot
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import CLIENT, Driver

TIERS = ("device", "host", "disk")
Blocks = dict[str, set[bytes]]


def make_engine(path, **options) -> EngineCore:
    base = {"num_slots": 700, "num_threads": 1, "max_running": 2, "cache_events_url": "tcp://127.0.0.1:*"}
    return EngineCore(EngineConfig(model=str(path), precision="float32", **(base | options)))


def apply(blocks: Blocks, frame: CacheEvents | None, *, after: int = 0) -> None:
    for event in () if frame is None else frame.events:
        if event.seq > after:
            change = (
                blocks[event.tier].update if isinstance(event, BlocksStored) else blocks[event.tier].difference_update
            )
            change(event.names)


def as_blocks(snapshot: CacheSnapshot) -> Blocks:
    return {tier: set(getattr(snapshot, tier)) for tier in TIERS}


def held(engine: EngineCore) -> Blocks:
    """The blocks in the tree and in the tiers, read from them."""
    names = {name for node in engine.cache.tree.nodes() for name in node.names or ()}
    tiers = engine.tiers
    host = set() if tiers is None else set(tiers.host.names())
    disk = (
        set()
        if tiers is None or tiers.store is None
        else {bytes.fromhex(p.stem) for p in tiers.store.store.folder.rglob("*.kv")}
    )
    return {"device": names, "host": host, "disk": disk}


def ask_snapshot(engine: EngineCore) -> CacheSnapshot:
    answers = [a for _, a in engine.step([(CLIENT, m.Query(1, "cache_blocks"))]) if isinstance(a, m.Answer)]
    assert answers[0].error is None
    return decode_cache_snapshot(answers[0].value)


@pytest.mark.parametrize("with_tiers", [False, True])
def test_events_and_snapshots_with_later_events_are_what_the_cache_has(tiny_model_path, tmp_path, with_tiers):
    options = {"host_cache_bytes": 1 << 20, "disk_cache": str(tmp_path), "disk_cache_bytes": 3 << 20}
    engine = make_engine(tiny_model_path, **(options if with_tiers else {}))
    assert engine.cache_feed is not None
    driver, rng = Driver(engine), random.Random(3)
    followed: Blocks = {tier: set() for tier in TIERS}
    snapshots: list[tuple[int, Blocks]] = []
    num_frames = num_evicted = 0
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for i in range(24):
        salt = rng.choice(["", "salt"])
        prompt = f"{rng.randrange(6)} " + "the sap rises " * rng.randrange(4, 20)
        ops = [o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=params), o.Close(op=2, seq=0)]
        driver.run(ops, settings=m.ProgramSettings(cache_salt=salt))
        if i % 5 == 2:
            snapshot = ask_snapshot(engine)  # before the events so far were taken: they are in it
            snapshots.append((snapshot.seq, as_blocks(snapshot)))
            if not with_tiers:
                assert as_blocks(snapshot) == held(engine)
        if i == 15:
            engine.cache.flush()
        frame = engine.cache_feed.take()
        if frame is not None:
            num_frames += 1
            num_evicted += sum(not isinstance(event, BlocksStored) for event in frame.events)
            for blocks, after in [(followed, 0), *((blocks, seq) for seq, blocks in snapshots)]:
                apply(blocks, frame, after=after)
    if engine.tiers is not None:
        engine.tiers.wait()
        engine.tiers.write_behind(1000)
        engine.tiers.wait()
        frame = engine.cache_feed.take()
        for blocks, after in [(followed, 0), *((blocks, seq) for seq, blocks in snapshots)]:
            apply(blocks, frame, after=after)
    now = held(engine)
    assert followed == now and num_frames > 10 and num_evicted > 10 and now["device"]
    assert all(blocks == now for _, blocks in snapshots) and len(snapshots) == 5
    assert all(now[tier] for tier in TIERS) == with_tiers
    engine.close()


def test_each_start_has_another_epoch_and_equal_weights_one_digest(tiny_model_path):
    feeds = []
    for _ in range(2):
        engine = make_engine(tiny_model_path)
        feeds.append(engine.cache_feed)
        engine.close()
    assert feeds[0].epoch != feeds[1].epoch and feeds[0].model == feeds[1].model


def test_an_engine_without_events_says_how_to_have_them(tiny_model_path):
    engine = make_engine(tiny_model_path, cache_events_url="")
    [(_, answer)] = engine.step([(CLIENT, m.Query(1, "cache_blocks"))])
    assert answer.error is not None and "--cache-events-url" in answer.error.message
    engine.close()
