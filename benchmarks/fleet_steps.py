"""Step times of two engines that work at once on one machine, as their clients see them, for the simulator.

    python -m benchmarks.fleet steps [--model smollm2] [--save]

Two runtimes with one engine and one thread each play the same calls at the same time. A decode step is the mean time of
a token while a number of calls decode; a prompt step is the time to the first token on an engine that does nothing
else. So the times contain the engine's loop, the messages, the client, and what the engines take from each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from phloem.cluster.step_clock import StepTimes, TapeCosts
from phloem.cluster.traces import Paths, TimedCall, TimedProgram, Trace
from phloem.runtime.executor.tape_shapes import MAX_TOKENS, MULTIPLE

ROWS, PROMPTS = (1, 2, 3, 4, 6, 8), (16, 64, 128, 256)
NEAR, FAR = 150, 1150  # tokens of contexts
CONTEXT_ROWS = 4  # of the decode steps that are measured at both contexts
CONTEXT_PROMPT = 128  # tokens of the prompt that is measured at both contexts
NEW_TOKENS = 32
REPEATS = 5  # of each prompt: the first is recorded, the others run from the tape
GAP_S = 0.3  # between two prompts, which is longer than one takes

Play = Callable[[Trace], list[TimedCall]]
Together = Callable[[Callable[[], Trace]], list[TimedCall]]  # the calls of one engine after those of the other


@dataclass(frozen=True, slots=True)
class MachineTimes:
    steps: StepTimes
    tape_costs: TapeCosts


def measure_steps(plays: list[Play]) -> MachineTimes:
    """``plays``: one for each engine; plays a trace there and returns its calls in the trace's order."""
    with ThreadPoolExecutor(len(plays)) as pool:

        def together(make: Callable[[], Trace]) -> list[TimedCall]:
            return [call for calls in pool.map(lambda play: play(make()), plays) for call in calls]

        near, far = (_decode_s(together, CONTEXT_ROWS, context) for context in (NEAR, FAR))
        context_s = max(0.0, far - near) / (CONTEXT_ROWS * (FAR - NEAR))
        middle = NEW_TOKENS / 2
        decodes = [(float(rows), _decode_s(together, rows, NEAR) - context_s * rows * (NEAR + middle)) for rows in ROWS]
        prompts, recorded = [decodes[0]], []
        times = {n: _prompt_s(together, n) for n in PROMPTS}
        taped = {n: statistics.median(first[1:]) for n, first in times.items()}
        after_s = statistics.median(_more_s(together, CONTEXT_PROMPT)[1:])
        prefill_context_s = max(0.0, after_s - taped[CONTEXT_PROMPT]) / (CONTEXT_PROMPT * FAR)
        for n, first in times.items():
            recorded.append(first[0] - taped[n])
            prompts.append((float(n), taped[n] - prefill_context_s * n * n / 2))
        steps = StepTimes(tuple(decodes), tuple(prompts), context_s, prefill_context_s)
        # The shortest prompt without a tape, against the line through the two longest with one.
        beyond, (before, longest) = MAX_TOKENS + MULTIPLE, PROMPTS[-2:]
        slope_s = (taped[longest] - taped[before]) / (longest - before)
        untaped_s = statistics.median(_prompt_s(together, beyond)) - taped[longest] - slope_s * (beyond - longest)
        return MachineTimes(steps, TapeCosts(max(0.0, untaped_s), statistics.median(recorded)))


def _decode_s(together: Together, rows: int, context: int) -> float:
    """Seconds of a step of so many rows. The second run finds the prompts in the cache, so all calls decode at once."""

    def make() -> Trace:
        paths, programs = Paths(), []
        for i in range(rows):
            program = TimedProgram(f"{rows} {context} {i}", 0.0)
            program.call(paths, 0, paths.add((), f"{i}", context), NEW_TOKENS)
            programs.append(program)
        return Trace("decode", paths, programs)

    together(make)
    return statistics.median((call.end_s - call.first_s) / (NEW_TOKENS - 1) for call in together(make))


def _prompt_s(together: Together, tokens: int) -> list[float]:
    """Seconds to the first token of a new prompt, of each repeat."""

    def make() -> Trace:
        paths, programs = _own_paths(tokens), []
        for i in range(REPEATS):
            program = TimedProgram(f"prompt {tokens} {i}", i * GAP_S)
            program.call(paths, 0, paths.add((), f"{i}", tokens), 1)
            programs.append(program)
        return Trace("prompts", paths, programs)

    return _first_s(together(make))


def _more_s(together: Together, tokens: int) -> list[float]:
    """The same of as many tokens after ``FAR`` tokens and more that are cached."""

    def make() -> Trace:
        paths = _own_paths(tokens + 1)
        program = TimedProgram("long", 0.0)
        last = program.call(paths, 0, paths.add((), "long", FAR - REPEATS * tokens // 2), 1)
        for i in range(REPEATS):
            prompt = paths.add(last.output, f"more {i}", tokens - 1)  # and the token that was drawn
            last = program.call(paths, 0, prompt, 1, after=(last,), delay_s=GAP_S / 4)
        return Trace("long prompt", paths, [program])

    calls = together(make)
    half = len(calls) // 2
    return _first_s([*calls[1:half], *calls[half + 1 :]])


def _own_paths(number: int) -> Paths:
    """Paths whose token ids are not those of other numbers, so that no prompt is in the cache already."""
    paths = Paths()
    paths.add((), "skipped", 10_000 * number)
    return paths


def _first_s(calls: list[TimedCall]) -> list[float]:
    """Seconds to the first token of each of a trace's calls, the mean of both engines."""
    half = len(calls) // 2
    return [
        statistics.mean(call.first_s - call.arrival_s for call in pair)
        for pair in zip(calls[:half], calls[half:], strict=True)
    ]


def as_times(found: dict[str, Any]) -> MachineTimes:
    """What ``asdict`` and JSON made of ``MachineTimes``."""
    steps = dict(found["steps"])
    for name in ("decodes", "prompts"):
        steps[name] = tuple(map(tuple, steps[name]))
    return MachineTimes(StepTimes(**steps), TapeCosts(**found["tape_costs"]))


def report(times: MachineTimes) -> dict[str, Any]:
    """Print the times; returns them for a file."""
    print("milliseconds of a step, without contexts:")
    for what, unit in ((times.steps.decodes, "rows"), (times.steps.prompts, "prompt tokens")):
        for n, seconds in what:
            print(f"{n:8g} {unit:14}{1e3 * seconds:9.2f}")
    print(f"1,000 tokens of a decoding row's context: {1e6 * times.steps.context_s:.2f} ms")
    print(f"1,000 tokens before 100 prompt tokens: {1e8 * times.steps.prefill_context_s:.2f} ms")
    costs = times.tape_costs
    print(f"a step without a tape: {1e3 * costs.untaped_s:.1f} ms longer; to record: {1e3 * costs.recording_s:.1f} ms")
    return asdict(times)
