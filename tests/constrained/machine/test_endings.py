"""Endings: texts are complete within a number of tokens, and masks far from the limit are those without it."""

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from phloem.constrained import CompiledGrammar, Vocabulary, compile
from phloem.constrained.compiler import Compiler
from phloem.constrained.machine.endings import SPARE
from phloem.constrained.spec import GrammarKind, GrammarSpec

from ..conftest import is_set, reachable

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 3},
        "children": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        "eyes": {"enum": ["blue", "green", "brown"]},
    },
    "required": ["name", "eyes"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "uniqueItems": True, "minItems": 3, "items": {"enum": ["a", "bb", "ccc", "dddd"]}}
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "array", "contains": {"const": "the age"}, "items": {"type": ["string", "integer"]}},
    UNIQUE,
    {"type": "array", "items": UNIQUE, "minItems": 1},
    {"type": "array", "uniqueItems": True, "minItems": 3, "items": {"type": "integer"}},
    {"type": "object", "minProperties": 2},
    {"type": "object", "minProperties": 4, "propertyNames": {"pattern": "^[ab]{2}$"}},
    {"type": "array", "contains": {"type": "object", "minProperties": 2}},
    {"type": "object", "patternProperties": {"^x.{3}$": {"type": "integer", "minimum": 100}}, "required": ["xabc"]},
    {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b", "c"]}]},
    {
        "type": "object",
        "properties": {"kind": {"enum": ["p", "q"]}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "q"}}},
        "then": {"required": ["more"]},
    },
    {"type": "string", "pattern": "^[a-c]{2,5}-(the|name)$"},
    {"type": "string", "minLength": 7},
    {"oneOf": [{"type": "number", "multipleOf": 5}, {"type": "number", "multipleOf": 3}], "minimum": 10},
    {"$defs": {"l": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#/$defs/l"}},
     "required": ["next"], "additionalProperties": False}]}}, "$ref": "#/$defs/l"},
]  # fmt: skip
TAGS = {"tags": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}, {"begin": "<g>", "regex": "[ab]{3}", "end": "."}]}
GRAMMARS: list[tuple[GrammarKind, str, dict[str, Any]]] = [
    *[("json_schema", json.dumps(schema), {}) for schema in SCHEMAS],
    ("json_schema", json.dumps(PERSON), {"property_order": "any"}),
    ("json_schema", json.dumps(PERSON), {"whitespace": "compact"}),
    ("json", "", {}),
    ("regex", "[a-z]{3,20}x?(foo|return)", {}),
    ("regex", "(name|age)( (the|a))*\\.", {}),
    ("regex", "[^a]*é", {}),
    ("choices", '["name", "the name", "return acc"]', {}),
    ("ebnf", 'root ::= sum\nsum ::= num "+" sum | num | "(" sum ")"\nnum ::= [0-9]+', {}),
    ("ebnf", 'root ::= "return " item ("," item)* ";"\nitem ::= "the" | "[" item "]" | [a-c]{2,4}', {}),
    ("lark", 'start: "a" start "b" | X\nX: /[xyz]{4}/\n%ignore " "', {}),
    ("structural_tags", json.dumps(TAGS), {}),
    ("structural_tags", json.dumps({**TAGS, "start_after": "me>", "at_least_one": True}), {}),
]
NAMES = [f"{kind}-{i}" for i, (kind, _, _) in enumerate(GRAMMARS)]


def compiled(at: int, vocabulary: Vocabulary) -> CompiledGrammar:
    kind, text, options = GRAMMARS[at]
    return compile(kind, text, vocabulary, **options)


def draw(row: np.ndarray, rng: random.Random) -> int:
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    return int(allowed[rng.randrange(len(allowed))])


def check_text(at: int, text: str) -> None:
    if GRAMMARS[at][0] == "json_schema":
        jsonschema.Draft202012Validator(json.loads(GRAMMARS[at][1])).validate(json.loads(text))
    elif GRAMMARS[at][0] == "json":
        json.loads(text)


