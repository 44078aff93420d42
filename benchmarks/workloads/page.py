"""The page of the workloads: its tables, listings and charts, made from the figures and from the source files.

    python -m benchmarks.workloads.page   # writes docs/workloads.md and its charts again

The words of the page are in ``docs/workloads.md`` itself; what stands between two marks, ``<!-- made: NAME -->`` and
``<!-- end -->``, is made here.
"""

import inspect
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..chart import DARK, LIGHT, bar_chart
from . import ablations
from .catalogue import WORKLOADS
from .held import held_figures
from .measure import BARS, Figures, Found, from_json, judged, ratios
from .systems import HTTP, PROGRAM, SYSTEMS
from .workload import Workload

DOCS = Path(__file__).parents[2] / "docs"
PAGE, IMAGES = DOCS / "workloads.md", DOCS / "images"
MODEL, LARGER = "smollm2", "qwen2.5-coder-1.5b"
_MADE = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str, models: dict[str, Any]) -> str:
    """``text`` with every made part made again. Raises KeyError for a mark of an unknown part."""
    entry = models.get(MODEL, {})
    found, without = from_json(entry.get("workloads", {})), from_json(entry.get("ablations", {}))
    larger = models.get(LARGER, {})
    found_larger = from_json(larger.get("workloads", {}))
    parts: dict[str, Callable[[], str]] = {
        "throughput": lambda: throughput_table(found),
        "latency": lambda: latency_table(found),
        "charts": lambda: pictures(
            {"throughput": "Programs a second by workload and system", "latency": "Latency of one program alone"}
            if found
            else {}
        ),
        "ablations-chart": lambda: pictures(
            {"ablations": "Throughput without a part of the engine"} if without else {}
        ),
        "bars": lambda: "\n".join(f"- {judged(found, bar)}" for bar in BARS) + "\n",
        "work": lambda: work_table(found),
        "requests": lambda: request_table(found),
        "answers": lambda: answers(entry),
        "larger": lambda: larger_table(found_larger),
        "larger-bars": lambda: "\n".join(f"- {judged(found_larger, bar)}" for bar in BARS) + "\n",
        "larger-answers": lambda: answers(larger),
        "larger-measured": lambda: measured(larger),
        "ablations": lambda: ablation_table(without),
        "measured": lambda: measured(entry),
        **{name: lambda one=one: listing(one) for name, one in WORKLOADS.items()},
    }
    return _MADE.sub(lambda match: match[1] + "\n" + parts[match[2]]() + "\n" + match[3], text)


def listing(workload: Workload) -> str:
    """Both forms of a workload, from their source files, and their lines."""
    program, plain = source(workload.program.func), source(workload.plain)
    return (
        f"{workload.source}. The program, {num_lines(program)} lines:\n\n```py\n{program}```\n\n"
        f"The plain way, {num_lines(plain)} lines:\n\n```py\n{plain}```\n"
    )


def source(function: Callable[..., Any]) -> str:
    return inspect.getsource(function)


def num_lines(code: str) -> int:
    """Lines that are not blank."""
    return sum(bool(line.strip()) for line in code.splitlines())


def shown_systems(found: Found) -> list[str]:
    return [system for system in SYSTEMS if any(system in row for row in found.values())]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n" if rows else "Not measured yet.\n"


def throughput_table(found: Found) -> str:
    systems = shown_systems(found)
    rows = [[name, *(_throughput(row.get(system)) for system in systems)] for name, row in found.items()]
    return markdown(["programs a second", *systems], rows)


def latency_table(found: Found) -> str:
    systems = shown_systems(found)
    rows = [[name, *(_latency(row.get(system)) for system in systems)] for name, row in found.items()]
    return markdown(["seconds of one program alone", *systems], rows)


def larger_table(found: Found) -> str:
    """Programs a second and the latency in one table."""
    systems = shown_systems(found)
    rows = [
        [
            name,
            *(
                "-" if (one := row.get(system)) is None else f"{_throughput(one)} ({_latency(one)} s)"
                for system in systems
            ),
        ]
        for name, row in found.items()
    ]
    return markdown(["programs a second (latency alone)", *systems], rows)


def work_table(found: Found) -> str:
    """What ours by program computes: prompt tokens that no cache held, output tokens, and both a second."""
    rows = []
    for name, row in found.items():
        if (ours := row.get(PROGRAM)) is not None:
            prompt = ours.prompt_tokens - ours.cached_tokens
            rate = (prompt + ours.output_tokens) / ours.wall_s[-1]
            rows.append([name, f"{prompt:,}", f"{ours.output_tokens:,}", f"{rate:,.0f}"])
    return markdown(["computed by programs", "prompt tokens", "output tokens", "tokens a second"], rows)


