"""Bounds on the work of one question, counted in steps so that the same question always has the same answer.

A step is one derivative, join or trial: about 2 microseconds of a core.
"""

from .spec import GrammarTooComplex

NO_LIMIT = 1 << 62


class Fuel:
    """Counts steps. ``spent`` only grows; past ``most`` the running question fails.

    Hot loops add to ``spent`` and compare with ``most`` themselves.
    """

    __slots__ = ("amount", "most", "spent")

    def __init__(self) -> None:
        self.spent = 0
        self.most = self.amount = NO_LIMIT

    def spend(self, amount: int) -> None:
        """Count ``amount`` steps. Raises GrammarTooComplex past the limit."""
        self.spent += amount
        if self.spent > self.most:
            raise self.empty()

    def empty(self) -> GrammarTooComplex:
        return GrammarTooComplex(
            f"finding what may follow takes more than {self.amount:,} steps; alternatives that begin alike or overlap "
            "cost most: make them exclude each other, or use fewer"
        )

    def at_most(self, amount: int) -> "Limit":
        """Limit a question to ``amount`` steps, and to what is left of the question around it."""
        return Limit(self, amount)


class Limit:
    """The context manager of ``Fuel.at_most``; ``contextlib`` would cost each mask another half microsecond."""

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