@pytest.mark.parametrize("at", range(len(GRAMMARS)), ids=NAMES)
def test_every_walk_ends_within_its_limit(vocabulary: Vocabulary, at: int) -> None:
    grammar = compiled(at, vocabulary)
    least = grammar.least_tokens
    assert least is not None
    rng = random.Random(at)
    for most in [least, least, least + 1, *[least + rng.randrange(60) for _ in range(12)]]:
        matcher = grammar.matcher(max_tokens=most)
        text = b""
        while matcher.num_tokens < most:
            token = draw(matcher.mask(), rng)
            assert matcher.accept(token), matcher.error
            if token == vocabulary.eos:
                break
            text += vocabulary.tokens[token]
        assert matcher.is_accepting(), (most, text)
        check_text(at, text.decode())


@pytest.mark.parametrize("at", range(len(GRAMMARS)), ids=NAMES)
def test_masks_hold_the_tokens_after_which_the_ending_fits_and_no_others(vocabulary: Vocabulary, at: int) -> None:
    grammar = compiled(at, vocabulary)
    # Where items have to differ, the cost of one token stands for others, which may need fewer tokens or more.
    spare = 2 * SPARE if grammar.machine.reads_items else 0
    rng = random.Random(at)
    most = (grammar.least_tokens or 0) + 12
    matcher, free = grammar.matcher(max_tokens=most), grammar.matcher()
    while matcher.num_tokens < most and not matcher.is_finished():
        row, left = matcher.mask(), most - matcher.num_tokens
        for token in reachable(free):
            after = free.clone()
            assert after.accept(token)
            ending = grammar.endings.of(after.state) if token != vocabulary.eos else None
            needed = ending.num_tokens if ending is not None else 0
            assert needed < left if is_set(row, token) else needed + spare >= left, (token, needed, left)
            twin = matcher.clone()
            assert twin.accept(token) == is_set(row, token)
        token = draw(row, rng)
        assert matcher.accept(token) and free.accept(token)
        assert free.state == matcher.state


MOST_STEPS = 1_000  # of a mask: for the text's own ending, and those after the tokens
PAIR = {"type": "array", "uniqueItems": True, "minItems": 2}
DISTINCT: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True, "minItems": 10},
    {"type": "array", "uniqueItems": True, "minItems": 4, "items": PAIR},
    {"type": "array", "uniqueItems": True, "minItems": 9, "items": {"type": "string", "pattern": "^[ab]+$"}},
    {"type": "object", "minProperties": 10},
]


