"""What texts that have begun may still need: no ending of a walk is longer, and the limit is not looked at before."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from phloem.constrained import CompiledGrammar, GrammarKind, Matcher, Vocabulary, compile
from phloem.constrained.expressions import Expressions
from phloem.constrained.regex_syntax import compile_regex
from phloem.constrained.rests import rest_of

CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("[a-z]{3}", 3, 3),
        ("[a-z]{3,9}", 3, 3),
        ("x(long|s)", 2, 4),
        ("(, [A-Z][a-z]{2}){0,5}", 0, 5),
        ('{"town": "[A-Z][a-z]{3,14}", "year": 1[0-9]{3}}', 30, 30),
        ("(yes|no), because [a-z]{1,5}", 13, 14),
        ("é?", 0, 2),
        ("[^a]", 1, 3),
        ("(?=.{2,4}$)[ab]*", 4, 4),
        ("a*a{50}b", 51, 52),
    ],
)
def test_the_rest_of_a_pattern(pattern: str, least: int, most: int) -> None:
    ex = Expressions()
    found = rest_of(ex, compile_regex(pattern, ex, anchored=True))
    assert found is not None and (found.least, found.most) == (least, most)


def test_characters_that_json_escapes_are_wider() -> None:
    ex = Expressions()
    rests = [rest_of(ex, compile_regex(pattern, ex, anchored=True), in_json=True) for pattern in ('"', r"\x01", "é")]
    assert [rest.least for rest in rests if rest is not None] == [2, 6, 2]


def test_intersections_without_a_longest_text_have_no_rest() -> None:
    ex = Expressions()
    assert rest_of(ex, compile_regex("(?=.*[0-9])[a-z0-9]*", ex, anchored=True)) is None


def pattern_of(rng: random.Random, depth: int) -> str:
    match rng.randrange(6 if depth else 2):
        case 0:
            return rng.choice(["a", "b", "the", "name", "é", ", ", "1"])
        case 1:
            return rng.choice(["[ab]", "[a-z]", "[0-9é]", "[^,]"])
        case 2 | 3:
            return "".join(pattern_of(rng, depth - 1) for _ in range(rng.randint(2, 4)))
        case 4:
            return "(" + "|".join(pattern_of(rng, depth - 1) for _ in range(rng.randint(2, 3))) + ")"
    low = rng.randint(0, 3)
    return f"({pattern_of(rng, depth - 1)}){{{low},{rng.choice(['', low + rng.randint(0, 4)])}}}"


def regex_of(rng: random.Random, vocabulary: Vocabulary) -> CompiledGrammar:
    return compile("regex", pattern_of(rng, 3), vocabulary)


SCALARS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0, "maximum": 120},
    {"type": "number"},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string"},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    {"type": "string", "pattern": '^("|\\x01){2}$'},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "email", "maxLength": 20},
    {"enum": ["a", "the name", 'a "quoted" one', 12, None, [1, {"a": 2}]]},
    {"const": {"the": ["name", 1]}},
]


def schema_of(rng: random.Random, depth: int) -> dict[str, Any]:
    match rng.randrange(5 if depth else 1):
        case 0:
            return rng.choice(SCALARS)
        case 1:
            low = rng.randint(0, 2)
            most = {"maxItems": low + rng.randint(0, 2)} if rng.random() < 0.5 else {}
            return {"type": "array", "items": schema_of(rng, depth - 1), "minItems": low, **most}
        case 2:
            parts = [schema_of(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": rng.randint(0, len(parts))}
        case 3:
            return {"anyOf": [schema_of(rng, depth - 1) for _ in range(2)]}
    names = rng.sample(["a", "the", "name", "na", "größe", 'q"', "a long name\n"], rng.randint(1, 4))
    inner = {name: schema_of(rng, depth - 1) for name in names}
    schema = CLOSED | {"properties": inner, "required": rng.sample(names, rng.randint(0, len(names)))}
    if rng.random() < 0.2:
        schema["additionalProperties"] = rng.choice(SCALARS)
    return schema


def json_of(rng: random.Random, vocabulary: Vocabulary) -> CompiledGrammar:
    style = rng.choice(["neat", "compact", "flexible"])
    order = rng.choice(["schema", "any"])
    return compile("json_schema", json.dumps(schema_of(rng, 3)), vocabulary, whitespace=style, property_order=order)


@pytest.mark.parametrize(("make", "least_known"), [(regex_of, 60), (json_of, 60)])
def test_no_text_needs_more(
    make: Callable[[random.Random, Vocabulary], CompiledGrammar], least_known: int, vocabulary: Vocabulary
) -> None:
    rng = random.Random(4)
    num_known = 0
    while num_known < least_known:
        grammar = make(rng, vocabulary)
        if grammar.most_needed is None:
            continue
        num_known += 1
        matcher, endings = grammar.matcher(), grammar.endings
        for _ in range(25):
            ending = endings.of(matcher.state)
            assert ending is not None and ending.num_tokens <= grammar.most_needed, (grammar.spec, ending)
            row = matcher.mask()
            allowed = [t for t in range(len(vocabulary)) if row[t >> 5] >> (t & 31) & 1 and t != vocabulary.eos]
            if not allowed:
                break
            for token in rng.sample(allowed, min(len(allowed), 8)):
                assert matcher.accept(token)
                ending = endings.of(matcher.state)
                assert ending is not None and ending.num_tokens <= grammar.most_needed, (grammar.spec, ending)
                matcher.rollback(1)
            matcher.accept(rng.choice(allowed))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "array"},
        {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"},
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 2},
        CLOSED | {"properties": {"a": True}},
        CLOSED | {"patternProperties": {"^x": {"type": "null"}}},
        CLOSED | {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "minProperties": 1},
        {"type": "array", "items": {"type": "null"}, "contains": {"type": "null"}},
        {"type": "object", "properties": {"a": {"not": {"type": "object"}}}},
    ],
)
def test_schemas_without_a_bound_have_none(schema: dict[str, Any], vocabulary: Vocabulary) -> None:
    assert compile("json_schema", json.dumps(schema), vocabulary).most_needed is None


def test_the_limit_of_tokens_is_looked_at_where_a_text_may_need_what_is_left(vocabulary: Vocabulary) -> None:
    grammar = compile("regex", "[a-z]{3,20}", vocabulary)
    assert grammar.most_needed == grammar.margin == 3
    matcher = grammar.matcher(max_tokens=10)
    assert matcher.free_until == 7
    for _ in range(8):
        assert not matcher.is_short and matcher.accept(ord("a"))
    matcher.rollback(4)
    assert matcher.free_until == 7


def many(count: int, **more: Any) -> dict[str, Any]:
    """An object of ``count`` required integers."""
    names = [f"f{i}" for i in range(count)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names} | more


TAGS = [{"begin": "<t>", "schema": {"type": "object", "properties": {"big": many(20)}}, "end": "</t>"}]
# A few tokens end each of them, until one token begins a part that takes a hundred and more.
GROWING: dict[str, tuple[GrammarKind, Any]] = {
    "items": ("json_schema", {"type": "array", "items": many(20)}),
    "closed items": ("json_schema", {"type": "array", "items": many(20, additionalProperties=False)}),
    "a property": ("json_schema", {"type": "object", "properties": {"big": many(20)}}),
    "a property of any name": ("json_schema", {"type": "object", "additionalProperties": many(20)}),
    "a property of a pattern": ("json_schema", {"type": "object", "patternProperties": {"^x": many(20)}}),
    "a branch": ("json_schema", {"type": "array", "items": {"anyOf": [{"type": "null"}, many(20)]}, "minItems": 1}),
    "a condition": (
        "json_schema",
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "b"}}},
            "then": {"required": [f"f{i}" for i in range(20)]},
        },
    ),
    "least items": ("json_schema", {"type": "array", "items": {"type": "array", "minItems": 60}}),
    "what an array contains": (
        "json_schema",
        {"type": "array", "items": {"type": "array", "contains": {"type": "integer"}, "minContains": 60}},
    ),
    "the schema itself": (
        "json_schema",
        {"type": "array", "items": {"anyOf": [{"$ref": "#"}, many(20, additionalProperties={"$ref": "#"})]}},
    ),
    "a long string": ("json_schema", {"type": "array", "items": {"type": "string", "minLength": 120}}),
    "rounds of a regex": ("regex", "x([0-9]{120};)*y"),
    "a branch of a regex": ("regex", "x(a|[b-d]{120}z)"),
    "EBNF": ("ebnf", 'root ::= item+\nitem ::= "a" | "(" big ")"\nbig ::= [0-9]{180} | "n" root "m"'),
    "Lark": ("lark", 'start: item+\nitem: "a" | "(" big ")"\nbig: D~60 | "n" start "m"\nD: /[0-9]x/'),
    "a tag": ("structural_tags", {"tags": TAGS, "begin_at_once": True}),
}


def longest_way(grammar: CompiledGrammar, matcher: Matcher, rng: random.Random) -> tuple[int, int]:
    """A token that the mask allows, mostly one after which the text needs the most tokens, and how many these are;
    -1 where only the end is left."""
    vocabulary = grammar.machine.vocabulary
    row = matcher.mask()
    allowed = [t for t in range(len(vocabulary)) if row[t >> 5] >> (t & 31) & 1 and t != vocabulary.eos]
    if not allowed:
        return -1, 0
    costs = grammar.endings.costs_after(matcher.state)[allowed]
    often = [t for t, cost in zip(allowed, costs, strict=True) if cost == costs.max()]
    return rng.choice(often if rng.random() < 0.7 else allowed), int(costs.max())


def growing(name: str, vocabulary: Vocabulary) -> CompiledGrammar:
    kind, text = GROWING[name]
    return compile(kind, text if isinstance(text, str) else json.dumps(text), vocabulary)


@pytest.mark.parametrize("name", GROWING)
def test_no_token_adds_more_than_the_margin(name: str, vocabulary: Vocabulary) -> None:
    grammar, rng = growing(name, vocabulary), random.Random(name)
    largest = 0
    for _ in range(12):
        matcher = grammar.matcher()
        for _ in range(30):
            ending = grammar.endings.of(matcher.state)
            token, needed = longest_way(grammar, matcher, rng)
            if token < 0:
                break
            assert ending is not None and matcher.accept(token)
            largest = max(largest, needed - ending.num_tokens)
    assert 60 < largest <= grammar.margin


@pytest.mark.parametrize("name", GROWING)
def test_a_text_that_takes_the_longest_ways_is_complete_within_its_limit(name: str, vocabulary: Vocabulary) -> None:
    grammar, rng = growing(name, vocabulary), random.Random(name)
    assert grammar.least_tokens is not None
    for more in range(0, 200, 10):
        limit = grammar.least_tokens + more
        matcher = grammar.matcher(max_tokens=limit)
        while matcher.num_tokens < limit and (token := longest_way(grammar, matcher, rng)[0]) >= 0:
            assert matcher.accept(token)
        assert matcher.is_accepting(), (limit, matcher.num_tokens)
