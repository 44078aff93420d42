"""How many more tokens a sequence is expected to generate: within its bounds, as learned from others of its kind.

A kind is a program's name and the size of ``max_tokens``: one function's title and its essay differ in that bound.
"""

from bisect import bisect_right

from .sequence import Sequence

BOUNDS = tuple(sorted({round(1.25**i) for i in range(1, 56)}))  # tokens, up to 200,000
MIN_OUTPUTS = 20  # with fewer, a kind is estimated from all sequences
MAX_OUTPUTS = 2000  # then all counts are halved, so that a change is learned
MAX_KINDS = 256
PROMPT_COST = 1 / 32  # of a prompt token, relative to a generated one: a step computes hundreds of prompt tokens
UNKNOWN = float(1 << 40)  # tokens left, if nothing is known

Kind = tuple[str, int]


class Outputs:
    """A histogram of output lengths; class i has ``BOUNDS[i - 1] <= length < BOUNDS[i]``."""

    __slots__ = ("_nums", "_tails", "_totals", "num")

    def __init__(self) -> None:
        self._nums = [0.0] * (len(BOUNDS) + 1)
        self._totals = [0.0] * (len(BOUNDS) + 1)
        self._tails: list[tuple[float, float]] | None = None  # by class: how many are longer, and their tokens
        self.num = 0.0

    def note(self, length: int) -> None:
        if self.num >= MAX_OUTPUTS:
            self._nums = [n / 2 for n in self._nums]
            self._totals = [n / 2 for n in self._totals]
            self.num /= 2
        i = bisect_right(BOUNDS, length)
        self._nums[i] += 1
        self._totals[i] += length
        self.num += 1
        self._tails = None

    def left(self, made: int) -> float:
        """Mean tokens still to come after ``made`` tokens; ``made`` again if no output was longer."""
        if self._tails is None:
            self._tails = self._sum_tails()
        i = bisect_right(BOUNDS, made)
        num, total = self._tails[i]
        if i < len(BOUNDS):  # the longer ones of its own class, assuming that lengths are even in a class
            low, high = BOUNDS[i - 1] if i else 0, BOUNDS[i]
            longer = self._nums[i] * (high - made) / (high - low)
            num += longer
            total += longer * (made + high) / 2
        return total / num - made if num > 0 else float(max(made, 1))

    def _sum_tails(self) -> list[tuple[float, float]]:
        tails, num, total = [], 0.0, 0.0
        for n, tokens in zip(reversed(self._nums), reversed(self._totals), strict=True):
            tails.append((num, total))
            num += n
            total += tokens
        return tails[::-1]


class Lengths:
    """Learns output lengths. ``usual`` is a moving average over the sequences that ended; 0 before the first."""

    __slots__ = ("_all", "by_kind", "usual")

    def __init__(self) -> None:
        self._all = Outputs()
        self.by_kind: dict[Kind, Outputs] = {}
        self.usual = 0.0

    def note(self, seq: Sequence) -> None:
        """Learn from ``seq``, which has stopped generating for now."""
        made = len(seq.tokens) - seq.prompt_len
        if made <= 0:
            return
        self.usual += (made - self.usual) * (0.05 if self.usual else 1.0)
        kind = _kind(seq)
        if kind in self.by_kind or len(self.by_kind) < MAX_KINDS:
            self.by_kind.setdefault(kind, Outputs()).note(made)
        self._all.note(made)

    def left(self, seq: Sequence) -> float:
        """Tokens that ``seq`` is expected to generate from now on; ``UNKNOWN`` if nothing is known."""
        made = max(len(seq.tokens) - seq.prompt_len, 0)
        most = seq.max_new - made if seq.max_new >= 0 else UNKNOWN
        least = min(seq.min_new - made, most)
        if least >= most:
            return max(most, 0.0)
        outputs = self.by_kind.get(_kind(seq))
        if outputs is None or outputs.num < MIN_OUTPUTS:
            outputs = self._all
        expected = outputs.left(made) if outputs.num >= MIN_OUTPUTS else UNKNOWN
        return max(least, min(expected, most), 0.0)

    def work(self, seq: Sequence) -> float:
        """Work left in ``seq``, in generated tokens; its pending tokens count ``PROMPT_COST`` each."""
        return self.left(seq) + PROMPT_COST * (len(seq.tokens) - seq.num_computed)


def _kind(seq: Sequence) -> Kind:
    return (seq.kind, max(seq.max_new, 0).bit_length())
