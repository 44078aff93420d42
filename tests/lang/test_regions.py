"""Sampling for a part of a program: over the run's, under a gen's own; inherited by forks; kept by compile()."""

import asyncio

import pytest
from phloem import function, gen
from phloem.protocol import errors
from phloem.protocol.ops import Gen


@function
def warm(s, heat=0.9):
    s += "a" + gen("x")
    with s.sampling(temperature=heat, stop="!"):
        s += gen("y")
        forks = s.fork(2)
        with s.sampling(top_p=0.5, temperature=0.1):
            s += gen("z", temperature=0.3)
    forks += gen("f")
    s += gen("end")


def params_of(backend):
    return [op.params for submit in backend.client.submits for op in submit.ops if isinstance(op, Gen)]


def check(params, heat):
    shown = [(p.temperature, p.top_p, p.stop) for p in params]
    root, forks = [shown[0], shown[1], shown[2], shown[-1]], shown[3:5]
    assert root == [(0.0, 1.0, ()), (heat, 1.0, ("!",)), (0.3, 0.5, ("!",)), (0.0, 1.0, ())]
    assert forks == [(heat, 1.0, ("!",))] * 2


def test_a_region_overrides_the_run_and_is_overridden_by_the_gen(connect):
    backend = connect()
    warm.run(backend=backend, temperature=0.0).sync()
    check(params_of(backend), 0.9)


def test_a_compiled_program_keeps_its_regions_and_fills_their_holes(connect):
    backend = connect()
    warm.compile(backend=backend).run(heat=0.7, backend=backend, temperature=0.0).sync()
    check(params_of(backend), 0.7)


def test_a_region_ends_with_an_exception(connect):
    @function
    def body(s):
        try:
            with s.sampling(temperature=0.5):
                raise ValueError
        except ValueError:
            s += gen("x")

    backend = connect()
    body.run(backend=backend, temperature=0.2).sync()
    assert [p.temperature for p in params_of(backend)] == [0.2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1}, r"s.sampling\(temprature=...\): there is no such parameter; there are .*temperature"),
        ({"seed": 1}, r"a seed belongs to a whole run, run\(seed=...\), or to one gen"),
    ],
)
def test_a_parameter_that_a_region_cannot_set_is_named(connect, given, message):
    def body(s):
        with s.sampling(**given):
            pass

    with pytest.raises(errors.InvalidRequest, match=message):
        function(body).run(backend=connect())


def test_retries_in_an_async_program_are_awaited(connect):
    answers = iter(["ten", "12"])
    backend = connect(reply=lambda prompt, op: next(answers) if prompt.endswith(":") else " ok")

    @function
    async def wrong(s):
        s += "n:" + gen("n", int, retries=1)

    with pytest.raises(errors.InvalidRequest, match=r"Gen\('n'\) waits for what it generates.*await s.append_async"):
        asyncio.run(wrong.run(backend=backend))

    @function
    async def right(s):
        await s.append_async("n:" + gen("n", int, retries=1) + " then" + gen("x"))
        assert await s.get("n") == 12

    s = asyncio.run(right.run(backend=backend))
    assert s.text() == "n:12 then ok"
    with pytest.raises(errors.InvalidRequest, match=r"Gen\('n'\) waits for .*neither traced nor compiled"):
        function(lambda s: s.__iadd__(gen("n", int, retries=1))).compile(backend=backend)
