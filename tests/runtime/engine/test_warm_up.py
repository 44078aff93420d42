"""A warmed-up engine gives the answers of a new one and has counted nothing."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore, ready_engine
from phloem.runtime.engine.warm_up import GRAPHS, prepare
from phloem.runtime.executor import Executor
from phloem.runtime.scheduler import PlanRow, StepPlan
from phloem.tests.runtime.engine.driver import CLIENT, Driver
from phloem.tests.runtime.executor.stand_in import StandIn

PROMPT = "the sap rises and the leaves fall "


def config(path: Path, **options: object) -> EngineConfig:
    return EngineConfig(**{"model": str(path), "precision": "float32", "num_threads": 1, **options})


def say(engine: EngineCore) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    steps = [o.Text(op=0, seq=0, text=PROMPT), o.Gen(op=1, seq=0, params=params), o.Close(op=2, seq=0)]
    return Driver(engine).run(steps).done[1].value


def test_a_warmed_up_engine_gives_the_answers_of_a_new_one(tiny_model_path: Path) -> None:
    answers = []
    for engine in (ready_engine(config(tiny_model_path)), EngineCore(config(tiny_model_path))):
        answers.append(say(engine))
        engine.check()
        engine.close()
    assert answers[0] == answers[1]


def test_an_engine_on_a_gpu_is_warmed_up_too_and_gives_the_cpu_s_answers(tiny_model_path: Path) -> None:
    device, told = StandIn(), []
    engines = EngineCore(config(tiny_model_path)), EngineCore(config(tiny_model_path), accelerator=device)
    prepare(engines[1], lambda *what: told.append(what))
    count = len(device.graphs)
    assert count > GRAPHS and told[0][1:] == (0, GRAPHS + 1) and told[-1][1:] == (GRAPHS + 1, GRAPHS + 1)
    assert say(engines[1]) == say(engines[0])
    assert len(device.graphs) == count  # a prompt of one chunk and steps of one row had theirs already
    for engine in engines:
        engine.check()
        engine.close()


def test_what_greedy_draws_need_is_made_before_the_engine_is_ready_and_on_its_thread(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    monkeypatch.setattr(Executor, "prepare_draws", lambda executor: threads.append(threading.current_thread()))
    engine = ready_engine(config(tiny_model_path))
    assert threads == [threading.current_thread()]
    engine.when_idle()
    engine.close()
    assert len(threads) == 1


def test_warm_up_leaves_no_counts_and_no_cache(tiny_model_path: Path) -> None:
    engine = ready_engine(config(tiny_model_path))
    ((_, answer),) = engine.step([(CLIENT, m.Query(1, "metrics"))])
    metrics = answer.value
    assert (metrics["steps"], metrics["forward_tokens"], metrics["cache_lookups"]) == (0, 0, 0)
    assert metrics["slots"]["free"] == metrics["slots"]["total"] and metrics["usage"]["programs"] == {}
    engine.close()


@pytest.mark.parametrize("limits", [{"num_slots": 1}, {"num_slots": 8, "max_running": 1}, {"max_seq_len": 2}])
def test_warm_up_works_with_small_limits(tiny_model_path: Path, limits: dict[str, int]) -> None:
    engine = ready_engine(config(tiny_model_path, **limits))
    engine.check()
    assert engine.step([]) == []
    engine.close()


def test_after_the_warm_up_steps_of_few_rows_are_not_cold(tiny_model_path: Path) -> None:
    engine = ready_engine(config(tiny_model_path))
    cold = []
    for num_rows in (1, 2, 3, 4):
        rows = [PlanRow(i, i, 5, np.zeros(1, np.int32), np.arange(6, dtype=np.int32), 0, 1) for i in range(num_rows)]
        engine.executor.forward(StepPlan(0, tuple(rows)))
        cold.append(engine.executor.is_cold)
    engine.close()
    assert cold == [False, False, True, False]


def test_what_no_first_answer_waits_for_is_done_once_nothing_has_run_for_a_while(tiny_model_path: Path) -> None:
    now, done = [0.0], []
    engine = EngineCore(config(tiny_model_path), clock=lambda: now[0])
    engine.when_idle = lambda: done.append(now[0])
    for now[0] in (0.4, 0.5):
        engine.step([])
    now[0] = 0.6
    engine.step([(CLIENT, m.Query(1, "metrics"))])
    now[0] = 1.0
    engine.step([])
    assert not done
    for now[0] in (1.2, 3.0):
        engine.step([])
    engine.close()
    assert done == [1.2]


def test_an_engine_without_work_records_the_tapes_of_more_rows_one_at_a_time(tiny_model_path: Path) -> None:
    now, ticks = [0.0], itertools.count()
    engine = ready_engine(config(tiny_model_path), clock=lambda: now[0] + 1e-6 * next(ticks))

    def is_cold(num_rows: int) -> bool:
        rows = [PlanRow(i, i, 5, np.zeros(1, np.int32), np.arange(6, dtype=np.int32), 0, 1) for i in range(num_rows)]
        engine.executor.forward(StepPlan(0, tuple(rows)))
        return engine.executor.is_cold

    now[0] = 10.0
    engine.step([])  # nothing has been asked yet
    assert is_cold(3)
    say(engine)
    now[0] += 0.4
    engine.step([])  # too soon
    now[0] += 0.2
    engine.step([])
    found = is_cold(5), is_cold(6)
    engine.check()
    engine.close()
    assert found == (False, True)


def test_after_the_first_answer_it_is_done_in_the_first_short_pause(tiny_model_path: Path) -> None:
    now, ticks, done = [0.0], itertools.count(), []
    engine = EngineCore(config(tiny_model_path), clock=lambda: now[0] + 1e-6 * next(ticks))
    engine.when_idle = lambda: done.append(engine.has_work)
    say(engine)
    for now[0] in (0.04, 0.06):  # PAUSE_S is 0.05, QUIET_S is never over
        assert not done
        engine.step([])
    engine.close()
    assert done == [False]