@pytest.mark.parametrize("schema", DISTINCT, ids=str)
def test_items_that_have_to_differ_are_complete_within_a_limit(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    least = grammar.least_tokens
    assert least is not None
    for seed in range(6):
        rng = random.Random(seed)
        most = least + rng.randrange(40)
        matcher, text = grammar.matcher(max_tokens=most), b""
        while matcher.num_tokens < most and not matcher.is_finished():
            before = grammar.endings.num_steps
            token = draw(matcher.mask(), rng)
            assert grammar.endings.num_steps - before < MOST_STEPS
            assert matcher.accept(token), matcher.error
            text += vocabulary.tokens[token] if token != vocabulary.eos else b""
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("name", ["items", "names"])
def test_two_hundred_items_that_have_to_differ_have_an_ending(vocabulary: Vocabulary, name: str) -> None:
    schema: dict[str, Any] = {"type": "array", "uniqueItems": True, "minItems": 200}
    if name == "names":
        schema = {"type": "object", "propertyNames": {"pattern": "^[a-z]{2,8}$"}, "minProperties": 200}
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    ending = grammar.endings.of_start(grammar.start)
    assert ending is not None and grammar.least_tokens == ending.num_tokens
    jsonschema.Draft202012Validator(schema).validate(json.loads(ending.word))


@pytest.mark.parametrize("at", range(len(GRAMMARS)), ids=NAMES)
def test_far_from_the_limit_masks_are_those_without_it(vocabulary: Vocabulary, at: int) -> None:
    grammar = compiled(at, vocabulary)
    rng = random.Random(at)
    matcher, free = grammar.matcher(max_tokens=5_000), grammar.matcher()
    for _ in range(25):
        assert matcher.mask() is free.mask()
        assert matcher.forced_tokens() == free.forced_tokens()
        token = draw(free.mask(), rng)
        assert matcher.accept(token) and free.accept(token)
        if token == vocabulary.eos:
            break
    assert not matcher.is_closed_early


@pytest.mark.parametrize("text", [b'{"a": ["x", 1], "b": {"d": "y", "c": 1}}', b'[{"a": "b", "c": [1, 2]}, "d"]'])
def test_tokens_that_open_values_cost_what_the_text_after_them_needs(text: bytes) -> None:
    """The first time, when none of the stacks that they push is there."""
    cuts = {text[i:j] for i in range(len(text)) for j in range(i + 2, min(i + 5, len(text)))}
    opening = [b' "\\', b'"}', b' "}\\', b'", "', b'", "\\', b'{\n  "', b'{ "', b"[\n\t[", b'["', b"]}", b'"}, "']
    tokens = [*(bytes([b]) for b in range(256)), *sorted(cuts | {*opening}), b"</s>"]
    schema = {"type": ["object", "array"], "additionalProperties": {"required": ["d"]}, "minItems": 2}
    for end in range(len(text)):
        vocabulary = Vocabulary(tokens, {len(tokens) - 1}, len(tokens) - 1)
        grammar = compile("json_schema", json.dumps(schema), vocabulary)
        matcher = grammar.matcher()
        assert all(matcher.accept(byte) for byte in text[:end])
        costs = grammar.endings.costs_after(matcher.state)
        for token in reachable(matcher):
            if token != vocabulary.eos:
                ending = grammar.endings.of(grammar.machine.advance(matcher.state, token))
                assert ending is not None and costs[token] == ending.num_tokens, (text[:end], tokens[token])


def test_a_first_token_that_asks_for_much_is_looked_at_from_the_start(vocabulary: Vocabulary) -> None:
    """A number would do, and an object needs more tokens than one token usually adds."""
    names = [f"property {n} of the whole" for n in range(9)]
    schema = {"type": ["object", "integer"], "properties": {n: {"type": "string"} for n in names}, "required": names}
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    ending = grammar.endings.of(grammar.machine.advance(grammar.start, ord("{")))
    assert grammar.least_tokens == 1 and ending is not None and ending.num_tokens > 100
    for most, allowed in ((80, False), (ending.num_tokens, False), (ending.num_tokens + 1, True)):
        matcher = grammar.matcher(max_tokens=most)
        assert is_set(matcher.mask(), ord("{")) == allowed and is_set(matcher.mask(), ord("1"))


def test_values_that_decide_between_branches_get_fewer_results_as_steps_run_out(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(name: str, num: int) -> dict[str, Any]:
        inner = {"type": "object", "properties": {"t": {"type": "string"}, "u": {"type": ["number", "string"]}}}
        return {"type": "object", "properties": {f"{name}{i}": inner for i in range(num)}}

    def branch(name: str) -> dict[str, Any]:
        needed = {"type": "array", "items": {"type": "object"}}
        values = {"x": record(name, 4), "y": record(name, 3), name: needed, "w": record(name + "w", 4)}
        return {"type": "object", "properties": values, "required": [name]}

    monkeypatch.setattr("phloem.constrained.machine.endings.MAX_STEPS", 100)
    schema = {"anyOf": [branch(name) for name in ("layers", "spec", "mark")]}
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    begun = b'{"x":{}'
    ending = grammar.endings.of(grammar.machine.advance_bytes(grammar.start, begun))
    assert ending is not None and jsonschema.Draft202012Validator(schema).is_valid(json.loads(begun + ending.word))


def test_a_limit_below_the_shortest_text_is_refused(vocabulary: Vocabulary) -> None:
    grammar = compile("choices", '["name", "return acc"]', vocabulary)
    assert grammar.least_tokens == 1
    with pytest.raises(ValueError, match="max_tokens=0: the shortest text of the grammar has 1 tokens"):
        grammar.matcher(max_tokens=0)


def test_a_rollback_gives_the_tokens_back(vocabulary: Vocabulary) -> None:
    grammar = compile("json", "", vocabulary, whitespace="flexible")
    rng = random.Random(0)
    matcher = grammar.matcher(max_tokens=12)
    rows = [matcher.mask()]
    while matcher.num_tokens < 12:
        assert matcher.accept(draw(rows[-1], rng) if matcher.num_tokens > 3 else vocabulary.tokens.index(b"["))
        rows.append(matcher.mask())
    assert matcher.is_closed_early
    for count in (1, 2, 5, 3):
        matcher.rollback(count)
        assert np.array_equal(matcher.mask(), rows[matcher.num_tokens])
    assert not matcher.num_tokens > 1 and not matcher.is_closed_early


def test_forced_tokens_near_the_limit_are_those_that_the_masks_leave(vocabulary: Vocabulary) -> None:
    grammar = compile("json", "", vocabulary)
    matcher = grammar.matcher(max_tokens=6)
    for token in (b"[", b"[", b"["):
        assert matcher.accept(vocabulary.tokens.index(token))
    forced = matcher.forced_tokens()
    assert b"".join(vocabulary.tokens[t] for t in forced) == b""  # "]" and "]]" both fit
    assert matcher.accept(vocabulary.tokens.index(b"["))
    assert [vocabulary.tokens[t] for t in matcher.forced_tokens()] == [b"]]", b"]]"]


def test_endings_are_spelled_by_the_fewest_tokens(vocabulary: Vocabulary) -> None:
    grammar = compile("regex", "the name return acc", vocabulary)
    ending = grammar.endings.of(grammar.start)
    assert ending is not None
    spelled = [vocabulary.tokens[t] for t in grammar.endings.tokens_of(ending)]
    assert b"".join(spelled) == ending.word == b"the name return acc"
    assert spelled == [b"the", b" ", b"name", b" ", b"return acc"]


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a(a|b){4}", "x[^a]{2,9}y?", "(the|na|é)+(x{3}|[0-9]{2}){2}", "[À-ÿ]{2}a*", "(x[a-z]{1,5}y?){2,9}",
        "([^\\n]{3}\\n|q{2,4}z){2}", "(ab|a)(c|bcd)[α-ω]?", "(foo|ba[rz])?(x|yz)*",
    ],
)  # fmt: skip
def test_what_an_expression_tells_of_an_ending_is_as_short_as_what_a_search_finds(
    vocabulary: Vocabulary, pattern: str
) -> None:
    told, searched = (Compiler(vocabulary).compile(GrammarSpec("regex", pattern)) for _ in range(2))
    rng = random.Random(pattern)
    for _ in range(4):
        matcher, twin = told.matcher(), searched.matcher()
        for _ in range(12):
            ending = told.endings.of(matcher.state)
            searched.machine.texts.clear()  # then nothing is told
            found = searched.endings.of(twin.state)
            assert ending is not None and found is not None and len(ending.word) == len(found.word)
            after = told.machine.advance_bytes(matcher.state, ending.word) if ending.word else matcher.state
            assert told.machine.may_end(after)
            token = draw(matcher.mask(), rng)
            if token == vocabulary.eos:
                break
            assert matcher.accept(token) and twin.accept(token)
    assert told.endings.num_steps == 0 < searched.endings.num_steps


