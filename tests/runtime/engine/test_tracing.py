"""A traced program gets every token with its origin; an untraced one gets the same text and no trace."""

import phloem
import pytest
from phloem.lang.views.record import record_of
from phloem.runtime.engine.tracing import texts_of
from phloem.runtime.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    with phloem.Engine(model=str(tiny_model_path)) as engine:
        yield engine


@phloem.function
def program(s):
    s += phloem.user("Zoë 日本: say something")
    s += phloem.assistant(phloem.gen("a", max_tokens=12, temperature=0))
    forks = s.fork(2)
    for fork in forks:
        fork += " and then" + phloem.select("b", choices=["left", "right"])
        fork += phloem.gen("c", regex='\\{"name": "[ab]{3}"\\}', max_tokens=24, temperature=0)
    forks.join()
    s += phloem.user("more") + phloem.assistant(phloem.gen("d", n=3, max_tokens=5, temperature=0.5, seed=1))


def test_the_traced_tokens_join_to_the_text_of_each_sequence(engine):
    state = program.run(trace=True, backend=engine)
    run = record_of(state.program)
    assert run.is_traced
    root = "".join(token.text for stretch in run.lanes[0].stretches for token in stretch.tokens)
    assert root == state.text()
    for lane in run.lanes[1:]:
        text = "".join(token.text for stretch in lane.stretches for token in stretch.tokens)
        assert text.startswith(" and then") and '{"name": "' in text


def test_the_counts_of_origins_equal_those_of_the_meta(engine):
    state = program.run(trace=True, backend=engine)
    meta = state.get_meta_info("c")[0]
    (first, *_) = [op for op in record_of(state.program).ops if op.name == "c"]
    run = record_of(state.program)
    (written,) = [s.tokens for s in run.lanes[1].stretches if s.op == first.number]
    origins = [token.origin for token in written]
    assert origins.count("forced") == meta["forced_tokens"] > 5
    assert len(origins) == len(meta["output_ids"])
    for token in written:
        assert (token.logprob is None) == (token.origin == "forced")
        assert not token.top or (len(token.top) <= 5 and all(value <= 0 for _, value in token.top))
    given = [token.origin for s in run.lanes[0].stretches if s.op is None for token in s.tokens]
    assert "cached" in given and set(given) <= {"cached", "prompt"}


def test_an_op_starts_before_it_ends_and_branches_lie_between_their_neighbours(engine):
    run = record_of(program.run(trace=True, backend=engine).program)
    a, *branches, d = run.ops
    assert a.start_s >= 0 and all(op.is_timed and op.end_s >= op.start_s for op in run.ops)
    assert all(a.end_s <= op.start_s + 1e-6 and op.end_s <= d.start_s + 1e-6 for op in branches)
    assert run.total_s == pytest.approx(max(op.end_s for op in run.ops))


def test_tracing_changes_no_text_and_is_off_by_default(engine):
    plain, traced = program.run(backend=engine), program.run(trace=True, backend=engine)
    assert plain.text() == traced.text() and plain["d"] == traced["d"]
    assert not record_of(plain.program).is_traced
    assert "output_token_logprobs" not in traced.get_meta_info("a")


def test_traced_tokens_join_to_the_text_when_a_stop_string_cuts_a_token(engine):
    @phloem.function
    def stops(s):
        s += "abc" + phloem.gen("x", max_tokens=40, temperature=1, seed=3)

    text = stops.run(backend=engine)["x"]
    stop = text[5:7]

    @phloem.function
    def stopped(s):
        s += "abc" + phloem.gen("x", max_tokens=40, temperature=1, seed=3, stop=stop) + phloem.gen("y", max_tokens=2)

    state = stopped.run(trace=True, backend=engine)
    (lane,) = record_of(state.program).lanes
    assert "".join(token.text for stretch in lane.stretches for token in stretch.tokens) == state.text()


def test_a_character_that_stays_incomplete_is_a_replacement_character_of_the_trace_too(tiny_model_path):
    tokenizer = load_tokenizer(tiny_model_path)  # its tokens are bytes
    assert texts_of([97, 0xE2, 0x82], tokenizer) == ["a", "", "\ufffd"]
    end = min(tokenizer.special_ids)
    assert texts_of([0xE2, end, 98], tokenizer) == ["", "\ufffd" + tokenizer.special_text(end), "b"]
    assert texts_of([], tokenizer) == []
