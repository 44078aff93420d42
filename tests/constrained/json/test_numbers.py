# ruff: noqa: E501
import json
import random
from decimal import Decimal
from typing import Any

import pytest
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.constrained.expressions import NOTHING, Expressions
from phloem.constrained.json.numbers import Bound, Numbers

from ..conftest import takes

jsonschema = pytest.importorskip("jsonschema")

BOUNDS = [
    "0",
    "1",
    "-1",
    "5",
    "12",
    "99",
    "100",
    "-7",
    "0.5",
    "-0.5",
    "1.25",
    "3.14",
    "-12.5",
    "1000",
    "0.01",
    "-0.01",
    "2.50",
]
SPELLINGS = [
    "0",
    "-0",
    "0.0",
    "-0.0",
    "1",
    "1.0",
    "-1",
    "5",
    "12",
    "9",
    "10",
    "99",
    "99.9",
    "100",
    "100.0",
    "100.01",
    "101",
    "-7",
    "-6.99",
    "-7.01",
    "0.5",
    "0.49",
    "0.51",
    "0.500",
    "0.5001",
    "-0.5",
    "-0.499",
    "-0.51",
    "1.25",
    "1.2",
    "1.3",
    "1.249",
    "1.2501",
    "3.14",
    "3.1",
    "3.141",
    "-12.5",
    "-12",
    "-13",
    "1000",
    "999.99",
    "1000.1",
    "12345",
    "0.01",
    "0.009",
    "0.011",
    "-0.01",
    "0.0100",
    "2.5",
    "2.50",
    "2.49",
]


@pytest.fixture(scope="module")
def numbers() -> Numbers:
    return Numbers(Expressions())


def is_within(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or value > low.value or (low.is_inclusive and value == low.value)
    return above and (high is None or value < high.value or (high.is_inclusive and value == high.value))


@pytest.mark.parametrize("seed", range(8))
def test_ranges_hold_exactly_the_numbers_between(numbers: Numbers, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        low, high = (
            Bound(Decimal(rng.choice(BOUNDS)), rng.random() < 0.5) if rng.random() < 0.7 else None for _ in range(2)
        )
        integer = rng.random() < 0.3
        found = numbers.between(low, high, integer=integer)
        for text in SPELLINGS:
            value = Decimal(text)
            expected = is_within(value, low, high) and (not integer or value == value.to_integral_value())
            assert numbers.ex.matches(found, text.encode()) == expected, (low, high, integer, text)


@pytest.mark.parametrize("step", ["1", "2", "3", "0.01", "2.5", "0.5", "10", "7", "1e2", "0.25"])
def test_multiples(numbers: Numbers, step: str) -> None:
    found = numbers.multiple_of(Decimal(step))
    for text in [*SPELLINGS, "21", "30", "7.5", "200", "-300"]:
        assert numbers.ex.matches(found, text.encode()) == (Decimal(text) % Decimal(step) == 0), text


def test_multiples_within_a_range_are_found_or_known_to_be_none(numbers: Numbers) -> None:
    ex = numbers.ex
    between = numbers.between(Bound(Decimal(8), True), Bound(Decimal(13), True))
    assert not ex.is_nonempty(ex.intersect(between, numbers.multiple_of(Decimal("7")), numbers.multiple_of(Decimal(5))))
    assert ex.is_nonempty(ex.intersect(numbers.multiple_of(Decimal(123456789)), numbers.plain))


@pytest.mark.parametrize("text", ["1e5", "-2.5E-3", "1e307", "0"])
def test_unbounded_numbers_may_have_exponents(numbers: Numbers, text: str) -> None:
    assert numbers.ex.matches(numbers.any, text.encode())


@pytest.mark.parametrize(
    ("text", "whole"), [("1.0", True), ("1.5", False), ("1e16", True), ("1.5e+20", True), ("1e-5", False), ("-0", True)]
)
def test_integers_by_value(numbers: Numbers, text: str, whole: bool) -> None:
    assert numbers.ex.matches(numbers.integer, text.encode()) == whole


def test_too_many_digits_are_refused(numbers: Numbers) -> None:
    with pytest.raises(GrammarError, match="more than 400 digits"):
        numbers.between(Bound(Decimal("1e500"), True), None, where="#/minimum")


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"minimum": 1_600_000_000_000, "maximum": 4_102_444_800_000, "multipleOf": 1000}, 1_700_000_000_000, 10**12),
        ({"minimum": 16_000_000, "multipleOf": 86_400}, 16_070_400, 16_000_000),
        ({"minimum": 16, "maximum": 10_000_000, "multipleOf": 3600}, 9_997_200, 9_997_201),
    ],
)
def test_multiples_of_large_steps_within_wide_bounds_are_found(
    vocabulary: Vocabulary, schema: dict, inside: int, outside: int
) -> None:
    grammar = compile("json_schema", json.dumps({"type": "integer", **schema}), vocabulary)
    assert takes(grammar, str(inside)) and not takes(grammar, str(outside))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"}, {"type": "integer", "minimum": -5, "maximum": 120}, {"type": "integer", "multipleOf": 5}, {"const": 4},
        {"enum": [4, 10]}, {"type": "number", "multipleOf": 2}, {"allOf": [{"type": "integer"}, {"minimum": 3.5}]}, {"type": "integer", "not": {"const": 7}},
        {"type": ["integer", "string"]},
    ],
)  # fmt: skip
def test_integers_are_spelled_one_way_unless_asked(vocabulary: Vocabulary, schema: Any) -> None:
    text = json.dumps(schema)
    canonical, any_way = (
        compile("json_schema", text, vocabulary),
        compile("json_schema", text, vocabulary, numbers="any"),
    )
    validator = jsonschema.Draft202012Validator(schema)
    for value in (0, 4, 7, 10, -5, 120, 121):
        assert takes(canonical, str(value)) == takes(any_way, str(value)) == validator.is_valid(value), value
        assert not takes(canonical, f"{value}.0") and not takes(canonical, f"{value}e0")
        assert takes(any_way, f"{value}.0") == validator.is_valid(value), value


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "number", "minimum": 0, "maximum": 1000}])
def test_canonical_numbers_have_at_most_17_decimals(vocabulary: Vocabulary, schema: Any) -> None:
    canonical = compile("json_schema", json.dumps(schema), vocabulary)
    any_way = compile("json_schema", json.dumps(schema), vocabulary, numbers="any")
    assert takes(canonical, "0.1") and takes(canonical, "1." + 17 * "0") and takes(canonical, repr(2 / 3))
    assert takes(any_way, "1." + 18 * "0") and not takes(canonical, "1." + 18 * "0")
    constant = compile("json_schema", '{"const": 0.1234567890123456789}', vocabulary)
    assert takes(constant, "0.1234567890123456789")  # what has no shorter spelling keeps its own


