"""Ops on a tiny random model: what each means, that each ends once, and that no fast path changes a token."""

import math
import random
import typing

import pytest
from phloem.radix_cache import POLICIES
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import Engine
from phloem.runtime.protocol import messages as m
from phloem.runtime.protocol import ops as o
from phloem.runtime.protocol.errors import InvalidParams
from phloem.runtime.protocol.sampling import SamplingParams
from phloem.runtime.scheduler import ORDERS
from phloem.tests.runtime.engine.driver import CLIENT, Driver

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    engine = Engine(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=4096))
    yield engine
    engine.close()


@pytest.fixture
def driver(engine):
    """Starts with an empty cache; at the end every program is dropped and nothing may be left of them."""
    engine.cache.flush()
    yield Driver(engine)
    engine.drop_client(CLIENT)
    engine.check()
    assert not engine.has_work and not engine.interpreter.live and engine.cache.num_locked == 0


def generate(driver: Driver, prompt: str, params: SamplingParams = GREEDY, **options) -> tuple[list[str], m.GenMeta]:
    outcome = driver.run([o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=params, **options)])
    return outcome.value(1), outcome.done[1].meta


def prompts(count: int, *, seed: int = 0, longest: int = 300) -> list[str]:
    rng = random.Random(seed)
    words = ["sap", "leaf", "root", "ring", "phloem", "xylem", "Grüße", "木", "42", "and", "the"]
    return [" ".join(rng.choice(words) for _ in range(rng.randrange(1, longest // 5))) for _ in range(count)]


def test_text_then_gen_answers_every_op_once_and_closes(driver):
    outcome = driver.run([o.Text(op=0, seq=0, text="hello"), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)])
    assert outcome.ends == {0: 1, 1: 1, 2: 1}
    meta = outcome.done[1].meta
    assert meta.candidates[0].finish_reason == "length" and meta.candidates[0].completion_tokens == 12
    assert outcome.value(2) == "hello" + outcome.value(1)[0]
    assert outcome.closed.stats.generated_tokens == 12 and outcome.closed.stats.submits == 1


def test_greedy_tokens_are_equal_alone_batched_cached_chunked_and_not(tiny_model_path, driver):
    texts = prompts(12)
    alone = [generate(driver, text)[1].candidates[0].token_ids for text in texts]
    again = [generate(driver, text) for text in texts]
    assert [meta.candidates[0].token_ids for _, meta in again] == alone
    assert all(meta.cached_tokens == meta.prompt_tokens - 1 for _, meta in again)
    for options in ({"prefix_cache": False}, {"prefill_chunk": 7}, {"max_step_tokens": 24, "prefill_chunk": 16}):
        other = Engine(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=8192, **options))
        batch = Driver(other)
        outcomes = [batch.submit([o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=GREEDY)]) for text in texts]
        batch.run()
        assert [out.done[1].meta.candidates[0].token_ids for out in outcomes] == alone, options
        other.close()


def test_forked_children_continue_as_copies_would(driver):
    ops = [o.Text(op=0, seq=0, text="the phloem "), o.Fork(op=1, seq=0, children=(1, 2))]
    for child in (1, 2):
        ops += [
            o.Text(op=10 + child, seq=child, text=f"child {child}: "),
            o.Gen(op=20 + child, seq=child, params=GREEDY),
        ]
    ops += [o.Join(op=30, seq=0, children=(1, 2), mode="concate_and_append"), o.Close(op=40, seq=0)]
    ops += [o.Close(op=41, seq=1), o.Close(op=42, seq=2)]
    outcome = driver.run(ops)
    assert outcome.rejected is None
    assert set(outcome.ends) == {op.op for op in ops} and set(outcome.ends.values()) == {1}
    expected = []
    for child in (1, 2):
        # The same token boundaries: the fork's point is one.
        plain = driver.run(
            [
                o.Text(op=0, seq=0, text="the phloem "),
                o.Special(op=1, seq=0, ids=()),
                o.Text(op=2, seq=0, text=f"child {child}: "),
                o.Gen(op=3, seq=0, params=GREEDY),
            ]
        )
        assert outcome.value(20 + child) == plain.value(3)
        expected.append(f"child {child}: " + plain.value(3)[0])
    assert outcome.value(40) == "the phloem " + "".join(expected)
    assert outcome.closed is not None


def test_ref_pastes_a_value_that_did_not_exist_when_it_was_sent(driver):
    outcome = driver.run(
        [
            o.Text(op=0, seq=1, text="abc"),
            o.Gen(op=1, seq=1, params=GREEDY),
            o.Text(op=2, seq=0, text="they said: "),
            o.Ref(op=3, seq=0, source=1),
            o.Close(op=4, seq=0),
            o.Close(op=5, seq=1),
        ]
    )
    assert outcome.value(4) == "they said: " + outcome.value(1)[0]


def test_select_takes_the_choice_with_the_likeliest_tokens(driver):
    choices = (" alpha", " beta", " gamma delta")
    scored = {}
    for choice in choices:
        outcome = driver.run([o.Text(op=0, seq=0, text="pick:"), o.Score(op=1, seq=0, text=choice)])
        scored[choice] = outcome.value(1) / len(outcome.done[1].meta.token_ids[0])
    outcome = driver.run(
        [o.Text(op=0, seq=0, text="pick:"), o.Select(op=1, seq=0, choices=choices), o.Close(op=2, seq=0)]
    )
    assert outcome.value(1) == max(scored, key=scored.get)
    assert outcome.done[1].meta.scores == pytest.approx([scored[c] for c in choices], abs=1e-4)
    assert outcome.value(2) == "pick:" + outcome.value(1)


@pytest.mark.parametrize("method", ["greedy_token_selection", "unconditional_likelihood_normalized"])
def test_the_other_two_ways_to_choose_follow_their_formulas(driver, method):
    choices = (" yes", " no", " no way")
    outcome = driver.run([o.Text(op=0, seq=0, text="well,"), o.Select(op=1, seq=0, choices=choices, method=method)])
    meta = outcome.done[1].meta
    if method == "unconditional_likelihood_normalized":
        gains = [
            sum(a - (b or 0.0) for a, b in zip(row, alone, strict=True)) / len(row)
            for row, alone in zip(meta.logprobs, meta.unconditional, strict=True)
        ]
        assert meta.scores == pytest.approx(gains) and meta.index == gains.index(max(gains))
    else:
        assert meta.logprobs[meta.index][0] == max(row[0] for row in meta.logprobs)


def test_after_select_generation_goes_on_from_the_winner(driver):
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text="pick:"),
            o.Select(op=1, seq=0, choices=(" one", " two")),
            o.Gen(op=2, seq=0, params=GREEDY),
        ]
    )
    whole, _ = generate(driver, "pick:" + outcome.value(1))
    assert outcome.value(2) == whole


