"""Typed values: the grammar that travels, and the value that comes back."""

import dataclasses
import datetime
import enum
import json
import re
from typing import Annotated, Literal, TypedDict

import phloem
import pytest
from phloem import function, gen
from phloem.lang.grammar import integer, one_of, regex, text, words
from phloem.lang.number_patterns import integer_pattern
from phloem.lang.types import ParseError, typed_text
from phloem.protocol import errors, ops
from pydantic import BaseModel, Field, field_validator


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Row(TypedDict):
    name: str
    tags: list[str]


class City(BaseModel):
    name: str
    founded: Annotated[int, Field(ge=-3000, le=2100)]
    mayor: str | None = None

    @field_validator("name")
    @classmethod
    def capital(cls, value: str) -> str:
        if not value[0].isupper():
            raise ValueError("must begin with a capital")
        return value


@pytest.mark.parametrize(
    ("type_", "kind", "written", "value"),
    [
        (int, "regex", "-12", -12),
        (float, "regex", "2.5", 2.5),
        (bool, "choices", "true", True),
        (str, None, "any text", "any text"),
        (range(1, 11), "regex", "10", 10),
        (Annotated[int, Field(gt=0, lt=3)], "regex", "2", 2),
        (range(0, 10, 5), "choices", "5", 5),
        (Literal["a", 3, None], "choices", "3", 3),
        (Colour, "choices", "2", Colour.TWO),
        (datetime.date, "regex", "2024-02-29", datetime.date(2024, 2, 29)),
        (datetime.time, "regex", "23:59:00", datetime.time(23, 59)),
        (datetime.datetime, "regex", "2024-02-29T01:02:03", datetime.datetime(2024, 2, 29, 1, 2, 3)),
        (list[int], "json_schema", "[1, 2]", [1, 2]),
        (set[str], "json_schema", '["a", "b"]', {"a", "b"}),
        (int | Literal["none"], "json_schema", '"none"', "none"),
        (Point, "json_schema", '{"x": 1, "y": 2}', Point(1, 2.0)),
        (Row, "json_schema", '{"name": "n", "tags": []}', {"name": "n", "tags": []}),
        (City, "json_schema", '{"name": "Rome", "founded": -753}', City(name="Rome", founded=-753)),
    ],
)
def test_a_type_travels_as_a_grammar_and_comes_back_as_a_value(connect, type_, kind, written, value):
    @function
    def body(s):
        s += "value: " + gen("x", type_)

    backend = connect(reply=lambda prompt, op: written)
    s = body.run(backend=backend)
    got = s["x"]
    assert got == value and type(got) is type(value)
    assert s.text() == "value: " + written and s.raw("x") == written
    (op,) = (op for op in backend.client.submits[0].ops if isinstance(op, ops.Gen))
    assert (op.grammar.kind if op.grammar else None) == kind


def test_schemas_of_objects_are_closed_and_hold_their_limits():
    schema = json.loads(typed_text(City).grammar.text)
    assert schema["additionalProperties"] is False and "title" not in schema
    assert schema["properties"]["founded"]["minimum"] == -3000


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (0, 9), (7, 13), (1, 10), (-3, 5), (-120, -98), (0, 999), (95, 1203), (-1, 1), (10, 99), (307, 4096)],
)
def test_integer_patterns_match_exactly_their_range(low, high):
    pattern = re.compile(integer_pattern(low, high))
    matched = [i for i in range(low - 150, high + 1200) if pattern.fullmatch(str(i))]
    assert matched == list(range(low, high + 1))
    assert (
        not pattern.fullmatch("0" + str(max(low, 1)))
        and not pattern.fullmatch(f"{low}.0")
        and not pattern.fullmatch("-0")
    )


def test_open_integers_have_up_to_18_digits():
    pattern = re.compile(integer_pattern())
    assert all(pattern.fullmatch(t) for t in ("0", "-1", "42", "9" * 18)) and not pattern.fullmatch("9" * 19)
    assert len(integer_pattern()) < 60


def test_a_type_is_the_second_argument_or_named_and_dtype_gives_text(connect):
    @function
    def body(s):
        s += gen("a", int, temperature=0) + gen("b", max_tokens=5, type=int) + gen("c", dtype=int)

    backend = connect(reply=lambda prompt, op: "7")
    s = body.run(backend=backend)
    assert (s["a"], s["b"], s["c"]) == (7, 7, "7")


def test_candidates_are_typed_one_by_one(connect):
    s = function(lambda s: s.__iadd__(gen("a", int, n=2))).run(backend=connect(reply=lambda prompt, op: ["1", "2"]))
    assert s["a"] == [1, 2]


def test_a_wrong_value_keeps_its_text_and_says_what_to_do(connect):
    s = function(lambda s: s.__iadd__(gen("a", City))).run(
        backend=connect(reply=lambda prompt, op: '{"name": "rome", "founded": 1}')
    )
    with pytest.raises(ParseError, match=r"must begin with a capital.*retries=2") as caught:
        s["a"]
    assert caught.value.raw == s.raw("a")
    short = function(lambda s: s.__iadd__(gen("a", list[int], max_tokens=1))).run(
        backend=connect(reply=lambda prompt, op: "[1, 2]")
    )
    with pytest.raises(ParseError, match=r"'a' was cut short by max_tokens: '\[1,'"):
        short["a"]


