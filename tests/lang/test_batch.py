"""Many runs at once: order, failures, threads, and the number in flight."""

import asyncio
import threading

import pytest
from phloem import function, gen
from phloem.protocol import errors
from phloem.tests.lang.fakes import ENDLESS, echo
from phloem.tests.runtime.wire import wait_until


@function
def ask(s, question, shout=False):
    if question == "bad":
        raise LookupError("bad item")
    s += question + gen("answer")
    if shout:
        s["loud"] = s["answer"].upper()


def test_a_batch_keeps_its_order_and_takes_dicts_and_tuples(connect):
    backend = connect(reply=echo)
    states = ask.run_batch([{"question": "a"}, ("b",), ["c", True]], backend=backend)
    assert [s["answer"] for s in states] == [" <a>", " <b>", " <c>"]
    assert states[2]["loud"] == " <C>"
    assert ask.run_batch([], backend=backend) == []
    assert ask.bind(shout=True).run_batch([("q",)], backend=backend)[0]["loud"] == " <Q>"


def test_one_failing_item_returns_its_error_and_harms_no_other(connect):
    states = ask.run_batch([("a",), ("bad",), ("c",)], backend=connect(reply=echo))
    assert states[0]["answer"] == " <a>" and states[2]["answer"] == " <c>"
    assert isinstance(states[1].error(), LookupError)
    with pytest.raises(LookupError, match="bad item"):
        states[1]["answer"]


def test_wrong_items_are_refused_before_anything_runs(connect):
    backend = connect()
    with pytest.raises(errors.InvalidRequest, match="arguments mismatch the SGL function signature: 3 given.*1 to 2"):
        ask.run_batch([("a",), ("a", True, 3)], backend=backend)
    with pytest.raises(errors.InvalidRequest, match="no argument 'q'; it has question, shout"):
        ask.run_batch([{"q": "a"}], backend=backend)
    with pytest.raises(errors.InvalidRequest, match="does not know 'question'"):
        ask.run_batch([{}], question="x", backend=backend)
    assert backend.client.submits == []


def test_bodies_that_do_not_wait_need_one_thread(connect):
    seen = set()

    @function
    def body(s, i):
        seen.add(threading.get_ident())
        s += f"{i}" + gen("a")

    body.run_batch([(i,) for i in range(50)], backend=connect())
    assert len(seen) == 1


def test_bodies_that_wait_do_not_block_each_other(connect):
    states = ask.run_batch([(f"q{i}", True) for i in range(20)], backend=connect(reply=echo, step_s=0.02))
    assert [s["loud"] for s in states] == [f" <Q{i}>" for i in range(20)]
    messages = states[0].stats()["messages"]
    assert messages == 2


def test_num_threads_limits_how_many_items_run_at_once(connect):
    running, most = [0], [0]
    lock = threading.Lock()
    three = threading.Barrier(3)

    @function
    def body(s, i):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        s += "x" + gen("a")
        s["a"]
        three.wait(30)  # passes only when three items run
        with lock:
            running[0] -= 1

    states = body.run_batch([(i,) for i in range(12)], backend=connect(), num_threads=3)
    assert all(s.error() is None for s in states) and len(states) == 12 and most[0] == 3
    with pytest.raises(errors.InvalidRequest, match="num_threads=0"):
        body.run_batch([(1,)], backend=connect(), num_threads=0)


def test_generator_style_yields_in_order_as_they_finish(connect):
    backend = connect(reply=echo)
    states = ask.run_batch([(f"q{i}",) for i in range(5)], backend=backend, generator_style=True)
    assert next(iter(states))["answer"] == " <q0>"
    assert [s["answer"] for s in states] == [f" <q{i}>" for i in range(1, 5)]


def test_a_progress_bar_counts_finished_items(connect, capsys):
    ask.run_batch([("a",), ("b",)], backend=connect(reply=echo), progress_bar=True)
    assert "ask" in capsys.readouterr().out


def test_leaving_a_batch_early_cancels_what_still_runs(connect):
    backend = connect(reply=lambda prompt, op: " w" if prompt == "0" else ENDLESS, step_s=0.002)
    states = ask.run_batch([(str(i),) for i in range(8)], backend=backend, generator_style=True, max_new_tokens=100_000)
    next(states)
    states.close()
    wait_until(lambda: not backend.client.engine.programs)
    assert backend.client.cancels and all(c.op is None for c in backend.client.cancels)


def test_a_batch_of_an_async_program_counts_and_yields_too(connect, capsys):
    @function
    async def body(s, q):
        s += q + gen("a")
        await s.get("a")

    items = [{"q": str(i)} for i in range(5)]
    backend = connect()
    assert len(body.run_batch(items, backend=backend, progress_bar=True)) == 5
    assert "100%" in capsys.readouterr().out

    async def main():
        seen = [state["a"] async for state in body.iter_batch_async(items, backend=backend, num_threads=2)]
        left = body.iter_batch_async(items, backend=backend)
        async for _ in left:
            break
        await left.aclose()
        with pytest.raises(errors.InvalidRequest, match=r"async for state in body.iter_batch_async"):
            await body.run_batch_async(items, backend=backend, generator_style=True)
        return seen

    assert len(asyncio.run(main())) == 5
    with pytest.raises(errors.InvalidRequest, match=r"async for state in body.iter_batch_async"):
        body.run_batch(items, backend=backend, generator_style=True)


def test_a_batch_refuses_to_stream_text_and_says_what_to_write(connect):
    with pytest.raises(errors.InvalidRequest, match=r"generator_style=True yields each as it ends"):
        ask.run_batch([("1",)], backend=connect(), stream=True)
