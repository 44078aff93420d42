"""The policy that Serve's controller calls, with made reports of replicas: how many replicas it wants."""

from types import SimpleNamespace
from typing import Any

import pytest
from phloem.cluster.ray.scaling import MAX_KINDS, OTHERS, FleetScaler, LoadReport

SECONDS_OF_A_TOKEN = 0.001


def metrics(runs: dict[str, int], *, generated: int, waiting: int = 0, seconds: float = 0.0) -> dict[str, Any]:
    programs = {
        name: {"runs": count, "tokens": {"computed": 3 * count, "generated": generated}} for name, count in runs.items()
    }
    steps = {"steps": 10, "forward_rows": 10.0, "forward_tokens": 10.0, "step_seconds": seconds}
    return {"usage": {"programs": programs}, "waiting": waiting, **steps}


def test_a_replica_reports_sums_by_kind_and_its_rates():
    report = LoadReport(start_s=4.0, max_rows=8)
    assert report.numbers == {"start_s": 4.0}
    report.note(metrics({"chat": 2, "judge": 1}, generated=50, waiting=3, seconds=0.08))
    numbers = report.numbers
    assert (numbers["runs chat"], numbers["computed chat"], numbers["generated judge"]) == (2, 6, 50)
    assert (numbers["waiting"], numbers["start_s"]) == (3, 4.0)
    assert numbers["output_s_per_token"] > 0 and numbers["prefill_s_per_token"] > 0


def test_a_report_names_a_bounded_number_of_kinds():
    report = LoadReport(start_s=4.0, max_rows=8)
    report.note(metrics({f"kind {i}": 1 for i in range(MAX_KINDS + 10)}, generated=5))
    kinds = [name for name in report.numbers if name.startswith("runs ")]
    assert len(kinds) == MAX_KINDS + 1 and report.numbers[f"runs {OTHERS}"] == 10


class Served:
    """Replicas whose programs arrive at ``rate``, each of ``tokens``; Serve reports them to ``scaler`` each second."""

    def __init__(self, scaler: FleetScaler) -> None:
        self.scaler = scaler
        self.now_s = 1000.0
        self.target = 1
        self.series: dict[str, dict[str, list[Any]]] = {}
        self.runs: dict[str, float] = {}
        self.history: list[int] = []

    def run(self, seconds: int, *, rate: float, tokens: int = 100) -> int:
        for _ in range(seconds):
            self.now_s += 1.0
            names = [f"r{i}" for i in range(self.target)]  # a replica starts at once
            self.series = {key: {n: s for n, s in by.items() if n in names} for key, by in self.series.items()}
            for name in names:
                self.runs[name] = self.runs.get(name, 0.0) + rate / len(names)
                runs = int(self.runs[name])
                rates = {"prefill_s_per_token": 1e-9, "output_s_per_token": SECONDS_OF_A_TOKEN}
                numbers = {"runs chat": runs, "generated chat": runs * tokens, "waiting": 0, "start_s": 2.0, **rates}
                for key, value in numbers.items():
                    series = self.series.setdefault(key, {}).setdefault(name, [])
                    series[:] = [*series[-9:], SimpleNamespace(timestamp=self.now_s, value=value)]
            for _ in range(3):  # Serve asks more often than replicas report
                ctx = SimpleNamespace(
                    raw_metrics=self.series, current_num_replicas=len(names), target_num_replicas=self.target
                )
                found, state = self.scaler(ctx)
                assert state == {}
            self.target = found
            self.history.append(found)
        return self.target


def test_replicas_follow_the_work_that_is_reported_up_at_once_and_down_late():
    served = Served(FleetScaler(max_replicas=4, window_s=36, calm_s=20))
    assert served.run(20, rate=2.0) == 1, "0.2 s of work a second"
    assert served.run(30, rate=12.0) == 2, "1.2 s of work a second, and a replica is to be busy for 0.7 of its time"
    served.history.clear()
    assert served.run(15, rate=2.0) == 2, "not before calm_s"
    assert served.run(60, rate=2.0) == 1
    assert served.history == sorted(served.history, reverse=True), "no swing"


def test_what_ran_before_the_policy_began_is_no_arrival():
    served = Served(FleetScaler(max_replicas=4, window_s=36, calm_s=20))
    served.runs["r0"] = 10_000.0
    assert served.run(30, rate=1.0) == 1


def test_a_sample_counts_once():
    scaler, arrived = FleetScaler(max_replicas=4), []
    scaler.scaler.arrived = lambda kind, now_s: arrived.append(kind)
    Served(scaler).run(10, rate=3.0)
    assert len(arrived) == 27, "30 less those of the first sample"


def test_without_a_report_the_number_stays_within_the_bounds():
    ctx = SimpleNamespace(raw_metrics={}, current_num_replicas=1, target_num_replicas=7)
    assert FleetScaler(max_replicas=4)(ctx) == (4, {})


@pytest.mark.parametrize(("settings", "expected"), [({}, 2.0), ({"start_s": 9.0}, 9.0)])
def test_the_time_of_a_start_is_learned_unless_it_is_given(settings, expected):
    scaler = FleetScaler(max_replicas=4, **settings)
    Served(scaler).run(3, rate=1.0)
    assert scaler.scaler.settings.start_s == expected
