"""What each engine of a fleet has been given and has not finished, and how fast it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runtime.scheduler.lengths import MAX_KINDS, MIN_OUTPUTS, Outputs

UNKNOWN_OUTPUT = 128.0  # tokens, while nothing is known
SLOWNESS_MEMORY_S = 30.0  # after which what was learned of an engine's slowness counts 1 / e
SLOWNESS_TRUST_S = 10.0  # expected seconds of work that weigh as much as the assumption that an engine is not slow
ARRIVALS_MEMORY_S = 15.0  # after which a booking counts 1 / e in the rate of bookings
SPAN_STEPS = 500.0  # steps after which an observation of step times counts 1 / e
# An engine computes fewer prompt tokens than this in the time of one decode step. Fitted to few and noisy reports, a
# prompt token may seem to cost nothing; without this limit, an engine that has the prompt would then be no better than
# any other.
MOST_TOKENS_A_STEP = 10_000


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of an engine's work: a prompt token, a decode step without its rows, and each row of it.

    ``host_load_s_per_token``: for a cached token that is in host memory or on disk.
    """

    prefill_s_per_token: float
    step_s: float
    row_s: float
    host_load_s_per_token: float = 0.0


# Of an 8-billion-parameter model on one large GPU. ``RatesFit`` replaces them after some steps.
DEFAULT_RATES = Rates(prefill_s_per_token=30e-6, step_s=8e-3, row_s=0.1e-3, host_load_s_per_token=5e-6)


@dataclass(slots=True)
class Booking:
    """Work that an engine was given: ``prefill_s`` seconds of prompt, then ``output_tokens`` steps of ``rows`` rows.

    On an engine of usual speed it is expected to begin after ``queued_s`` seconds, and a step to take ``step_s``.
    ``prompt_tokens``: of the whole prompt, cached ones included.
    """

    engine: str
    rows: float
    prefill_s: float
    output_tokens: float
    booked_s: float
    queued_s: float
    step_s: float
    prompt_tokens: int = 0


