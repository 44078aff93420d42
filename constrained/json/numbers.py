"""JSON numbers under bounds, as languages of their decimal spellings.

A bounded number is spelled without an exponent. Zeros may trail behind the point: ``1``, ``1.0`` and ``1.00`` are the
same integer in JSON Schema. Numbers without bounds may have an exponent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from math import gcd
from typing import NamedTuple

from ..expressions import EMPTY, NOTHING, Expressions
from ..spec import GrammarError, GrammarTooComplex

MAX_DIGITS = 400
MAX_LISTED = 256  # numbers


@dataclass(frozen=True, slots=True)
class Bound:
    value: Decimal
    is_inclusive: bool


class Digits(NamedTuple):
    """How many digits a number has before and behind the point."""

    whole: int
    decimals: int


USUAL_DIGITS = Digits(18, 17)  # of canonical spellings; 17 digits tell any two doubles apart


class Numbers:
    """Sets of numbers as expressions of one store."""

    def __init__(self, expressions: Expressions) -> None:
        ex = self.ex = expressions
        self._between: dict[tuple[Bound | None, Bound | None, bool], int] = {}
        self.digit = self._digits(0, 9)
        self.point = ex.literal(b".")
        self.minus = ex.literal(b"-")
        sign = ex.union(EMPTY, self.minus)
        self.natural = ex.union(ex.literal(b"0"), ex.concat(self._digits(1, 9), ex.repeat(self.digit, 0, None)))
        self.zeros = ex.union(EMPTY, ex.concat(self.point, ex.repeat(ex.literal(b"0"), 1, None)))
        self._sign = sign
        self._canonical: dict[tuple[int, Digits], int] = {}
        self._digits_of: dict[int, Digits] = {}
        self._listed: dict[int, tuple[Decimal, ...] | None] = {}
        self._integers: set[int] = set()  # expressions of which every text is an integer
        self.fraction = ex.union(EMPTY, ex.concat(self.point, ex.repeat(self.digit, 1, None)))
        self.plain = ex.concat(sign, self.natural, self.fraction)
        self.plain_integer = ex.concat(sign, self.natural, self.zeros)
        self.pointless_integer = ex.concat(sign, self.natural)  # the integers of draft 4
        mark = ex.bytes_in(1 << ord("e") | 1 << ord("E"))
        below_309 = ex.union(
            ex.repeat(self.digit, 1, 2),
            ex.concat(self._digits(1, 2), self.digit, self.digit),
            ex.concat(ex.literal(b"30"), self._digits(0, 7)),
        )
        plus_minus = ex.union(EMPTY, ex.bytes_in(1 << ord("+") | 1 << ord("-")))
        exponent = ex.union(EMPTY, ex.concat(mark, plus_minus, below_309))
        self.any = ex.concat(self.plain, exponent)
        self._exponent = exponent
        # d.ddd e16 and above, with at most 16 decimals, is an integer whatever its digits are
        from_16 = ex.union(
            ex.concat(ex.literal(b"1"), self._digits(6, 9)),
            ex.concat(self._digits(2, 9), self.digit),
            ex.concat(self._digits(1, 2), self.digit, self.digit),
            ex.concat(ex.literal(b"30"), self._digits(0, 7)),
        )
        mantissa = ex.concat(
            sign, self._digits(1, 9), ex.union(EMPTY, ex.concat(self.point, ex.repeat(self.digit, 1, 16)))
        )
        self.integer = ex.union(
            self.plain_integer, ex.concat(mantissa, mark, ex.union(EMPTY, ex.literal(b"+")), from_16)
        )

    @property
    def distinct(self) -> int:
        """Spellings of some numbers, one spelling for each of them: for counting different numbers."""
        fraction = self.ex.concat(self.point, self.ex.repeat(self.digit, 0, 16), self._digits(1, 9))
        return self.ex.concat(self.canonical_integer(USUAL_DIGITS.whole), self.ex.union(EMPTY, fraction))

    def listed(self, expr: int) -> tuple[Decimal, ...] | None:
        """The numbers of a language, if it has spellings of at most ``MAX_LISTED`` numbers; else None."""
        if expr in self._listed:
            return self._listed[expr]
        ex = self.ex
        found: tuple[Decimal, ...] | None = None
        if expr == NOTHING:
            found = ()
        elif expr not in (self.any, self.integer, self.plain, self.plain_integer, self.pointless_integer):
            distinct = ex.intersect(expr, self.distinct)
            if 0 < ex.num_texts(distinct, MAX_LISTED + 1) <= MAX_LISTED:
                values = [Decimal(text.decode()) for text in ex.texts(distinct)]
                if ex.is_subset(expr, self.equal_to_any(values)):
                    found = tuple(values)
        self._listed[expr] = found
        return found

    def _up_to(self, num_digits: int) -> int:
        """Positive integers of at most so many digits."""
        return self.ex.concat(self._digits(1, 9), self.ex.repeat(self.digit, 0, num_digits - 1))

    def canonical_integer(self, num_digits: int) -> int:
        """Integers of at most so many digits, without point and exponent."""
        return self.ex.union(self.ex.literal(b"0"), self.ex.concat(self._sign, self._up_to(num_digits)))

    def short(self, digits: Digits) -> int:
        """Numbers of at most so many digits, with or without an exponent."""
        ex = self.ex
        whole = ex.union(ex.literal(b"0"), self._up_to(digits.whole))
        part = ex.union(EMPTY, ex.concat(self.point, ex.repeat(self.digit, 1, digits.decimals)))
        return ex.concat(self._sign, whole, part, self._exponent)

    def _digits(self, low: int, high: int) -> int:
        return self.ex.bytes_in((1 << (0x30 + high + 1)) - (1 << (0x30 + low))) if low <= high else NOTHING

    def canonical(self, expr: int, digits: Digits = USUAL_DIGITS) -> int:
        """The preferred spellings in a language of numbers: of at most so many digits, integers among them in a
        language of integers without point and exponent. All spellings if there are none of these.

        An exponent has at most three digits in any language.
        """
        key = (expr, digits)
        found = self._canonical.get(key)
        if found is None:
            found = self._canonical[key] = self._make_canonical(expr, digits)
        return found

    def _make_canonical(self, expr: int, digits: Digits) -> int:
        ex = self.ex
        if expr == self.any:
            return self.short(digits)
        if expr in (self.integer, self.plain_integer, self.pointless_integer):
            return self.canonical_integer(digits.whole)
        try:
            if expr in self._integers or ex.is_subset(expr, self.plain_integer):
                preferred = ex.alive(ex.intersect(expr, self.canonical_integer(digits.whole)))
            else:
                preferred = ex.intersect(expr, self.short(digits))
            return preferred if ex.is_nonempty(preferred) else expr
        except GrammarTooComplex:
            return expr

    def digits_for(self, *exprs: int) -> Digits:
        """The usual digits, or more where the bounds and values that the languages were made from have more."""
        known = (self._digits_of.get(expr, USUAL_DIGITS) for expr in exprs)
        return Digits(*map(max, zip(USUAL_DIGITS, *known, strict=True)))

    def _made_from(self, expr: int, parts: Iterable[int], *values: Decimal) -> int:
        """Note the digits of the languages and values that a language was made from."""
        digits = [self.digits_for(expr, *parts)]
        digits += [Digits(v.adjusted() + 1, -int(v.as_tuple().exponent)) for v in values]
        self._digits_of[expr] = Digits(*map(max, zip(*digits, strict=True)))
        return expr

    def without_exponents(self, expr: int) -> int:
        """The language's spellings that have no exponent."""
        if expr == self.any:
            return self.plain
        return self.plain_integer if expr == self.integer else self.ex.intersect(self.plain, expr)

    def equal_to(self, value: Decimal) -> int:
        """Plain spellings of one number."""
        bound = Bound(value, True)
        return self.between(bound, bound)

    def equal_to_any(self, values: list[Decimal]) -> int:
        """Plain spellings of some numbers."""
        parts = list(map(self.equal_to, values))
        return self._made_from(self.ex.union(*parts), parts)

    def intersect(self, *parts: int) -> int:
        """The numbers that are in all of the languages."""
        return self._made_from(self.ex.intersect(*parts), parts)

    def multiple_of(self, step: Decimal, *, integer: bool = False, where: str = "") -> int:
        """Plain spellings of the multiples of ``step``, or of the integers among them."""
        if step <= 0:
            raise GrammarError(f"multipleOf must be above 0, not {step}", where=where)
        _, digits, exponent = step.as_tuple()
        assert isinstance(exponent, int)
        value = int("".join(map(str, digits)))
        scale = max(0, -exponent)
        modulus = value * 10 ** max(0, exponent)
        while scale and modulus % 10 == 0:
            modulus, scale = modulus // 10, scale - 1
        if modulus > 10**15 or scale > 30:
            raise GrammarError(f"multipleOf {step} has more than 15 digits or 30 decimals", where=where)
        if integer:  # the integers among the multiples of a / b, in lowest terms, are the multiples of a
            modulus, scale = modulus // gcd(modulus, 10**scale), 0
        if modulus == 1 and scale == 0:
            return self.plain_integer
        well_formed = self.plain_integer if integer else self.plain
        return self._made_from(self.ex.intersect(well_formed, self.ex.multiple_of(modulus, scale)), (), step)

    def between(self, low: Bound | None, high: Bound | None, *, integer: bool = False, where: str = "") -> int:
        """Plain spellings of the numbers, or integers, between the bounds."""
        for bound in (low, high):
            if bound is None:
                continue
            if max(abs(bound.value.adjusted()), len(bound.value.as_tuple().digits)) > MAX_DIGITS:
                raise GrammarError(f"numeric bound {bound.value} has more than {MAX_DIGITS} digits", where=where)
        key = (low, high, integer)
        found = self._between.get(key)
        if found is None:
            found = self._between[key] = self._make_between(low, high, integer)
            self._made_from(found, (), *(bound.value for bound in (low, high) if bound is not None))
            if integer:
                self._integers.add(found)
        return found

    def _make_between(self, low: Bound | None, high: Bound | None, integer: bool) -> int:
        if integer:
            low = low and self._whole(low, ROUND_CEILING, 1)
            high = high and self._whole(high, ROUND_FLOOR, -1)
        if low is None and high is None:
            return self.plain_integer if integer else self.plain
        zero = Bound(Decimal(0), True)
        parts = []
        if high is None or high.value >= 0:
            floor = low if low is not None and low.value >= 0 else zero
            positive = self._natural_between(floor, high, integer)
            parts.append(positive)
        if low is None or low.value < 0:
            above_zero = Bound(Decimal(0), False)
            floor = Bound(-high.value, high.is_inclusive) if high is not None and high.value < 0 else above_zero
            ceiling = None if low is None else Bound(-low.value, low.is_inclusive)
            parts.append(self.ex.concat(self.minus, self._natural_between(floor, ceiling, integer)))
        if _holds(Decimal(0), low, high):
            parts.append(self.ex.concat(self.minus, self.ex.literal(b"0"), self.zeros))
        return self.ex.union(*parts)

    @staticmethod
    def _whole(bound: Bound, rounding: str, step: int) -> Bound:
        value = bound.value.to_integral_value(rounding)
        if value == bound.value and not bound.is_inclusive:
            value += step
        return Bound(value, True)

    def _natural_between(self, low: Bound, high: Bound | None, integer: bool) -> int:
        """Spellings without a sign of the numbers in [low, high], where low >= 0."""
        if high is not None and high.value < low.value:
            return NOTHING
        if high is not None and high.value == low.value and not (high.is_inclusive and low.is_inclusive):
            return NOTHING
        low_whole, low_part = _split(low.value)
        high_whole, high_part = _split(high.value) if high is not None else ("", "")
        longest = len(high_whole) if high is not None else len(low_whole)
        parts = []
        shorter = longest - len(low_whole) - 1  # numbers longer than the lower bound and shorter than the upper one
        if shorter > 0:
            tail = self.zeros if integer else self.fraction
            digits = self.ex.repeat(self.digit, len(low_whole), len(low_whole) + shorter - 1)
            parts.append(self.ex.concat(self._digits(1, 9), digits, tail))
        for length in sorted({len(low_whole), longest}):
            tight_low = length == len(low_whole)
            tight_high = high is not None and length == len(high_whole)
            first = low_whole if tight_low else "1" + "0" * (length - 1)
            last = high_whole if tight_high else "9" * length
            fractions = _Fractions(
                self,
                low_part if tight_low else "",
                low.is_inclusive or not tight_low,
                high_part if tight_high else None,
                high is None or high.is_inclusive,
                integer,
            )
            parts.append(self._whole_part(first, last, 0, True, True, fractions))
        if high is None:
            free = self.zeros if integer else self.fraction
            parts.append(self.ex.concat(self._digits(1, 9), self.ex.repeat(self.digit, len(low_whole), None), free))
        return self.ex.union(*parts)

    def _whole_part(self, low: str, high: str, at: int, on_low: bool, on_high: bool, tail: "_Fractions") -> int:
        ex = self.ex
        if at == len(low):
            return tail.expression(on_low, on_high)
        # a first digit may be bound to be no zero
        on_low = on_low and (at == 0 or bool(low[at:].strip("0")) or not tail.is_free_above)
        on_high = on_high and (bool(high[at:].strip("9")) or not tail.is_free_below)
        first = int(low[at]) if on_low else 0
        last = int(high[at]) if on_high else 9
        if not on_low and not on_high:
            rest = ex.repeat(self.digit, len(low) - at, len(low) - at)
            return ex.concat(rest, tail.expression(False, False))
        parts = []
        if first == last and on_low and on_high:
            return ex.concat(self._digits(first, first), self._whole_part(low, high, at + 1, True, True, tail))
        if on_low:
            parts.append(ex.concat(self._digits(first, first), self._whole_part(low, high, at + 1, True, False, tail)))
            first += 1
        if on_high:
            parts.append(ex.concat(self._digits(last, last), self._whole_part(low, high, at + 1, False, True, tail)))
            last -= 1
        if first <= last:
            rest = self._whole_part(low, high, at + 1, False, False, tail)
            parts.append(ex.concat(self._digits(first, last), rest))
        return ex.union(*parts)


