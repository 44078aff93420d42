"""Decoders (samples, the best of n, votes) on both paths, compiled, and in event loops."""

import asyncio
import itertools
import threading

import pytest
from phloem import assistant, best_of, function, gen, sample, select, vote
from phloem.lang.backend.base_backend import BaseBackend
from phloem.protocol import errors, ops
from phloem.tests.lang.fakes import ENDLESS


class Scripted(BaseBackend):
    """A third party's: the texts in turn for every prompt, with log-probabilities."""

    precache_in_batch = False

    def __init__(self, *texts, has_logprobs=True):
        self.texts = itertools.cycle(texts)
        self.lock = threading.Lock()
        self.has_logprobs = has_logprobs
        self.prompts = []

    def generate(self, s, sampling_params):
        with self.lock:
            self.prompts.append(s.text_)
            text = next(self.texts)
        logprobs = [(-float(len(text)), 1, text)]
        return text, {"output_token_logprobs": logprobs} if self.has_logprobs else {}


def in_turn(*texts):
    """A reply that gives these one after the other, and ``<last word>`` after a text that ends with a colon."""
    left = itertools.cycle(texts)
    return lambda prompt, op: f" <{prompt.split()[-1]}>" if prompt.endswith(":") else next(left)


def submits(backend):
    return [submit.ops for submit in backend.client.submits]


@function
def voting(s, question="q"):
    s += question + vote(" so" + gen("why") + gen("answer"), 3, on="answer", name="v") + " then:" + gen("after")


WHYS = (" a", " 1", " b", " 2", " c", " 2")


def check_vote(s, num_messages=2):
    assert s.text() == "q so b 2 then: <then:>" and s["answer"] == " 2" and s["why"] == " b" and s["v"] == " so b 2"
    info = s.get_meta_info("v")
    assert info["votes"] == [("1", 1), ("2", 2)] and info["answer"] == "2" and info["index"] == 1
    assert info["share"] == pytest.approx(2 / 3)
    assert s.get_meta_info("why")["completion_tokens"] == 1  # that of the fork that was picked
    assert s.stats()["messages"] == num_messages


def test_a_vote_continues_with_the_first_branch_of_the_majority(connect):
    backend = connect(reply=sequential(WHYS))
    check_vote(voting.run(backend=backend))
    first, second = submits(backend)
    assert sum(isinstance(op, ops.Gen) for op in first) == 6
    join = next(op for op in second if isinstance(op, ops.Join))
    assert join.mode == "concate_and_append" and len(join.children) == 1  # its tokens, not its text again


def sequential(texts):
    """Reply by fork: the k-th prompt to ask for a why gets the k-th pair."""
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    whys = iter([why for why, _ in pairs] * 50)
    answer_of = dict(pairs)

    def reply(prompt, op):
        if prompt.endswith(":"):
            return f" <{prompt.split()[-1]}>"
        return next(whys) if prompt.endswith("so") else answer_of.get(" " + prompt.split()[-1], " ?")

    return reply


def test_a_vote_is_the_same_compiled_and_in_an_event_loop(connect):
    check_vote(voting.compile(backend=connect()).run(backend=connect(reply=sequential(WHYS))))
    check_vote(asyncio.run(voting.run_async(backend=connect(reply=sequential(WHYS)))))

    @function
    async def later(s):
        s += "q" + vote(" so" + gen("why") + gen("answer"), 3, on="answer", name="v") + " then:" + gen("after")
        assert await s.get("answer") == " 2" and await s.get("after") == " <then:>"

    check_vote(asyncio.run(later.run(backend=connect(reply=sequential(WHYS)))), num_messages=3)


def test_a_decision_before_no_further_generation_needs_no_extra_message(connect):
    @function
    def body(s):
        s += "q" + vote(" so" + gen("why") + gen("answer"), 3, on="answer") + " end"

    s = body.run(backend=connect(reply=sequential(WHYS)))
    assert s.text() == "q so b 2 end" and s.stats()["messages"] == 1