def test_numbers_that_may_be_fractions_keep_their_points(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", '{"type": "number", "minimum": 0, "maximum": 1}', vocabulary)
    assert takes(grammar, "1.0") and takes(grammar, "0.50") and takes(grammar, "1") and not takes(grammar, "1.01")
    not_whole = compile("json_schema", '{"type": "number", "not": {"type": "integer"}}', vocabulary)
    assert takes(not_whole, "1.5") and not takes(not_whole, "1.0") and not takes(not_whole, "1")


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {"type": "number"}, {}, {"multipleOf": 3}, {"not": {"const": 5}}], ids=str
)
def test_numbers_without_bounds_have_at_most_18_digits_unless_asked(
    vocabulary: Vocabulary, schema: dict[str, Any], sign: str
) -> None:
    canonical = compile("json_schema", json.dumps(schema), vocabulary)
    any_way = compile("json_schema", json.dumps(schema), vocabulary, numbers="any")
    nines = sign + 18 * "9"
    assert takes(canonical, nines) and takes(any_way, nines) and takes(any_way, nines + "9")
    assert not takes(canonical, nines + "9")
    if schema == {"type": "number"}:
        assert takes(canonical, sign + "1e22") and takes(canonical, nines + ".25E-307")
        assert not takes(canonical, sign + "1e1000") and not takes(canonical, "1e-1000")


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"const": 10**25}, ["1" + 25 * "0"], ["1" + 26 * "0"]),
        ({"enum": [1, 10**20, 10**30]}, ["1", "1" + 20 * "0", "1" + 30 * "0"], ["10"]),
        ({"enum": [0.5, "0.1234567890123456789"]}, ["0.5"], ["0." + "1234567890123456789"]),
        ({"type": "integer", "maximum": 10**25}, ["1" + 25 * "0", 25 * "9", "-" + 26 * "9"], ["1" + 26 * "0", "-" + 27 * "9"]),
        ({"type": "integer", "minimum": 10**25}, ["1" + 25 * "0", 26 * "9"], [27 * "9", "5"]),
        ({"type": "integer", "minimum": -5, "maximum": 10**25, "multipleOf": 10}, [24 * "9" + "0"], [25 * "9"]),
        ({"allOf": [{"type": "integer"}, {"maximum": 10**20}]}, ["1" + 20 * "0"], [21 * "9"]),
        ({"type": "number", "exclusiveMinimum": 10**20}, ["1" + 20 * "0" + ".5", 21 * "9"], [18 * "9", "1" + 20 * "0"]),
        ({"type": "integer", "not": {"maximum": 10**20}}, [21 * "9"], ["1" + 20 * "0"]),
    ],
)  # fmt: skip
def test_a_schema_that_names_longer_numbers_gets_them(
    vocabulary: Vocabulary, schema: Any, inside: list[str], outside: list[str]
) -> None:
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    assert [text for text in inside if not takes(grammar, text)] == []
    assert [text for text in outside if takes(grammar, text)] == []


def test_long_decimals_beside_short_ones_are_kept(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", '{"enum": [0.5, 0.1234567890123456789, 2]}', vocabulary)
    assert all(takes(grammar, text) for text in ("0.5", "0.1234567890123456789", "2"))
    step = compile("json_schema", '{"multipleOf": 0.00000000000000000001, "maximum": 1}', vocabulary)
    assert takes(step, "0.00000000000000000003")


def test_a_counted_digit_costs_no_mask_of_its_own(vocabulary: Vocabulary) -> None:
    """Masks of a number are shared where no token reaches the limit."""
    grammar = compile("json_schema", '{"type": "array", "items": {"type": "integer"}}', vocabulary)
    matcher = grammar.matcher()
    rows = []
    for byte in b"[9999999999":
        assert matcher.accept(byte)
        rows.append(grammar.masks.of(matcher.state))
    assert len({id(row) for row in rows[1:]}) == 1


def test_the_numbers_of_a_short_list_are_named() -> None:
    numbers = Numbers(Expressions((True,) * 256))
    one, five = Bound(Decimal(1), True), Bound(Decimal(5), True)
    assert numbers.listed(numbers.between(one, five, integer=True)) == tuple(map(Decimal, range(1, 6)))
    assert numbers.listed(numbers.between(one, Bound(Decimal(257), True), integer=True)) is None
    assert numbers.listed(numbers.between(one, five)) is None
    halves = numbers.intersect(numbers.between(one, five), numbers.multiple_of(Decimal("0.5")))
    assert sorted(numbers.listed(halves) or ()) == [Decimal(n) / 2 for n in range(2, 11)]
    assert numbers.listed(NOTHING) == () and numbers.listed(numbers.any) is None
