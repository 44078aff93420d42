"""What a step costs by its number of tokens, learnt from the steps that are run.

    tokens    1     2     4     8    16           between two observed sizes the estimate is linear;
    seconds  .008   .     .0095 .    .016         beyond them each token costs ``slope`` of a single-token step

Noise only adds time, so a fast step has more weight than a slow one. One ``pace`` for all sizes follows the speed of
the machine (contexts grow, other load comes and goes), so a measurement at one size corrects the others too.
"""

import numpy as np

_LONGEST_STEP = 512
_SLOWER, _QUICKER = 0.03, 0.15  # weight of a measurement above and below the estimate


class StepCosts:
    """``estimate[n]``: seconds of a step of n tokens, for n from 0 to 512."""

    __slots__ = ("_count", "_pace", "_seconds", "_step", "estimate", "slope")

    def __init__(self, *, slope: float) -> None:
        self.slope = slope
        self._seconds = np.zeros(_LONGEST_STEP + 1)  # at pace 1; 0: not observed
        self._count = np.zeros(_LONGEST_STEP + 1, np.int64)
        self._pace = 1.0
        self._step = 0
        self.estimate = 1.0 + slope * np.arange(_LONGEST_STEP + 1)

    def observe(self, num_tokens: int, seconds: float) -> None:
        if not 0 < num_tokens <= _LONGEST_STEP or seconds <= 0.0:
            return
        self._step += 1
        self._count[num_tokens] += 1
        count = self._count.item(num_tokens)
        if count == 1:
            return  # the first step of a size may compile or record
        now = seconds / self._pace
        old = self._seconds.item(num_tokens)
        if old == 0.0:
            self._seconds[num_tokens] = now
        else:
            weight = _QUICKER if now < old else _SLOWER
            excess = min(now / old, 1.5) - 1.0
            # Equal weights for both, so that both come to rest at the same value.
            self._seconds[num_tokens] = old * (1.0 + max(weight, 0.5 / count) * excess)
            self._pace *= 1.0 + 0.3 * weight * excess
        if count < 8 or self._step % 16 == 0:
            self._refresh()

    def _refresh(self) -> None:
        seen = np.flatnonzero(self._seconds)
        # More tokens never cost less, so sizes that contradict this are averaged (isotonic regression by pooling).
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
        sizes = np.arange(_LONGEST_STEP + 1)
        unit = known[0] / (1.0 + self.slope * (seen[0] - 1))
        estimate = np.interp(sizes, seen, known)
        beyond, below = sizes > seen[-1], sizes < seen[0]
        estimate[beyond] = known[-1] + unit * self.slope * (sizes[beyond] - seen[-1])
        estimate[below] = known[0] - unit * self.slope * (seen[0] - sizes[below])
        self.estimate = estimate * self._pace
