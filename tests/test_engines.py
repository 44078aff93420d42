"""Runtime, Engine and connect on the tiny model: one face, the same answers."""

import asyncio
import os
import signal
import sys
import threading

import phloem
import pytest
from phloem.engines import make_config
from phloem.protocol.address import ClientKeys, ServerKeys, new_key_pair
from phloem.protocol.errors import EngineLost
from phloem.runtime.config import EngineConfig
from phloem.runtime.process.loop import SWITCH_S
from phloem.tests.runtime.encoder.tiny_encoder import make_encoder
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

OPTIONS = {"precision": "float32", "num_slots": 2048}


@phloem.function
def two_steps(s, word):
    s += phloem.user(f"Say {word}.")
    s += phloem.assistant(phloem.gen("first", max_tokens=6, temperature=0, ignore_eos=True))
    s += phloem.user("Again.")
    s += phloem.assistant(phloem.gen("second", max_tokens=6, temperature=0, ignore_eos=True))


@pytest.fixture(scope="module")
def runtime(tiny_model_path):
    with phloem.Runtime(model=str(tiny_model_path), **OPTIONS) as runtime:
        yield runtime


def test_process_thread_and_connection_give_the_same_answers(tiny_model_path, runtime):
    def answers(backend: object) -> tuple[str, str]:
        state = two_steps.run("sap", backend=backend)
        return state["first"], state["second"]

    expected = answers(runtime)
    with phloem.Engine(model=str(tiny_model_path), **OPTIONS) as engine:
        assert answers(engine) == expected
        assert engine.info()["num_slots"] == 2048
    with phloem.connect(runtime.url) as connection:
        assert answers(connection) == expected
    assert answers(runtime) == expected


def test_a_program_is_one_message_and_says_what_it_cost(runtime):
    runtime.flush_cache()
    state = two_steps.run("leaf", backend=runtime)
    assert len(state["second"]) > 0
    stats = state.stats()
    assert stats["messages"] == 1 and stats["generated_tokens"] == 12
    assert stats["cached_tokens"] + stats["prefilled_tokens"] == stats["prompt_tokens"]


def test_a_stream_left_early_is_cancelled_and_its_closed_loop_troubles_nobody(runtime, caplog):
    async def first_of_many():
        async for text in runtime.async_generate("Say sap.", {"max_new_tokens": 300, "ignore_eos": True}):
            if text:
                return text

    assert asyncio.run(first_of_many())
    answer = runtime.generate("Say leaf.", {"max_new_tokens": 4, "ignore_eos": True})
    assert len(answer["output_ids"]) == 4
    wait_until(lambda: runtime.metrics()["running"] == 0)
    assert not caplog.records


def test_the_cache_tree_shows_the_prefixes_and_flush_empties_it(runtime):
    two_steps.run("bark", backend=runtime).sync()
    (root,) = runtime.cache_tree()
    assert "bark" in str(root["children"])
    assert runtime.flush_cache() > 0
    assert not any(root["children"] for root in runtime.cache_tree())
    assert runtime.metrics()["slots"]["cached"] == 0


