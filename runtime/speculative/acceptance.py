"""How often draft tokens are accepted, by source and by the length of the match that they rest on.

An accepted token makes a match of m tokens one of m + 1, so token j of a draft counts for matches of m + j tokens.
"""

import numpy as np

# The class of a match: 0-1, 2, 3-4, 5-8, 9-16, 17-32 and more tokens.
CLASS_OF = np.array([0, 0, 1, 2, 2, *[3] * 4, *[4] * 8, *[5] * 16, *[6] * 512], np.int64)
_CLASSES = CLASS_OF.tolist()
_PRIOR = (0.05, 0.1, 0.3, 0.6, 0.8, 0.9, 0.95)
_FEW = 4.0  # tries that the starting rate counts as


class Acceptance:
    """Acceptance rates of one sequence. They start from those of ``wider`` (all sequences), or from the prior.

    ``rates[source, class]`` is a float64 array. With each draft the weight of earlier ones is multiplied by ``keep``.
    """

    __slots__ = ("_hits", "_keep", "_start", "_tries", "rates", "wider")

    def __init__(self, num_sources: int, *, wider: "Acceptance | None" = None, keep: float) -> None:
        self.wider = wider
        self.rates: np.ndarray = np.tile(_PRIOR, (num_sources, 1)) if wider is None else wider.rates.copy()
        self._keep = keep
        self._start: list[list[float]] = self.rates.tolist()
        self._tries = [[0.0] * len(_PRIOR) for _ in range(num_sources)]
        self._hits = [[0.0] * len(_PRIOR) for _ in range(num_sources)]

    def observe(self, source: int, match_len: int, num_right: int, num_judged: int) -> None:
        """Of the first ``num_judged`` tokens of a draft the first ``num_right`` were accepted, and the next was not."""
        tries, hits, rates = self._tries[source], self._hits[source], self.rates[source]
        at = 0
        while at < num_judged:
            group = _CLASSES[match_len + at]
            tried = right = 0
            while at < num_judged and _CLASSES[match_len + at] == group:
                tried += 1
                right += at < num_right
                at += 1
            tries[group] = tries[group] * self._keep + tried
            hits[group] = hits[group] * self._keep + right
            rates[group] = (hits[group] + _FEW * self._start[source][group]) / (tries[group] + _FEW)
        if self.wider is not None:
            self.wider.observe(source, match_len, num_right, num_judged)