class _Fractions:
    """What may follow the digits before the point, given whether they equal those of the lower and the upper bound."""

    def __init__(
        self, numbers: Numbers, low: str, low_inclusive: bool, high: str | None, high_inclusive: bool, integer: bool
    ) -> None:
        self.numbers = numbers
        self.low, self.low_inclusive = low, low_inclusive
        self.high, self.high_inclusive = high, high_inclusive
        self.integer = integer

    @property
    def is_free_below(self) -> bool:
        """Whether all decimals may follow the whole part of the upper bound."""
        return self.integer or self.high is None

    @property
    def is_free_above(self) -> bool:
        """Whether all decimals may follow the whole part of the lower bound."""
        return self.low == "" and self.low_inclusive

    def expression(self, on_low: bool, on_high: bool) -> int:
        ex = self.numbers.ex
        on_high = on_high and self.high is not None
        if self.is_free_above:
            on_low = False
        if self.integer:
            return self.numbers.zeros  # bounds of integers are whole and inclusive
        if not on_low and not on_high:
            return self.numbers.fraction
        return ex.union(
            EMPTY if self._ends(0, on_low, on_high) else NOTHING,
            ex.concat(self.numbers.point, self._from(0, on_low, on_high, True)),
        )

    def _ends(self, at: int, on_low: bool, on_high: bool) -> bool:
        if on_low and (self.low[at:].strip("0") or not self.low_inclusive):
            return False
        return not (on_high and not (self.high or "")[at:].strip("0") and not self.high_inclusive)

    def _from(self, at: int, on_low: bool, on_high: bool, first: bool) -> int:
        """Digits from decimal place ``at`` on; at least one where ``first``."""
        ex, numbers = self.numbers.ex, self.numbers
        high = self.high or ""
        if on_low and at >= len(self.low) and self.low_inclusive:
            on_low = False
        if not on_low and not on_high:
            return ex.repeat(numbers.digit, 1 if first else 0, None)
        if at >= len(self.low) and at >= len(high):
            zeros = ex.repeat(ex.literal(b"0"), 0, None)
            if on_high:  # any other digit would pass the bound
                is_reached = self.high_inclusive and not on_low
                return ex.repeat(ex.literal(b"0"), 1 if first else 0, None) if is_reached else NOTHING
            return ex.concat(zeros, numbers._digits(1, 9), ex.repeat(numbers.digit, 0, None))
        parts = []
        if not first and self._ends(at, on_low, on_high):
            parts.append(EMPTY)
        low_digit = int(self.low[at]) if on_low and at < len(self.low) else 0
        high_digit = (int(high[at]) if at < len(high) else 0) if on_high else 9
        for digit in range(low_digit, high_digit + 1):
            rest = self._from(at + 1, on_low and digit == low_digit, on_high and digit == high_digit, False)
            parts.append(ex.concat(numbers._digits(digit, digit), rest))
        return ex.union(*parts)


def _split(value: Decimal) -> tuple[str, str]:
    whole, _, part = format(abs(value), "f").partition(".")
    return whole.lstrip("0") or "0", part.rstrip("0")


def _holds(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    if low is not None and (value < low.value or (value == low.value and not low.is_inclusive)):
        return False
    return high is None or value < high.value or (value == high.value and high.is_inclusive)