def test_many_threads_share_one_runtime(runtime):
    results: dict[int, str] = {}

    def run(i: int) -> None:
        results[i] = two_steps.run(f"word {i % 4}", backend=runtime)["second"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(results) == 16
    assert all(results[i] == results[i % 4] for i in range(16))


def test_an_unknown_model_an_unknown_option_and_a_bad_value_are_named(tmp_path):
    with pytest.raises(phloem.UnknownModel, match="no-such-model"):
        phloem.Runtime(model="no-such-model")
    with pytest.raises(phloem.InvalidParams, match="unknown option 'slots'"):
        phloem.Runtime(model="smollm2", slots=3)
    with pytest.raises(phloem.InvalidParams, match="num_slots"):
        make_config("smollm2", {"num_slots": "many"})
    with pytest.raises(phloem.InvalidParams, match="ipc://PATH or tcp://HOST:PORT"):
        phloem.connect("http://localhost:1")


def test_a_context_beyond_the_model_s_is_refused(tiny_model_path):
    with pytest.raises(phloem.InvalidParams, match="max_seq_len"):
        phloem.Runtime(model=str(tiny_model_path), max_seq_len=1_000_000)


def test_a_killed_engine_is_an_error_where_the_value_is_read(tiny_model_path):
    with phloem.Runtime(model=str(tiny_model_path), **OPTIONS) as runtime:
        state = two_steps.run("root", backend=runtime)
        os.kill(runtime.process.pid, signal.SIGKILL)
        with pytest.raises(phloem.EngineLost, match="SIGKILL"):
            two_steps.run("again", backend=runtime)["second"]
        del state


def test_replicas_are_kept_alive_and_have_the_same_face():
    with phloem.Runtime(model="none", engine_factory=f"{STRINGS}:plain", replicas=2) as runtime:
        expected = runtime.generate("a tree").text
        wait_until(lambda: [replica.state for replica in runtime.fleet()] == ["ready", "ready"])
        victim = runtime.fleet()[0]
        os.kill(victim.pid, signal.SIGKILL)
        assert [answer.text for answer in runtime.generate(["a tree"] * 8)] == [expected] * 8
        wait_until(lambda: runtime.fleet()[0].epoch == victim.epoch + 1 and runtime.fleet()[0].state == "ready")
        assert runtime.info()["model"] == "string"
        for call, message in (
            (lambda: runtime.url, "replicas have no common address"),
            (lambda: runtime.process, "which come and go; fleet.. lists them"),
        ):
            with pytest.raises(phloem.Unsupported, match=message):
                call()
    assert [replica.state for replica in runtime.fleet()] == ["stopped", "stopped"]


def test_replicas_have_roles():
    with phloem.Runtime(
        model="none", engine_factory=f"{STRINGS}:plain", replicas=3, roles=["prefill", "decode"], max_rebalanced=0
    ) as runtime:
        assert [replica.role for replica in runtime.fleet()] == ["prefill", "decode", "both"]


def test_what_does_not_go_with_replicas_is_named(runtime, tmp_path):
    plain = {"model": "none", "engine_factory": f"{STRINGS}:plain"}
    with pytest.raises(phloem.InvalidParams, match="max_rebalanced=9: it must be 0 to 8"):
        phloem.Runtime(**plain, replicas=2, max_rebalanced=9)
    with pytest.raises(phloem.InvalidParams, match="role='prefill' needs a replica with the role 'decode'"):
        phloem.Runtime(**plain, replicas=2, roles=["prefill"])
    for options in ({"roles": ["prefill", "decode"]}, {"max_rebalanced": 0}):
        with pytest.raises(phloem.InvalidParams, match="this is one engine; give replicas too"):
            phloem.Runtime(**plain, **options)
    with pytest.raises(phloem.InvalidParams, match="is an encoder, which generates nothing"):
        phloem.Runtime(model=str(make_encoder(tmp_path / "encoder")), replicas=2, roles=["prefill", "decode"])
    with pytest.raises(phloem.InvalidParams, match="replicas=0: it must be 1 to 256"):
        phloem.Runtime(model="none", engine_factory=f"{STRINGS}:plain", replicas=0)
    with pytest.raises(phloem.InvalidParams, match="replicas=2: replicas have no address; leave out url"):
        phloem.Runtime(model="none", url="tcp://127.0.0.1:*", replicas=2)
    with pytest.raises(phloem.Unsupported, match="one engine, which is not kept alive; give replicas=N"):
        runtime.fleet()


# -- generate(), over an engine without a model ------------------------------------------------------------------------

STRINGS = "phloem.tests.runtime.process.engines"


@pytest.fixture(scope="module")
def strings():
    with phloem.Runtime(model="none", engine_factory=f"{STRINGS}:plain") as runtime:
        yield runtime


def test_generate_continues_one_text_or_many(strings):
    one = strings.generate("a tree", max_tokens=2, n=2)
    assert one.text == one.texts[0] and len(one.texts) == 2
    assert one.meta.candidates[0].completion_tokens == 2 and one.meta.candidates[0].finish_reason == "length"
    many = strings.generate(["a tree", "a root"])
    assert [len(answer.texts) for answer in many] == [1, 1]
    assert strings.generate([]) == []


def test_generate_names_what_it_cannot_do(strings):
    with pytest.raises(phloem.InvalidParams, match="unknown option 'max_token'"):
        strings.generate("a", max_token=3)
    with pytest.raises(phloem.InvalidParams, match=r"temperature"):
        strings.generate("a", temperature="hot")
    with pytest.raises(phloem.InvalidParams, match="max_tokens=-1: must be >= 0"):
        strings.generate(["a", "b"], max_tokens=-1)
    with pytest.raises(phloem.LimitExceeded, match="n=1000"):
        strings.generate("a", n=1000)


def test_generate_gives_up_after_its_time_and_cancels():
    with phloem.Runtime(model="none", engine_factory=f"{STRINGS}:slow") as runtime:
        with pytest.raises(phloem.DeadlineExceeded, match=r"no answer within 0.1 s"):
            runtime.generate(["a", "b"], timeout_s=0.1, max_tokens=50_000)
        assert runtime.metrics()["ops_failed"] == 4, "both programs were cancelled: a Gen and a Close each"


def test_an_engine_made_elsewhere_has_the_same_face():
    with phloem.Engine.over(StringEngine(reply=lambda prompt, op: prompt.upper())) as engine:
        assert engine.generate("sap").text == "SAP"
        assert engine.info()["model"] == "string" and engine.url.startswith("inproc://")
    engine.shutdown()
    with pytest.raises(phloem.EngineLost, match="closed"):
        engine.generate("sap")


def test_while_engines_run_a_thread_gives_pythons_lock_away_soon():
    before = sys.getswitchinterval()
    with phloem.Engine.over(StringEngine(reply=lambda prompt, op: prompt)) as one:
        with phloem.Engine.over(StringEngine(reply=lambda prompt, op: prompt)) as other:
            assert one.generate("sap").text == other.generate("sap").text == "sap"
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_an_engine_thread_that_fails_says_so(caplog):
    class Broken(StringEngine):
        def fail_all(self, error):
            raise KeyError("worse")

        def step(self, inbox):
            if inbox:
                raise ValueError("boom")
            return []

    said = "the engine's thread failed: EngineBroken: .*boom"
    with caplog.at_level("CRITICAL"), phloem.Engine.over(Broken()) as engine, pytest.raises(EngineLost, match=said):
        engine.generate("sap")


def test_keys_open_an_engine_to_the_clients_that_hold_them():
    engine_key, own_key, friend_key = (new_key_pair() for _ in range(3))
    own, friend = (ClientKeys(secret=pair[1], server=engine_key[0]) for pair in (own_key, friend_key))
    with pytest.raises(phloem.InvalidParams, match="go together"):
        phloem.Runtime(model="none", client_keys=own)
    keys = ServerKeys(secret=engine_key[1], clients=frozenset([own_key[0], friend_key[0]]))
    with phloem.Runtime(
        model="none", url="tcp://0.0.0.0:*", keys=keys, client_keys=own, engine_factory=f"{STRINGS}:plain"
    ) as runtime:
        assert runtime.generate("a").text
        with phloem.connect(runtime.url, keys=friend) as connection:
            assert connection.generate("a").text == runtime.generate("a").text


def test_options_change_a_config_that_is_made():
    config = make_config(EngineConfig(model="a", seed=3), {"num_slots": 5})
    assert (config.model, config.seed, config.num_slots) == ("a", 3, 5)
    with pytest.raises(phloem.InvalidParams, match="unknown option 'slots'"):
        make_config(config, {"slots": 3})


def test_a_stream_of_several_candidates_is_refused_before_anything_is_sent():
    async def first_of(engine):
        async for text in await engine.async_generate("sap", {"n": 2}, stream=True):
            return text

    with phloem.Engine.over(StringEngine()) as engine:
        with pytest.raises(phloem.InvalidParams, match="n=2: a stream has one candidate"):
            asyncio.run(first_of(engine))
        assert engine.metrics()["submits"] == 0
