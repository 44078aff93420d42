"""What each part of the engine gains: the same programs without it, as in section 6.3 of the SGLang paper.

Each ablation is one setting of ours. Orders and what the scheduler learns from programs matter where many programs
wait and slots are short, so these run more cases of a workload with ``TIGHT`` slots, beside a run of the whole engine
with as many.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .measure import Found, measure
from .systems import CLIENT_TIMEOUT_S, Programs, Run
from .workload import Case, Workload

TIGHT = 2048  # slots: the longest sequence has 1,500 tokens
ROOMY = 65536


@dataclass(frozen=True, slots=True)
class Ablation:
    """``options``: the engine's settings that differ from ``against``, another ablation's name. ``one_by_one``: the
    frontend runs the programs of a batch in turn. ``about``: the part that is missing.
    """

    name: str
    about: str
    options: dict[str, Any] = field(default_factory=dict)
    one_by_one: bool = False
    against: str = "whole"

    @property
    def is_tight(self) -> bool:
        return "tight" in (self.name, self.against)

    @property
    def num_slots(self) -> int:
        return TIGHT if self.is_tight else ROOMY


ABLATIONS = (
    Ablation("whole", "nothing"),
    Ablation("no-cache", "the prefix cache", {"prefix_cache": False}),
    Ablation("last-prompt", "the tree: only the last prompt is kept", {"cached_prompts": "last"}),
    Ablation("one-by-one", "parallel programs of the frontend", one_by_one=True),
    Ablation("no-jump-forward", "jump-forward", {"jump_forward": False}),
    Ablation("no-drafts", "drafts", {"speculative": "off"}),
    Ablation("tight", "nothing, but slots are short"),
    Ablation("first-come", "the order by programs", {"order": "first_come"}, against="tight"),
    Ablation("random-order", "any order", {"order": "random"}, against="tight"),
    Ablation(
        "program-unaware",
        "what programs say of their future",
        {"order": "first_come", "eviction": "lru"},
        against="tight",
    ),
)


class OneByOne(Programs):
    """``Programs`` whose batch runs one program after the other."""

    def run(self, workload: Workload, cases: list[Case], *, alone: bool, to_the_end: bool = True) -> Run:
        run = super().run(workload, cases, alone=True, to_the_end=to_the_end)
        return run if alone else Run(run.wall_s, run.answers, [], run.usage)


def make(ablation: Ablation, model: str, threads: int) -> Programs:
    options = {"num_threads": threads, "client_timeout_s": CLIENT_TIMEOUT_S, "num_slots": ablation.num_slots}
    kind = OneByOne if ablation.one_by_one else Programs
    return kind(ablation.name, model, {**options, **ablation.options})


def measure_ablations(
    model: str,
    workloads: Iterable[Workload],
    *,
    threads: int,
    repeats: int,
    count: Callable[[Workload], int],
    tight_count: Callable[[Workload], int],
    say: Callable[[str], None],
) -> Found:
    """Every workload with each ablation, all its programs at once; one engine runs at a time. ``tight_count``: cases
    where slots are short.
    """
    found: Found = {}
    for ablation in ABLATIONS:
        system = make(ablation, model, threads)
        num = tight_count if ablation.is_tight else count
        try:
            system.start()
            for name, row in measure([system], workloads, repeats=repeats, alone=0, count=num, say=say).items():
                found.setdefault(name, {}).update(row)
        finally:
            system.stop()
    return found


def gains(found: Found, ablation: Ablation) -> dict[str, float]:
    """The throughput without the part, as a share of the throughput with it, by workload."""
    return {
        name: row[ablation.name].programs_per_s / row[ablation.against].programs_per_s
        for name, row in found.items()
        if ablation.name in row and ablation.against in row
    }


def table(found: Found) -> list[str]:
    """Throughput of each ablation in per cent of the engine with all its parts."""
    shown = [one for one in ABLATIONS if one.name not in ("whole", "tight")]
    lines = [f"{'% of the throughput':<22}" + "".join(f"{one.name:>17}" for one in shown)]
    for name in found:
        cells = [gains(found, one).get(name) for one in shown]
        lines.append(f"{name:<22}" + "".join(f"{'-' if cell is None else f'{cell:.0%}':>17}" for cell in cells))
    return lines
