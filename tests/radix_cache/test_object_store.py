"""KV in a bucket that engines share: found by others, bounded, verified. A failing server spoils and stalls nothing."""

import logging
import math

import pytest
from phloem.radix_cache import StoreTier, block_names
from phloem.radix_cache.object_store import ObjectStore, open_object_store
from phloem.radix_cache.store_tier import MAX_PAUSE_S
from phloem.tests.radix_cache.tiered import BLOCK_BYTES, BLOCK_LEN, SPOILERS, Engine, MemoryBucket, spoil, text

VALUE_BYTES = 18 + 3 * 16 + BLOCK_BYTES


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(bucket, clock):
    engines: list[Engine] = []

    def make(num_slots: int = 40, *, format: str = "test", max_bytes: int = 1 << 20) -> Engine:
        store = ObjectStore(bucket, about="s3://kv")
        engine = Engine(num_slots, disk=StoreTier(store, format=format, max_bytes=max_bytes, clock=clock), clock=clock)
        engines.append(engine)
        return engine

    yield make
    bucket.gate.set()
    for engine in engines:
        engine.tiers.close()


def saved(make, tokens) -> Engine:
    engine = make()
    engine.run(tokens)
    assert engine.tiers.flush()
    return engine


def test_a_second_engine_and_a_restarted_one_read_what_the_first_computed(make, bucket):
    first = saved(make, text(0, 30))
    assert first.tiers.counters.written == 7 == len(bucket.objects)
    first.tiers.close()
    for _ in range(2):
        other = make()
        assert other.run(text(0, 30)) == 2
        assert other.tiers.counters.read == 7
        assert other.tiers.flush() and other.tiers.counters.written == 0


def test_a_block_that_another_engine_wrote_meanwhile_is_not_written_again(make, bucket):
    one, two = make(), make()
    for engine in (one, two):
        engine.run(text(0, 12))
    assert one.tiers.flush() and two.tiers.flush()
    assert (one.tiers.counters.written, two.tiers.counters.written) == (3, 0)


def test_a_new_prompt_costs_one_look_up(make, bucket):
    saved(make, text(0, 12))
    bucket.asked.clear()
    engine = make(200)
    assert engine.run(text(500, 120)) == 120
    assert bucket.asked == ["has"] * 8
    assert engine.tiers.counters.missing == 30


def test_another_format_reads_nothing_and_counts_for_the_size(make, bucket):
    saved(make, text(0, 12))
    other = make(format="other", max_bytes=4 * VALUE_BYTES)
    assert other.run(text(0, 12)) == 12
    assert other.tiers.flush()
    assert len(bucket.objects) <= 4 and other.tiers.store.size_bytes <= 4 * VALUE_BYTES


def test_the_bucket_keeps_its_size_and_drops_what_was_written_first(make, bucket):
    engine = make(100, max_bytes=10 * VALUE_BYTES)
    for start in range(0, 600, 50):
        engine.run(text(start, 8))
        assert engine.tiers.flush()
        assert len(bucket.objects) <= 10
    store = engine.tiers.store
    assert [store.key_of(name) in bucket.objects for name in block_names(text(0, 8), block_len=BLOCK_LEN)] == [
        False
    ] * 2
    assert [store.key_of(name) in bucket.objects for name in block_names(text(550, 8), block_len=BLOCK_LEN)] == [
        True
    ] * 2


@pytest.mark.parametrize("spoiler", SPOILERS.values(), ids=SPOILERS.keys())
def test_a_spoiled_block_is_computed_again_and_replaced(make, bucket, spoiler):
    saved(make, text(0, 12))
    key = sorted(bucket.objects)[-1]
    assert spoil(bucket, spoiler, which=lambda k: k == key) == 1
    engine = make()
    num_left = [engine.tiers.store.key_of(n) for n in block_names(text(0, 12), block_len=BLOCK_LEN)].index(key)
    assert engine.run(text(0, 12)) == 12 - BLOCK_LEN * num_left  # ``run`` checks each token's KV
    assert engine.tiers.flush()
    assert make().run(text(0, 12)) == 0


def test_a_block_that_vanishes_after_the_look_up_is_computed(make, bucket):
    saved(make, text(0, 12))
    engine = make()
    bucket.gate.clear()
    reading = engine.tiers.read_ahead(text(0, 12))
    while "get" not in bucket.asked:
        pass
    bucket.objects.clear()
    bucket.gate.set()
    assert engine.tiers.wait() and reading.is_done
    assert engine.run(text(0, 12)) == 12


