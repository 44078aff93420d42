"""Async programs, streaming for asyncio, cancelling and deadlines."""

import asyncio

import pytest
from phloem import function, gen
from phloem.lang.backend.base_backend import BaseBackend
from phloem.protocol import errors
from phloem.tests.lang.fakes import ENDLESS, echo


@function
async def ask(s, question):
    s += question + gen("a")
    answer = await s.get("a")
    s += " yes" if question in answer else " no"
    s += gen("b")
    return answer


def test_an_async_program_awaits_its_values(connect):
    async def main():
        s = await ask.run("q", backend=backend)
        return s.ret_value, await s.get("b"), await s.text_async(), await s.stats_async(), await s.error_async()

    backend = connect(reply=echo)
    value, b, text, stats, error = asyncio.run(main())
    assert (value, b, text, error) == (" <q>", " <yes>", "q <q> yes <yes>", None)
    assert stats["messages"] == 2


def test_a_blocking_read_in_an_async_program_says_what_to_write(connect):
    @function
    async def body(s):
        s += "q" + gen("a")
        return s["a"]

    with pytest.raises(errors.InvalidRequest, match=r"block the event loop.*write await s\.get\('a'\)"):
        asyncio.run(body.run(backend=connect()))


def test_a_known_value_can_be_read_without_await(connect):
    @function
    async def body(s):
        s += "q" + gen("a")
        await s.sync_async()
        return s["a"], s.text(), await s.messages_async()

    assert asyncio.run(body.run(backend=connect(reply=echo))).ret_value == (" <q>", "q <q>", [])


def test_many_async_programs_share_one_loop_and_keep_their_order(connect):
    backend = connect(reply=echo)
    states = ask.run_batch([(f"q{i}",) for i in range(40)], backend=backend)
    assert [s.ret_value for s in states] == [f" <q{i}>" for i in range(40)]
    assert [s["b"] for s in states] == [" <yes>"] * 40

    async def main():
        with pytest.raises(errors.InvalidRequest, match=r"write await ask\.run_batch_async"):
            ask.run_batch([("q",)], backend=backend)
        return await ask.run_batch_async([("q",), ("r",)], backend=backend, num_threads=1)

    assert [s.ret_value for s in asyncio.run(main())] == [" <q>", " <r>"]


def test_one_failing_async_item_keeps_its_error(connect):
    @function
    async def body(s, x):
        s += "q" + gen("a")
        await s.get("a")
        if x:
            raise LookupError("mine")

    good, bad = body.run_batch([(0,), (1,)], backend=connect())
    assert good.error() is None and isinstance(bad.error(), LookupError)


def test_an_async_stream_yields_constants_and_deltas(connect):
    backend = connect(reply=lambda prompt, op: " x y")

    async def main():
        s = await ask.run("q", backend=backend, stream=True)
        whole = [chunk async for chunk in s.text_async_iter()]
        only = [item async for item in s.text_async_iter("b", return_meta_data=True)]
        return whole, only

    whole, only = asyncio.run(main())
    assert whole == ["q", " x", " y", " no", " x", " y"]
    assert [chunk for chunk, _ in only] == [" x", " y"] and only[-1][1]["completion_tokens"] == 2


def test_a_sync_program_runs_in_a_loop_too(connect):
    @function
    def body(s):
        s += "q" + gen("a")

    async def main():
        s = await body.run_async(backend=connect(reply=echo))
        return await s.get("a")

    assert asyncio.run(main()) == " <q>"


def test_cancelling_the_task_cancels_the_program(connect):
    backend = connect(reply=lambda prompt, op: ENDLESS, step_s=0.005)

    async def main():
        task = asyncio.create_task(ask.run("q", backend=backend, max_new_tokens=100_000))
        while not backend.client.engine.programs:  # until the program runs at the engine
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert backend.client.cancels


def test_cancel_ends_a_run_or_one_value_and_keeps_the_text_so_far(connect):
    @function
    def body(s):
        s += "q" + gen("a") + gen("b")

    backend = connect(reply=lambda prompt, op: ENDLESS, step_s=0.002)
    s = body.run(backend=backend, stream=True, max_new_tokens=100_000)
    assert next(s.text_iter("a")) == " w"
    s.cancel("a")
    with pytest.raises(errors.Cancelled):
        s["a"]
    assert s.text(partial=True).startswith("q w")
    s = body.run(backend=backend, max_new_tokens=100_000)
    s.cancel()
    with pytest.raises(errors.Cancelled):
        s["b"]
    s.stats()


class Endless(BaseBackend):
    async def generate_async(self, s, sampling_params):
        await asyncio.Event().wait()


def test_a_deadline_ends_programs_on_every_backend(connect):
    @function
    def body(s):
        s += "q" + gen("a") + gen("b")

    backend = connect(reply=lambda prompt, op: ENDLESS, step_s=0.005)
    for chosen, deadline_s in ((backend, 0.05), (Endless(), 0.02)):
        s = body.run(backend=chosen, deadline_s=deadline_s, max_new_tokens=100_000)
        with pytest.raises(errors.DeadlineExceeded):
            s["a"]
        s.stats()


def test_async_backends_run_on_the_programs_own_loop():
    loops = []

    class Where(BaseBackend):
        async def generate_async(self, s, sampling_params):
            loops.append(asyncio.get_running_loop())
            return f" <{s.text_.split()[-1]}>", {}

    async def main():
        s = await ask.run("q", backend=Where())
        assert await s.get("b") == " <yes>"
        return asyncio.get_running_loop()

    loop = asyncio.run(main())
    assert set(loops) == {loop}


def test_three_hundred_programs_wait_together():
    """The number of programs in flight has no limit: the backend answers when all 300 have sent their request."""
    asked = [0]

    class AllAtOnce(BaseBackend):
        async def generate_async(self, s, sampling_params):
            asked[0] += 1
            batch = -(-asked[0] // 300)
            while asked[0] < 300 * batch:
                await asyncio.sleep(0.001)
            return " ok", {}

    @function
    def three(s, i):
        s += f"q{i}" + gen("a") + gen("b") + gen("c")

    states = three.run_batch([(i,) for i in range(300)], backend=AllAtOnce())
    assert asked == [900] and all(s["c"] == " ok" for s in states)
