"""Seconds of a simulated engine's steps, predicted or measured, and the first steps of a shape on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..runtime.engine.warm_up import PROMPT_LEN, ROWS
from ..runtime.executor.tape_shapes import StepShape, tape_shape
from ..runtime.planning import Hardware, ModelShape, step_time
from ..runtime.planning.hardware import Curve, interpolate
from ..runtime.scheduler import StepPlan
from .loads import Rates


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured steps of one engine, without contexts: ``decodes`` (rows, seconds), ``prompts`` (tokens, seconds).

    ``context_s``: seconds for each token of a decoding row's context; ``prefill_context_s``: of each prompt token's.
    """

    decodes: Curve
    prompts: Curve
    context_s: float
    prefill_context_s: float


class StepClock:
    """Seconds of an engine's steps; sums of decode steps in closed form.

    They are linear in the contexts that are read: a step costs a part that depends on its rows and prompt tokens alone
    (``fixed``), and a rate for each token of context.
    """

    def __init__(self, fixed: Callable[[int, int], float], *, context_s: float, prefill_context_s: float) -> None:
        """``fixed(rows, prefill)``: seconds without contexts. ``context_s``: of each token of a decoding row's context.
        ``prefill_context_s``: the same for each prompt token.
        """
        self.fixed_s = cache(fixed)
        self._context_s, self._prefill_context_s = context_s, prefill_context_s

    @classmethod
    def planned(cls, shape: ModelShape, hardware: Hardware) -> StepClock:
        """As ``planning.step_time`` predicts."""

        def predict(rows: int, prefill: int, context: float = 0.0, prefill_context: float = 0.0) -> float:
            return step_time(
                shape, hardware, rows=rows, context=context, prefill=prefill, prefill_context=prefill_context
            ).total

        far = 1e6
        return cls(
            predict,
            context_s=(predict(1, 0, context=far) - predict(1, 0)) / far,
            prefill_context_s=(predict(0, 1, prefill_context=far) - predict(0, 1)) / far,
        )

    @classmethod
    def measured(cls, times: StepTimes) -> StepClock:
        """Between measured steps. A prompt's tokens and the rows that decode beside it count together."""

        def fixed(rows: int, prefill: int) -> float:
            return interpolate(times.prompts, rows + prefill) if prefill else interpolate(times.decodes, rows)

        return cls(fixed, context_s=times.context_s, prefill_context_s=times.prefill_context_s)

    def plan_s(self, plan: StepPlan) -> float:
        rows = prefill = context = prefill_context = 0
        for row in plan.rows:
            n = len(row.token_ids)
            if n == 1:
                rows += 1
                context += row.start
            else:
                prefill += n
                prefill_context += n * (row.start + n // 2)
        return self.fixed_s(rows, prefill) + self._context_s * context + self._prefill_context_s * prefill_context

    def decodes_s(self, rows: int, context: int, num_steps: int) -> float:
        """Of ``num_steps`` steps of ``rows`` rows, whose contexts are ``context`` tokens together in the first."""
        read = num_steps * context + rows * num_steps * (num_steps - 1) // 2
        return num_steps * self.fixed_s(rows, 0) + self._context_s * read

    def steps_until(self, rows: int, context: int, elapsed_s: float) -> int:
        """The least number of such steps that take ``elapsed_s`` or longer."""
        low, high = 0, max(1, math.ceil(elapsed_s / self.fixed_s(rows, 0)))
        while low < high:
            middle = (low + high) // 2
            if self.decodes_s(rows, context, middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low

    def rates(self) -> Rates:
        """The same as a fleet counts it: at a prompt chunk of 512 tokens and contexts of 1,000."""
        one, many = self.decodes_s(1, 1000, 1), self.decodes_s(17, 17_000, 1)
        row_s = (many - one) / 16
        prefill_s = (self.fixed_s(16, 512) - self.fixed_s(16, 0)) / 512 + self._prefill_context_s * 500
        return Rates(prefill_s_per_token=prefill_s, step_s=one - row_s, row_s=row_s)


@dataclass(frozen=True, slots=True)
class TapeCosts:
    """What a CPU's step takes longer than from its tape: ``untaped_s`` without one, ``recording_s`` to record it."""

    untaped_s: float
    recording_s: float


NO_TAPES = TapeCosts(0.0, 0.0)  # every step is as fast as all of its shape


class Tapes:
    """The step shapes that one engine has met: a shape is recorded at its first step, as by the CPU's executor.

    The executor drops tapes beyond a number of shapes that simulated traces do not reach; here none is dropped.
    """

    def __init__(self, costs: TapeCosts) -> None:
        """The tapes of an engine that has just started."""
        self._costs = costs
        self._seen: set[StepShape] = {(1, PROMPT_LEN), *((rows, rows) for rows in ROWS)}

    def has_decode(self, rows: int) -> bool:
        """Whether decode steps of so many rows take no longer than later ones."""
        if self._costs == NO_TAPES:
            return True
        shape = tape_shape(rows, rows, longest=1, context=1)
        return shape in self._seen

    def extra_s(self, plan: StepPlan) -> float:
        """Seconds beside those of the clock, for the next step. Counts it."""
        if self._costs == NO_TAPES:
            return 0.0
        longest = max(len(row.token_ids) for row in plan.rows)
        shape = tape_shape(len(plan.rows), plan.num_tokens, longest=longest, context=max(row.end for row in plan.rows))
        if shape is None:
            return self._costs.untaped_s
        if shape in self._seen:
            return 0.0
        self._seen.add(shape)
        return self._costs.recording_s