def test_a_stop_string_is_cut_and_text_and_tokens_agree(driver):
    full, _ = generate(driver, "once upon", GREEDY)
    stop = full[0][4:6]
    texts, meta = generate(
        driver, "once upon", SamplingParams(temperature=0.0, max_tokens=12, stop=(stop,), ignore_eos=True)
    )
    assert texts[0] == full[0][: full[0].index(stop)]
    assert meta.candidates[0].finish_reason == "stop" and meta.candidates[0].matched_stop == stop
    assert driver.engine.tokenizer.decode(list(meta.candidates[0].token_ids)) == texts[0]


def test_candidates_differ_by_seed_and_equal_seeds_repeat(driver):
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=7, ignore_eos=True)
    first, meta = generate(driver, "seeded", params, n=4)
    again, _ = generate(driver, "seeded", params, n=4)
    assert first == again and len(set(first)) == 4
    other, _ = generate(driver, "seeded", SamplingParams(temperature=1.0, max_tokens=10, seed=8, ignore_eos=True))
    assert other[0] != first[0]
    assert len(meta.candidates) == 4


def test_streamed_deltas_join_to_the_value(driver):
    ops = [o.Text(op=0, seq=0, text="flow"), o.Gen(op=1, seq=0, params=GREEDY, n=2, stream=True)]
    outcome = driver.run(ops)
    for index in (0, 1):
        pieces = [delta for delta in outcome.deltas if delta.index == index]
        assert "".join(piece.text for piece in pieces) == outcome.value(1)[index]
        ids = tuple(i for piece in pieces for i in piece.token_ids)
        assert ids == outcome.done[1].meta.candidates[index].token_ids