def test_a_vote_compares_typed_values_by_a_key_and_skips_values_that_cannot_be_parsed(connect):
    texts = (" a", "10", " b", "oops", " c", "13", " d", "19")

    @function
    def body(s):
        s += vote(" so" + gen("why") + gen("answer", int), 4, on="answer", key=lambda n: n // 10, name="v")

    s = body.run(backend=connect(reply=sequential(texts)))
    assert s["answer"] == 10 and s.get_meta_info("v")["votes"] == [(1, 3)]
    assert s.get_meta_info("v")["share"] == 0.75
    bad = body.run(backend=connect(reply=sequential((" a", "x", " b", "y", " c", "z", " d", "?"))))
    with pytest.raises(errors.PhloemError, match="'answer' is not a valid value"):
        bad["answer"]


def test_the_best_is_the_likeliest_on_average(connect):
    @function
    def body(s):
        s += "q" + best_of(gen("x") + "!", 3, name="b")

    backend = Scripted(" long one", " s", " mid")
    s = body.run(backend=backend)
    assert s["x"] == " s" and s.text() == "q s!" and sorted(s.get_meta_info("b")["scores"]) == [-9, -4, -2]
    with pytest.raises(errors.Unsupported, match=r"this backend gave none; give best_of\(score=\.\.\.\)"):
        body.run(backend=Scripted(" a", has_logprobs=False))["x"]
    compiled = connect()
    body.run(backend=compiled).sync()
    assert all(op.params.return_logprob for op in submits(compiled)[0] if isinstance(op, ops.Gen))


def test_a_users_score_may_wait_and_call_a_model(connect):
    judge = function(lambda s, text: s.__iadd__(text + ":" + gen("mark")))
    backend = connect(reply=in_turn(" aa", " bbbb", " c"))

    def score(branch):
        return len(judge.run(text=branch.text, backend=backend)["mark"]) + len(branch["x"])

    @function
    def body(s):
        s += "q" + best_of(gen("x"), 3, score=score, name="b") + " and:" + gen("y")

    s = body.run(backend=backend)
    assert s.text() == "q bbbb and: <and:>" and s.get_meta_info("b")["index"] == 1
    with pytest.raises(errors.InvalidRequest, match=r"best_of\(.*\) waits for what it generates.*compiled"):
        body.compile(backend=backend)

    async def score_async(branch):
        return len((await judge.run_async(text=branch.text, backend=backend))["mark"] if False else branch["x"])

    @function
    async def blocking(s):
        s += best_of(gen("x"), 3, score=score_async)

    with pytest.raises(errors.InvalidRequest, match=r"write await s.append_async\(\.\.\.\) instead of s \+="):
        asyncio.run(blocking.run(backend=backend))

    @function
    async def right(s):
        await s.append_async("q" + best_of(gen("x"), 3, score=score_async) + "!")
        assert await s.get("x") == " bbbb"

    assert asyncio.run(right.run(backend=connect(reply=in_turn(" aa", " bbbb", " c")))).text() == "q bbbb!"
    sync = function(lambda s: s.__iadd__(best_of(gen("x"), 2, score=score_async)))
    with pytest.raises(errors.InvalidRequest, match="an async function was given to a program that is not async"):
        sync.run(backend=backend)


def test_samples_are_lists_and_the_text_continues_with_the_first(connect):
    @function
    def body(s):
        s += "q" + sample(" so" + gen("why") + gen("answer"), 3) + " then:" + gen("after")

    backend = connect(reply=sequential(WHYS))
    s = body.run(backend=backend)
    assert s["why"] == [" a", " b", " c"] and s["answer"] == [" 1", " 2", " 2"]
    assert s.text() == "q so a 1 then: <then:>" and s.stats()["messages"] == 1
    compiled = body.compile(backend=backend).run(backend=connect(reply=sequential(WHYS)))
    assert compiled.text() == s.text() and compiled["why"] == s["why"]


def test_the_body_of_a_decoder_may_be_a_function_or_a_program(connect):
    solve = function(lambda s, question: s.__iadd__(question + " so" + gen("why") + gen("answer")))

    @function
    def outer(s):
        s += vote(solve.bind(question="q"), 3, on="answer") + vote(lambda b: " so" + gen("w") + gen("v"), 3, on="v")

    s = outer.run(backend=connect(reply=sequential(WHYS)))
    assert s.text() == "q so b 2 so b 2"


def test_decoders_nest_and_run_beside_each_other(connect):
    inner = vote(" so" + gen("why") + gen("answer"), 3, on="answer")

    @function
    def body(s):
        forks = s.fork(3)
        forks += lambda i: f"{i}" + inner + " then:" + gen("after")
        forks.join()
        s += vote("x" + inner + " then:" + gen("end"), 2, on="end") + " last:" + gen("last")

    backend = connect(reply=sequential(WHYS))
    s = body.run(backend=backend)
    assert s["answer"] == " 2" and s["after"] == [" <then:>"] * 3
    assert s.text() == "x so b 2 then: <then:> last: <last:>"
    assert s.stats()["messages"] <= 4


def test_best_of_counts_the_log_probabilities_of_the_choice_taken(connect):
    @function
    def body(s):
        s += best_of(select("c", ["a", "b"]) + gen("x"), 2, name="b")

    s = body.run(backend=connect())
    assert s["c"] == "a" and s.error() is None


def test_a_role_inside_a_decoder_is_refused(connect):
    @function
    def body(s):
        s.user("q")
        s += assistant(vote(" so" + gen("why") + gen("answer"), 3, on="answer"))
        s.user("again")
        s += assistant(gen("after"))

    s = body.run(backend=connect(reply=sequential((*WHYS,))))
    assert [m["content"] for m in s.messages()][1] == "so b 2" and s.stats()["messages"] == 2
    with pytest.raises(errors.InvalidRequest, match=r"a role begins or ends inside a decoder.*s \+= assistant\(vote"):
        function(lambda s: s.__iadd__(vote(assistant(gen("x")), 2, on="x"))).run(backend=connect())


def test_a_failed_fork_fails_the_decision_and_only_what_depends_on_it():
    class Failing(Scripted):
        def generate(self, s, sampling_params):
            if s.text_.startswith("bad"):
                raise OSError("the line is dead")
            return super().generate(s, sampling_params)

    @function
    def body(s):
        good, bad = s.fork(2)
        good += "good" + best_of(gen("x"), 2) + gen("y")
        bad += "bad" + best_of(gen("x"), 2) + gen("y")
        forks = bad.fork(2)
        forks += gen("z")
        forks.join()
        s["good"], s["bad"], s["forks"] = good, bad, forks

    s = body.run(backend=Scripted(" a", " b"))
    assert s["good"].error() is None
    s = body.run(backend=Failing(" a", " b"))
    assert s["good"].error() is None and s["good"]["y"]
    for state, name in ((s["bad"], "x"), (s["bad"], "y"), (s["forks"][0], "z")):
        with pytest.raises((OSError, errors.DependencyFailed), match="the line is dead"):
            state[name]
    assert s.stats()["messages"] >= 2  # the program ended


def test_a_failing_rule_ends_the_program_and_is_the_cause_of_what_follows(connect):
    def broken(value):
        raise ZeroDivisionError("no key")

    @function
    def body(s):
        s += vote(gen("x"), 2, on="x", key=broken) + gen("y")

    backend = connect()
    s = body.run(backend=backend)
    with pytest.raises(ZeroDivisionError):
        s["x"]
    with pytest.raises(errors.DependencyFailed, match="a value that this depends on failed: no key"):
        s["y"]
    s.stats()
    assert not backend.client.engine.programs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vote(gen("x"), 0, on="x"), r"vote\(n=0\): must be between 1 and 1,024"),
        (lambda: vote(gen("x"), 2, on=int), "must be the name of a variable that the body sets"),
        (lambda: best_of(3, 2), r"best_of\(3\): must be an expression, or a function"),
        (lambda: best_of(gen("x"), 2, score=3), r"best_of\(score=3\): must be a function"),
        (lambda: sample(gen("x"), "3"), r"sample\(n='3'\): must be between"),
    ],
)
def test_an_invalid_decoder_is_refused_when_it_is_written(make, message):
    with pytest.raises(errors.InvalidRequest, match=message):
        make()


