"""What programs share on a tiny random model: prefixes, pins, the queue and slots."""

import typing

import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import InvalidParams
from phloem.protocol.sampling import SamplingParams
from phloem.radix_cache import POLICIES
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.scheduler import ORDERS
from phloem.tests.runtime.engine.driver import GREEDY, Driver, prompts


def test_identical_requests_at_once_compute_their_prompt_once(driver):
    before = driver.engine.loop.counters.forward_tokens
    prompt = prompts(1, seed=5, longest=400)[0]
    one = SamplingParams(temperature=0.0, max_tokens=1)
    outcomes = [driver.submit([o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=one)]) for _ in range(32)]
    driver.run()
    num_prompt = outcomes[0].done[1].meta.prompt_tokens
    assert driver.engine.loop.counters.forward_tokens - before == (num_prompt - 1) + 32


def test_turns_find_their_history_generated_tokens_included(driver):
    ops = [o.Text(op=0, seq=0, text="turn one")]
    for turn in range(6):
        ops += [
            o.Gen(op=10 * turn + 1, seq=0, params=GREEDY),
            o.Text(op=10 * turn + 2, seq=0, text=f" and turn {turn}"),
        ]
    outcome = driver.run(ops)
    for turn in range(1, 6):
        meta, last = outcome.done[10 * turn + 1].meta, outcome.done[10 * turn - 9].meta
        # All except the last generated token, which was never run, and the new text.
        assert meta.cached_tokens == last.prompt_tokens + 12 - 1


def test_a_later_submit_extends_a_finished_sequence_in_place(driver):
    """A client that reads an answer before its next question: no token of the history is run again."""
    first = driver.submit([o.Text(op=0, seq=0, text="turn one"), o.Gen(op=1, seq=0, params=GREEDY)], program="chat")
    driver.run()
    history = first.done[1].meta.prompt_tokens + 12
    before = driver.engine.loop.counters.forward_tokens
    driver.submit([o.Text(op=2, seq=0, text=" and on"), o.Gen(op=3, seq=0, params=GREEDY)], program="chat")
    driver.run()
    meta = first.done[3].meta
    assert meta.prompt_tokens == history + len(" and on") and meta.cached_tokens == history - 1
    assert (
        driver.engine.loop.counters.forward_tokens - before
        <= 1 + len(" and on") + 12 + meta.candidates[0].drafted_tokens
    )
    driver.engine.cache.flush()
    ops = [o.Text(op=0, seq=0, text="turn one"), o.Gen(op=1, seq=0, params=GREEDY)]
    at_once = driver.run([*ops, o.Text(op=2, seq=0, text=" and on"), o.Gen(op=3, seq=0, params=GREEDY)])
    assert [first.value(op) for op in (1, 3)] == [at_once.value(op) for op in (1, 3)]


def test_submits_beyond_max_waiting_are_rejected_and_accepted_ones_finish(tiny_model_path):
    engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", max_running=1, max_waiting=2))
    driver = Driver(engine)
    outcomes = [driver.submit([o.Text(op=0, seq=0, text=f"{n}"), o.Gen(op=1, seq=0, params=GREEDY)]) for n in range(3)]
    driver.step()
    refused = driver.submit([o.Text(op=0, seq=0, text="no"), o.Gen(op=1, seq=0, params=GREEDY)], program="late")
    driver.step()
    error = refused.rejected.errors[0]
    assert error.kind == "Overloaded" and "max_waiting" in error.message and error.retry_after_s >= 1.0
    driver.run()
    assert all(outcome.ends == {0: 1, 1: 1} for outcome in outcomes) and not refused.ends
    again = driver.submit([o.Text(op=0, seq=0, text="no"), o.Gen(op=1, seq=0, params=GREEDY)], program="late again")
    driver.run()
    assert again.ends == {0: 1, 1: 1}
    engine.close()


def test_a_pin_keeps_a_prefix_for_its_time_within_its_budget(tiny_model_path):
    now_s = 0.0
    sizes = {"num_slots": 300, "max_seq_len": 280}
    config = EngineConfig(model=str(tiny_model_path), precision="float32", eviction="lru", **sizes)
    engine = EngineCore(config, clock=lambda: now_s)
    driver = Driver(engine)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    stem, rest = "the garden has oaks and beeches " * 3, "and one of them is old " * 8

    def cached(text: str) -> int:
        ops = [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=one), o.Close(op=2, seq=0)]
        return driver.run(ops).done[1].meta.cached_tokens

    def pin(text: str, ttl_s: float) -> object:
        ops = [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=one), o.Pin(op=2, seq=0, ttl_s=ttl_s)]
        return driver.run([*ops, o.Close(op=3, seq=0)]).value(2)

    assert pin(stem, 60.0) == len(stem)
    for n in range(3):
        cached(f"{n} {rest}")
    assert cached(stem) == len(stem) - 1
    assert pin(rest, 60.0) == 150 - len(stem), "pins keep half of the slots at most"
    now_s = 61.0
    for n in range(3, 6):
        cached(f"{n} {rest}")
    assert cached(stem) == 0
    # A prompt that needs the pinned slots runs all the same.
    assert pin(stem, 60.0) == len(stem)
    assert cached("x" * 270) == 0 and cached("x" * 270) > 0
    engine.close()