def test_logprobs_are_of_the_tokens_and_sum_to_the_score(driver):
    params = SamplingParams(temperature=0.0, max_tokens=6, return_logprob=True, top_logprobs_num=3, logprob_start_len=0)
    outcome = driver.run([o.Text(op=0, seq=0, text="ab cd"), o.Gen(op=1, seq=0, params=params)])
    meta = outcome.done[1].meta
    assert len(meta.prompt_logprobs) == meta.prompt_tokens and meta.prompt_logprobs[0].logprob is None
    for entry in meta.candidates[0].logprobs:
        assert entry.top[0][0] == entry.token_id and entry.logprob == pytest.approx(entry.top[0][1], abs=1e-5)
        assert len(entry.top) == 3 and sum(math.exp(p) for _, p, _ in entry.top) <= 1.0 + 1e-6
    head = driver.run(
        [o.Text(op=0, seq=0, text="ab"), o.Special(op=2, seq=0, ids=()), o.Score(op=1, seq=0, text=" cd")]
    )
    tail = [entry.logprob for entry in meta.prompt_logprobs[-len(head.done[1].meta.token_ids[0]) :]]
    assert head.value(1) == pytest.approx(sum(tail), abs=1e-4)


def test_rollback_returns_to_the_mark_and_goes_on_as_if_nothing_had_been(driver):
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text="keep this"),
            o.Mark(op=1, seq=0),
            o.Text(op=2, seq=0, text=" drop that"),
            o.Gen(op=3, seq=0, params=GREEDY),
            o.Rollback(op=4, seq=0, to=1),
            o.Gen(op=5, seq=0, params=GREEDY),
            o.Mark(op=6, seq=0, begin=1),
        ]
    )
    assert outcome.done[5].meta.cached_tokens == len("keep this") - 1  # no token of it is run again but for its logits
    plain, _ = generate(driver, "keep this")
    assert outcome.value(5) == plain
    assert outcome.value(6) == plain[0]


def test_a_failed_op_fails_what_follows_by_name_and_no_other_program(driver):
    other = driver.submit([o.Text(op=0, seq=0, text="fine"), o.Gen(op=1, seq=0, params=GREEDY)])
    too_long = "x" * (driver.engine.context_len + 10)
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text=too_long),
            o.Gen(op=1, seq=0, params=GREEDY),
            o.Text(op=2, seq=0, text="later"),
            o.Close(op=3, seq=0),
        ]
    )
    assert outcome.failed[1].error.kind == "PromptTooLong" and "but the context is" in outcome.failed[1].error.message
    assert outcome.failed[2].error.kind == "DependencyFailed"
    assert set(outcome.ends.values()) == {1} and outcome.closed is not None
    assert len(other.value(1)[0]) > 0


@pytest.mark.parametrize(
    ("op", "kind", "says"),
    [
        (o.Gen(op=1, seq=0, params=SamplingParams(max_tokens=-1)), "InvalidParams", "max_tokens=-1: must be >= 0"),
        (o.Gen(op=1, seq=0, params=SamplingParams(top_p=1.5)), "InvalidParams", r"top_p=1.5: must be in (0, 1]"),
        (o.Gen(op=1, seq=0, n=0), "LimitExceeded", "n=0: must be between 1 and 128"),
        (o.Gen(op=0, seq=0), "InvalidRequest", "op id 0 is taken"),
        (o.Select(op=1, seq=0, choices=()), "InvalidParams", "must be non-empty strings"),
        (o.Ref(op=1, seq=0, source=9), "InvalidRequest", "source 9 is not an earlier op"),
        (o.Join(op=1, seq=0, children=(7,)), "InvalidRequest", "child 7 is not another sequence"),
        (o.Image(op=1, seq=0, hash="x"), "Unsupported", "takes no images"),
        (o.Rollback(op=1, seq=0, to=5), "InvalidRequest", "to 5 is not an earlier mark"),
    ],
)
def test_a_bad_submit_is_rejected_whole_and_says_why(driver, op, kind, says):
    outcome = driver.run([o.Text(op=0, seq=0, text="a"), op])
    assert [error.kind for error in outcome.rejected.errors] == [kind]
    assert says in outcome.rejected.errors[0].message
    assert not outcome.ends and not driver.engine.interpreter.programs