class Loads:
    """The engines that take work, as arrays by position, so that a choice among a thousand takes no loop.

    Prompt work is drained by time: an engine that was given p seconds of it is free of it p seconds later. Rows are
    held until their booking is finished. ``slowness`` is learned from how long bookings took against what was expected.
    """

    # By position: rows of one table, valid until the next ``add`` or ``remove``. The rates are those of ``Rates``.
    rows: np.ndarray  # booked and not finished
    output_tokens: np.ndarray  # likewise
    max_rows: np.ndarray
    prefill_s_per_token: np.ndarray
    step_s: np.ndarray
    row_s: np.ndarray
    host_load_s_per_token: np.ndarray
    _drained_s: np.ndarray  # time at which the prompt work is done
    _took_s: np.ndarray  # of ended bookings, with forgetting: the time they took
    _expected_s: np.ndarray  # and the time that was expected
    _learned_s: np.ndarray  # time of the last ended booking

    def __init__(self) -> None:
        self.names: list[str] = []
        self.position: dict[str, int] = {}
        self.rates: list[Rates] = []
        self._set_numbers(np.zeros((len(_NUMBERS), 0)))
        self._arrived, self._arrived_s = 0.0, 0.0  # rows booked lately, with forgetting, and when that was counted
        self._asked: tuple[str, ...] | None = None  # the names of the last ``positions_of``, and its answer
        self._positions = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, engine: str) -> bool:
        return engine in self.position

    def add(self, engine: str, *, rates: Rates = DEFAULT_RATES, max_rows: int) -> None:
        """An engine that has nothing to do yet; one of that name that is known already is forgotten."""
        self.remove(engine)
        self.position[engine] = len(self.names)
        self.names.append(engine)
        self.rates.append(rates)
        self._set_numbers(np.concatenate((self._numbers, np.zeros((len(_NUMBERS), 1))), axis=1))
        self.max_rows[-1] = max(max_rows, 1)
        self.set_rates(engine, rates)
        self._asked = None

    def remove(self, engine: str) -> None:
        """Take no more work there. Bookings of it may still be finished, without effect."""
        at = self.position.pop(engine, None)
        if at is not None:
            del self.names[at], self.rates[at]
            self._set_numbers(np.delete(self._numbers, at, axis=1))
            self.position = {name: i for i, name in enumerate(self.names)}
            self._asked = None

    def set_rates(self, engine: str, rates: Rates) -> None:
        at = self.position[engine]
        self.rates[at] = rates
        for name in ("prefill_s_per_token", "step_s", "row_s", "host_load_s_per_token"):
            getattr(self, name)[at] = getattr(rates, name)

    def book(self, booking: Booking) -> None:
        at = self.position[booking.engine]
        self._drained_s[at] = max(self._drained_s[at], booking.booked_s) + booking.prefill_s
        self.rows[at] += booking.rows
        self.output_tokens[at] += booking.output_tokens
        self._arrived = self.arrivals_per_s(booking.booked_s) * ARRIVALS_MEMORY_S + booking.rows
        self._arrived_s = max(self._arrived_s, booking.booked_s)

    def arrivals_per_s(self, now_s: float) -> float:
        """Rows that were booked a second, lately."""
        return self._arrived * math.exp(-max(now_s - self._arrived_s, 0.0) / ARRIVALS_MEMORY_S) / ARRIVALS_MEMORY_S

    def finish(self, booking: Booking, now_s: float, *, made: int = 0) -> None:
        """The work has ended. ``made``: tokens of output of each row; 0 if it says nothing of the engine's speed."""
        at = self.position.get(booking.engine)
        if at is None:
            return
        for numbers, value in ((self.rows, booking.rows), (self.output_tokens, booking.output_tokens)):
            numbers[at] = max(numbers[at] - value, 0.0)
        if made:
            keep = math.exp(-max(now_s - self._learned_s[at], 0.0) / SLOWNESS_MEMORY_S)
            expected_s = booking.queued_s + booking.prefill_s + made * booking.step_s
            for numbers, value in ((self._took_s, now_s - booking.booked_s), (self._expected_s, expected_s)):
                numbers[at] = keep * numbers[at] + value
            self._learned_s[at] = now_s

    def positions_of(self, engines: tuple[str, ...]) -> np.ndarray:
        """The position of each of ``engines``, -1 where it takes no work. Kept for the next such call."""
        if engines is not self._asked:
            self._positions = np.array([self.position.get(engine, -1) for engine in engines], np.int64)
            self._asked = engines
        return self._positions

    def _set_numbers(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        for name, row in zip(_NUMBERS, numbers, strict=True):
            setattr(self, name, row)

    def queued_s(self, now_s: float) -> np.ndarray:
        """Seconds of prompt work that are left."""
        queued: np.ndarray = np.maximum(self._drained_s - now_s, 0.0)
        return queued

    def slowness(self, now_s: float) -> np.ndarray:
        """How much longer bookings took lately than expected, relative to all engines; tends to 1 while nothing ends.

        Relative: expectations that are wrong by the same factor everywhere, as before the rates are known, say nothing
        against the engine that ends its bookings first.
        """
        keep = np.exp(-np.maximum(now_s - self._learned_s, 0.0) / SLOWNESS_MEMORY_S)
        took_s, expected_s = keep * self._took_s, keep * self._expected_s
        usual = took_s.sum() / max(expected_s.sum(), 1e-9) if took_s.any() else 1.0
        slowness: np.ndarray = (SLOWNESS_TRUST_S + took_s) / (SLOWNESS_TRUST_S + usual * expected_s)
        return slowness


_NUMBERS = tuple(Loads.__annotations__)  # the rows of the table of numbers


class RatesFit:
    """Learns rates from the engines' metrics: seconds = steps x step_s + rows x row_s + prompt tokens x prefill_s.

    Least squares over the differences of successive reports, with exponential forgetting; the rates given first count
    as ``trust`` steps. A report of a restarted engine, whose counts are lower, begins anew. Engines of one kind share
    their rates: an engine that has just started would otherwise look faster or slower than one that has worked.
    """

    def __init__(self, first: Rates = DEFAULT_RATES, *, trust: float = 1.0) -> None:
        self.rates = first
        self._last: dict[str, np.ndarray] = {}  # report by engine
        # The prior is three observations, one for each rate, each of typical size.
        sizes = np.array([1.0, 8.0, 100.0])
        known = np.array([first.step_s, first.row_s, first.prefill_s_per_token])
        self._squares = np.diag(trust * sizes**2)
        self._products = self._squares @ known

    def forget(self, engine: str) -> None:
        """The engine is gone. What it has taught stays."""
        self._last.pop(engine, None)

    def note(self, engine: str, metrics: Mapping[str, Any]) -> Rates:
        """Learn from an engine's answer to the query ``metrics``; returns the present rates."""
        rows = float(metrics["forward_rows"])
        report = np.array(
            [metrics["steps"], rows, max(metrics["forward_tokens"] - rows, 0.0), metrics["step_seconds"]], float
        )
        change = report - self._last.get(engine, np.zeros(4))
        self._last[engine] = report
        steps = change[0]
        if steps < 0 or change[3] <= 0 or steps == 0:
            return self.rates
        # A report is the mean step, observed ``steps`` times.
        mean, keep = change / steps, math.exp(-steps / SPAN_STEPS)
        weight = min(steps, SPAN_STEPS)
        x, seconds = mean[:3], mean[3]
        self._squares = keep * self._squares + weight * np.outer(x, x)
        self._products = keep * self._products + weight * x * seconds
        floor = 1e-12 * np.trace(self._squares) * np.eye(3)
        step_s, row_s, prefill_s = np.linalg.solve(self._squares + floor, self._products)
        old, step_s = self.rates, max(float(step_s), 1e-6)
        self.rates = Rates(
            prefill_s_per_token=max(float(prefill_s), step_s / MOST_TOKENS_A_STEP),
            step_s=step_s,
            row_s=max(float(row_s), 0.0),
            host_load_s_per_token=old.host_load_s_per_token,
        )
        return self.rates


class OutputLengths:
    """Predicts how many tokens a generation makes, from those of programs of the same name."""

    def __init__(self) -> None:
        self._all = Outputs()
        self._by_name: dict[str, Outputs] = {}

    def note(self, name: str, made: int) -> None:
        """A generation of a program called ``name`` has ended after ``made`` tokens."""
        if name in self._by_name or len(self._by_name) < MAX_KINDS:
            self._by_name.setdefault(name, Outputs()).note(made)
        self._all.note(made)

    def predict(self, name: str, max_tokens: int, *, made: int = 0) -> float:
        """Tokens to come after ``made``. ``max_tokens`` -1: without a bound."""
        outputs = self._by_name.get(name)
        if outputs is None or outputs.num < MIN_OUTPUTS:
            outputs = self._all
        expected = outputs.left(made) if outputs.num >= MIN_OUTPUTS else UNKNOWN_OUTPUT
        return expected if max_tokens < 0 else min(expected, float(max(max_tokens - made, 0)))
