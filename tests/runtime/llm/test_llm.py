"""Runtime, Engine and connect on the tiny model: one face, the same answers."""

import threading

import phloem
import pytest
from phloem.runtime.llm import make_config

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
    import os
    import signal

    with phloem.Runtime(model=str(tiny_model_path), **OPTIONS) as runtime:
        state = two_steps.run("root", backend=runtime)
        os.kill(runtime.process.pid, signal.SIGKILL)
        with pytest.raises(phloem.EngineLost, match="SIGKILL"):
            two_steps.run("again", backend=runtime)["second"]
        del state