def test_a_bad_grammar_fails_its_op_alone(driver):
    good = driver.submit([o.Text(op=0, seq=0, text="a"), o.Gen(op=1, seq=0, params=GREEDY)])
    outcome = driver.run(
        [
            o.Text(op=0, seq=0, text="a"),
            o.Gen(op=1, seq=0, grammar=o.GrammarSpec("regex", "(unclosed")),
            o.Close(op=2, seq=0),
        ]
    )
    assert outcome.failed[1].error.kind == "InvalidGrammar"
    assert good.value(1)


def test_a_grammar_that_gives_up_fails_its_op_alone_and_keeps_the_text(driver):
    good = driver.submit([o.Text(op=0, seq=0, text="a"), o.Gen(op=1, seq=0, params=GREEDY)])
    outcome = driver.submit(
        [
            o.Text(op=0, seq=0, text="a"),
            o.Gen(op=1, seq=0, n=3, params=GREEDY, grammar=o.GrammarSpec("regex", "[a-z]{40}")),
            o.Close(op=2, seq=0),
        ]
    )

    def second() -> object:
        tags = [seq.tag for seq in driver.engine.interpreter.live.values()]
        return next((tag for tag in tags if getattr(tag, "index", 0) == 1 and tag.num_generated > 2), None)

    for _ in range(500):
        driver.step()
        if second() is not None:
            break
    second().matcher.error = "at position 3: too complex"
    driver.run()
    assert outcome.failed[1].error.kind == "InvalidGrammar" and "too complex" in outcome.failed[1].error.message
    assert len(outcome.failed[1].partial) == 3 and outcome.failed[1].partial[0]
    assert outcome.closed is not None and good.value(1)


def test_a_regex_holds_for_every_candidate(driver):
    import re

    pattern = r"[a-c]{3}-\d{2,4}"
    params = SamplingParams(temperature=1.5, max_tokens=40, seed=3)
    texts, meta = generate(driver, "code: ", params, n=6, grammar=o.GrammarSpec("regex", pattern))
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert {candidate.finish_reason for candidate in meta.candidates} == {"stop"}


def test_cancel_keeps_what_was_generated_and_frees_everything(driver):
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    outcome = driver.submit(
        [o.Text(op=0, seq=0, text="go"), o.Gen(op=1, seq=0, params=long), o.Close(op=2, seq=0)], program="doomed"
    )
    for _ in range(8):
        driver.step()
    driver.say(m.Cancel("doomed"))
    driver.run()
    assert outcome.failed[1].error.kind == "Cancelled" and outcome.failed[1].partial[0]
    assert outcome.failed[2].error.kind == "Cancelled" and outcome.closed is not None
    assert driver.engine.cache.num_leased == 0 and not driver.engine.interpreter.live


def test_a_cancelled_op_takes_later_ops_with_it_but_no_earlier_one(driver):
    outcome = driver.submit(
        [
            o.Text(op=0, seq=0, text="go"),
            o.Gen(op=1, seq=0, params=GREEDY),
            o.Text(op=2, seq=0, text="on"),
            o.Gen(op=3, seq=0, params=GREEDY),
            o.Gen(op=4, seq=0, params=GREEDY),
            o.Close(op=5, seq=0),
        ],
        program="half",
    )
    driver.step()
    driver.say(m.Cancel("half", op=3))
    driver.run()
    assert set(outcome.done) == {0, 1, 2, 5} and outcome.done[1].meta.candidates[0].finish_reason == "length"
    assert {op: failed.error.kind for op, failed in outcome.failed.items()} == {3: "Cancelled", 4: "DependencyFailed"}


def test_a_close_is_not_cancelled_so_that_its_program_ends(driver):
    outcome = driver.submit(
        [o.Text(op=0, seq=0, text="go"), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)], program="closing"
    )
    driver.step()
    driver.say(m.Cancel("closing", op=2))
    driver.run()
    assert set(outcome.done) == {0, 1, 2} and outcome.closed is not None


