"""Cache events over a socket: a subscriber knows the prefixes that an engine holds."""

import numpy as np
import pytest
import zmq
from phloem.engines import Engine
from phloem.protocol.cache_events import BlocksEvicted, BlocksStored, decode_cache_events, decode_cache_snapshot
from phloem.protocol.errors import InvalidParams
from phloem.radix_cache import RadixCache, block_names
from phloem.runtime.engine.cache_feed import CacheFeed
from phloem.runtime.process.cache_publisher import CachePublisher


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribe(context: zmq.Context, url: str) -> zmq.Socket:
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVTIMEO, 10_000)
    socket.subscribe(b"")
    socket.connect(url)
    return socket


def receive_after(socket: zmq.Socket, publish) -> object:
    """Call ``publish`` until events arrive, because a subscription takes some time; returns the events."""
    for _ in range(1000):
        publish()
        if socket.poll(10):
            return decode_cache_events(socket.recv())
    raise AssertionError("nothing was published")


def test_what_is_stored_and_evicted_is_published_by_name(context):
    publisher = CachePublisher("tcp://127.0.0.1:*", context=context)
    socket = subscribe(context, publisher.url)
    feed = CacheFeed(block_len=4, model="m")
    cache = RadixCache(64, on_event=feed.note, block_len=4)
    tokens = np.arange(10, dtype=np.int32)

    def store_and_flush() -> None:
        lease = cache.acquire(tokens, namespace="salt")
        lease.extend(10)
        lease.commit(tokens)
        lease.release()
        cache.flush()
        events = feed.take()
        assert events is not None and feed.take() is None
        publisher.publish(events)

    frame = receive_after(socket, store_and_flush)
    names = tuple(block_names(tokens, namespace="salt", block_len=4))
    stored, evicted = frame.events
    assert (frame.block_len, frame.epoch, frame.model) == (4, feed.epoch, "m") and len(names) == 2
    assert isinstance(stored, BlocksStored) and (stored.namespace, stored.names) == ("salt", names)
    assert isinstance(evicted, BlocksEvicted) and (evicted.cause, evicted.seq) == ("flush", stored.seq + 1)
    assert evicted.names == names
    socket.close()
    publisher.close()


def test_an_engine_says_where_it_publishes_and_tells_of_a_prompt(context, tiny_model_path):
    engine = Engine(str(tiny_model_path), num_slots=2048, num_threads=1, cache_events_url="tcp://127.0.0.1:*")
    try:
        url = engine.client.welcome.cache_events_url
        assert url.startswith("tcp://127.0.0.1:") and not url.endswith("*")
        socket = subscribe(context, url)
        prompts = (f"{n} " + "leaf " * 40 for n in range(1000))
        frame = receive_after(socket, lambda: engine.generate(next(prompts), max_tokens=1))
        assert frame.block_len == 64 and isinstance(frame.events[0], BlocksStored)
        snapshot = decode_cache_snapshot(engine.client.query("cache_blocks"))
        assert (snapshot.epoch, snapshot.model) == (frame.epoch, frame.model) and snapshot.seq >= frame.events[-1].seq
        assert set(frame.events[0].names) <= set(snapshot.device)
        socket.close()
    finally:
        engine.shutdown()


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:5555", "nonsense"])
def test_an_address_that_others_reach_is_refused(context, url):
    with pytest.raises(InvalidParams):
        CachePublisher(url, context=context)
