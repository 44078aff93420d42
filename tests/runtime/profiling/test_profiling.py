"""Profiling: spans nest, watching changes no answer, and every part of a step has its spans."""

import json
from pathlib import Path

import pytest
from phloem.cli import main
from phloem.protocol.errors import InvalidParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.profiling import Load, Spans, profile_lines, run_load, watch
from phloem.runtime.speculative import LookupDrafter, Speculation
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.speculative.oracle import Free


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("profiled"), seed=3)


@pytest.fixture
def engine(model: Path):
    engine = EngineCore(EngineConfig(model=str(model), max_seq_len=256, num_threads=1, speculative="off"))
    yield engine
    engine.close()


def test_a_spans_own_time_is_without_what_lies_inside() -> None:
    spans = Spans()
    with spans.span("step"):
        spans.mark("decode")
        with spans.span("outer"):
            spans.add("inner", 0, 7_000_000)
    inner, outer, step = spans.spans
    assert (inner.name, inner.own_ns) == ("inner", 7_000_000)
    assert outer.own_ns == outer.end_ns - outer.start_ns - 7_000_000
    assert step.own_ns == step.end_ns - step.start_ns - (outer.end_ns - outer.start_ns)
    count, times = spans.milliseconds("decode")
    assert count == 1 and times["inner"] == 7.0
    assert spans.milliseconds("prefill") == (0, {})


def test_outliers_do_not_count_in_the_mean_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]
    monkeypatch.setattr("phloem.runtime.profiling.spans.clock_ns", lambda: now_ns[0])
    spans = Spans()
    for length_ms in (2, 4, 4, 6, 4, 90, 1, 4):
        with spans.span("step"):
            spans.mark("decode")
            with spans.span("kernel"):
                now_ns[0] += length_ms * 1_000_000
    assert spans.milliseconds("decode") == (8, {"kernel": 4.0, "step": 0.0})


def test_time_set_apart_is_in_no_other_span_and_in_no_trace(tmp_path: Path) -> None:
    spans = Spans()
    with spans.span("step"):
        spans.mark("decode")
        spans.set_apart("watching", 5_000_000)
    step = spans.spans[-1]
    assert spans.milliseconds("decode")[1]["watching"] == 5.0
    assert step.own_ns == step.end_ns - step.start_ns - 5_000_000
    spans.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["step"]


def test_watching_changes_no_answer_and_finds_every_part(engine: EngineCore) -> None:
    load = Load(rows=3, prompt_tokens=20, new_tokens=6, shared_tokens=10)
    plain = run_load(engine, load)
    spans = Spans()
    watch(engine, spans)
    watched = run_load(engine, load, spans=spans)
    assert plain.output_tokens == watched.output_tokens == 18
    count, times = spans.milliseconds("decode")
    assert count >= 4
    assert {"schedule", "gather", "attention", "small ops", "sample", "mask", "accept", "send", "step"} <= set(times)
    table = "\n".join(profile_lines(spans))
    assert "decode steps" in table and "prefill steps" in table and "schedule" in table


def test_a_load_that_runs_again_does_not_find_its_own_answers_as_drafts(model: Path) -> None:
    engine = EngineCore(EngineConfig(model=str(model), max_seq_len=256, num_threads=1, prefix_cache=False))
    lookup = LookupDrafter(lambda ids, name, limit: ids[:0])
    engine.loop.speculation = Speculation([lookup], max_draft=12, costs=Free(), clock=lambda: 0.0)
    load, steps = Load(prompt_tokens=20, new_tokens=40), list[int]()
    for flush in (True, True, False):
        before = engine.loop.counters.steps
        run_load(engine, load, flush=flush)
        steps.append(engine.loop.counters.steps - before)
    engine.close()
    assert steps[0] == steps[1] > steps[2], steps


def test_a_load_with_a_grammar_may_be_shorter_than_its_shortest_text(engine: EngineCore) -> None:
    ran = run_load(engine, Load(rows=2, prompt_tokens=8, new_tokens=2, grammar=True))
    assert 0 < ran.output_tokens <= 4


def test_a_trace_has_every_span_in_microseconds(engine: EngineCore, tmp_path: Path) -> None:
    spans = Spans()
    watch(engine, spans)
    run_load(engine, Load(new_tokens=3), spans=spans)
    spans.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"process_name": "phloem engine", "thread_name": "step loop"}
    events = sorted((event for event in events if event["ph"] == "X"), key=lambda event: (event["ts"], -event["dur"]))
    assert {"step", "schedule", "attention"} <= {event["name"] for event in events}
    ends: list[float] = []  # of the spans that are open
    for event in events:
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert event["dur"] > 0 and event["ts"] >= 0
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3, event
        ends.append(event["ts"] + event["dur"])


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (Load(prompt_tokens=200, new_tokens=100), "300 tokens a row, but the model's context is 256"),
        (Load(rows=65, prompt_tokens=8), "65 rows, but max_running is 64"),
        (Load(prompt_tokens=8, shared_tokens=9), "shared_tokens at most prompt_tokens"),
    ],
)
def test_a_load_that_does_not_fit_is_named(engine: EngineCore, load: Load, message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        run_load(engine, load)


def test_bench_prints_speed_and_profile(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "2", "--prompt-tokens", "9", "--new-tokens", "4", "--max-seq-len", "64", "--num-threads", "1"]
    assert main(["bench", str(model), *sizes, "--profile", str(tmp_path / "t.json")]) == 0
    out = capsys.readouterr().out
    assert "2 rows: 8 tokens" in out and "decode steps" in out
    assert (tmp_path / "t-2.json").exists()
