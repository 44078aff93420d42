"""What one question may cost before it is refused. Never measures time: the same question always has the same answer.

Whatever is derived, joined or tried is counted. A unit is about 2 microseconds of a core.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from .spec import GrammarTooComplex

NO_LIMIT = 1 << 62


class Fuel:
    """``spent`` counts for ever; past ``most`` the question is given up. Who spends adds to the one and compares."""

    __slots__ = ("amount", "most", "spent")

    def __init__(self) -> None:
        self.spent = 0
        self.most = self.amount = NO_LIMIT

    def spend(self, amount: int) -> None:
        self.spent += amount
        if self.spent > self.most:
            raise self.empty()

    def empty(self) -> GrammarTooComplex:
        return GrammarTooComplex(
            f"what may follow takes more than {self.amount:,} steps to find out; alternatives that begin alike or "
            "overlap need most: make them exclude each other, or fewer"
        )

    @contextmanager
    def at_most(self, amount: int) -> Iterator[None]:
        """A question within another one shares what that may cost."""
        before = self.most, self.amount
        if self.spent + amount < self.most:
            self.most, self.amount = self.spent + amount, amount
        try:
            yield
        finally:
            self.most, self.amount = before
