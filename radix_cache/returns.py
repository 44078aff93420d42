"""Which share of conversations goes on after each of their turns, and after how long: learned from lookups.

A client that sends its whole conversation with each turn never says that it has ended. But conversations that have had
equally many turns end alike often, and a pause that has lasted long is more likely an end. With pauses of mean p whose
ends are memoryless, and the share s of conversations that go on after the turn, the odds that a conversation still goes
on after a pause of t are s / (1 - s) * exp(-t / p). So the order of leaves is that of

    last use + p log(s / (1 - s))

which does not change while they wait.
"""

from math import log

MAX_TURN = 32  # later turns count as this one
PRIOR = 8.0  # lookups of each turn that count as if they had gone on like those of all turns
MAX_LOG_ODDS = 4.0


class Returns:
    """Times are counts of uses of the cache."""

    def __init__(self) -> None:
        self._looked_up = [0.0] * (MAX_TURN + 1)
        self._went_on = [0.0] * (MAX_TURN + 1)
        self._pauses = 0.0

    def count(self, turn: int, pause: int = 0) -> None:
        """A lookup of a conversation's turn, from 1 on; ``pause``: uses since that of the turn before."""
        self._looked_up[min(turn, MAX_TURN)] += 1
        if turn > 1:
            self._went_on[min(turn - 1, MAX_TURN)] += 1
            self._pauses += pause

    def fade(self) -> None:
        """Halve all counts, so that what was learned long ago counts less."""
        self._looked_up = [n / 2 for n in self._looked_up]
        self._went_on = [n / 2 for n in self._went_on]
        self._pauses /= 2

    def worth(self, turn: int) -> float:
        """Later uses of the cache that are worth as much as having been used in that turn; 0: nothing is known."""
        all_on = sum(self._went_on)
        if turn == 0 or all_on < PRIOR:
            return 0.0
        turn = min(turn, MAX_TURN)
        share = all_on / sum(self._looked_up)
        on = self._went_on[turn] + PRIOR * share
        ended = max(self._looked_up[turn] - self._went_on[turn], 0.0) + PRIOR * (1 - share)
        odds = max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, log(on / ended) if ended else MAX_LOG_ODDS))
        return self._pauses / all_on * odds