def test_retries_go_back_and_generate_again(connect):
    answers = iter(["rome", "milan", "Turin"])

    @function
    def body(s):
        s += "city: " + gen("a", City, retries=2, temperature=0) + " end" + gen("b", str)

    def reply(prompt, op):
        return " ok" if prompt.endswith("end") else json.dumps({"name": next(answers), "founded": 1})

    backend = connect(reply=reply)
    s = body.run(backend=backend)
    assert s["a"].name == "Turin" and s["b"] == " ok"
    assert s.text() == 'city: {"name": "Turin", "founded": 1} end ok'
    gens = [op for sent in backend.client.submits for op in sent.ops if isinstance(op, ops.Gen)]
    assert [op.params.temperature for op in gens[:3]] == [0, 0.7, 0.7] and gens[1].params.seed != gens[2].params.seed
    closed = [op for sent in backend.client.submits for op in sent.ops if isinstance(op, ops.Rollback)]
    assert len(closed) == 2


def test_an_impossible_type_is_refused_when_the_gen_is_written():
    with pytest.raises(errors.InvalidRequest, match="contains no number"):
        gen("a", range(3, 3))
    with pytest.raises(errors.InvalidRequest, match="cannot write a"):
        gen("a", list[object.__class__.__call__.__class__])
    with pytest.raises(errors.InvalidRequest, match=r"second argument is max_tokens \(an int\) or a type"):
        gen("a", "12")
    with pytest.raises(errors.InvalidRequest, match="a type and a grammar"):
        gen("a", int, regex="[0-9]")
    with pytest.raises(errors.InvalidRequest, match="needs a type whose checks could fail"):
        gen("a", retries=2)
    with pytest.raises(errors.InvalidRequest, match="regex and lark"):
        gen("a", regex="a", lark="b")
    with pytest.raises(errors.InvalidRequest, match="grammar_options=.* has no grammar"):
        gen("a", grammar_options={"whitespace": "compact"})


def test_options_travel_with_a_grammar_and_with_a_types_own():
    options = {"whitespace": "compact"}
    for expr in (
        gen("a", json_schema={"type": "object"}, grammar_options=options),
        gen("a", Point, grammar_options=options),
    ):
        assert expr.grammar.kind == "json_schema" and expr.grammar.options == options
    tags = {"tags": [{"begin": "<n>", "regex": "[0-9]", "end": "</n>"}]}
    assert gen("a", structural_tags=tags).grammar.kind == "structural_tags"
    with pytest.raises(errors.InvalidRequest, match=r"grammar_options \(whitespace\) are not served by this backend"):
        gen("a", json_schema={}, grammar_options=options).sampling_params


def test_grammars_compose_and_their_captures_become_variables(connect):
    amount = integer().capture("amount")
    unit = one_of("USD", "EUR").capture("unit")
    line = "total: " + amount + (text(" ") + unit).optional() + "."

    @function
    def body(s):
        s += gen("line", line) + " again " + s.ref("amount")

    backend = connect(reply=lambda prompt, op: "total: 12 EUR.")
    s = body.run(backend=backend)
    assert (s["line"], s["amount"], s["unit"]) == ("total: 12 EUR.", "12", "EUR")
    assert s.text() == "total: 12 EUR. again 12"
    (op,) = (op for op in backend.client.submits[0].ops if isinstance(op, ops.Gen))
    assert op.grammar.kind == "regex" and "?P<" not in op.grammar.text
    assert line.captures("total: 3.") == {"amount": "3", "unit": None}


def test_grammars_repeat_and_choose():
    assert re.fullmatch(words(2, 3).spec().text, "a bc d") and not re.fullmatch(words(2, 3).spec().text, "a b c d")
    listed = regex("[a-z]").many(1, 3, sep=", ")
    assert re.fullmatch(listed.pattern, "a, b") and not re.fullmatch(listed.pattern, "")
    assert re.fullmatch(regex("x").many().pattern, "") and re.fullmatch(("a" | regex("b")).pattern, "a")
    with pytest.raises(errors.InvalidRequest, match="inside many"):
        regex("x").capture("n").many()
    with pytest.raises(errors.InvalidRequest, match="'n' is used twice"):
        regex("x").capture("n") + regex("y").capture("n")


@pytest.mark.parametrize(
    ("type_", "ended"),
    [
        (int, {"11. So": "11", "-4 apples": "-4", "7": "7", "0\n": "0"}),
        (float, {"3.5. So": "3.5", "3.\nSo": "3", "-2.25 kg": "-2.25", "12": "12"}),
        (range(1, 100), {"42%": "42", "7.": "7"}),
    ],
)
def test_a_number_ends_where_the_model_writes_something_else(connect, type_, ended):
    """If only digits were allowed, a model that wants a full stop would write another digit."""
    backend = connect(reply=lambda prompt, op: "1")
    function(lambda s: s.__iadd__(gen("x", type_))).run(backend=backend).sync()
    (sent,) = [op for op in backend.client.submits[0].ops if isinstance(op, ops.Gen)]
    (end,) = sent.params.stop_regex
    for written, kept in ended.items():
        assert re.fullmatch(sent.grammar.text, written), written
        found = re.search(end, written)
        assert (written if found is None else written[: found.start()]) == kept
    assert not re.fullmatch(sent.grammar.text, "1-2") and not re.fullmatch(sent.grammar.text, "x")


@pytest.mark.model
def test_a_real_model_ends_its_numbers(smollm2_path):
    few = "Q: 3 + 2?\nA: The answer is 5.\n\nQ: 6 + 6?\nA: The answer is 12.\n\nQ: 7 + 4?\nA: The answer is "

    @function
    def ask(s):
        s += few + gen("n", int, temperature=0) + "." + gen("rest", max_tokens=2, temperature=0)

    with phloem.Engine(model=str(smollm2_path), num_slots=2048) as engine:
        s = ask.run(backend=engine)
        assert 0 < s["n"] < 100 and s.text().startswith(few + f"{s['n']}.")
