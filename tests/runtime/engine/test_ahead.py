"""Sequences that share a prompt run in the step that computes the last of its tokens, on a tiny random model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.kernels.backend import CPU, using
from phloem.protocol import ops as o
from phloem.protocol.errors import EngineLost, InternalError
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.executor import Executor
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.parallel import sequence
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.quantizing import quantize_model
from phloem.runtime.scheduler import PlanRow, StepPlan
from phloem.tests.runtime.engine.driver import CLIENT, Driver, Outcome
from phloem.tests.runtime.executor.stand_in import StandIn, traced
from phloem.tests.runtime.models.families import FAMILIES, make_family
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.parallel import staged

EIGHT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DOCUMENT = "The river rises in the hills, passes two mills and a town with an old bridge, and ends in a lake. " * 3
QUESTIONS = [f"Question {n}: {word}?" for n, word in enumerate(["mills", "towns", "lakes", "hills", "river"])]


def ask(text: str, params: SamplingParams = EIGHT) -> list[o.AnyOp]:
    return [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=params), o.Close(op=2, seq=0)]


def token_ids(outcome: Outcome, op: int = 1) -> tuple[int, ...]:
    assert op in outcome.done, outcome.failed
    return outcome.done[op].meta.candidates[0].token_ids


def engine_of(path: Path, accelerator: StandIn | None = None, **options: Any) -> EngineCore:
    sizes = {"num_slots": 4096, "max_seq_len": 512, "prefill_chunk": 128, "max_step_tokens": 1024, "num_threads": 1}
    config = EngineConfig(model=str(path), **(sizes | {"precision": "float32", "speculative": "off"} | options))
    return EngineCore(config, accelerator=accelerator)


@pytest.fixture(scope="module")
def packed_path(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_model(tiny_model_path, tmp_path_factory.mktemp("packed") / "model", "int4-g32").path


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny", {}),
        ("packed", {"precision": "auto"}),
        ("packed", {"precision": "int16", "kv_dtype": "int8"}),
        ("tiny", {"is_ahead": True}),
        ("tiny", {"is_ahead": True, "cuda_graphs": "off"}),
    ],
    ids=str,
)
def test_questions_about_one_text_are_answered_as_one_after_another_and_take_a_step_less(
    model: str, options: dict[str, Any], tiny_model_path: Path, packed_path: Path
) -> None:
    path, is_ahead = tiny_model_path if model == "tiny" else packed_path, options.pop("is_ahead", False)
    with using(traced(CPU) if is_ahead else CPU):
        engine = engine_of(path, StandIn() if is_ahead else None, **options)
        driver, alone = Driver(engine), []
        for question in QUESTIONS:
            engine.cache.flush()
            outcome = driver.run(ask(DOCUMENT + question))
            alone.append(token_ids(outcome))
        engine.cache.flush()
        before = engine.loop.counters.steps, engine.loop.counters.forward_tokens
        outcomes = [driver.submit(ask(DOCUMENT + question)) for question in QUESTIONS]
        driver.run()
    assert [token_ids(each) for each in outcomes] == alone and len(set(alone)) > 1
    assert [each.done[1].meta.cached_tokens for each in outcomes[1:]] == [len(DOCUMENT) + len("Question ")] * 4
    num_chunks = -(-outcomes[0].done[1].meta.prompt_tokens // 128)
    assert engine.loop.counters.steps - before[0] == num_chunks + 8 - 1
    num_own = sum(len(question) - len("Question ") for question in QUESTIONS[1:])
    assert engine.loop.counters.forward_tokens - before[1] == len(DOCUMENT + QUESTIONS[0]) + num_own + 5 * 7
    engine.close()


def test_a_fork_takes_one_step_for_its_prompt_and_its_children(tiny_model_path: Path) -> None:
    engine = engine_of(tiny_model_path)
    driver = Driver(engine)
    count = len(QUESTIONS)
    ops: list[o.AnyOp] = [o.Text(op=0, seq=0, text=DOCUMENT[:100]), o.Fork(op=1, seq=0, children=(1, 2, 3, 4, 5))]
    for n, question in enumerate(QUESTIONS, start=1):
        ops += [o.Text(op=2 * n, seq=n, text=question), o.Gen(op=2 * n + 1, seq=n, params=EIGHT)]
    outcome = driver.run([*ops, *(o.Close(op=20 + n, seq=n) for n in range(count + 1))])
    assert engine.loop.counters.steps == 8
    for n, question in enumerate(QUESTIONS, start=1):
        engine.cache.flush()
        assert token_ids(outcome, 2 * n + 1) == token_ids(driver.run(ask(DOCUMENT[:100] + question)))
    engine.close()


def test_scores_and_vectors_of_one_text_are_those_of_each_alone(tiny_model_path: Path) -> None:
    choices = ("the mills of the town", "the mills of the lake", "a bridge")

    scored = SamplingParams(temperature=0.0, max_tokens=2, return_logprob=True, logprob_start_len=200)

    def programs() -> list[list[o.AnyOp]]:
        text = o.Text(op=0, seq=0, text=DOCUMENT)
        close = o.Close(op=2, seq=0)
        return [
            [text, o.Select(op=1, seq=0, choices=choices), close],
            [text, o.Score(op=1, seq=0, text="two mills"), close],
            [text, o.Embedding(op=1, seq=0), close],
            [text, o.Gen(op=1, seq=0, n=3, params=EIGHT), close],
            [text, o.Gen(op=1, seq=0, params=scored), close],
        ]

    def shown(outcome: Outcome) -> object:
        meta = outcome.done[1].meta
        scores = [round(score, 4) for score in getattr(meta, "scores", ())]
        drawn = [candidate.token_ids for candidate in getattr(meta, "candidates", ())]
        logprobs = [round(each.logprob, 4) for each in getattr(meta, "prompt_logprobs", ()) if each.logprob is not None]
        value = outcome.value(1)
        if isinstance(value, bytes):
            value = np.frombuffer(value, np.float32).round(3).tolist()
        return scores, drawn, logprobs, round(value, 3) if isinstance(value, float) else value

    engine = engine_of(tiny_model_path)
    driver, alone = Driver(engine), []
    for ops in programs():
        engine.cache.flush()
        alone.append(shown(driver.run(ops)))
    engine.cache.flush()
    outcomes = [driver.submit(ops) for ops in programs()]
    driver.run()
    assert [shown(each) for each in outcomes] == alone
    engine.close()


# -- steps that are not run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True], ids=["whole steps", "overlap"])
@pytest.mark.parametrize("failing_step", [0, 2])
def test_what_a_failed_forward_was_to_compute_is_found_by_nobody(
    tiny_model_path: Path, failing_step: int, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails that has the last chunk of a text and the questions about it, or the first chunks of all."""
    text = DOCUMENT if failing_step else DOCUMENT[:100]
    with using(traced(CPU)):
        fresh = Driver(engine_of(tiny_model_path))
        want = [token_ids(fresh.run(ask(text + question))) for question in QUESTIONS]
        engine = engine_of(tiny_model_path, StandIn() if is_ahead else None)
        driver = Driver(engine, check=False)
        forward, num_calls = engine.executor.forward, 0

        def failing(plan: StepPlan, *, needs_all: bool = True) -> object:
            nonlocal num_calls
            num_calls += 1
            if num_calls - 1 == failing_step:
                assert len(plan.rows) == len(QUESTIONS) and plan.rows[1].start > plan.rows[0].start
                raise RuntimeError("the device has failed")
            return forward(plan, needs_all=needs_all)

        monkeypatch.setattr(engine.executor, "forward", failing)
        asked = [driver.submit(ask(text + question)) for question in QUESTIONS]
        with pytest.raises(RuntimeError, match="the device has failed"):
            driver.run()
        for client, message in engine.fail_all(InternalError("a step failed")):
            assert client == CLIENT
            driver.outcomes[message.program].take(message)
        assert all(each.failed[1].error.kind == "InternalError" and each.closed is not None for each in asked)
        engine.check()
        assert engine.cache.num_cached == 128 * failing_step
        driver.check = True
        again = [driver.submit(ask(text + question)) for question in QUESTIONS]
        driver.run()
    assert [token_ids(each) for each in again] == want
    engine.close()
    fresh.engine.close()