def test_the_ending_of_a_pattern_with_many_states_is_told_by_its_expression(vocabulary: Vocabulary) -> None:
    grammar = compile("regex", "(a|b)*a(a|b){12}", vocabulary)
    states = grammar.machine.num_states
    assert grammar.least_tokens is not None and grammar.machine.num_states == states


@pytest.mark.parametrize("begun", [b'"', b'"appropriiqagricult', b'"a-b-c-d'])
def test_the_shortest_ending_of_a_long_string_is_found_in_few_steps(vocabulary: Vocabulary, begun: bytes) -> None:
    words = {"type": "string", "pattern": "^[a-z]{1,60}(-[a-z]{1,60}){2,100}$", "minLength": 100, "maxLength": 200}
    grammar = compile("json_schema", json.dumps(words), vocabulary)
    config = grammar.machine.advance_bytes(grammar.start, begun)
    before = grammar.endings.num_steps
    ending = grammar.endings.of(config)
    assert ending is not None and grammar.endings.num_steps - before < 300
    text = json.loads(begun + ending.word)
    assert len(text) == 100 and jsonschema.Draft202012Validator(words).is_valid(text)


DOUBLING = "^(a|b)*%s(a|b){%d}$"  # each further character doubles the states that a search may visit


@pytest.mark.parametrize(
    ("more", "length"),
    [
        ({"minLength": 20}, 20),
        ({"minLength": 30, "maxLength": 31}, 30),
        ({}, 13),
        ({"allOf": [{"pattern": DOUBLING % ("b", 9)}]}, 13),
        ({"allOf": [{"pattern": DOUBLING % ("b", 9)}], "minLength": 18}, 18),
    ],
)
def test_the_shortest_text_of_an_intersection_is_known_and_fewer_tokens_are_refused(
    vocabulary: Vocabulary, more: dict[str, Any], length: int
) -> None:
    schema = {"type": "string", "pattern": DOUBLING % ("a", 12), **more}
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    before = grammar.endings.num_steps
    ending = grammar.endings.of(grammar.start)
    assert ending is not None and grammar.endings.num_steps - before < 300
    text = json.loads(ending.word)
    assert len(text) == length and jsonschema.Draft202012Validator(schema).is_valid(text)
    with pytest.raises(ValueError, match=f"the shortest text of the grammar has {ending.num_tokens} tokens"):
        grammar.matcher(max_tokens=3)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^(ab|ba)*x$", "minLength": 4},
        {"pattern": "^(aab|b)*$", "not": {"pattern": "^(b|x)*$"}, "minLength": 5},
        {"pattern": "^a*(xa|b)+$", "allOf": [{"pattern": "a.*b.*a"}]},
        {"pattern": "^(xé|éb)*a$", "not": {"pattern": "^a?$"}},
        {"pattern": "^(éé)*$", "allOf": [{"pattern": "^(ééé)*$"}], "minLength": 1},
        {"pattern": "a.*x", "maxLength": 5, "minLength": 3, "not": {"pattern": "^a"}},
        {"pattern": "^(a|b)*a(a|b){3}$", "minLength": 6, "not": {"pattern": "^(a|b)*a(a|b){2}$"}},
    ],
)
def test_the_ending_of_a_string_is_as_short_as_the_shortest_of_all_texts(
    vocabulary: Vocabulary, schema: dict[str, Any]
) -> None:
    grammar = compile("json_schema", json.dumps({"type": "string", **schema}), vocabulary)
    validator = jsonschema.Draft202012Validator(schema)
    texts = ("".join(chars) for count in range(7) for chars in itertools.product("abxé", repeat=count))
    shortest = min((text for text in texts if validator.is_valid(text)), key=lambda text: len(text.encode()))
    ending = grammar.endings.of(grammar.start)
    assert ending is not None and len(ending.word) == len(shortest.encode()) + 2
    assert validator.is_valid(json.loads(ending.word))


