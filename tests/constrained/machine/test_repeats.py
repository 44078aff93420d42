"""The work of following unique items grows with the items, not with their combinations."""

import json
from typing import Any

import pytest
from phloem.constrained import Compiler, GrammarSpec, Vocabulary

from ..conftest import is_set

TOKENS = [*(bytes([b]) for b in range(256)), b'", "', b'",', b"}, {", b'{"id": "', b"item", b"</s>"]
VOCABULARY = Vocabulary(TOKENS, {len(TOKENS) - 1}, len(TOKENS) - 1)
ITEM = {"type": "object", "properties": {"id": {"type": "string"}, "n": {"type": "integer"}, "k": {"enum": ["a", "b"]}}}
NAMES = [f"name{i:03}" for i in range(300)]


def work(items: dict[str, Any], values: list[Any]) -> tuple[int, int, int]:
    """Fuel, states, expressions and formulas that masks and tokens of an array with the values need."""
    schema = {"type": "array", "items": items, "uniqueItems": True}
    grammar = Compiler(VOCABULARY).compile(GrammarSpec("json_schema", json.dumps(schema), {"whitespace": "compact"}))
    machine, matcher = grammar.machine, grammar.matcher()
    before = machine.fuel.spent, machine.num_states, len(machine.expressions.nodes)
    for byte in json.dumps(values, separators=(",", ":")).encode():
        assert is_set(matcher.mask(), byte), matcher.error
        assert matcher.accept(byte)
    assert matcher.is_accepting()
    fuel, states, nodes = before
    return machine.fuel.spent - fuel, machine.num_states - states, len(machine.expressions.nodes) - nodes


@pytest.mark.parametrize(
    ("items", "make"),
    [
        ({"type": "string"}, lambda i: f"item{i:03}"),
        ({"type": "string", "pattern": "^[a-z0-9]+$"}, lambda i: f"item{i:03}"),
        ({"type": "integer", "minimum": 0, "maximum": 365}, lambda i: 3 * i),
        ({**ITEM, "required": ["id", "n"]}, lambda i: {"id": f"item{i:03}", "n": i % 7, "k": "a"}),
        ({**ITEM, "required": ["n"], "additionalProperties": False}, lambda i: {"id": f"x{i % 9}", "n": i, "k": "a"}),
        ({"type": "array", "items": {"type": "integer"}}, lambda i: [i, i + 1]),
    ],
)  # fmt: skip
def test_an_item_costs_at_most_in_proportion_to_the_items_before_it(items: dict[str, Any], make: Any) -> None:
    small, big = work(items, [make(i) for i in range(20)]), work(items, [make(i) for i in range(80)])
    assert big[1] <= small[1] + 8 and big[2] <= small[2] + 40  # states and expressions do not depend on the items
    assert big[0] <= 20 * small[0]  # 4 times as many items, each compared with 4 times as many


def test_an_item_out_of_a_list_makes_a_constant_number_of_states_and_no_expression() -> None:
    few, many = work({"enum": NAMES}, NAMES[:10]), work({"enum": NAMES}, NAMES[:100])
    assert many[1] - few[1] <= 2 * 90 and many[2] == few[2]
    assert many[0] - few[0] <= 90 * 40


def test_a_listed_item_is_refused_the_second_time_also_inside_of_a_longer_name() -> None:
    schema = {"type": "array", "items": {"enum": ["a", "ab", "", None]}, "uniqueItems": True, "minItems": 4}
    grammar = Compiler(VOCABULARY).compile(GrammarSpec("json_schema", json.dumps(schema), {"whitespace": "compact"}))
    matcher = grammar.matcher()
    for byte in b'["a","':
        assert matcher.accept(byte)
    assert is_set(matcher.mask(), ord("a")) and is_set(matcher.mask(), ord('"'))
    assert matcher.accept(ord("a")) and not is_set(matcher.mask(), ord('"')) and is_set(matcher.mask(), ord("b"))
    assert matcher.accept(ord("b")) and matcher.accept(ord('"')) and not is_set(matcher.mask(), ord("]"))
    assert not grammar.machine.item_readers


def test_an_item_is_not_repeated_behind_white_space_that_its_token_has() -> None:
    tokens = [*(bytes([b]) for b in range(256)), b'\n  "a"', b'\n  "a",', b'\n  "b"', b"</s>"]
    vocabulary = Vocabulary(tokens, {259}, 259)
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    matcher = Compiler(vocabulary).compile(GrammarSpec("json_schema", json.dumps(schema))).matcher()
    assert all(matcher.accept(byte) for byte in b'[\n  "a",')
    assert [is_set(matcher.mask(), token) for token in (256, 257, 258)] == [False, False, True]
