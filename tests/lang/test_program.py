"""The core of the language over the compiled path: what is sent, when, and what is read back."""

import threading

import pytest
from phloem import function, gen, select
from phloem.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from phloem.protocol import ops
from phloem.tests.lang.fakes import echo


def test_a_linear_program_is_one_message(connect):
    @function
    def three(s):
        s += "one" + gen("a")
        s += " two" + gen("b")
        s += " three" + gen("c")

    backend = connect(reply=echo)
    s = three.run(backend=backend)
    assert (s["a"], s["b"], s["c"]) == (" <one>", " <two>", " <three>")
    assert s.text() == "one <one> two <two> three <three>"
    assert s.stats()["messages"] == 1 == len(backend.client.submits)


def test_fork_join_and_a_gen_after_it_are_one_message(connect):
    @function
    def tree(s):
        s += "root"
        forks = s.fork(8)
        for i, f in enumerate(forks):
            f += f" b{i}" + gen("leaf")
        forks.join()
        s += " all:" + forks.ref("leaf").join(",") + " end" + gen("last")

    backend = connect(reply=echo)
    s = tree.run(backend=backend)
    assert s["leaf"] == [f" <b{i}>" for i in range(8)]
    assert s["last"] == " <end>"
    assert s.text() == "root all:" + ",".join(f" <b{i}>" for i in range(8)) + " end <end>"
    assert s.stats()["messages"] == 1 == len(backend.client.submits)


def test_neighbouring_texts_travel_as_one_op(connect):
    @function
    def texts(s):
        s += "a"
        s += "b" + gen("x")
        f = s.fork(1)[0]
        s += "c"
        f += "C"
        s += "d"
        f += "D"

    backend = connect()
    texts.run(backend=backend).sync()
    sent = [op.text for op in backend.client.submits[0].ops if isinstance(op, ops.Text)]
    assert sent == ["ab", "cd", "CD"]


def test_a_branch_on_a_value_needs_one_more_message(connect):
    @function
    def branch(s):
        s += "q" + gen("a")
        s += " yes" if "q" in s["a"] else " no"
        s += gen("b")

    backend = connect(reply=echo)
    s = branch.run(backend=backend)
    assert s["b"] == " <yes>"
    assert s.stats()["messages"] == 2 == s.stats()["submits"]


def test_run_returns_before_the_values_are_known(connect):
    @function
    def slow(s):
        s += "q" + gen("a")

    returned = threading.Event()

    def reply(prompt, op):
        assert returned.wait(30)  # the engine answers only after run() has returned
        return " w" * 20

    s = slow.run(backend=connect(reply=reply))
    returned.set()
    assert s["a"] == " w" * 20


def test_every_program_ends_at_the_engine(connect):
    @function
    def forked(s):
        s += "x" + gen("a")
        forks = s.fork(3)
        forks += gen("b")

    backend = connect()
    s = forked.run(backend=backend)
    s.stats()
    assert backend.client.engine.programs == []


def test_the_body_runs_in_the_callers_thread_and_its_return_value_is_kept(connect):
    @function
    def body(s):
        s += "x" + gen("a")
        return threading.get_ident(), s["a"]

    thread, value = body.run(backend=connect(reply=echo)).ret_value
    assert thread == threading.get_ident() and value == " <x>"


def test_after_a_gen_with_candidates_the_text_continues_with_the_first(connect):
    @function
    def many(s):
        s += "x" + gen("a", n=2)
        s += " then" + s.ref("a", 1)

    s = many.run(backend=connect(reply=lambda prompt, op: [" one", " two"]))
    assert s["a"] == [" one", " two"]
    assert s.text() == "x one then two"
    assert len(s.get_meta_info("a")["candidates"]) == 2


def test_select_gives_the_winner_and_its_scores(connect):
    @function
    def choose(s):
        s += "colour:" + select("c", choices=[" red", " blue"])
        s += gen("d", choices=[" x", " y"])

    s = choose.run(backend=connect(select=lambda prompt, op: 1))
    assert (s["c"], s["d"]) == (" blue", " y")
    assert s.text() == "colour: blue y"
    meta = s.get_meta_info("c")
    assert meta["normalized_prompt_logprobs"] == [-1.5, -0.5]


def test_var_scope_holds_all_text_inside(connect):
    @function
    def body(s):
        s += "a"
        with s.var_scope("scope"):
            s += "b" + gen("x")
        s += " again:" + s.ref("scope")

    s = body.run(backend=connect(reply=lambda prompt, op: " w"))
    assert s["scope"] == "b w"
    assert s.text() == "ab w again:b w"


def test_joins_gather_new_variables_and_a_second_join_refreshes_them(connect):
    @function
    def twice(s):
        for round in ("first", "second"):
            forks = s.fork(2)
            for i, f in enumerate(forks):
                f += f"{round}{i}" + gen("x")
                f["i"] = i
            forks.join()
            s["seen_" + round] = s["x"]

    s = twice.run(backend=connect(reply=echo))
    assert s["seen_first"] == [" <first0>", " <first1>"]
    assert s["x"] == [" <second0>", " <second1>"] and s["i"] == [0, 1]


