"""What holds guessing back: what guesses gained so far against what was expected, and sequences that give no good ones.

Never sees a token.
"""

from collections import Counter

_WEIGHT = 0.08  # of a step in what is known of its kind
_FORGOTTEN = 0.002  # of a disappointment, with each step that runs no guess
_FEW = 4  # sequences that decode at once: so few are always asked
_PATIENCE = 8  # steps in a row without a guess worth running, after which a sequence is asked less often
_LONGEST_REST = 8  # steps


class Outcomes:
    """By how many sequences decode (1, 2-3, 4-7, ...): what steps with drafts made of the tokens per second that were
    expected of them, against what steps without made. What slows both down is no fault of the drafts.
    """

    __slots__ = ("_gain", "_num_without", "_without")

    def __init__(self) -> None:
        self._gain: dict[int, float] = {}
        self._without: dict[int, float] = {}
        self._num_without: Counter[int] = Counter()

    def factor(self, num_decoding: int) -> float:
        """What an expected gain is to be multiplied by; at most 1."""
        return min(1.0, self._gain.get(num_decoding.bit_length(), 1.0))

    def observe(self, num_decoding: int, *, has_drafts: bool, ratio: float) -> None:
        """A step made ``ratio`` of the tokens per second that were expected of it."""
        kind = num_decoding.bit_length()
        without, gain = self._without.get(kind, 1.0), self._gain.get(kind, 1.0)
        if has_drafts:
            self._gain[kind] = gain + _WEIGHT * (min(max(ratio / without, 0.25), 2.0) - gain)
            return
        self._num_without[kind] += 1
        self._without[kind] = without + max(_WEIGHT, 1.0 / self._num_without[kind]) * (ratio - without)
        self._gain[kind] = gain + _FORGOTTEN * (1.0 - gain)


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
