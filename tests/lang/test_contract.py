"""The semantics that programs written for SGLang rely on, row by row (1.3 of the contract; 1.4 is in test_choices.py).

Where SGLang has a defect, a race or a gap, a row says what we do instead.
"""

import asyncio
import contextvars
import logging
import threading
import time

import pytest
from phloem import (
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    gen_int,
    global_config,
    image,
    select,
    separate_reasoning,
    system,
    user,
    user_begin,
    user_end,
)
from phloem.lang.backend.base_backend import BaseBackend
from phloem.lang.chat_template import ChatTemplate
from phloem.lang.ir import SglArgument, SglVariable
from phloem.runtime.protocol import errors
from phloem.runtime.protocol.ops import Gen

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 16


class Fake(BaseBackend):
    """Answers " <last word>" after ``delay_s``; fails where the text holds ``bad``."""

    precache_in_batch = False

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s
        self.params = []
        self.prefixes = []

    def generate(self, s, sampling_params):
        self.params.append(sampling_params)
        time.sleep(self.delay_s)
        if "bad" in s.text_:
            raise OSError("the line is dead")
        texts = [f" <{s.text_.split()[-1]}{i or ''}>" for i in range(sampling_params.n)]
        return (texts if sampling_params.n > 1 else texts[0]), {"completion_tokens": 2}

    def generate_stream(self, s, sampling_params):
        for piece in (" one", " two"):
            yield piece, {"completion_tokens": 2}

    def fill_image(self, s):
        pass

    def cache_prefix(self, prefix_str):
        self.prefixes.append(prefix_str)


def echo(prompt, op):
    return [f" <{prompt.split()[-1]}>"] * op.n


@pytest.fixture(params=["compiled", "interpreted"])
def backend(request, connect):
    """Every row holds on both paths."""
    return connect(reply=echo) if request.param == "compiled" else Fake()


def run(body, backend, **options):
    return function(body).run(backend=backend, **options)


def says(*exprs):
    def body(s):
        for expr in exprs:
            s += expr

    return body


# -- 1 to 8: running, reading, failing --------------------------------------------------------------------------------


def test_row_1_run_returns_at_once_and_reading_waits():
    begin = time.monotonic()
    s = run(says("a", gen("x")), Fake(delay_s=0.3))
    assert time.monotonic() - begin < 0.2
    assert s["x"] == " <a>" and time.monotonic() - begin >= 0.3


def test_row_1_use_thread_false_runs_everything_here():
    threads = []

    class Here(Fake):
        def generate(self, s, sampling_params):
            threads.append(threading.current_thread())
            return super().generate(s, sampling_params)

    s = run(says("a", gen("x")), Here(), use_thread=False)
    assert threads == [threading.current_thread()] and s["x"] == " <a>"


def test_row_2_context_variables_reach_a_body_on_another_thread(backend):
    name = contextvars.ContextVar("name")
    name.set("here")
    s = run(lambda s: name.get(), backend, stream=True)
    assert s.text() == "" and s.ret_value == "here"


def test_row_2_forks_need_no_thread_each():
    before = threading.active_count()
    seen = []

    class Counting(Fake):
        async def generate_async(self, s, sampling_params):
            seen.append(threading.active_count())
            await asyncio.sleep(0.01)
            return " x", {}

    @function
    def body(s):
        forks = s.fork(64)
        forks += "a" + gen("x")
        forks.join()

    assert len(body.run(backend=Counting())["x"]) == 64
    assert max(seen) <= before + 1


def test_row_3_the_bodys_return_value_is_kept(backend):
    assert run(lambda s: 42, backend).ret_value == 42


