"""Figures of workloads by system: measured in turn, so that all systems meet the same noise of the machine."""

import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .systems import HTTP, PATIENCE_S, PROGRAM, TRANSFORMERS, System
from .workload import Case, Workload

FEW = {"chat_short": 2, "long_document": 1}  # cases of transformers: it has no cache and no grammars, and is slow
ALONE_SEED, ANSWERS_SEED = 500_000, 900_000  # far from the seeds of repeats


@dataclass(slots=True)
class Figures:
    """One workload on one system. ``wall_s``: of all programs at once, one value per repeat; token counts are those of
    the last repeat. ``latency_s``: of programs that ran alone. ``right``: of the last repeat, out of ``programs``,
    where every answer ends where the model ends it.
    """

    workload: str
    system: str
    programs: int
    wall_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    right: int | None = None

    @property
    def programs_per_s(self) -> float:
        return self.programs / statistics.median(self.wall_s)

    @property
    def latency(self) -> float:
        return statistics.median(self.latency_s)


Found = dict[str, dict[str, Figures]]  # by workload, then by system


def supports(system: str, workload: Workload) -> bool:
    return system != TRANSFORMERS or workload.name in FEW


def measure(
    systems: Iterable[System],
    workloads: Iterable[Workload],
    *,
    repeats: int,
    alone: int,
    count: Callable[[Workload], int],
    say: Callable[[str], None],
    keep: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Run every workload on every started system, ``repeats`` times, and then ``alone`` programs alone. A fault of
    one system is said and skips it there; one that takes too long is stopped and skipped from then on. ``keep`` gets
    the figures so far after each workload.

    The prefixes of a repeat are new to every cache, and the same for all systems.
    """
    found: Found = {}
    start_s, running = time.perf_counter(), list(systems)
    for repeat in range(repeats):
        for workload in workloads:
            begin_s = time.perf_counter()
            for system in list(running):
                if not supports(system.name, workload):
                    continue
                num = min(count(workload), FEW[workload.name]) if system.name == TRANSFORMERS else count(workload)
                row = found.setdefault(workload.name, {})
                figures = row.get(system.name) or Figures(workload.name, system.name, num)
                try:
                    measure_once(system, workload, figures, repeat, alone)
                except TimeoutError:
                    say(f"{workload.name} on {system.name} failed: not done after {PATIENCE_S:g} s; it is stopped")
                    running.remove(system)
                    stop(system, say)
                    continue
                except (SystemExit, Exception):
                    say(f"{workload.name} on {system.name} failed:\n{traceback.format_exc()}")
                    continue
                row[system.name] = figures
                say(line(figures))
            keep(found)
            end_s = time.perf_counter()
            say(f"{workload.name}: {end_s - begin_s:.0f} s, so far {end_s - start_s:.0f} s")
    return found


def start(system: System, say: Callable[[str], None]) -> bool:
    """Whether ``system`` runs now; a fault is said."""
    begin_s = time.perf_counter()
    try:
        system.start()
    except (SystemExit, Exception):
        say(f"{system.name} did not start:\n{traceback.format_exc()}")
        stop(system, say)
        return False
    say(f"{system.name}: {system.version}, started in {time.perf_counter() - begin_s:.0f} s")
    return True


def stop(system: System, say: Callable[[str], None]) -> None:
    """Stop a system, started or not; a fault is said."""
    try:
        system.stop()
    except (SystemExit, Exception):
        say(f"{system.name} did not stop:\n{traceback.format_exc()}")


def measure_once(system: System, workload: Workload, figures: Figures, repeat: int, alone: int) -> None:
    """One repeat: all programs at once, then ``alone`` others one by one, unless the first was alone already."""
    cases = workload.make(repeat + 1, figures.programs)
    run = system.run(workload, cases, alone=False)
    latencies_s = [run.wall_s] if figures.programs == 1 else []
    if not latencies_s and alone:
        latencies_s = system.run(workload, workload.make(ALONE_SEED + repeat, alone), alone=True).latencies_s
    figures.wall_s.append(run.wall_s)
    figures.latency_s += latencies_s
    for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens"):
        setattr(figures, name, getattr(run.usage, name))
    figures.right = num_right(system, workload, cases, run.answers)


def num_right(system: System, workload: Workload, cases: list[Case], answers: list[Any]) -> int | None:
    """How many answers are right. ``answers``: of a run that went on behind the ends of free texts, so texts are asked
    for again.
    """
    if workload.check is None:
        return None
    if workload.free_tokens:
        answers = system.run(workload, cases, alone=False, to_the_end=False).answers
    return sum(workload.check(answer, case.expected) for answer, case in zip(answers, cases, strict=True))


def same_answers(program: System, http: System, workload: Workload, num: int) -> tuple[int, int]:
    """(equal answers, answers) of ours by program and by HTTP, where every answer ends where the model ends it."""
    cases = workload.make(ANSWERS_SEED, num)
    ours = program.run(workload, cases, alone=False, to_the_end=False).answers
    plain = http.run(workload, cases, alone=False, to_the_end=False).answers
    return sum(map(_equal, ours, plain)), num


def _equal(ours: Any, plain: Any) -> bool:
    return list(ours) == list(plain) if isinstance(ours, list) else ours == plain


def count_faults(found: Found, workloads: dict[str, Workload]) -> list[str]:
    """Where a system did other work than the workload asks: output tokens outside grammars, right to the token.

    Under a grammar a text is as long as the model makes it, so the count may differ by a fifth from ours by program.
    """
    faults = []
    for name, row in found.items():
        if not workloads[name].counts_output:
            continue
        free = workloads[name].free_tokens
        for system, figures in row.items():
            least = free * figures.programs
            if free and not workloads[name].needs_grammar and figures.output_tokens != least:
                faults.append(f"{name} on {system}: {figures.output_tokens} output tokens, not {least}")
            elif figures.output_tokens < least:
                faults.append(f"{name} on {system}: {figures.output_tokens} output tokens, fewer than {least}")
            elif PROGRAM in row and system != TRANSFORMERS and not close(figures, row[PROGRAM]):
                ours = row[PROGRAM].output_tokens
                faults.append(f"{name} on {system}: {figures.output_tokens} output tokens, ours by program {ours}")
    return faults


def close(figures: Figures, ours: Figures) -> bool:
    most = max(figures.output_tokens, ours.output_tokens)
    return abs(figures.output_tokens - ours.output_tokens) <= 0.2 * most + 2 * figures.programs


def ratios(found: Found, peer: str, *, by_latency: bool = False) -> dict[str, float]:
    """How much faster ours by program is than ``peer``, by workload."""
    return {
        name: row[peer].latency / row[PROGRAM].latency
        if by_latency
        else row[PROGRAM].programs_per_s / row[peer].programs_per_s
        for name, row in found.items()
        if PROGRAM in row and peer in row
    }


@dataclass(frozen=True, slots=True)
class Bar:
    """``mean``: the least geometric mean of the ratios to ``peer``; ``least``: the least ratio of any workload."""

    peer: str
    mean: float
    least: float = 0.0
    by_latency: bool = False


BARS = (
    Bar("llama.cpp", 6.0, 2.0),
    Bar("openvino", 3.0, 1.2),
    Bar("llama.cpp", 3.0, by_latency=True),
    Bar(HTTP, 1.3, by_latency=True),
)


def judged(found: Found, bar: Bar) -> str:
    what = "latency of one program alone" if bar.by_latency else "throughput"
    about = f"{what} against {bar.peer}"
    values = ratios(found, bar.peer, by_latency=bar.by_latency)
    if not values:
        return f"{about}: not measured"
    mean = statistics.geometric_mean(values.values())
    lowest = min(values, key=values.__getitem__)
    holds = mean >= bar.mean and values[lowest] >= bar.least
    least = f", none below {bar.least:g}x" if bar.least else ""
    return (
        f"{about}: {mean:.2f}x in the geometric mean, lowest {values[lowest]:.2f}x ({lowest}); "
        f"must be {bar.mean:g}x{least}: {'holds' if holds else 'MISSED'}"
    )


def line(f: Figures) -> str:
    right = "" if f.right is None else f"  {f.right}/{f.programs} right"
    alone = f"{f.latency * 1e3:>8.0f} ms alone" if f.latency_s else ""
    return (
        f"{f.workload:<20}{f.system:<15}{f.programs:>4} programs{f.wall_s[-1]:>8.2f} s{f.output_tokens:>7} tokens"
        f"{alone}{right}"
    )


def table(found: Found, systems: list[str]) -> list[str]:
    """Programs a second by workload and system, and the latency of a program alone."""
    lines = [f"{'programs/s, latency alone':<24}" + "".join(f"{name:>20}" for name in systems)]
    for name, row in found.items():
        cells = [f"{row[s].programs_per_s:.2f} {row[s].latency * 1e3:>6.0f} ms" if s in row else "-" for s in systems]
        lines.append(f"{name:<24}" + "".join(f"{cell:>20}" for cell in cells))
    return lines


def as_json(found: Found) -> dict[str, Any]:
    return {name: {system: asdict(figures) for system, figures in row.items()} for name, row in found.items()}


def from_json(held: dict[str, Any]) -> Found:
    return {name: {system: Figures(**figures) for system, figures in row.items()} for name, row in held.items()}