def _one_of(pattern: str, *most: int) -> dict[str, Any]:
    """Strings of a pattern that are longer than all of the lengths but the largest."""
    return {"oneOf": [{"type": "string", "pattern": pattern, "maxLength": length} for length in most]}


def _nested(depth: int) -> dict[str, Any]:
    """Objects of objects, whose names are long."""
    inner = _nested(depth - 1) if depth else {"type": "boolean"}
    names = [f"the {number} thing of everything" for number in ("first", "second", "third")]
    return {
        "type": "object",
        "properties": dict.fromkeys(names, inner),
        "required": names,
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("schema", "num_bytes", "steps"),
    [
        (_one_of(r"^([^\n]{0,61}\n){0,5}[^\n]{0,5}$", 200, 33), 37, 100),
        (_one_of(r"once-\S{1,10}$", 50, 33), 36, 100),
        ({"type": "string", "pattern": r"[\u4e00-\u9fff]{3,}"}, 11, 100),
        ({"type": "string", "pattern": r"^([^\n]{0,61}\n){2,5}$"}, 6, 100),
        ({"type": "string", "pattern": r"^[^\n]+\n[ab]+$"}, 6, 100),
        ({"type": "string", "pattern": r"^([aé]+\n){2}$"}, 8, 100),
        ({"type": "string", "pattern": "^.{3,}€([\\s\\S]*é\\u0007+){3,}x{3}"}, 35, 400),
        ({"type": "string", "pattern": "^(.{3}[^x]*\\u0007){3}", "not": {"pattern": "  "}, "maxLength": 40}, 29, 400),
        (_nested(3), 4364, 3000),
    ],
)
def test_an_ending_is_found_in_few_steps(
    vocabulary: Vocabulary, schema: dict[str, Any], num_bytes: int, steps: int
) -> None:
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    before = grammar.endings.num_steps
    ending = grammar.endings.of_start(grammar.start)
    assert ending is not None and grammar.endings.num_steps - before < steps and len(ending.word) == num_bytes
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(ending.word))