def test_row_4_the_runs_sampling_is_the_default_of_every_gen():
    backend = Fake()
    backend.chat_template = ChatTemplate("t", None, {"user": ("U:", "")}, ("<end>",))
    function(says("a", gen("x"), gen("y", temperature=0.5, stop="."))).run(
        backend=backend, max_new_tokens=7, temperature=0.1, stop=["!"]
    ).sync()
    first, second = backend.params
    assert (first.max_new_tokens, first.temperature, first.stop) == (7, 0.1, ("!", "<end>"))
    assert (second.max_new_tokens, second.temperature, second.stop) == (7, 0.5, (".", "<end>"))
    assert (Fake().params, function(says("a", gen("x"))).run(backend=backend).text()) == ([], "a <a>")
    assert (backend.params[-1].max_new_tokens, backend.params[-1].temperature, backend.params[-1].top_k) == (128, 1, -1)


def test_row_5_an_unnamed_gen_is_under_none_and_the_next_replaces_it(backend):
    s = run(says("a", gen(), " b", gen()), backend)
    assert s[None] == " <b>" and s.text() == "a <a> b <b>"


def test_row_5_several_candidates_are_a_list_and_the_text_goes_on_with_the_first(backend):
    s = run(says("a", gen("x", n=3), gen("y")), backend)
    assert len(s["x"]) == 3 and s["x"][0] == " <a>" and s.text() == "a <a>" + s["y"]


def test_row_6_a_missing_variable_is_a_key_error_that_names_the_others(backend):
    s = run(says("a", gen("x")), backend)
    with pytest.raises(KeyError, match=r"no variable 'z' in this program; it has: 'x'"):
        s["z"]
    assert s.get_meta_info("z") is None and "x" in s and "z" not in s


def test_row_6_meta_info_may_be_waited_for_no_longer_than_wanted():
    s = run(says("a", gen("x")), Fake(delay_s=0.3))
    with pytest.raises(TimeoutError):
        s.get_meta_info("x", timeout=0.01)
    assert s.get_meta_info("x")["completion_tokens"] == 2


def test_row_7_swallowed_there_raised_here_the_cause_comes_out_where_the_value_is_read():
    s = run(says("bad", gen("x"), " more", gen("y")), Fake())
    with pytest.raises(OSError, match="the line is dead"):
        s["x"]
    with pytest.raises(errors.DependencyFailed, match="the line is dead"):
        s["y"]
    with pytest.raises(OSError):
        s.text()
    assert s.text(partial=True) == "bad more" and isinstance(s.error(), OSError)


def test_row_7_errors_of_the_body_come_out_of_run(backend):
    with pytest.raises(ZeroDivisionError):
        run(lambda s: 1 / 0, backend)