def test_a_burst_within_one_step_counts_against_the_queue(tiny_model_path):
    engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", max_running=2, max_waiting=3))
    driver = Driver(engine)
    outcomes = [driver.submit([o.Text(op=0, seq=0, text=f"{n}"), o.Gen(op=1, seq=0, params=GREEDY)]) for n in range(9)]
    driver.run()
    assert [outcome.rejected is None for outcome in outcomes] == [True] * 5 + [False] * 4
    assert all(outcome.ends == {0: 1, 1: 1} for outcome in outcomes[:5])
    engine.close()


def test_tenants_share_by_the_weights_of_the_config(tiny_model_path):
    config = EngineConfig(
        model=str(tiny_model_path), precision="float32", max_running=1, speculative="off", tenant_weights={"a": 3.0}
    )
    engine = EngineCore(config)
    driver = Driver(engine)
    outcomes = {}
    for n in range(8):
        for tenant in "ab":
            ops = [o.Text(op=0, seq=0, text=f"{n}{tenant}"), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)]
            outcomes[tenant, n] = driver.submit(ops, settings=m.ProgramSettings(tenant=tenant))
    ended: list[str] = []
    while len(ended) < 8:
        driver.step()
        ended += [tenant for (tenant, n), out in list(outcomes.items()) if out.closed and outcomes.pop((tenant, n))]
    assert 5 <= ended[:8].count("a") <= 7
    driver.run()
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"match_window": 0}, "match_window=0: it must be at least 1"),
        ({"order": "shortest_remaining", "match_window": 8}, "match_window=8: order='shortest_remaining' orders by"),
        ({"max_running": -1}, "max_running=-1"),
        ({"tenant_weights": {"a": 0.0}}, "tenant_weights: 0.0 for 'a'"),
        ({"cached_prompts": "last", "eviction": "lfu"}, "so eviction='lfu' has no effect"),
        ({"cached_prompts": "last", "prefix_cache": False}, "so prefix_cache=False has no effect"),
        ({"cached_prompts": "last", "host_cache_bytes": 1 << 20}, "they need cached_prompts 'all'"),
    ],
)
def test_impossible_scheduling_options_are_refused_by_name(tiny_model_path, options, words):
    with pytest.raises(InvalidParams, match=words):
        EngineCore(EngineConfig(model=str(tiny_model_path), **options))


def test_the_config_names_every_order_and_every_policy():
    types = typing.get_type_hints(EngineConfig)
    assert set(typing.get_args(types["order"])) == set(ORDERS)
    assert set(typing.get_args(types["eviction"])) == set(POLICIES)


def test_where_the_last_prompt_is_kept_answers_are_the_same_and_older_prompts_are_computed_again(tiny_model_path):
    config = EngineConfig(model=str(tiny_model_path), precision="float32", cached_prompts="last", order="random")
    last, tree = Driver(EngineCore(config)), Driver(EngineCore(EngineConfig(config.model, precision="float32")))

    def run(driver, text):
        gen = o.Gen(op=1, seq=0, params=GREEDY)
        done = driver.run([o.Text(op=0, seq=0, text=text), gen, o.Close(op=2, seq=0)])
        return done.value(1), done.done[1].meta.cached_tokens

    first, second = "an old prompt " * 4, "the new text " * 4
    asked = [first, first, second, first]
    kept, all_ = [run(last, text) for text in asked], [run(tree, text) for text in asked]
    assert [value for value, _ in kept] == [value for value, _ in all_]
    assert [cached > 16 for _, cached in kept] == [False, True, False, False]
    assert [cached > 16 for _, cached in all_] == [False, True, False, True]


def test_a_small_pool_serves_many_programs_by_preemption(tiny_model_path):
    engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=256, max_seq_len=200))
    driver, plenty = Driver(engine), Driver(EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32")))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    texts = prompts(10, seed=2, longest=120)
    outcomes = [
        [d.submit([o.Text(op=0, seq=0, text=t), o.Gen(op=1, seq=0, params=params)]) for t in texts]
        for d in (driver, plenty)
    ]
    driver.run()
    plenty.run()
    assert [out.value(1) for out in outcomes[0]] == [out.value(1) for out in outcomes[1]]
    assert engine.scheduler.num_preemptions > 0
    engine.close()
    plenty.engine.close()