def request_table(found: Found) -> str:
    """How much longer one program alone takes the plain way, for each of its requests; the least gain first."""
    rows = []
    for name, ratio in sorted(ratios(found, HTTP, by_latency=True).items(), key=lambda item: item[1]):
        ours, plain = found[name][PROGRAM], found[name][HTTP]
        num = plain.requests / plain.programs
        lost_ms = (plain.latency - ours.latency) * 1e3
        computed = (ours.prompt_tokens - ours.cached_tokens + ours.output_tokens) / ours.programs
        rows.append([name, f"{ratio:.2f}", f"{num:.0f}", f"{lost_ms / num:.1f} ms", f"{computed:,.0f}"])
    return markdown(["one program alone", "plain / program", "requests", "lost for each", "tokens computed"], rows)


def _throughput(figures: Figures | None) -> str:
    if figures is None:
        return "-"
    rates = sorted(figures.programs / wall for wall in figures.wall_s)
    spread = f" ({rates[0]:.2f} to {rates[-1]:.2f})" if len(rates) > 1 else ""
    right = "" if figures.right is None else f", {figures.right}/{figures.programs} right"
    return f"{statistics.median(rates):.2f}{spread}{right}"


def _latency(figures: Figures | None) -> str:
    return "-" if figures is None else f"{figures.latency:.2f}"


def answers(entry: dict[str, Any]) -> str:
    equal = entry.get("same_answers", {})
    if not equal:
        return "Not measured.\n"
    same, asked = sum(one for one, _ in equal.values()), sum(all_ for _, all_ in equal.values())
    other = [f"{name} {one} of {all_}" for name, (one, all_) in equal.items() if one < all_]
    less = f" Not all of: {', '.join(other)}." if other else ""
    return f"{same} of {asked} answers by program equal those by HTTP.{less}\n"


def ablation_table(found: Found) -> str:
    shown = [one for one in ablations.ABLATIONS if one.name not in ("whole", "tight")]
    rows = []
    for name in found:
        cells = [ablations.gains(found, one).get(name) for one in shown]
        rows.append([name, *("-" if cell is None else f"{cell:.0%}" for cell in cells)])
    return markdown(["throughput without", *(one.name for one in shown)], rows)


def pictures(names: dict[str, str]) -> str:
    """The charts of these names, with what they show."""
    return "".join(
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="images/workloads-{name}-dark.svg">'
        f'<img src="images/workloads-{name}-light.svg" alt="{about}" width="440"></picture>\n'
        for name, about in names.items()
    )


def measured(entry: dict[str, Any]) -> str:
    lines = []
    for part in ("about_workloads", "about_ablations"):
        if about := entry.get(part):
            versions = "; ".join(f"{name}: {version}" for name, version in about.get("versions", {}).items())
            lines.append(
                f"- `{about['command']}` on {about['machine']}, commit {about['commit']}, {about['date']}, "
                f"torch {about['torch']}" + (f" ({versions})" if versions else "")
            )
    return ("\n".join(lines) or "Not measured.") + "\n"


def charts(models: dict[str, Any]) -> dict[str, str]:
    """The SVGs by file name, each for a light and for a dark ground."""
    entry = models.get(MODEL, {})
    found, without = from_json(entry.get("workloads", {})), from_json(entry.get("ablations", {}))
    about = entry.get("about_workloads", {})
    where = f"{MODEL}, {about.get('machine', '').partition(',')[0]}; log scale"
    made = {}
    for theme_name, theme in (("light", LIGHT), ("dark", DARK)):
        if found:
            rates = {
                name: {system: row[system].programs_per_s for system in SYSTEMS if system in row}
                for name, row in found.items()
            }
            made[f"workloads-throughput-{theme_name}.svg"] = bar_chart(
                "Programs a second",
                rates,
                theme=theme,
                label=lambda value: f"{value:.3g}",
                note=f"{where}, longer is faster",
                is_log=True,
            )
            times = {
                name: {system: row[system].latency * 1e3 for system in SYSTEMS if system in row}
                for name, row in found.items()
            }
            made[f"workloads-latency-{theme_name}.svg"] = bar_chart(
                "One program alone, milliseconds",
                times,
                theme=theme,
                label=lambda value: f"{value:,.0f} ms",
                note=f"{where}, shorter is faster",
                is_log=True,
            )
        if without:
            shown = [one for one in ablations.ABLATIONS if one.name not in ("whole", "tight")]
            shares = {
                name: {one.name: share for one in shown if (share := ablations.gains(without, one).get(name))}
                for name in without
            }
            made[f"workloads-ablations-{theme_name}.svg"] = bar_chart(
                "Throughput without a part of the engine",
                shares,
                theme=theme,
                label=lambda value: f"{value:.0%}",
                note=f"{MODEL}; 100%: with the part",
            )
    return made


def write() -> list[Path]:
    """Write the page and its charts; returns the files."""
    models = held_figures()
    PAGE.write_text(render(PAGE.read_text(), models))
    IMAGES.mkdir(exist_ok=True)
    files = [PAGE]
    for name, svg in charts(models).items():
        (IMAGES / name).write_text(svg)
        files.append(IMAGES / name)
    return files


if __name__ == "__main__":
    print(*write(), sep="\n")