def test_row_7_one_failing_item_of_a_batch_leaves_the_others_whole(backend):
    @function
    def body(s, i):
        s += str(10 // i) + gen("x")

    states = body.run_batch([{"i": i} for i in (1, 0, 2)], backend=backend)
    assert [states[0]["x"], states[2]["x"]] == [" <10>", " <5>"]
    assert isinstance(states[1].error(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        states[1]["x"]


def test_row_8_what_cannot_be_appended_is_a_value_error(backend):
    with pytest.raises(ValueError, match=r"s \+= None: there is nothing to append"):
        run(says(None), backend)
    with pytest.raises(ValueError, match="cannot append 7 of type int"):
        run(says(7), backend)

    def forks(s):
        group = s.fork(2)
        group += "text"

    with pytest.raises(ValueError, match="say forks \\+= lambda i"):
        run(forks, backend)
    with pytest.raises(ValueError, match="join mode 'glue'; it is one of gather_variable, concate_and_append"):
        run(lambda s: s.fork(2).join("glue"), backend)


# -- 9 to 15: roles, scopes, forks ------------------------------------------------------------------------------------


def test_row_9_a_default_system_prompt_comes_first_unless_one_is_given():
    backend = Fake()
    backend.chat_template = ChatTemplate(
        "t", "Be good.", {"system": ("S:", "\n"), "user": ("U:", "\n"), "assistant": ("A:", "\n")}
    )
    s = run(says(user("hi"), assistant(gen("a"))), backend)
    assert s.messages()[0] == {"role": "system", "content": "Be good."} and s.text().startswith("S:Be good.\nU:hi\n")
    s = run(says(system("Mine."), user("hi")), backend)
    assert [m["content"] for m in s.messages()] == ["Mine.", "hi"]


def test_row_9_nested_roles_are_an_error_that_says_what_to_write(backend):
    with pytest.raises(errors.InvalidRequest, match=r"roles do not nest: end it first \(s \+= user_end\(\)"):
        run(says(user(assistant("x"))), backend)


def test_row_9_messages_are_there_when_their_role_has_ended_leading_blanks_aside(backend):
    def body(s):
        s += user_begin()
        s += "  hello"
        before = len(s.messages())
        s += user_end()
        s += assistant_begin() + gen("a") + assistant_end()
        return before

    s = run(body, backend)
    assert s.ret_value == 0
    assert s.messages() == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": s["a"].lstrip()}]


def test_row_9_messages_carry_several_images():
    s = run(says(user(image(PNG) + image(PNG) + "what is it?"), assistant(gen("a"))), Fake())
    (text, first, second) = s.messages()[0]["content"]
    assert text == {"type": "text", "text": "what is it?"} and first == second
    assert first["image_url"]["url"].startswith("data:image/png;base64,")
    assert s["a"]


def test_row_10_a_role_block_closes_its_role_on_an_exception(backend):
    def body(s):
        try:
            with s.user():
                s += "half"
                raise RuntimeError
        except RuntimeError:
            pass
        s += assistant(gen("a"))

    assert [m["role"] for m in run(body, backend).messages()] == ["user", "assistant"]


def test_row_11_a_scope_holds_all_text_inside_also_generated(backend):
    def body(s):
        s += "before "
        with s.var_scope("v"):
            s += "a" + gen("x") + "!"

    s = run(body, backend)
    assert s["v"] == "a <a>!"


def test_row_12_a_fork_has_what_its_parent_had(backend):
    def body(s):
        s += user("hi")
        s["k"] = 3
        s += assistant_begin() + "so"
        (child,) = s.fork(1)
        child += gen("x")
        child += assistant_end()
        return child["k"], child["x"], child.messages()

    key, text, messages = run(body, backend).ret_value
    assert key == 3 and text.startswith(" <") and [m["role"] for m in messages] == ["user", "assistant"]
    assert messages[1]["content"] == "so" + text


def test_row_13_stale_there_fresh_here_a_second_join_replaces_the_names_of_the_first(backend):
    def body(s):
        for word in ("a", "b"):
            forks = s.fork(2)
            forks += word + gen("x")
            forks.join()

    assert run(body, backend)["x"] == [" <b>", " <b>"]


def test_row_13_a_copy_brings_new_names_back_as_lists_of_one(backend):
    def body(s):
        s += "a"
        with s.copy() as t:
            t += gen("x")

    s = run(body, backend)
    assert s["x"] == [" <a>"] and s.text() == "a"


def test_row_14_a_join_can_append_the_branches_in_order(backend):
    def body(s):
        s += "a"
        forks = s.fork(2)
        forks += lambda i: f" {i}" + gen("x")
        forks.join("concate_and_append")
        s += " z" + gen("y")

    s = run(body, backend)
    assert s.text() == "a 0 <0> 1 <1> z <z>"


def test_row_15_race_there_none_here_a_fork_commits_all_that_was_appended():
    for _ in range(20):
        seen = []

        class Told(Fake):
            def commit_lazy_operations(self, s, seen=seen):
                seen.append(s.text_)

        def body(s):
            s += "prompt"
            s.fork(2).join()

        run(body, Told()).sync()
        assert seen == ["prompt"]


# -- 16 to 24 ---------------------------------------------------------------------------------------------------------


def test_row_16_streams_yield_every_text_or_one_variables():
    body = says("a", gen("x"), " b", gen("y"), "c")
    s = run(body, Fake(), stream=True)
    assert list(s.text_iter()) == ["a", " one", " two", " b", " one", " two", "c"]
    assert list(run(body, Fake(), stream=True).text_iter("y")) == [" one", " two"]
    assert list(run(body, Fake()).text_iter()) == ["a <a> b <b>c"]
    assert list(run(body, Fake()).text_iter("y")) == [" <b>"]


def test_row_16_streams_carry_meta_data_in_an_event_loop():
    async def main():
        s = run(says("a", gen("x")), Fake(), stream=True)
        return [item async for item in s.text_async_iter("x", return_meta_data=True)]

    assert asyncio.run(main())[-1] == (" two", {"completion_tokens": 2})


def test_row_17_bound_arguments_win_and_unknown_ones_are_named(backend):
    @function
    def body(s, word):
        s += word + gen("x")

    assert body.bind(word="a").run(word="b", backend=backend)["x"] == " <a>"
    with pytest.raises(AssertionError, match=r"bind\(wrd=\.\.\.\): body\(\) has no such argument; it has word"):
        body.bind(wrd="a")


@function
def two(s, a, b="y"):
    s += a + b + gen("x")


def test_row_18_batches_take_dicts_and_tuples_and_keep_their_order(backend):
    assert two.run_batch([], backend=backend) == []
    states = two.run_batch([{"a": "p"}, ("q",), ["r", "z"]], backend=backend)
    assert [s["x"] for s in states] == [" <py>", " <qy>", " <rz>"]
    found = two.run_batch([(str(i),) for i in range(300)], backend=backend, generator_style=True)
    assert [s["x"] for s in found] == [f" <{i}y>" for i in range(300)]
    with pytest.raises(errors.InvalidRequest, match="Given arguments mismatch the SGL function signature"):
        two.run_batch([("a", "b", "c")], backend=backend)
    with pytest.raises(errors.InvalidRequest, match="Given arguments mismatch"):
        two.run_batch([{"c": "d"}], backend=backend)


@pytest.mark.parametrize(("length", "is_cached"), [(64, False), (65, True)])
def test_row_19_a_batch_caches_a_common_prefix_longer_than_64_characters(length, is_cached):
    backend = Fake()
    backend.precache_in_batch = True

    @function
    def body(s, topic, word):
        s += topic + word + gen("x")

    body.bind(topic="t" * length).run_batch([("a",), ("b",)], backend=backend)
    assert backend.prefixes == (["t" * length] if is_cached else [])
    body.bind(topic="t" * 80).run_batch([("a",)], backend=backend)
    assert len(backend.prefixes) == is_cached


def test_row_19_role_prefixes_count_and_a_switch_turns_it_off(monkeypatch):
    backend = Fake()
    backend.precache_in_batch = True
    body = function(lambda s, word: s.__iadd__(system("s" * 60) + user(word) + assistant(gen("x"))))
    body.run_batch([("a",), ("b",)], backend=backend)
    assert backend.prefixes == ["SYSTEM:" + "s" * 60 + "\nUSER:"]
    monkeypatch.setattr(global_config, "enable_precache_with_tracing", False)
    body.run_batch([("a",), ("b",)], backend=backend)
    assert len(backend.prefixes) == 1


def test_row_20_a_trace_has_holes_for_arguments_and_takes_part_in_nothing_unknown(backend):
    @function
    def inner(s, word):
        s += "in " + word

    @function
    def body(s, word, count):
        s += "a" + word + gen("x")
        inner(word)
        s += s["x"]

    trace = body.trace(backend=backend)
    assert any(isinstance(node, SglArgument) for node in trace.flatten_nodes())
    assert isinstance(trace.variables["x"], SglVariable)
    with pytest.raises(TypeError, match=r"Cannot put argument inside a f-string.*write s \+= \"...\" \+ word"):
        function(lambda s, word: s.__iadd__(f"a {word}")).trace(backend=backend)
    with pytest.raises(TypeError, match="argument 'word' is not known while the program is traced"):
        function(lambda s, word: s.__iadd__("yes" if word else "no")).trace(backend=backend)
    with pytest.raises(TypeError, match="is not known while the program is traced"):
        function(lambda s, word: s.__iadd__("a" * len(word))).trace(backend=backend)


def test_row_21_a_dtype_keeps_the_text_and_numbers_stop_at_blanks(connect):
    backend = connect(reply=lambda prompt, op: ["42"])
    s = run(says("n=", gen_int("x", stop="#")), backend)
    assert s["x"] == "42"
    (op,) = [op for op in backend.client.submits[0].ops if isinstance(op, Gen)]
    assert op.grammar.text == r"[-+]?[0-9]+[ \n]*" and op.params.stop == ("#", " ", "\n")


def test_row_21_a_dtype_beats_a_regex_with_a_warning():
    with pytest.warns(UserWarning, match=r"dtype=<class 'int'> and regex: dtype holds"):
        expr = gen("x", dtype=int, regex="[a-z]")
    assert expr.grammar == gen("x", dtype=int).grammar


def test_row_24_verbosity_2_logs_the_text_of_finished_programs(monkeypatch, caplog):
    monkeypatch.setattr(global_config, "verbosity", 2)
    with caplog.at_level(logging.INFO, logger="phloem"):
        run(says("a", gen("x")), Fake(), use_thread=False)
    assert "program ended: a <a>" in caplog.text


# -- what users have asked for ----------------------------------------------------------------------------------------


def test_asked_async_programs_await_their_values(backend):
    @function
    async def body(s):
        s += "a" + gen("x")
        return await s.get("x")

    async def main():
        return (await body.run(backend=backend)).ret_value

    assert asyncio.run(main()) == " <a>"


def test_asked_two_event_loops_do_not_disturb_each_other(backend):
    body = function(says("a", gen("x")))

    async def main():
        return await (await body.run_async(backend=backend)).get("x")

    assert [asyncio.run(main()) for _ in range(3)] == [" <a>"] * 3


def test_asked_a_batch_inside_an_event_loop_says_what_to_write(backend):
    @function
    async def body(s):
        s += "a"

    async def main():
        body.run_batch([{}], backend=backend)

    with pytest.raises(errors.InvalidRequest, match=r"write await body\.run_batch_async\(\.\.\.\)"):
        asyncio.run(main())


def test_asked_an_argument_may_be_called_like_a_sampling_parameter(backend):
    @function
    def body(s, n, stop):
        s += f"{n}{stop}" + gen("x")

    assert body.run(n=3, stop="!", backend=backend)["x"] == " <3!>"


def test_asked_rollback_by_forking_from_a_point(backend):
    def body(s):
        s += "a"
        with s.copy() as t:
            t += " first" + gen("x")
        s += " second" + gen("y")

    s = run(body, backend)
    assert s.text() == "a second <second>" and s["x"] == [" <first>"]


def test_asked_reasoning_apart_also_while_streaming(connect):
    backend = connect(reply=lambda prompt, op: ["<think>hm</think>yes"])
    s = run(says("q", separate_reasoning(gen("a"), "qwen3")), backend, stream=True)
    assert "".join(s.text_iter("a")) == "yes" and s["a_reasoning_content"] == "hm" and s.text() == "qyes"


def test_asked_a_later_submit_that_cannot_be_sent_ends_the_program(connect):
    backend = connect(reply=echo)

    @function
    def body(s):
        s += "a" + gen("x")
        assert s["x"] == " <a>"
        backend.client.submit = refuse
        s += "b" + gen("y")

    def refuse(submit, take):
        raise errors.LimitExceeded("too large")

    s = body.run(backend=backend)
    with pytest.raises(errors.LimitExceeded, match="too large"):
        s["y"]
    assert s["x"] == " <a>" and len(backend.client.cancels) == 1


def test_asked_wrong_arguments_of_a_program_are_pythons_own_errors(backend):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        two.run(backend=backend)
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'; it takes a, b"):
        two.run(a="x", c="y", backend=backend)
    with pytest.raises(errors.InvalidRequest, match=r"run_batch\(\) does not know 'temprature'"):
        two.run_batch([("a",)], backend=backend, temprature=1)


def test_asked_select_on_the_first_assistant_token(backend):
    if isinstance(backend, Fake):
        pytest.skip("this backend cannot score")
    s = run(says(user("yes or no?"), assistant(select("c", ["yes", "no"]))), backend)
    assert s["c"] == "yes" and s.messages()[-1]["content"] == "yes"