@pytest.mark.parametrize("method", ["has", "get"])
def test_an_unreachable_server_is_asked_again_only_after_a_pause(make, bucket, clock, caplog, method):
    saved(make, text(0, 12))
    bucket.fail.add(method)
    engine = make()
    with caplog.at_level(logging.WARNING):
        assert engine.run(text(0, 12)) == 12
        num_asked = len(bucket.asked)
        for _ in range(3):
            engine.cache.flush()
            assert engine.run(text(0, 12)) == 12
    assert len(bucket.asked) == num_asked  # not once more
    (line,) = [record.getMessage() for record in caplog.records]
    assert "s3://kv" in line and "tried again in 1 s" in line and engine.tiers.store.num_faults >= 1
    bucket.fail.clear()
    clock.now_s += MAX_PAUSE_S
    engine.tiers.rates.share = 1.0
    engine.cache.flush()
    assert engine.run(text(0, 12)) == 0


@pytest.mark.parametrize("method", ["put", "list", "delete"])
def test_a_full_bucket_drops_writes_and_reads_go_on(make, bucket, clock, method):
    saved(make, text(0, 12))
    engine = make(200, max_bytes=1 if method == "delete" else 1 << 20)
    bucket.fail.add(method)
    bucket.asked.clear()
    engine.run(text(100, 40))
    assert engine.tiers.flush()
    assert engine.tiers.counters.dropped >= 8 and 1 <= bucket.asked.count(method) <= 2
    assert engine.run(text(0, 12)) == 0
    bucket.fail.clear()
    clock.now_s += MAX_PAUSE_S
    engine.run(text(300, 12))
    assert engine.tiers.flush()
    assert engine.tiers.counters.written >= 3


def test_a_sequence_waits_for_a_slow_server_no_longer_than_its_budget(make, bucket, clock):
    saved(make, text(0, 12))
    engine = make()
    bucket.gate.clear()
    reading = engine.tiers.read_ahead(text(0, 12))
    clock.now_s = engine.tiers.read_budget_s - 0.01
    assert not reading.is_done
    clock.now_s = engine.tiers.read_budget_s
    assert reading.is_done
    assert engine.tiers.counters.late >= 1
    lease = engine.cache.acquire(text(0, 12))
    assert engine.cache.restore(lease, text(0, 12)) == 0
    lease.release()
    bucket.gate.set()
    assert engine.tiers.wait()
    assert engine.run(text(0, 12)) == 0  # what came late is in host memory


def test_a_sequence_waits_no_longer_than_computing_would_take(make, bucket, clock):
    saved(make, text(0, 12))
    engine = make()
    engine.tiers.recompute_s_per_token = 0.01
    bucket.gate.clear()
    reading = engine.tiers.read_ahead(text(0, 12))
    clock.now_s = 0.119
    assert not reading.is_done
    clock.now_s = 0.121
    assert reading.is_done
    for _ in range(3):  # and the slow server is not asked for the next prompts
        assert engine.tiers.read_ahead(text(0, 12)).is_done
    assert engine.tiers.counters.not_read == 9


def test_a_server_slower_than_computing_is_tried_now_and_then(make, bucket):
    saved(make, text(0, 12))
    engine = make()
    engine.tiers.recompute_s_per_token = 0.001
    engine.tiers.rates.read(0.5)
    bucket.asked.clear()
    for _ in range(15):
        assert engine.tiers.read_ahead(text(0, 12)).is_done
    assert bucket.asked == []
    engine.tiers.read_ahead(text(0, 12))
    assert engine.tiers.wait() and "has" in bucket.asked


def test_prompts_that_are_never_there_end_the_look_ups(make, bucket):
    engine = make()
    engine.tiers.recompute_s_per_token = 0.001
    engine.tiers.rates.looked_up(0.002, num_found=0, num_asked=1)
    engine.tiers.rates.lookup_s = 0.002
    for start in range(0, 40 * 100, 100):
        engine.tiers.read_ahead(text(start, 12))
        assert engine.tiers.wait()
        engine.tiers.rates.lookup_s = 0.002
    assert 8 <= bucket.asked.count("has") // 3 <= 20


def test_closing_does_not_wait_for_a_server_that_hangs(make, bucket):
    engine = make()
    bucket.gate.clear()
    engine.run(text(0, 12))
    engine.tiers.write_behind(10)
    assert not engine.tiers.wait(0.01)
    engine.tiers.close(0.01)
    assert engine.tiers.flush(math.inf)  # nothing is left that it could wait for


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/var/kv", "a folder goes to disk_cache"),
        ("gs://kv", "give s3://"),
        ("s3://", "give s3://"),
        ("s3://key:secret@kv/x", "keys do not belong"),
        ("s3://kv?endpont=http://x", "'endpont' is unknown"),
    ],
)
def test_a_wrong_address_is_refused(url, words):
    with pytest.raises(ValueError, match=words):
        open_object_store(url)
