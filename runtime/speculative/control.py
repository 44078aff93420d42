"""Two limits on drafting: by the gain that drafts really had, and for sequences whose drafts are not worth running."""

from collections import Counter

_WEIGHT = 0.08  # of one step in the running mean
_FORGOTTEN = 0.002  # of the distance to a gain of 1, with each step without drafts
_FEW = 4  # decoding sequences; up to so many are asked for a draft in every step
_PATIENCE = 8  # steps without a draft worth running, after which a sequence is asked less often
_LONGEST_REST = 8  # steps


class Outcomes:
    """The measured gain of steps with drafts as a share of the expected gain, by decoding sequences (1, 2-3, 4-7, ...).

    Steps without drafts are measured too, so that load on the machine, which slows both, does not count against drafts.
    """

    __slots__ = ("_gain", "_num_without", "_without")

    def __init__(self) -> None:
        self._gain: dict[int, float] = {}
        self._without: dict[int, float] = {}
        self._num_without: Counter[int] = Counter()

    def factor(self, num_decoding: int) -> float:
        """The factor for an expected gain; at most 1."""
        return min(1.0, self._gain.get(num_decoding.bit_length(), 1.0))

    def observe(self, num_decoding: int, *, has_drafts: bool, ratio: float) -> None:
        """A step made ``ratio`` times the tokens per second that were expected of it."""
        kind = num_decoding.bit_length()
        without, gain = self._without.get(kind, 1.0), self._gain.get(kind, 1.0)
        if has_drafts:
            self._gain[kind] = gain + _WEIGHT * (min(max(ratio / without, 0.25), 2.0) - gain)
            return
        self._num_without[kind] += 1
        self._without[kind] = without + max(_WEIGHT, 1.0 / self._num_without[kind]) * (ratio - without)
        self._gain[kind] = gain + _FORGOTTEN * (1.0 - gain)


class Patience:
    """When many sequences decode, those without good drafts are asked for one less often, because asking takes time.

    A sequence without a draft worth running for eight steps is asked every second step, then every third, at last
    every eighth. After a draft worth running it is asked in every step again.
    """

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle: dict[int, int] = {}  # steps since a draft of the sequence was worth running

    def rests(self, seq_id: int, num_decoding: int) -> bool:
        """Whether the sequence is not asked in this step."""
        if num_decoding <= _FEW:
            return False
        idle = self._idle.get(seq_id, 0)
        return idle % min(1 + idle // _PATIENCE, _LONGEST_REST) != 0

    def observe(self, seq_id: int, *, was_worth: bool) -> None:
        self._idle[seq_id] = 0 if was_worth else self._idle.get(seq_id, 0) + 1

    def forget(self, seq_id: int) -> None:
        self._idle.pop(seq_id, None)
