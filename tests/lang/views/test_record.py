"""The record of a run lists its operations and the texts of its sequences."""

import asyncio

import pytest
from phloem.lang.api import function
from phloem.lang.gen import gen
from phloem.lang.select import select
from phloem.lang.views.record import record_of
from phloem.protocol import errors
from rich.console import Console


@function
def story(s):
    s += "Once " + gen("a", max_tokens=8)
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += f" branch {i}" + select("b", choices=["yes", "no"])
    forks.join()
    s += " end" + gen("c", n=2)


def test_ops_and_texts_are_listed_under_their_sequences(connect):
    state = story.run(backend=connect(reply=lambda prompt, op: " upon a time"))
    run = record_of(state.program, "story")
    assert [(op.kind, op.name, op.seq) for op in run.ops] == [
        ("gen", "a", 0),
        ("select", "b", 1),
        ("select", "b", 2),
        ("gen", "c", 0),
    ]
    assert [(lane.seq, lane.parent) for lane in run.lanes] == [(0, None), (1, 0), (2, 0)]
    texts = ["".join(t.text for s in lane.stretches for t in s.tokens) for lane in run.lanes]
    assert texts[0] == state.text() and texts[1].startswith(" branch 0") and not run.is_traced
    assert run.stats["messages"] == 1
    (others,) = [stretch.others for stretch in run.lanes[0].stretches if stretch.op == 3]
    assert len(others) == 1


def test_a_failed_op_is_listed_with_its_error(connect):
    @function
    def bad(s):
        s += "Once " + gen("a", max_tokens=-1)

    run = record_of(bad.run(backend=connect(reply=lambda prompt, op: "x")).program)
    assert "max_tokens=-1" in run.ops[0].error


def test_show_prints_texts_and_costs(connect):
    console = Console(record=True, width=120, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    state = story.run(backend=connect(reply=lambda prompt, op: " upon a time"))
    state.show(console)
    told = console.export_text()
    assert "Once  upon a time" in told and "sequence 2, a fork of 0" in told and "1 message" in told
    console.file.close()


def test_show_of_a_stream_prints_each_text_once(connect):
    console = Console(record=True, width=200, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    story.run(backend=connect(reply=lambda prompt, op: " upon a time"), stream=True).show(console)
    told = console.export_text()
    assert told.count("Once  upon a time") == 1 and "select b" in told
    console.file.close()


def test_show_inside_the_body_of_a_stream_prints_the_run_up_to_here(connect):
    console = Console(record=True, width=120, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115

    @function
    def body(s):
        s += "Once " + gen("a")
        s.show(console)
        s += " later"

    state = body.run(backend=connect(reply=lambda prompt, op: " upon a time"), stream=True)
    assert state.text() == "Once  upon a time later"
    told = console.export_text()
    assert "Once  upon a time" in told and "gen a" in told and "later" not in told
    console.file.close()


@pytest.mark.parametrize("read", [lambda s: s.show(), lambda s: list(s.text_iter()), lambda s: s.text()])
def test_waiting_on_its_own_loop_for_an_async_stream_is_refused(connect, read):
    @function
    async def body(s):
        s += "Once " + gen("a")

    async def main():
        state = await body.run(backend=connect(reply=lambda prompt, op: " upon a time"), stream=True)
        with pytest.raises(errors.InvalidRequest, match="would block the event loop.* await s.text_async"):
            read(state)
        assert await state.text_async() == "Once  upon a time"

    asyncio.run(main())
