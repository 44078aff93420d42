"""Engines that share a bucket: a second one and a restarted one reuse KV, and no fault of the bucket changes an answer.

The bucket is in memory; with the mark ``s3`` it is a server's, over HTTP (``make test-s3``).
"""

import urllib.request
from importlib.util import find_spec

import pytest
from phloem.protocol.errors import InvalidParams, Unsupported
from phloem.radix_cache.object_store import ObjectStore, open_object_store
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore, loading
from phloem.runtime.quantizing import quantize_model
from phloem.tests.radix_cache.tiered import SPOILERS, MemoryBucket, spoil
from phloem.tests.runtime.engine.test_tiers import PROMPTS, ask, assert_restart_keeps_hits, make_engine

URL = "s3://kv-blocks/models"
HAS_SERVER = all(find_spec(name) is not None for name in ("obstore", "moto"))
WITH_SERVER = [pytest.mark.s3, pytest.mark.skipif(not HAS_SERVER, reason="needs obstore and moto: make test-s3")]
NUM_BLOCKS = len(PROMPTS[0]) // 64


@pytest.fixture(scope="module")
def server():
    """Moto's server on loopback, with an empty bucket."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture(params=["memory", pytest.param("server", marks=WITH_SERVER)])
def shared(request, monkeypatch):
    """The address of an empty bucket, and its store."""
    if request.param == "memory":
        store = ObjectStore(MemoryBucket(), about="s3://kv-blocks")
        monkeypatch.setattr(loading, "open_object_store", lambda url: store)
        return URL, store
    endpoint = request.getfixturevalue("server")
    name = f"kv-{request.node.callspec.indices.get('spoiler', 9)}-{len(request.node.name)}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    url = f"s3://{name}/models?endpoint={endpoint}"
    return url, open_object_store(url)


@pytest.fixture(scope="module")
def cold(tiny_model_path) -> list[tuple[int, ...]]:
    engine = make_engine(tiny_model_path, prefix_cache=False)
    answers = [ask(engine, prompt)[0] for prompt in PROMPTS]
    engine.close()
    return answers


def run_once(path, url: str, prompt: str) -> tuple[tuple[int, ...], int]:
    engine = make_engine(path, shared_cache=url)
    found = ask(engine, prompt)
    engine.close()
    return found


def test_a_second_engine_and_a_restarted_one_reuse_what_the_first_computed(tiny_model_path, shared, cold):
    url, store = shared
    first, second = (make_engine(tiny_model_path, shared_cache=url) for _ in range(2))
    assert ask(first, PROMPTS[0]) == (cold[0], 0)
    first.tiers.flush()
    tokens, num_cached = ask(second, PROMPTS[0])
    assert tokens == cold[0] and num_cached >= NUM_BLOCKS * 64
    assert ask(second, PROMPTS[1]) == (cold[1], 0)
    first.close()
    second.close()
    assert len(store.entries()) >= 2 * NUM_BLOCKS
    for prompt, answer in zip(PROMPTS[:2], cold[:2], strict=True):
        tokens, num_cached = run_once(tiny_model_path, url, prompt)
        assert tokens == answer and num_cached >= NUM_BLOCKS * 64


def test_a_restart_costs_hits_of_the_unsaved_ends_of_prompts_alone(tiny_model_path, shared):
    assert_restart_keeps_hits(tiny_model_path, shared_cache=shared[0])


def test_8_bit_keys_and_values_come_back_from_a_bucket_with_equal_answers(tiny_model_path, shared, tmp_path):
    # With weights of 4 bits a token's keys have equal bits in every batch.
    model, (url, store) = quantize_model(tiny_model_path, tmp_path / "packed", "int4-g32").path, shared
    options = {"precision": "auto", "kv_dtype": "int8", "shared_cache": url}
    first, second = (make_engine(model, **options) for _ in range(2))
    tokens, num_cached = ask(first, PROMPTS[0])
    first.close()
    assert num_cached == 0 and len(store.entries()) >= NUM_BLOCKS
    again, num_cached = ask(second, PROMPTS[0])
    second.close()
    assert again == tokens and num_cached >= NUM_BLOCKS * 64


@pytest.mark.parametrize("spoiler", SPOILERS.values(), ids=SPOILERS.keys())
def test_spoiled_objects_are_computed_again(tiny_model_path, shared, cold, spoiler):
    url, store = shared
    run_once(tiny_model_path, url, PROMPTS[0])
    assert spoil(store.bucket, spoiler) >= NUM_BLOCKS
    assert run_once(tiny_model_path, url, PROMPTS[0]) == (cold[0], 0)


def test_one_spoiled_object_costs_only_the_tokens_from_it_on(tiny_model_path, shared, cold):
    url, store = shared
    run_once(tiny_model_path, url, PROMPTS[0])
    keys = sorted(entry.key for entry in store.entries())
    spoil(store.bucket, SPOILERS["a cut object"], which=lambda key: key == keys[0])
    tokens, num_cached = run_once(tiny_model_path, url, PROMPTS[0])
    assert tokens == cold[0] and num_cached % 64 == 0 and num_cached < NUM_BLOCKS * 64


@pytest.mark.parametrize("methods", [{"has"}, {"get"}, {"put"}, {"list"}, {"has", "get", "put", "list", "delete"}])
def test_a_bucket_that_fails_changes_no_answer(tiny_model_path, monkeypatch, cold, methods):
    bucket = MemoryBucket()
    monkeypatch.setattr(loading, "open_object_store", lambda url: ObjectStore(bucket, about=url))
    run_once(tiny_model_path, URL, PROMPTS[0])
    bucket.fail |= methods
    for prompt, answer in zip(PROMPTS[:2], cold[:2], strict=True):
        assert run_once(tiny_model_path, URL, prompt)[0] == answer


def test_a_bucket_that_hangs_delays_an_answer_by_its_budget_at_most(tiny_model_path, monkeypatch, cold):
    bucket = MemoryBucket()
    monkeypatch.setattr(loading, "open_object_store", lambda url: ObjectStore(bucket, about=url))
    run_once(tiny_model_path, URL, PROMPTS[0])
    bucket.gate.clear()
    engine = make_engine(tiny_model_path, shared_cache=URL)
    looks = iter(range(10**6))
    engine.tiers.clock = lambda: next(looks) / 10  # each look at the clock takes a tenth of a second
    try:
        assert ask(engine, PROMPTS[0]) == (cold[0], 0)
        assert engine.tiers.counters.late > 0
    finally:
        bucket.gate.set()
        engine.close()


@pytest.mark.s3
@pytest.mark.skipif(find_spec("obstore") is None, reason="needs obstore: make test-s3")
def test_a_server_that_is_gone_changes_no_answer(tiny_model_path, cold, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    engine = make_engine(tiny_model_path, shared_cache="s3://kv-blocks/x?endpoint=http://127.0.0.1:9")
    assert ask(engine, PROMPTS[0]) == (cold[0], 0)
    assert engine.tiers.store.num_faults == 1
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shared_cache": "/var/kv"}, "a folder goes to disk_cache"),
        ({"shared_cache": URL, "disk_cache": "kv"}, "one store; leave out one"),
        ({"shared_cache": URL, "shared_cache_bytes": 0}, "shared_cache_bytes positive"),
        ({"shared_cache": URL, "prefix_cache": False}, "shared_cache keep cached prefixes; they need prefix_cache"),
    ],
)
def test_impossible_options_are_refused_by_name(tiny_model_path, options, words):
    with pytest.raises(InvalidParams, match=words):
        make_engine(tiny_model_path, **options)


def test_a_split_model_has_no_shared_cache():
    with pytest.raises(Unsupported, match="tensor_parallel=2 with shared_cache"):
        EngineCore(EngineConfig(model="unused", tensor_parallel=2, shared_cache=URL))