@pytest.mark.parametrize("begun", [b'"\\uda', b'"the name\\uDB', b'"\\ud', b'"the\\ud83d\\'])
def test_a_character_that_is_half_spelled_ends_in_few_steps(vocabulary: Vocabulary, begun: bytes) -> None:
    grammar = compile("json_schema", '{"type": "string", "maxLength": 9}', vocabulary)
    assert grammar.least_tokens is not None
    before = grammar.endings.num_steps
    ending = grammar.endings.of(grammar.machine.advance_bytes(grammar.start, begun))
    assert ending is not None and grammar.endings.num_steps - before < 30
    assert len(json.loads(begun + ending.word)) <= 9


@pytest.mark.parametrize("begun", [b'["the', b'["the\\', b'["the\\u', b'["the\\ud83d', b'["je'])
def test_a_string_of_which_more_is_asked_ends_in_few_steps(vocabulary: Vocabulary, begun: bytes) -> None:
    wanted = {"type": "string", "pattern": "uoe[0-9]{4} |jeph", "minLength": 12, "maxLength": 100}
    schema = {"type": "array", "maxItems": 30, "contains": wanted}
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    assert grammar.least_tokens is not None
    before = grammar.endings.num_steps
    ending = grammar.endings.of(grammar.machine.advance_bytes(grammar.start, begun))
    assert ending is not None and grammar.endings.num_steps - before < 20
    value = json.loads(begun + ending.word)
    assert len(value) == 1 and jsonschema.Draft202012Validator(schema).is_valid(value)


def _overlapping(count: int) -> dict[str, Any]:
    """Objects of which a size below 10 tells the first one alone."""
    branches = [
        {"type": "object", "properties": {f"a{i}": {"type": "integer"}, "size": {"type": "integer", "minimum": 10 * i}}}
        for i in range(count)
    ]
    return {"oneOf": [{**branch, "required": [f"a{i}"]} for i, branch in enumerate(branches)]}


@pytest.mark.parametrize(
    ("schema", "shortest"),
    [
        ({"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "string", "maxLength": 200}]}, '""'),
        (
            {"type": "string", "if": {"pattern": "^[a-m]"}, "then": {"pattern": "^[a-z]+$"}, "else": {"maxLength": 5}},
            '""',
        ),
        ({"type": "string", "pattern": "^(?:[a-z]+\\n){2,9}[a-z]+$"}, r'"a\na\na"'),
        ({"type": "string", "pattern": "^(?:[a-z]+\\n){2,9}[a-z]+$", "maxLength": 90}, r'"a\na\na"'),
        (
            {"type": "array", "contains": {"type": "string", "pattern": "cqg", "maxLength": 20}, "minContains": 2},
            '["cqg","cqg"]',
        ),
        ({"type": "array", "contains": {"type": "string", "pattern": '^x"\\n$'}, "maxItems": 3}, r'["x\"\n"]'),
        (
            {
                "type": "array",
                "maxItems": 30,
                "contains": {"type": "string", "pattern": "uoe[0-9]{4} |jeph", "minLength": 12, "maxLength": 100},
            },
            '["jeph~~~~~~~~"]',
        ),
        (_overlapping(5), '{"a0":0}'),
    ],
)  # fmt: skip
def test_what_a_text_needs_most_is_found_before_what_is_near(
    vocabulary: Vocabulary, schema: dict[str, Any], shortest: str
) -> None:
    grammar = compile("json_schema", json.dumps(schema), vocabulary)
    ending = grammar.endings.of(grammar.start)
    assert ending is not None and len(ending.word) == len(shortest) and ending.num_tokens == grammar.least_tokens
    matcher = grammar.matcher()
    assert all(matcher.accept(byte) for byte in ending.word) and matcher.is_accepting()
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(ending.word))
