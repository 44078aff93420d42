"""What a step costs by its number of tokens, learnt from the steps that were made. Never measures by itself.

    tokens    1     2     4     8    16           a step between two that were seen lies on the line between them;
    seconds  .008   .     .0095 .    .016         beyond those seen each token costs ``slope`` of a single-token step

Noise only ever adds time, so a quick step is believed sooner than a slow one. How fast the machine is now (contexts
grow, neighbours come and go) is one ``pace`` for all sizes: what is learnt at one size holds for the others.
"""

import numpy as np

_LONGEST_STEP = 512
_SLOWER, _QUICKER = 0.03, 0.15  # weight of a measurement above and below what was expected


class StepCosts:
    """``estimate[n]`` seconds for a step of n tokens, n from 0 to the longest that is told apart."""

    __slots__ = ("_count", "_pace", "_seconds", "_step", "estimate", "slope")

    def __init__(self, *, slope: float) -> None:
        self.slope = slope
        self._seconds = np.zeros(_LONGEST_STEP + 1)  # at pace 1; 0: never seen
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
            return  # the first of a size may have things to prepare
        now = seconds / self._pace
        old = self._seconds.item(num_tokens)
        if old == 0.0:
            self._seconds[num_tokens] = now
        else:
            weight = _QUICKER if now < old else _SLOWER
            excess = min(now / old, 1.5) - 1.0
            # Both by the same weights, so that where one rests the other does.
            self._seconds[num_tokens] = old * (1.0 + max(weight, 0.5 / count) * excess)
            self._pace *= 1.0 + 0.3 * weight * excess
        if count < 8 or self._step % 16 == 0:
            self._refresh()

    def _refresh(self) -> None:
        seen = np.flatnonzero(self._seconds)
        # More tokens never cost less: neighbours that say so are averaged (isotonic regression by pooling).
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
