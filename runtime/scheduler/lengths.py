"""How many tokens sequences still make: within the bounds they came with, as others of their kind did. Never ranks.

A kind is a program's name and the size of its bound: a function's title and its essay differ in ``max_tokens``.
"""

from bisect import bisect_right

from .sequence import Sequence

BOUNDS = tuple(sorted({round(1.25**i) for i in range(1, 56)}))  # tokens, up to 200,000
MIN_OUTPUTS = 20  # before which a kind is taken to be as all are
MAX_OUTPUTS = 2000  # at which all count half, so that what has changed is learned again
MAX_KINDS = 256
PROMPT_COST = 1 / 32  # of a prompt's token, where a generated one costs 1: a step computes hundreds of the former
UNKNOWN = float(1 << 40)  # tokens left, where nothing is known

Kind = tuple[str, int]


class Outputs:
    """Lengths that were made, in classes; ``BOUNDS[i - 1] <= length < BOUNDS[i]`` in class i."""

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
        """The mean of what is still to come after ``made`` tokens; as much again where nobody made more."""
        if self._tails is None:
            self._tails = self._sum_tails()
        i = bisect_right(BOUNDS, made)
        num, total = self._tails[i]
        if i < len(BOUNDS):  # of its own class those that are longer, as if they lay evenly
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
    """``usual``: what a sequence makes on average, by those that ended lately; 0 before the first."""

    __slots__ = ("_all", "_by_kind", "usual")

    def __init__(self) -> None:
        self._all = Outputs()
        self._by_kind: dict[Kind, Outputs] = {}
        self.usual = 0.0

    def note(self, seq: Sequence) -> None:
        """``seq`` makes no more for now."""
        made = len(seq.tokens) - seq.prompt_len
        if made <= 0:
            return
        self.usual += (made - self.usual) * (0.05 if self.usual else 1.0)
        kind = _kind(seq)
        if kind in self._by_kind or len(self._by_kind) < MAX_KINDS:
            self._by_kind.setdefault(kind, Outputs()).note(made)
        self._all.note(made)

    def left(self, seq: Sequence) -> float:
        """Tokens that ``seq`` is expected still to make; ``UNKNOWN`` where nothing is known."""
        made = max(len(seq.tokens) - seq.prompt_len, 0)
        most = seq.max_new - made if seq.max_new >= 0 else UNKNOWN
        least = min(seq.min_new - made, most)
        if least >= most:
            return max(most, 0.0)
        outputs = self._by_kind.get(_kind(seq))
        if outputs is None or outputs.num < MIN_OUTPUTS:
            outputs = self._all
        expected = outputs.left(made) if outputs.num >= MIN_OUTPUTS else UNKNOWN
        return max(least, min(expected, most), 0.0)

    def work(self, seq: Sequence) -> float:
        """What ``seq`` still costs, in generated tokens: those it makes, and what is to be computed before."""
        return self.left(seq) + PROMPT_COST * (len(seq.tokens) - seq.num_computed)


def _kind(seq: Sequence) -> Kind:
    return (seq.kind, max(seq.max_new, 0).bit_length())