def test_a_vote_on_an_unknown_variable_names_the_known_ones(connect):
    with pytest.raises(errors.InvalidRequest, match="no variable 'answr' was set in the branch; it has: 'answer'"):
        function(lambda s: s.__iadd__(vote(gen("answer"), 2, on="answr", name="v"))).run(backend=connect())["v"]


@function
def pasted(s):
    s += "q" + vote(" so" + gen("why") + gen("answer"), 3, on="answer")
    (fork,) = s.fork(1)
    fork += " answer is" + s.ref("answer") + ":" + gen("said")
    s += " it is" + s.ref("answer") + " because" + s.ref("why") + ":" + gen("end")
    s["fork"] = fork


def test_a_picked_variable_can_be_pasted_before_it_is_known(connect):
    s = pasted.run(backend=connect(reply=sequential(WHYS)))
    assert s.text() == "q so b 2 it is 2 because b: <b:>" and s["fork"]["said"] == " <2:>"
    assert s.stats()["messages"] == 2


def test_a_compiled_program_pastes_a_picked_variable(connect):
    @function
    def body(s):
        s += (
            "q" + vote(" so" + gen("why") + gen("answer"), 3, on="answer") + " it is" + s.ref("answer") + ":" + gen("e")
        )

    for program in (body, body.compile(backend=connect())):
        s = program.run(backend=connect(reply=sequential(WHYS)))
        assert s.text() == "q so b 2 it is 2: <2:>" and s.stats()["messages"] == 2


def test_cancelling_a_decision_cancels_what_it_waits_for(connect):
    @function
    def body(s):
        s += vote(gen("x"), 3, on="x")

    backend = connect(reply=lambda prompt, op: ENDLESS, step_s=0.002)
    s = body.run(backend=backend, max_new_tokens=100_000)
    s.cancel("x")
    with pytest.raises(errors.Cancelled):
        s["x"]
    assert {c.op for c in backend.client.cancels} == {op.op for op in submits(backend)[0] if isinstance(op, ops.Gen)}


def test_a_run_with_decoders_has_a_page_and_a_graph(connect, tmp_path):
    s = voting.run(backend=connect(reply=sequential(WHYS)))
    s.trace_html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "continue with one of 3" in page and "gen after" in page
    assert "continue with one of 3" in str(voting.graph(backend=connect(), question="q"))
