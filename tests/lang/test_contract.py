"""The semantics that programs written for SGLang rely on, row by row: 1 to 15, of running, failing, roles and forks.

Where SGLang has a defect, a race or a gap, a row says what we do instead. Rows 16 to 24 are in
test_contract_batches.py, the choices' rows in test_choices.py.
"""

import asyncio
import contextvars
import threading

import pytest
from phloem import assistant, assistant_begin, assistant_end, function, gen, image, system, user, user_begin, user_end
from phloem.lang.chat_template import ChatTemplate
from phloem.protocol import errors
from phloem.tests.lang.fakes import Fake, run, says

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 16


class Held(Fake):
    """Answers once ``may_answer`` is set."""

    def __init__(self):
        super().__init__()
        self.may_answer = threading.Event()

    def generate(self, s, sampling_params):
        assert self.may_answer.wait(30)
        return super().generate(s, sampling_params)


# -- 1 to 8: running, reading, failing --------------------------------------------------------------------------------


def test_row_1_run_returns_at_once_and_reading_waits():
    backend = Held()
    s = run(says("a", gen("x")), backend)  # would not return if it waited for the answer
    backend.may_answer.set()
    assert s["x"] == " <a>"


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


def test_row_5_several_candidates_are_a_list_and_the_text_continues_with_the_first(backend):
    s = run(says("a", gen("x", n=3), gen("y")), backend)
    assert len(s["x"]) == 3 and s["x"][0] == " <a>" and s.text() == "a <a>" + s["y"]


def test_row_6_a_missing_variable_is_a_key_error_that_names_the_others(backend):
    s = run(says("a", gen("x")), backend)
    with pytest.raises(KeyError, match=r"no variable 'z' in this program; it has: 'x'"):
        s["z"]
    assert s.get_meta_info("z") is None and "x" in s and "z" not in s


def test_row_6_the_wait_for_meta_info_has_a_timeout():
    backend = Held()
    s = run(says("a", gen("x")), backend)
    with pytest.raises(TimeoutError):
        s.get_meta_info("x", timeout=0.01)
    backend.may_answer.set()
    assert s.get_meta_info("x")["completion_tokens"] == 2


def test_row_7_the_cause_of_a_failure_is_raised_where_the_value_is_read():
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

    with pytest.raises(ValueError, match="write forks \\+= lambda i"):
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
    with pytest.raises(errors.InvalidRequest, match=r"roles do not nest; end it first \(s \+= user_end\(\)"):
        run(says(user(assistant("x"))), backend)


def test_row_9_a_message_is_listed_once_its_role_has_ended_without_leading_blanks(backend):
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


def test_row_11_a_scope_holds_all_text_inside_generated_text_included(backend):
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


def test_row_13_a_second_join_replaces_the_variables_of_the_first(backend):
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


def test_row_15_a_fork_commits_everything_appended_before_it():
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
