import json
import random
import re
from typing import Any

import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.json.layouts import MAX_DEPTH, Layouts
from phloem.constrained.machine import Machine

from ..conftest import WORDS, encode, takes

EDGES = [
    b"{\n",
    b"[\n    ",
    b",\n",
    b'",\n',
    b'",\n  "',
    b"\n    ",
    b"    ",
    b"\n\t",
    b"\n}",
    b"\n]",
    b"  }",
    b' "',
    b"{ ",
    b" }",
    b'": [',
]
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer"},
        "below": {"type": "array", "items": {"$ref": "#"}},
        "any": {},
    },
    "additionalProperties": False,
}
STYLES: list[dict[str, Any]] = [{}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}]


@pytest.fixture(scope="module")
def edges() -> Vocabulary:
    """A vocabulary with tokens that cross from marks into white space and on."""
    tokens = [*(bytes([b]) for b in range(256)), *WORDS, *EDGES, b""]
    return Vocabulary(tokens, {len(tokens) - 1}, len(tokens) - 1)


def drawn(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 4)
    if kind < 4:
        return rng.choice([0, -17, 1.5, "", "a b", 'x"\\\n', True, None])
    if kind < 6:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["name", "a", "é", ""]) + str(i): drawn(rng, depth + 1) for i in range(rng.randrange(4))}


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_what_json_dumps_writes_is_neat(edges: Vocabulary, style: dict[str, Any]) -> None:
    rng = random.Random(str(style))
    grammar = compile("json", "", edges, whitespace="neat")
    for _ in range(60):
        text = json.dumps(drawn(rng), ensure_ascii=False, **style)
        assert takes(grammar, text) and takes(grammar, text, rng), text


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_what_json_dumps_writes_is_neat_under_a_schema(edges: Vocabulary, style: dict[str, Any]) -> None:
    leaf = {"name": "ab", "age": 7}
    value = {
        "name": "",
        "age": -1,
        "below": [leaf, {"below": [{}, {"below": []}]}, {"any": [[{}], {"x": [1, None]}]}],
        "any": leaf,
    }
    assert takes(compile("json_schema", json.dumps(TREE), edges, whitespace="neat"), json.dumps(value, **style))
    distinct = {"type": "array", "items": {"type": ["string", "integer", "array"]}, "uniqueItems": True}
    grammar = compile("json_schema", json.dumps(distinct), edges, whitespace="neat")
    assert takes(grammar, json.dumps(["a", 1, [2], [1, 2], []], **style))
    assert not takes(grammar, json.dumps(["a", [1, 2], 1, [1, 2]], **style))


@pytest.mark.parametrize(
    "text",
    [
        '{"a" :1}', '{"a":  1}', '{"a":\n1}', '{"a":\t1}', "[1 ,2]", "[1,\n2]", "[1,  2]", "  1", "\n1", "1 ",
        "[ ]", "{ }", "[\n]", "{\n}", "[ 1]", "[1 ]", "[ 1,2 ]", "[  1 ]", "[\n1\n]",
        "[\n  1]", "[\n  1, 2\n]", "[\n  1,2\n]", "[ 1,\n  2\n]", "[\n 1\n]", "[\n   1\n]", "[\n     1\n]",
        "[\n\n  1\n]", "[\r\n  1\r\n]", "[\n \t1\n]", "[\n\t\t1\n]", "[\n  1\n ]", "[\n  1\n  ]",
        "[\n  1,\n    2\n]", "[\n  [\n      1\n  ]\n]", "[\n  [\n  \t1\n  ]\n]", "[\n\t[\n    1\n\t]\n]",
        "[\n  [\n    1\n]\n]",
        "[[\n  1\n]]", "[ [\n  1\n] ]", '{"a": [\n  1\n]}', "[\n  [[\n    1\n  ]]\n]",
    ],
)  # fmt: skip
def test_mixes_are_not_neat(edges: Vocabulary, text: str) -> None:
    for kind, source in (
        ("json", ""),
        ("json_schema", "{}"),
        ("json_schema", json.dumps({"type": ["array", "object", "integer"]})),
    ):
        assert not takes(compile(kind, source, edges, whitespace="neat"), text), text
    assert not is_neat(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1, "b": 2,"c":3}', "[ 1, 2 ]", '{ "a": [1,2] }', "[[ 1 ], [2]]", "[\n  [1, 2],\n  { \"a\": 1 },\n  []\n]",
        "[\n\t1,\n\t[\n\t\t2\n\t]\n]", '{\n    "a":1,\n    "b": {\n        "c": {}\n    }\n}',
    ],
)  # fmt: skip
def test_brackets_of_one_text_may_differ_in_layout(edges: Vocabulary, text: str) -> None:
    assert takes(compile("json", "", edges, whitespace="neat"), text) and is_neat(text)


def is_neat(text: str) -> bool:
    """The definition: reads a JSON text from left to right."""
    parts = re.findall(r'([ \t\r\n]*)("(?:\\.|[^"\\])*"|[][{},:]|[^][{},:"\s]+)', text)
    if "".join(a + b for a, b in parts) != text:
        return False
    unit = ""
    at = 0

    def value(before: list[str], depth: int) -> bool:
        """``depth``: of the broken brackets around the value; -1 if another bracket is around it."""
        nonlocal at, unit
        space, mark = parts[at]
        at += 1
        if space not in before:
            return False
        if mark not in "[{":
            return True
        end = "]" if mark == "[" else "}"
        space, following = parts[at]
        if space == "" and following == end:
            at += 1
            return True
        if depth == 0 and space in ("\n  ", "\n    ", "\n\t"):
            unit = space[1:]
        if space in ("", " "):
            inner, commas, closing = -1, ["", " "] if space == "" else [" "], space
        elif depth >= 0 and unit and space == "\n" + unit * (depth + 1) and following != end:
            inner, commas, closing = depth + 1, [space], "\n" + unit * depth
        else:
            return False
        if following == end:
            return False
        before = [space]
        while True:
            if mark == "{":
                if parts[at][0] not in before or parts[at + 1][0] != "":
                    return False
                at += 2
                before = ["", " "]
            if not value(before, inner):
                return False
            space, comma = parts[at]
            at += 1
            if comma == end:
                return space == closing
            if space != "":
                return False
            before = commas

    return value([""], 0) and at == len(parts)