def test_join_can_append_the_branches(connect):
    @function
    def body(s):
        s += "root"
        forks = s.fork(2)
        forks += lambda i: f" b{i}" + gen("x")
        forks.join("concate_and_append")
        s += " end" + gen("y")

    backend = connect(reply=echo)
    s = body.run(backend=backend)
    assert s.text() == "root b0 <b0> b1 <b1> end <end>"
    assert "x" not in s


def test_copy_brings_its_variables_back_as_lists_of_one(connect):
    @function
    def body(s):
        s += "root"
        with s.copy() as t:
            t += " side" + gen("x")
        s += " main" + gen("y")

    s = body.run(backend=connect(reply=echo))
    assert s["x"] == [" <side>"] and s.text() == "root main <main>"


def test_arguments_may_have_the_names_of_sampling_parameters(connect):
    @function
    def body(s, n, stop, temperature=0.5):
        s += f"{n} {stop} {temperature}" + gen("a")

    backend = connect()
    assert body.run(n=3, stop="S", temperature=2, max_new_tokens=7, backend=backend).text().startswith("3 S 2")
    (submit,) = backend.client.submits
    params = next(op.params for op in submit.ops if isinstance(op, ops.Gen))
    assert params.max_tokens == 7 and params.temperature == 1.0 and params.stop == ()


def test_run_parameters_are_defaults_that_a_gen_overrides(connect):
    @function
    def body(s):
        s += gen("a") + gen("b", temperature=0.1, stop="x", max_tokens=3)

    backend = connect()
    body.run(backend=backend, temperature=0.7, stop=["y", "z"], max_new_tokens=9, deadline_s=60).sync()
    (submit,) = backend.client.submits
    a, b = (op.params for op in submit.ops if isinstance(op, ops.Gen))
    assert (a.temperature, a.stop, a.max_tokens) == (0.7, ("y", "z"), 9)
    assert (b.temperature, b.stop, b.max_tokens) == (0.1, ("x",), 3)
    assert submit.settings.deadline_s == 60 and submit.settings.name == "body"


def test_a_program_is_counted_under_its_functions_name_and_may_have_an_argument_name(connect):
    @function
    def greet(s, name):
        s += name + gen("a")

    backend = connect()
    greet.run(name="Ada", backend=backend).sync()
    (submit,) = backend.client.submits
    assert submit.settings.name == "greet" and any(isinstance(op, ops.Text) and op.text == "Ada" for op in submit.ops)


def test_streaming_yields_constants_and_deltas_in_order(connect):
    @function
    def body(s):
        s += "ask" + gen("a")
        s += " and" + gen("b")

    backend = connect(reply=lambda prompt, op: " x y")
    s = body.run(backend=backend, stream=True)
    assert list(s.text_iter()) == ["ask", " x", " y", " and", " x", " y"]
    assert list(s.text_iter("b")) == [" x", " y"]
    once = body.run(backend=backend)
    assert list(once.text_iter()) == ["ask x y and x y"] and list(once.text_iter("a")) == [" x y"]


def test_streaming_goes_on_while_the_body_waits_for_values(connect):
    @function
    def body(s):
        s += "ask" + gen("a")
        s += " got" + s["a"].upper() + gen("b")

    s = body.run(backend=connect(reply=lambda prompt, op: " x y"), stream=True)
    assert "".join(s.text_iter()) == "ask x y got X Y x y"
    assert s["b"] == " x y" and s.stats()["messages"] == 2


def test_grammars_travel_with_their_gens(connect):
    @function
    def body(s):
        s += gen("a", regex="[0-9]+") + gen("b", json_schema={"type": "object"}) + gen("c", dtype=int)

    backend = connect()
    body.run(backend=backend).sync()
    a, b, c = (op for op in backend.client.submits[0].ops if isinstance(op, ops.Gen))
    assert (a.grammar.kind, a.grammar.text) == ("regex", "[0-9]+")
    assert (b.grammar.kind, b.grammar.text) == ("json_schema", '{"type": "object"}')
    assert c.grammar.text == r"[-+]?[0-9]+[ \n]*" and c.params.stop == (" ", "\n")


def test_bind_wins_over_the_call(connect):
    @function
    def body(s, a, b=2):
        s += f"{a} {b}"

    assert body.bind(a=1).run(a=5, b=3, backend=connect()).text() == "1 3"
    with pytest.raises(AssertionError, match="has no such argument"):
        body.bind(c=1)


def test_a_users_choice_rule_decides_in_python(connect):
    class Longest(ChoicesSamplingMethod):
        def __call__(self, *, choices, **logprobs):
            assert len(logprobs["input_token_logprobs"]) == 2
            return ChoicesDecision(max(choices, key=len), {"rule": "longest"})

    @function
    def body(s):
        s += "q" + select("c", choices=[" a", " long"], choices_method=Longest()) + gen("x")

    s = body.run(backend=connect(reply=echo))
    assert (s["c"], s["x"]) == (" long", " <long>") and s.text() == "q long <long>"
    assert s.get_meta_info("c")["rule"] == "longest"


def test_speculative_of_a_gen_overrides_that_of_its_run(connect):
    @function
    def body(s):
        s += gen("a", speculative=True) + gen("b")

    backend = connect()
    body.run(backend=backend, speculative=False).sync()
    gens = [op for op in backend.client.submits[0].ops if isinstance(op, ops.Gen)]
    assert [op.params.speculative for op in gens] == [True, False]