def test_a_deadline_ends_a_program(tiny_model_path):
    now = [0.0]
    engine = Engine(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=2048), clock=lambda: now[0])
    driver = Driver(engine)
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    outcome = driver.submit(
        [o.Text(op=0, seq=0, text="go"), o.Gen(op=1, seq=0, params=long)], settings=m.ProgramSettings(deadline_s=5.0)
    )
    driver.step()
    now[0] = 5.1
    driver.run()
    assert outcome.failed[1].error.kind == "DeadlineExceeded"
    engine.close()


def test_identical_requests_at_once_compute_their_prompt_once(driver):
    before = driver.engine.report.forward_tokens
    prompt = prompts(1, seed=5, longest=400)[0]
    one = SamplingParams(temperature=0.0, max_tokens=1)
    outcomes = [driver.submit([o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=one)]) for _ in range(32)]
    driver.run()
    num_prompt = outcomes[0].done[1].meta.prompt_tokens
    assert driver.engine.report.forward_tokens - before == (num_prompt - 1) + 32


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
        # All but the last generated token (never run) and the new text.
        assert meta.cached_tokens == last.prompt_tokens + 12 - 1


def test_a_finished_sequence_is_extended_in_place_by_a_later_submit(driver):
    """As a client does that reads an answer before it asks on: nothing of the history is run again."""
    first = driver.submit([o.Text(op=0, seq=0, text="turn one"), o.Gen(op=1, seq=0, params=GREEDY)], program="chat")
    driver.run()
    history = first.done[1].meta.prompt_tokens + 12
    before = driver.engine.report.forward_tokens
    driver.submit([o.Text(op=2, seq=0, text=" and on"), o.Gen(op=3, seq=0, params=GREEDY)], program="chat")
    driver.run()
    meta = first.done[3].meta
    assert meta.prompt_tokens == history + len(" and on") and meta.cached_tokens == history - 1
    assert driver.engine.report.forward_tokens - before <= 1 + len(" and on") + 12 + meta.candidates[0].drafted_tokens
    driver.engine.cache.flush()
    ops = [o.Text(op=0, seq=0, text="turn one"), o.Gen(op=1, seq=0, params=GREEDY)]
    at_once = driver.run([*ops, o.Text(op=2, seq=0, text=" and on"), o.Gen(op=3, seq=0, params=GREEDY)])
    assert [first.value(op) for op in (1, 3)] == [at_once.value(op) for op in (1, 3)]


def test_more_sequences_than_may_wait_are_refused_and_what_was_accepted_goes_on(tiny_model_path):
    engine = Engine(EngineConfig(model=str(tiny_model_path), precision="float32", max_running=1, max_waiting=2))
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
    engine = Engine(config, clock=lambda: now_s)
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
    # A prompt for which there would be room but for the pins runs all the same.
    assert pin(stem, 60.0) == len(stem)
    assert cached("x" * 270) == 0 and cached("x" * 270) > 0
    engine.close()


def test_a_burst_within_one_step_counts_against_the_queue(tiny_model_path):
    engine = Engine(EngineConfig(model=str(tiny_model_path), precision="float32", max_running=2, max_waiting=3))
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
    engine = Engine(config)
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
        ({"order": "shortest_remaining", "match_window": 8}, "match_window=8: order='shortest_remaining' goes by"),
        ({"max_running": 0}, "max_running=0"),
        ({"tenant_weights": {"a": 0.0}}, "tenant_weights: 0.0 for 'a'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(tiny_model_path, options, words):
    with pytest.raises(InvalidParams, match=words):
        Engine(EngineConfig(model=str(tiny_model_path), **options))


def test_the_config_names_every_order_and_every_policy():
    types = typing.get_type_hints(EngineConfig)
    assert set(typing.get_args(types["order"])) == set(ORDERS)
    assert set(typing.get_args(types["eviction"])) == set(POLICIES)


def test_a_small_pool_serves_many_programs_by_preemption(tiny_model_path):
    engine = Engine(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=256, max_seq_len=200))
    driver, plenty = Driver(engine), Driver(Engine(EngineConfig(model=str(tiny_model_path), precision="float32")))
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