def test_random_white_space_is_judged_as_the_definition_does(edges: Vocabulary) -> None:
    rng = random.Random(0)
    grammar = compile("json", "", edges, whitespace="neat")
    verdicts = []
    for _ in range(600):
        text = json.dumps(drawn(rng), ensure_ascii=False, **rng.choice(STYLES))
        marks = [
            m.start()
            for m in re.finditer(r'[][{},: \n\t"]', re.sub(r'"(?:\\.|[^"\\])*"', lambda s: "'" * len(s[0]), text))
        ]
        for at in sorted(rng.sample(marks, min(rng.randrange(3), len(marks))), reverse=True):
            if text[at] in " \n\t" and rng.random() < 0.5:
                text = text[:at] + text[at + 1 :]
            else:
                text = text[:at] + rng.choice([" ", " ", "\n", "\t", "\n  "]) + text[at:]
        try:
            json.loads(text)
        except json.JSONDecodeError:
            continue
        verdicts.append(is_neat(text))
        assert takes(grammar, text, rng) == verdicts[-1], text
    assert 150 < sum(verdicts) < len(verdicts) - 150


def test_masks_are_what_the_machine_accepts(edges: Vocabulary) -> None:
    rng = random.Random(1)
    grammar = compile("json_schema", json.dumps(TREE), edges, whitespace="neat")
    texts = [json.dumps({"name": "a", "below": [{"age": 3, "any": [[1], {}]}]}, **style) for style in STYLES]
    for text in texts:
        config = grammar.start
        for token in encode(edges, text, rng):
            bits = [int(grammar.masks.of(config)[t >> 5]) >> (t & 31) & 1 for t in range(len(edges))]
            for each in range(len(edges)):
                if edges.is_text[each]:
                    assert bits[each] == (grammar.machine.advance_bytes(config, edges.tokens[each]) >= 0)
            config = grammar.machine.advance(config, token)


@pytest.mark.parametrize("schema", [{"maxItems": 0, "type": "array"}, {"type": "object", "maxProperties": 0}])
def test_a_bracket_that_stays_empty_is_closed_at_once(edges: Vocabulary, schema: dict[str, Any]) -> None:
    grammar = compile("json_schema", json.dumps(schema), edges, whitespace="neat")
    opened = "[" if schema["type"] == "array" else "{"
    assert takes(grammar, opened + chr(ord(opened) + 2))
    for space in " \n\t":
        assert not takes(grammar, opened + space)
        matcher = grammar.matcher()
        assert matcher.accept(ord(opened)) and not matcher.accept(ord(space))


def test_values_without_brackets_have_the_same_states_at_every_depth(vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "sub": {"$ref": "#"}},
        "additionalProperties": False,
    }
    grammar = compile("json_schema", json.dumps(schema), vocabulary, whitespace="neat")
    machine = grammar.machine

    def state_after(text: str) -> int:
        return machine.place(machine.advance_bytes(grammar.start, text.encode()))[0]

    texts = [
        '{"n":',
        '{"sub":{"n":',
        '{ "n":',
        '{\n  "n":',
        '{\n\t"sub": {\n\t\t"sub": {\n\t\t\t"n":',
        '{\n    "sub": { "n":',
    ]
    assert len({state_after(text) for text in texts}) == 1
    assert len({state_after(text + " 1") for text in texts}) == 1
    # On one line, depth is unknown: the frames below differ, the states do not.
    assert state_after('{"sub": {"sub": {"sub": {"n":') == state_after('{"sub": {"n":')
    state_after('{"sub": {"n": 1, ')
    before = machine.num_states
    state_after('{"sub": ' * 40 + '{"n": 1, ')
    assert machine.num_states == before


def test_deep_brackets_stay_on_one_line(vocabulary: Vocabulary) -> None:
    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else 1

    grammar = compile("json", "", vocabulary, whitespace="neat")
    for indent in (2, 4, "\t"):
        assert takes(grammar, json.dumps(nested(MAX_DEPTH), indent=indent))
        assert not takes(grammar, json.dumps(nested(MAX_DEPTH + 1), indent=indent))
    layouts = Layouts(Machine(vocabulary), "neat")
    layout = layouts.inside(layouts.root)[2]
    while len(layouts.inside(layout)) == 3:
        layout = layouts.inside(layout)[2]
    assert layout.depth == MAX_DEPTH and layouts.inside(layout) == layouts.inside(layouts.plain)


@pytest.mark.parametrize(("style", "text"), [("compact", "[1,2]"), ("flexible", "[ 1\n ,2]")])
def test_other_styles_have_one_layout(vocabulary: Vocabulary, style: str, text: str) -> None:
    layouts = Layouts(Machine(vocabulary), style)
    assert layouts.all == [layouts.root] and layouts.inside(layouts.root) == (layouts.root,)
    assert takes(compile("json", "", vocabulary, whitespace=style), text)
