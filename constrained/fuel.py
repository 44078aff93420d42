"""What one question may cost before it is refused. Never measures time: the same question always has the same answer.

Whatever is derived, joined or tried is counted. A unit is about 2 microseconds of a core.
"""

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

    def at_most(self, amount: int) -> "Limit":
        """A question that may cost so much; within another one it shares what that may cost."""
        return Limit(self, amount)


class Limit:
    """For ``with``; a generator would cost each mask another half microsecond."""

    __slots__ = ("_amount", "_before", "_fuel")

    def __init__(self, fuel: Fuel, amount: int) -> None:
        self._fuel, self._amount = fuel, amount
        self._before = fuel.most, fuel.amount

    def __enter__(self) -> None:
        fuel = self._fuel
        if fuel.spent + self._amount < fuel.most:
            fuel.most, fuel.amount = fuel.spent + self._amount, self._amount

    def __exit__(self, *exc_info: object) -> None:
        self._fuel.most, self._fuel.amount = self._before
