"""Features that users of SGLang's language have requested, as Phloem has them."""

import asyncio

import pytest
from phloem import assistant, function, gen, select, separate_reasoning, user
from phloem.protocol import errors
from phloem.tests.lang.fakes import echo, run, says


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


def test_asked_select_on_the_first_assistant_token(connect):
    s = run(says(user("yes or no?"), assistant(select("c", ["yes", "no"]))), connect())
    assert s["c"] == "yes" and s.messages()[-1]["content"] == "yes"
