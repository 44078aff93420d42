"""What holds guessing back: what guesses gained so far against what was expected, and sequences that give no good ones.

Never sees a token.
"""

_WEIGHT = 0.08  # of a step in what is known of its kind
_FORGOTTEN = 0.002  # of a disappointment, with each step that runs no guess
_FEW = 4  # sequences that decode at once: so few are always asked
_PATIENCE = 8  # steps in a row without a guess worth running, after which a sequence is asked less often
_LONGEST_REST = 8  # steps


class Outcomes:
    """By how many sequences decode (1, 2-3, 4-7, ...): tokens per second of the steps with drafts and of those
    without, each against what was expected of it. What slows both down is no fault of the drafts.
    """

    __slots__ = ("_with", "_without")

    def __init__(self) -> None:
        self._with: dict[int, float] = {}
        self._without: dict[int, float] = {}

    def factor(self, num_decoding: int) -> float:
        """What an expected gain is to be multiplied by; at most 1."""
        kind = num_decoding.bit_length()
        return min(1.0, self._with.get(kind, 1.0) / self._without.get(kind, 1.0))

    def observe(self, num_decoding: int, *, has_drafts: bool, ratio: float) -> None:
        """A step made ``ratio`` of the tokens per second that were expected of it."""
        kind, found = num_decoding.bit_length(), self._with if has_drafts else self._without
        old = found.get(kind, 1.0)
        found[kind] = old + _WEIGHT * (min(max(ratio, 0.25), 2.0) - old)
        if not has_drafts and kind in self._with:
            self._with[kind] += _FORGOTTEN * (found[kind] - self._with[kind])


class Patience:
    """Where many decode at once, asking one that has nothing to copy costs more than it may bring: it rests between.

    One whose guesses were not worth running for eight steps is asked every second step, then every third, at last
    every eighth; one worth running is asked at every step again.
    """

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle: dict[int, int] = {}  # steps since a guess of the sequence was worth running

    def rests(self, seq_id: int, num_decoding: int) -> bool:
        """Whether not to ask it in this step."""
        if num_decoding <= _FEW:
            return False
        idle = self._idle.get(seq_id, 0)
        return idle % min(1 + idle // _PATIENCE, _LONGEST_REST) != 0

    def observe(self, seq_id: int, *, was_worth: bool) -> None:
        self._idle[seq_id] = 0 if was_worth else self._idle.get(seq_id, 0) + 1

    def forget(self, seq_id: int) -> None:
        self._idle.pop(seq_id, None)
