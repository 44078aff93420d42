"""Ops on a tiny random model: their meaning, one end for each, and equal tokens on every fast path."""

import math
import re

import msgspec
import pytest
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.quantizing.quantize import quantize_model
from phloem.tests.runtime.engine.driver import GREEDY, Driver, generate, prompts


def test_text_then_gen_answers_every_op_once_and_closes(driver):
    outcome = driver.run([o.Text(op=0, seq=0, text="hello"), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)])
    assert outcome.ends == {0: 1, 1: 1, 2: 1}
    meta = outcome.done[1].meta
    assert meta.candidates[0].finish_reason == "length" and meta.candidates[0].completion_tokens == 12
    assert outcome.value(2) == "hello" + outcome.value(1)[0]
    assert outcome.closed.stats.generated_tokens == 12 and outcome.closed.stats.submits == 1


def test_greedy_tokens_are_equal_alone_batched_cached_and_chunked(tiny_model_path, driver):
    texts = prompts(12)
    alone = [generate(driver, text)[1].candidates[0].token_ids for text in texts]
    again = [generate(driver, text) for text in texts]
    assert [meta.candidates[0].token_ids for _, meta in again] == alone
    assert all(meta.cached_tokens == meta.prompt_tokens - 1 for _, meta in again)
    for options in ({"prefix_cache": False}, {"prefill_chunk": 7}, {"max_step_tokens": 24, "prefill_chunk": 16}):
        other = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=8192, **options))
        batch = Driver(other)
        outcomes = [batch.submit([o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=GREEDY)]) for text in texts]
        batch.run()
        assert [out.done[1].meta.candidates[0].token_ids for out in outcomes] == alone, options
        other.close()


def test_8_bit_keys_and_values_give_equal_tokens_alone_batched_cached_chunked_and_drafted(tiny_model_path, tmp_path):
    # With weights of 4 bits a token's keys have equal bits in every batch.
    path = quantize_model(tiny_model_path, tmp_path / "packed", "int4-g32").path
    config = EngineConfig(model=str(path), kv_dtype="int8", num_slots=4096)
    texts, said = prompts(6), []
    for options in (
        {"speculative": "off", "max_running": 1},
        {"prefix_cache": False, "speculative": "off"},
        {"prefill_chunk": 7, "max_step_tokens": 24},
        {"draft_model": "self:1"},
    ):
        engine = EngineCore(msgspec.structs.replace(config, **options))
        assert engine.info()["kv_dtype"] == "int8"
        driver = Driver(engine)
        for _ in range(2):  # the second time from the cache
            outcomes = [driver.submit([o.Text(op=0, seq=0, text=t), o.Gen(op=1, seq=0, params=GREEDY)]) for t in texts]
            driver.run()
            said.append([outcome.done[1].meta.candidates[0].token_ids for outcome in outcomes])
        engine.close()
    assert said == [said[0]] * len(said) and len(set(said[0])) > 1


def test_forked_children_continue_like_copies(driver):
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
        # The copies have the same token boundaries, because a fork is one.
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


def test_ref_pastes_a_value_that_is_generated_after_the_submit(driver):
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
def test_the_other_two_select_methods_follow_their_formulas(driver, method):
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


def test_generation_continues_from_the_choice_that_select_took(driver):
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


def test_after_a_rollback_generation_equals_that_without_the_text(driver):
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
    assert outcome.done[5].meta.cached_tokens == len("keep this") - 1  # its last token is run again for the logits
    plain, _ = generate(driver, "keep this")
    assert outcome.value(5) == plain
    assert outcome.value(6) == plain[0]


def test_a_regex_holds_for_every_candidate(driver):
    pattern = r"[a-c]{3}-\d{2,4}"
    params = SamplingParams(temperature=1.5, max_tokens=40, seed=3)
    texts, meta = generate(driver, "code: ", params, n=6, grammar=o.GrammarSpec("regex", pattern))
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert {candidate.finish_reason for candidate in meta.candidates} == {"stop"}
