"""What a step costs by its number of tokens, learnt from the steps that were made. Never measures by itself.

tokens    1     2     4     8    16           a step between two that were seen lies on the line between them;
seconds  .008   .     .0095 .    .016         beyond those seen each token costs ``slope`` of a single-token step
"""

import numpy as np

_WEIGHT = 0.08  # of a new measurement
_LONGEST_STEP = 512


class StepCosts:
    """``estimate[n]`` seconds for a step of n tokens, n from 0 to the longest that is told apart."""

    __slots__ = ("_seconds", "_seen_at", "_step", "estimate", "slope")

    def __init__(self, *, slope: float) -> None:
        self.slope = slope
        self._seconds = np.zeros(_LONGEST_STEP + 1)  # 0: never seen
        self._seen_at = np.zeros(_LONGEST_STEP + 1, np.int64)
        self._step = 0
        self.estimate = 1.0 + slope * np.arange(_LONGEST_STEP + 1)

    def observe(self, num_tokens: int, seconds: float) -> None:
        if not 0 < num_tokens <= _LONGEST_STEP or seconds <= 0.0:
            return
        self._step += 1
        old = self._seconds[num_tokens]
        if old == 0.0:
            # One slow step (a page fault, a neighbour) must not stand for its size: what was expected counts too.
            expected = self.estimate[num_tokens] if self._step > 1 else seconds
            old = min(seconds, 1.5 * expected)
        self._seconds[num_tokens] = old + _WEIGHT * (min(seconds, 2.0 * old) - old)
        self._seen_at[num_tokens] = self._step
        if self._step < 64 or self._step % 16 == 0:
            self._refresh()

    def _refresh(self) -> None:
        # What was seen long ago was seen at another context: it is forgotten, and may be tried again.
        seen = np.flatnonzero((self._seconds > 0.0) & (self._seen_at > self._step - 2000))
        if not len(seen):
            return
        # More tokens never cost less: neighbours that say so are averaged (isotonic by pooling).
        values: list[float] = []
        counts: list[int] = []
        for second in self._seconds[seen].tolist():
            values.append(second)
            counts.append(1)
            while len(values) > 1 and values[-2] > values[-1]:
                last, count = values.pop(), counts.pop()
                values[-1] = (values[-1] * counts[-1] + last * count) / (counts[-1] + count)
                counts[-1] += count
        known = np.repeat(values, counts)
        all_sizes = np.arange(_LONGEST_STEP + 1)
        unit = known[0] / (1.0 + self.slope * (seen[0] - 1))
        estimate = np.interp(all_sizes, seen, known)
        beyond = all_sizes > seen[-1]
        estimate[beyond] = known[-1] + unit * self.slope * (all_sizes[beyond] - seen[-1])
        below = all_sizes < seen[0]
        estimate[below] = known[0] - unit * self.slope * (seen[0] - all_sizes[below])
        self.estimate = estimate