def test_the_cache_stays_where_an_engine_is_stopped_between_steps(tiny_model_path: Path) -> None:
    engine = engine_of(tiny_model_path)
    driver = Driver(engine)
    driver.run(ask(DOCUMENT))
    for question in QUESTIONS:
        driver.submit(ask(DOCUMENT + question))
    driver.step()
    held = engine.cache.num_cached
    engine.fail_all(EngineLost("the engine was stopped"))
    assert engine.cache.num_cached == held > len(DOCUMENT)
    engine.close()


@pytest.mark.parametrize("fails", [True, False], ids=["it fails", "it runs"])
def test_an_engine_that_ends_after_a_failed_forward_stores_nothing_of_it(
    tiny_model_path: Path, tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_model_path, disk_cache=str(tmp_path))
    driver = Driver(engine, check=False)
    for question in QUESTIONS:
        driver.submit(ask(DOCUMENT[:100] + question))
    if fails:
        monkeypatch.setattr(engine.executor, "forward", lambda plan, needs_all: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.step()
    else:
        driver.step()
    engine.close()
    assert any(each.is_file() for each in tmp_path.rglob("*")) is not fails


@pytest.mark.parametrize("is_ahead", [False, True], ids=["whole steps", "overlap"])
def test_rows_that_read_from_a_failed_op_s_row_run_in_the_next_step(
    tiny_model_path: Path, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two texts that are scored is too long for the slots, so the other one's row leaves the step too."""
    prompt = DOCUMENT[:90]
    with using(traced(CPU)):
        fresh = Driver(engine_of(tiny_model_path))
        want = [token_ids(fresh.run(ask(prompt + question))) for question in QUESTIONS[:2]]
        engine = engine_of(tiny_model_path, StandIn() if is_ahead else None, num_slots=200)
        driver, plans = Driver(engine), []
        without = engine.scheduler.without_ended

        def without_ended(plan: StepPlan, *args: Any) -> StepPlan | None:
            left = without(plan, *args)
            plans.append((len(plan.rows), len(left.rows) if left else 0))
            return left

        monkeypatch.setattr(engine.scheduler, "without_ended", without_ended)
        choices = ("yes and yes again", "no " * 60)
        scored = driver.submit(
            [o.Text(op=0, seq=0, text=prompt), o.Select(op=1, seq=0, choices=choices), o.Close(op=2, seq=0)]
        )
        asked = [driver.submit(ask(prompt + question)) for question in QUESTIONS[:2]]
        driver.run()
    assert scored.failed[1].error.kind == "PromptTooLong"
    assert plans == [(3, 0)]
    assert [token_ids(each) for each in asked] == want
    engine.close()
    fresh.engine.close()


def test_a_candidate_that_is_parked_with_its_failed_op_is_not_run(tiny_model_path: Path) -> None:
    """The first candidate's sequence is the program's own, which outlives the op."""
    engine = engine_of(tiny_model_path, num_slots=120)
    driver = Driver(engine)
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    drawn = (o.Drawn((97,)), o.Drawn((98,) * 70))
    outcome = driver.run([o.Text(op=0, seq=0, text=DOCUMENT[:60]), o.Gen(op=1, seq=0, n=2, params=long, drawn=drawn)])
    assert outcome.failed[1].error.kind == "PromptTooLong" and engine.loop.counters.steps == 0
    assert engine.cache.num_cached == 0
    engine.close()


# -- one step of the model --------------------------------------------------------------------------------------------

IDS = np.random.default_rng(0).integers(0, 96, 64).astype(np.int32)
SLOTS = np.random.default_rng(1).permutation(64).astype(np.int32)


def row(number: int, start: int, end: int, slots: np.ndarray, *, ids: np.ndarray = IDS) -> PlanRow:
    """All slots are new to the executor, and all logits are wanted."""
    return PlanRow(number + 1, number, start, ids[start:end], slots[:end], 0, end - start)


def one_step() -> list[StepPlan]:
    """A prompt in two chunks. Two rows in the step of the second chunk read it, and the last one reads the second."""
    second, third = SLOTS.copy(), SLOTS.copy()
    second[38:48] = SLOTS[50:60]
    third[:48] = second[:48]
    third[44:52] = SLOTS[40:48]
    rows = (row(0, 12, 40, SLOTS), row(1, 38, 48, second, ids=IDS[::-1]), row(2, 44, 52, third, ids=IDS[::-1]))
    return [StepPlan(0, (row(0, 0, 12, SLOTS),)), StepPlan(1, rows)]


def step_after_step() -> list[StepPlan]:
    first, rows = one_step()
    return [first, *(StepPlan(i, (each,)) for i, each in enumerate(rows.rows, start=1))]


def logits(path: Path, plans: list[StepPlan], **options: Any) -> torch.Tensor:
    executor = executor_of(load_model(path, EngineConfig(model="tiny", **({"precision": "float32"} | options))))
    return torch.cat([executor.forward(plan).whole().clone() for plan in plans])


def executor_of(model: Model, num_slots: int = 64) -> Executor:
    sizes = {"num_slots": num_slots, "num_layers": len(model.layers)}
    kv = KVPool.for_model(model.config, dtype=model.kv_dtype, device=model.device, **sizes)
    return Executor(model, kv, max_rows=3, max_len=64, use_graphs=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_reads_the_keys_that_an_earlier_row_of_its_step_writes(name: str, tmp_path: Path) -> None:
    path = make_family(tmp_path / name, FAMILIES[name])
    want = logits(path, step_after_step())
    assert (logits(path, one_step()) - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("options", [{"precision": "auto"}, {"precision": "int16", "kv_dtype": "int8"}], ids=str)
def test_the_same_of_packed_weights(options: dict[str, str], packed_path: Path) -> None:
    assert torch.equal(logits(packed_path, one_step(), **options), logits(packed_path, step_after_step(), **options))


@pytest.mark.parametrize(
    "mesh",
    [Mesh(pipeline=2), Mesh(pipeline=4), Mesh(tensor=2, pipeline=2), Mesh(sequence=2), Mesh(2, 2, 1, 2)],
    ids=str,
)
@pytest.mark.parametrize("shared_tokens", [8, 1000], ids=["shared out", "run by all"])
def test_the_same_of_ranks(mesh: Mesh, shared_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages run a step in parts, and ranks that keep some slots of every sequence may share out its tokens."""
    monkeypatch.setattr(sequence, "SHARED_TOKENS", shared_tokens)
    monkeypatch.setattr(staged, "steps", lambda adapter: one_step())
    monkeypatch.setattr(staged, "executor_of", executor_of)
    path = make_tiny_model(tmp_path / "model", seed=1, num_layers=4)
    found, _ = staged.staged_logits(path, mesh, staged.config(path))
    assert (found - logits(path, step_after_step())).abs().max() <= 1e-4
