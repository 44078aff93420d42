"""Programs that have ended are freed by their reference counts: they leave no cycles to the garbage collector."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import CLIENT, GREEDY, Driver
from phloem.tests.runtime.engine.test_overlap import StandIn, engine_of

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@contextmanager
def no_cycles_left() -> Iterator[None]:
    """Fails if the block leaves objects of ours that only the collector can free."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = Counter(
            f"{type(item).__module__}.{type(item).__qualname__}"
            for item in gc.garbage
            if type(item).__module__.startswith("phloem.")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found


def text(op: int, seq: int, text: str = "sap rises") -> o.Text:
    return o.Text(op=op, seq=seq, text=text)


def gen(op: int, seq: int, params: SamplingParams = GREEDY, **options: object) -> o.Gen:
    return o.Gen(op=op, seq=seq, params=params, **options)


FORK = [
    text(0, 0),
    gen(1, 0),
    o.Fork(op=2, seq=0, children=(1, 2)),
    *(text(3, 1), gen(4, 1), text(5, 2), gen(6, 2, n=2), o.Ref(op=7, seq=1, source=6, index=1)),
    o.Join(op=8, seq=0, children=(1, 2)),
    gen(9, 0),
    *(o.Close(op=10, seq=1), o.Close(op=11, seq=2), o.Close(op=12, seq=0)),
]
PROGRAMS: dict[str, list[o.AnyOp]] = {
    "a generation": [text(0, 0), gen(1, 0, stream=True), o.Close(op=2, seq=0)],
    "candidates": [text(0, 0), gen(1, 0, n=3), gen(2, 0, n=2), o.Close(op=3, seq=0)],
    "a fork": FORK,
    "a grammar": [text(0, 0), gen(1, 0, grammar=o.GrammarSpec("regex", "[a-z]{3,9}"), n=2), o.Close(op=2, seq=0)],
    "a choice": [text(0, 0), o.Select(op=1, seq=0, choices=("yes", "no", "never")), o.Close(op=2, seq=0)],
    "a choice without context": [
        text(0, 0),
        o.Select(op=1, seq=0, choices=("yes", "no"), method="unconditional_likelihood_normalized"),
        o.Close(op=2, seq=0),
    ],
    "a score": [text(0, 0), o.Score(op=1, seq=0, text="and falls"), o.Close(op=2, seq=0)],
    "log-probabilities": [
        text(0, 0),
        gen(1, 0, SamplingParams(max_tokens=4, return_logprob=True, top_logprobs_num=2, logprob_start_len=0)),
        o.Close(op=2, seq=0),
    ],
    "a rollback": [
        text(0, 0),
        o.Mark(op=1, seq=0),
        gen(2, 0),
        o.Rollback(op=3, seq=0, to=1),
        o.Pin(op=4, seq=0, ttl_s=60.0),
        gen(5, 0),
        o.Close(op=6, seq=0),
    ],
    "a long text": [text(0, 0, "sap " * 100), gen(1, 0, LONG), o.Close(op=2, seq=0)],
    "too long a text": [text(0, 0, "x" * 9_000), gen(1, 0), gen(2, 0), o.Close(op=3, seq=0)],
    "too long a choice": [text(0, 0), o.Select(op=1, seq=0, choices=("x" * 9_000,)), o.Close(op=2, seq=0)],
    "a bad grammar": [text(0, 0), gen(1, 0, grammar=o.GrammarSpec("regex", "(open")), o.Close(op=2, seq=0)],
}


@pytest.fixture(scope="module", params=["one after the other", "host and device overlap"])
def engine(request: pytest.FixtureRequest, tiny_model_path: Path) -> Iterator[EngineCore]:
    engine = engine_of(
        tiny_model_path,
        StandIn() if "overlap" in request.param else None,
        num_slots=4096,
        max_seq_len=640,
        max_running=24,
    )
    everything(engine)  # what is loaded and cached once
    yield engine
    engine.close()


def everything(engine: EngineCore) -> None:
    driver = Driver(engine)
    outcomes = [
        driver.submit(ops, settings=m.ProgramSettings(trace=bool(i % 2))) for i, ops in enumerate(PROGRAMS.values())
    ]
    driver.run()
    assert all(outcome.closed is not None for outcome in outcomes)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("trace", [False, True])
def test_a_program_that_has_ended_leaves_no_cycle(engine: EngineCore, name: str, trace: bool) -> None:
    with no_cycles_left():
        outcome = Driver(engine).run(PROGRAMS[name], settings=m.ProgramSettings(trace=trace))
        assert outcome.closed is not None


def test_many_programs_at_once_leave_no_cycle(engine: EngineCore) -> None:
    with no_cycles_left():
        driver = Driver(engine, check=False)
        for i in range(40):
            driver.submit(list(PROGRAMS.values())[i % 4])
        driver.run()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("num_steps", [0, 1, 3, 8])
def test_a_program_that_is_cancelled_leaves_no_cycle(engine: EngineCore, name: str, num_steps: int) -> None:
    with no_cycles_left():
        driver = Driver(engine)
        outcome = driver.submit(PROGRAMS[name], program="cancelled")
        for _ in range(num_steps):
            driver.step()
        driver.say(m.Cancel("cancelled"))
        driver.run()
        assert outcome.closed is not None


def test_a_cancelled_op_and_a_client_that_leaves_leave_no_cycle(engine: EngineCore) -> None:
    with no_cycles_left():
        driver = Driver(engine)
        driver.submit(FORK, program="first")
        driver.submit([msgspec.structs.replace(op) for op in FORK], program="second")
        for _ in range(5):
            driver.step()
        driver.say(m.Cancel("first", op=6))
        for _ in range(3):
            driver.step()
        engine.drop_client(CLIENT)
        driver.run()
        assert not engine.programs.by_key and not engine.programs.live


def test_a_program_that_passes_its_deadline_leaves_no_cycle(engine: EngineCore) -> None:
    with no_cycles_left():
        outcome = Driver(engine).run(FORK, settings=m.ProgramSettings(deadline_s=1e-6))
        assert outcome.failed[1].error.kind == "DeadlineExceeded"
