"""How often guesses come true, by who guessed and on how long a match. Never guesses.

A guess on a match of m tokens that came true is a match of m + 1: token j of a draft is judged by m + j.
"""

import numpy as np

NUM_CLASSES = 7
# Matches of 0, 1-2, 3-4, 5-8, 9-16, 17-32 and more tokens.
CLASS_OF = np.array([0, 1, 1, 2, 2, *[3] * 4, *[4] * 8, *[5] * 16, *[6] * 512], np.int64)
_PRIOR = (0.3, 0.25, 0.5, 0.65, 0.8, 0.9, 0.95)
_FEW = 4.0  # tries for which the wider experience stands


class Acceptance:
    """Rates of one sequence, with those of ``wider`` (all sequences; or the prior) where it has tried little."""

    __slots__ = ("_keep", "hits", "tries", "wider")

    def __init__(self, num_sources: int, *, wider: "Acceptance | None" = None, keep: float) -> None:
        """After each draft what was known before counts ``keep`` as much."""
        self.tries = np.zeros((num_sources, NUM_CLASSES))
        self.hits = np.zeros((num_sources, NUM_CLASSES))
        self.wider = wider
        self._keep = keep

    def rates(self, source: int) -> np.ndarray:
        """float64 [classes]"""
        prior = np.array(_PRIOR) if self.wider is None else self.wider.rates(source)
        return (self.hits[source] + _FEW * prior) / (self.tries[source] + _FEW)

    def observe(self, source: int, match_len: int, num_right: int, num_judged: int) -> None:
        """Of a draft's first ``num_judged`` tokens the first ``num_right`` came true, and the next, if any, did not."""
        tried = np.bincount(CLASS_OF[match_len : match_len + num_judged], minlength=NUM_CLASSES)
        right = np.bincount(CLASS_OF[match_len : match_len + num_right], minlength=NUM_CLASSES)
        row, hits = self.tries[source], self.hits[source]
        judged = tried > 0
        row[judged] = row[judged] * self._keep + tried[judged]
        hits[judged] = hits[judged] * self._keep + right[judged]
        if self.wider is not None:
            self.wider.observe(source, match_len, num_right, num_judged)
