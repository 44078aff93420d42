# ruff: noqa: E501
r"""Random schemas of the kinds that are hard to follow: what their masks cost, and whether random texts are valid.

    python -m benchmarks.generated_schemas [--count 2000] [--seed 1] [--kind KIND] [--save]

Each schema is compiled with the default options, every third with ``property_order: any``. Random texts are walked to
their ends (``random_texts.py``) and judged by ``jsonschema`` (Draft 2020-12) with patterns as ECMA-262 has them, exact
numbers, and the formats that are checked in ``FORMAT_CHECKS``. Times are of the thread; every mask and accept of a walk
counts, in order, also those that were made before.
"""

import argparse
import gc
import ipaddress
import json
import random
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import cache
from typing import Any

from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.runtime.tokenizer import load_tokenizer
from phloem.runtime.weights.resolve import resolve_model

from . import RESULTS, percentiles, print_header, save
from .random_texts import SLOW_MASK_MS, WANDERS, RandomTexts, TimedMatcher, property_names, read_value

# -- small schemas of every keyword --------------------------------------------------------------------------------

NAMES = ["a", "b", "foo", "x1", "é"]
ATOMS: list[Any] = [
    None, True, False, 0, 1, 2, -1, 2.5, 1.0, 10, 0.1, "", "a", "ab", "foo", "é", "2024", [], [1], [1, 1], ["a", "b"], {},
    {"a": 1}, {"b": []}, {"a": {"a": 1}}, [[]], [{}],
]  # fmt: skip
LEAVES: list[Any] = [
    True, False, {}, {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "array"}, {"type": "object"},
    {"type": ["null", "boolean"]}, {"minimum": 1}, {"maximum": 2.5, "type": "number"}, {"exclusiveMinimum": 1},
    {"multipleOf": 0.5}, {"multipleOf": 2}, {"minLength": 1}, {"maxLength": 2}, {"pattern": "^a"}, {"pattern": "^[a-z]*$"},
    {"maxItems": 1}, {"minItems": 1}, {"minProperties": 1}, {"maxProperties": 1}, {"required": ["a"]},
    {"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"},
]  # fmt: skip
# the parts that a schema can be made of; each is given a source of subschemas
PARTS: list[Any] = [
    lambda r, sub: {"type": r.choice(["object", "array", "string", ["object", "array"], ["object", "string", "null"]])},
    lambda r, sub: {"properties": {n: sub() for n in r.sample(NAMES, r.randrange(1, 4))}},
    lambda r, sub: {"additionalProperties": r.choice([False, sub()])},
    lambda r, sub: {"patternProperties": {p: sub() for p in r.sample(["^a", "o", "^.$", "1$"], r.randrange(1, 3))}},
    lambda r, sub: {"required": r.sample(NAMES, r.randrange(1, 3))},
    lambda r, sub: {"minProperties": 1, "maxProperties": r.randrange(1, 3)},
    lambda r, sub: {"propertyNames": r.choice([{"maxLength": 1}, {"enum": ["a", "b", "foo"]}, sub()])},
    lambda r, sub: {"dependentRequired": {r.choice(NAMES): r.sample(NAMES, 1)}},
    lambda r, sub: {"dependentSchemas": {r.choice(NAMES): sub()}},
    lambda r, sub: {"items": r.choice([False, sub(), sub()])},
    lambda r, sub: {"prefixItems": [sub() for _ in range(r.randrange(1, 3))]},
    lambda r, sub: {"contains": sub(), "minContains": r.randrange(3)},
    lambda r, sub: {"contains": sub(), "maxContains": r.randrange(1, 3)},
    lambda r, sub: {"minItems": r.randrange(2), "maxItems": r.randrange(1, 3)},
    lambda r, sub: {"uniqueItems": True},
    lambda r, sub: {r.choice(["anyOf", "oneOf", "allOf"]): [sub() for _ in range(r.randrange(1, 4))]},
    lambda r, sub: {"not": sub()},
    lambda r, sub: {"if": sub(), "then": sub(), "else": sub()},
    lambda r, sub: {"unevaluatedProperties": r.choice([False, False, sub()])},
    lambda r, sub: {"unevaluatedItems": r.choice([False, False, sub()])},
    lambda r, sub: {"$ref": r.choice(["#", "#/$defs/d0", "#/$defs/d1"])},
    lambda r, sub: {"enum": [random_value(r, 2), random_value(r, 2)]},
]


def random_value(r: random.Random, depth: int) -> Any:
    kind = r.random()
    if depth == 0 or kind < 0.5:
        return r.choice(ATOMS)
    if kind < 0.72:
        return [random_value(r, depth - 1) for _ in range(r.randrange(4))]
    return {name: random_value(r, depth - 1) for name in r.sample(NAMES, r.randrange(4))}


def random_schema(r: random.Random, depth: int) -> Any:
    """A schema of any keywords; it may refer to ``#``, ``#/$defs/d0`` and ``#/$defs/d1``."""
    if depth == 0:
        return r.choice(LEAVES)
    made: dict[str, Any] = {}
    for part in r.sample(PARTS, r.choice([1, 1, 2, 2, 3, 4])):
        made |= part(r, lambda: random_schema(r, depth - 1))
    return made


def any_keywords(r: random.Random) -> dict[str, Any]:
    """``random_schema`` with the definitions that it refers to."""
    return {**random_schema(r, r.choice([1, 2, 2, 3])), "$defs": {f"d{i}": random_schema(r, 1) for i in range(2)}}


# -- texts ------------------------------------------------------------------------------------------------------------


def _text(r: random.Random, pattern: str, *, low: float = 0.25, high: float = 0.7) -> dict[str, Any]:
    """A string with a pattern, and with bounds on its length in these shares of schemas."""
    made: dict[str, Any] = {"type": "string", "pattern": pattern}
    if r.random() < low:
        made["minLength"] = r.choice([1, 2, 5, 8, 12])
    if r.random() < high:
        made["maxLength"] = r.choice([20, 30, 50, 64, 100, 140, 200, 255, 500, 1000, 4000])
    return made


def _word(r: random.Random) -> str:
    return "".join(r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(r.randrange(2, 9)))


def _unit(r: random.Random) -> str:
    """One character of a pattern."""
    return r.choice(["[a-z]", "[A-Z]", "[0-9]", r"\d", r"\w", "[a-z0-9]", "[a-zA-Z0-9_-]", r"\S", "[^,;]", "[^/]", "."])


def _range(r: random.Random, most: int) -> str:
    low = r.randrange(0, 3)
    return r.choice(
        [f"{{{low},{r.randrange(low + 1, most)}}}", f"{{1,{r.randrange(2, most)}}}", "+", f"{{{low + 1},}}"]
    )


def counted_words(r: random.Random) -> dict[str, Any]:
    count = r.choice([3, 9, 19, 49, 99, 199])
    gap = r.choice([r"\s+", r"\s", " ", ", ?", "[,;]", "\\n", "[ -]"])
    word = r.choice(
        [r"\S+", r"\w+", "[^ ]+", "[^,;\\n]+", "[a-z]+", "[A-Za-z']{1,20}", r"[\w.-]{2,30}", "(?:[A-Z]+|[0-9]{1,4})"]
    )
    shape = r.choice(
        ["^({w}{g}){{0,{n}}}{w}$", "^(?:{w}{g}){{1,{n}}}{w}$", "^{w}({g}{w}){{0,{n}}}$", "^({w}{g}?){{1,{n}}}$"]
    )
    if word == "[^ ]+" and "?" in shape:  # the reference would backtrack for ever
        word = r"\w+"
    return _text(r, shape.format(w=word, g=gap, n=count))


def unanchored(r: random.Random) -> dict[str, Any]:
    parts = [
        r.choice([_unit(r) + _range(r, 12), _word(r), "-", " ", r"\.", "[0-9]{4}"]) for _ in range(r.randrange(1, 4))
    ]
    pattern = r.choice(["{}", "{}", "^{}", "{}$", "{}|" + _word(r)]).format("".join(parts))
    return _text(r, pattern, low=0.4, high=0.8)


def look_ahead(r: random.Random) -> dict[str, Any]:
    words = "|".join(_word(r) for _ in range(r.randrange(1, 6)))
    pattern = r.choice(
        [
            f"^(?!(?:{words})$)[a-z]+$",
            f"^(?!{words})\\S+$",
            f"^(?!(?:{words})\\.)([a-z]+\\.){{0,{r.choice([3, 9, 19])}}}[a-z]+$",
            "^(?=.*[0-9])(?=.*[a-z])[a-zA-Z0-9]{6,32}$",
            "^(?=.*[A-Z])(?=.*[^A-Za-z0-9]).{8,}$",
            f"^(?!.*--)[a-z0-9-]{{2,{r.choice([20, 40, 63])}}}$",
            "^(?!\\s)[^<>]+$",
            f"^(?=.{{3,{r.choice([20, 60, 120])}}}$)[a-z]+(?:[._-][a-z]+)*$",
        ]
    )
    return _text(r, pattern, low=0.1, high=0.5)


def nested_repeats(r: random.Random) -> dict[str, Any]:
    a, b, c = (r.choice([2, 5, 9, 20, 40, 61]) for _ in range(3))
    unit = r.choice(["[a-z]", "[a-z0-9]", r"\w", "[0-9A-F]", "[^\\n,]"])
    pattern = r.choice(
        [
            f"^(({unit}+ ){{1,{a}}}\\n){{0,{b}}}$",
            f"^({unit}{{1,{a}}}(-{unit}{{1,{b}}}){{0,{c}}}\\.){{1,9}}[a-z]{{2,6}}$",
            f"^(([0-9a-f]{{2}}:){{3,{a + 3}}}[0-9a-f]{{2}},){{1,{b}}}$",
            f"^([^\\n]{{0,{a}}}\\n){{0,{b}}}[^\\n]{{0,{c}}}$",
            f"^([a-z0-9]([a-z0-9-]{{0,{a}}}[a-z0-9])?\\.){{0,{b}}}[a-z]{{2,{c + 1}}}$",
            f"^((a|ab){{0,{a}}}c){{1,{b}}}$",
            f"^\\[({unit}{{1,{a}}}(,{unit}{{1,{a}}}){{0,{b}}})?\\]$",
            f"^(/{unit}{{1,{a}}}){{1,{b}}}(\\?{unit}+=[^&]{{0,{c}}}(&{unit}+=[^&]{{0,{c}}}){{0,{a}}})?$",
        ]
    )
    return _text(r, pattern, low=0.2, high=0.6)


def character_classes(r: random.Random) -> dict[str, Any]:
    one = r.choice(
        [
            r"\p{L}",
            r"\p{Lu}",
            r"\p{N}",
            "[^\\x00-\\x1f]",
            "[\\u4e00-\\u9fff]",
            "[À-ÿ]",
            "[\\u0400-\\u04ff ]",
            r"[\p{L}\p{N}_]",
            r"[^\p{L}]",
        ]
    )
    other = r.choice(["[a-z]", " ", r"\s", "[-_.]", r"\d"])
    bound = r.choice([5, 20, 40, 100])
    pattern = r.choice(
        [
            f"^{one}{{1,{bound}}}$",
            f"^{one}+({other}{one}+){{0,{bound}}}$",
            f"^({one}|{other}){{2,{bound}}}$",
            f"{one}{{3,}}",
            f"^{one}",
        ]
    )
    return _text(r, pattern)


def long_texts(r: random.Random) -> dict[str, Any]:
    low = r.choice([30, 40, 60, 100])
    a, b = r.choice([10, 20, 60]), r.choice([5, 9, 30])
    pattern = r.choice(
        [
            f"^[a-z]{{1,{a}}}(-[a-z]{{1,{a}}}){{2,{low}}}$", f"^[A-Z][a-z ]+( [a-z]{{1,{a}}}){{0,{low}}}[.]$",
            f"^(\\S+ ){{{b},{low * 2}}}\\S+$", "^[^<>]*$", "[a-z]+[0-9]{0,4}$", f"^.{{0,{a}}}: .*$",
        ]
    )  # fmt: skip
    return {"type": "string", "pattern": pattern, "minLength": low, "maxLength": low + r.choice([5, 30, 100, 400])}


def several_patterns(r: random.Random) -> dict[str, Any]:
    make = r.choice([counted_words, unanchored, nested_repeats])
    one, other = make(r), unanchored(r)
    short = {"type": "string", "maxLength": r.choice([10, 40, 200])}
    listed = {"type": "string", "pattern": f"^[a-z]{{1,{r.choice([8, 20, 50])}}}(-[a-z]+){{0,{r.choice([3, 9])}}}$"}
    key = r.choice(["allOf", "oneOf", "anyOf", "not", "if"])
    match key:
        case "not":
            return {**one, "not": {"pattern": r.choice(["^" + _word(r), _word(r) + "$", _word(r), "  ", "^[0-9]+$"])}}
        case "if":
            return {"type": "string", "if": {"pattern": "^[a-m]"}, "then": listed, "else": short}
        case "allOf":
            return {
                "type": "string",
                "allOf": [r.choice([one, listed]), {"pattern": r.choice(["[a-z]", "^[^0]", "^[^ ]"])}, short],
            }
    return {key: r.choice([[one, listed], [one, short], [listed, other, short], [one, one | {"maxLength": 33}]])}


def formatted(r: random.Random) -> dict[str, Any]:
    names = [
        "date",
        "time",
        "date-time",
        "email",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "hostname",
        "duration",
        "json-pointer",
    ]
    made: dict[str, Any] = {"type": "string", "format": r.choice(names)}
    if r.random() < 0.4:
        made["maxLength"] = r.choice([40, 64, 100, 254])
    if r.random() < 0.2:
        made = {"anyOf": [made, {"type": "string", "format": r.choice(names)}]}
    return made


# -- other kinds ------------------------------------------------------------------------------------------------------


def _small(r: random.Random) -> dict[str, Any]:
    return r.choice(
        [
            {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "number"}, {"type": ["string", "null"]},
            {"type": "integer", "minimum": 0, "maximum": 255}, {"const": _word(r)}, {"type": "string", "maxLength": 40},
            {"enum": [_word(r) for _ in range(4)]}, {"type": "string", "minLength": 1},
        ]
    )  # fmt: skip


def enums(r: random.Random) -> dict[str, Any]:
    count = r.choice([20, 60, 200, 800])
    words: list[Any] = [f"{_word(r)}{r.choice(['', ' ', '-', '/'])}{i}" for i in range(count)]
    words += r.choice([[], [], [None], [1, 2, 3, True], [{"a": 1}, [1, 2]]])
    if r.random() < 0.4:
        return {"enum": words}
    unique = {"uniqueItems": True} if r.random() < 0.8 else {}
    return {"type": "array", "items": {"enum": words}, "maxItems": r.choice([3, 10, 40, 200]), **unique}


def unique_items(r: random.Random) -> dict[str, Any]:
    items: dict[str, Any] = r.choice(
        [
            {"type": "integer", "minimum": 1, "maximum": r.choice([5, 31, 300])}, {"type": "integer"}, {"type": "string"},
            {"type": "string", "pattern": r"^[a-z]{1,12}(-[a-z]{1,12}){0,4}$"}, {"type": "string", "maxLength": 30},
            {"type": "boolean"}, {"type": "number", "minimum": 0}, {"type": ["string", "null"]}, counted_words(r),
            {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "y"]}}, "required": ["n"], "additionalProperties": False},
            {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        ]
    )  # fmt: skip
    return {
        "type": "array",
        "items": items,
        "uniqueItems": True,
        "minItems": r.choice([0, 0, 1, 2]),
        "maxItems": r.choice([2, 5, 20, 100]),
    }


def patterned_names(r: random.Random) -> dict[str, Any]:
    stems = r.sample(
        [f"^{_word(r)}" for _ in range(12)]
        + ["^x-", "^[a-z]+_id$", "^[0-9]+$", "Url$", "^is[A-Z]", "^\\$", "_at$", "^[A-Z_]{2,20}$"],
        r.randrange(1, 13),
    )
    made: dict[str, Any] = {"type": "object", "patternProperties": {p: _small(r) for p in stems}}
    made["additionalProperties"] = r.choice([False, True, _small(r)])
    names = {_word(r): _small(r) for _ in range(r.randrange(6))}
    if made["additionalProperties"] is not False or r.random() < 0.5:
        made["properties"] = names
        made["required"] = r.sample(sorted(names), min(len(names), r.randrange(3)))
    if r.random() < 0.3 and "properties" not in made:
        made["propertyNames"] = r.choice([{"maxLength": 30}, {"pattern": "^[a-zA-Z0-9_$-]*$"}, {"minLength": 2}])
    return made


def limited_names(r: random.Random) -> dict[str, Any]:
    names = r.choice(
        [
            {"pattern": "^[a-z][a-z0-9_]{0,30}$"}, {"pattern": "^(?!_)[a-z_]+$"}, {"enum": [f"{_word(r)}{i}" for i in range(r.choice([5, 60, 300]))]},
            {"maxLength": 20}, {"pattern": r"^([a-z]+\.){0,9}[a-z]+$", "maxLength": 60}, {"format": "uuid"}, {"not": {"enum": ["id", "type"]}},
        ]
    )  # fmt: skip
    return {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": _small(r),
        "maxProperties": r.choice([2, 5, 20]),
    }


def _object(r: random.Random, source: Callable[[random.Random], dict[str, Any]], most: int) -> dict[str, Any]:
    names = [f"{_word(r)}{i}" for i in range(r.randrange(1, most))]
    made: dict[str, Any] = {"type": "object", "properties": {name: source(r) for name in names}}
    made["required"] = r.choice([names, names, r.sample(names, r.randrange(len(names) + 1))])
    if r.random() < 0.7:
        made["additionalProperties"] = False
    return made


def alternatives(r: random.Random) -> dict[str, Any]:
    count = r.choice([2, 3, 5, 8])
    branches = [_object(r, _small, 4) for _ in range(count)]
    shape = r.randrange(5)
    if shape == 0:  # told apart by a constant
        for i, branch in enumerate(branches):
            branch["properties"] = {"type": {"const": f"t{i}"}, **branch["properties"]}
            branch["required"] = ["type", *branch["required"]]
        return {r.choice(["oneOf", "anyOf"]): branches}
    if shape == 1:  # overlapping objects
        for i, branch in enumerate(branches):
            branch["properties"] |= {"size": {"type": "integer", "minimum": i * 10}}
            branch.pop("additionalProperties", None)
        return {"oneOf": branches}
    if shape == 2:
        return {"anyOf": [*branches, _small(r), {"type": "array", "items": _small(r), "maxItems": 4}]}
    if shape == 3:  # if and then, several
        names = [f"k{i}" for i in range(count)]
        rules = [
            {"if": {"properties": {n: {"const": i}}, "required": [n]}, "then": {"required": [f"m{i}"]}}
            for i, n in enumerate(names)
        ]
        inner = {n: {"type": "integer", "minimum": 0, "maximum": 9} for n in names}
        return {"type": "object", "properties": inner | {f"m{i}": _small(r) for i in range(count)}, "allOf": rules}
    low = r.randrange(10)
    return {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": _small(r)},
        "allOf": [{"properties": {"a": {"minimum": low}}}, {"properties": {"a": {"maximum": low + 50}}, "required": ["a"]}],
        "not": {"properties": {"a": {"const": low + 3}}, "required": ["a", "b"]},
    }  # fmt: skip


def catalogues(r: random.Random) -> dict[str, Any]:
    """Many kinds of one thing, as schemas of configuration files and of tagged unions have them."""
    count, most_names = r.choice([4, 12, 30, 80, 150]), r.choice([1, 1, 3, 40])
    tag, is_told = r.choice(["type", "kind", "task"]), r.random() < 0.85

    def names(i: int) -> dict[str, Any]:
        found = [f"{_word(r)}{i}@{j}" for j in range(r.randrange(1, most_names + 1))]
        if len(found) == 1:
            return {"const": found[0]} if r.random() < 0.7 else {"type": "string", "enum": found}
        return {"anyOf": [{"enum": [name]} for name in found]} if r.random() < 0.5 else {"enum": found}

    base = _object(r, _small, 5)
    base.pop("additionalProperties", None)
    things, tests = {}, []
    for i in range(count):
        thing = _object(r, lambda r: r.choice([_small(r), {"anyOf": [_small(r), {"type": "null"}]}]), 6)
        said = names(i)
        thing["properties"][tag] = said
        thing["required"] = [tag, *thing["required"]] if is_told or r.random() < 0.9 else thing["required"]
        if r.random() < 0.3:
            thing.pop("additionalProperties", None)
            thing = {"allOf": [{"$ref": "#/$defs/base"}, thing]}
        things[f"t{i}"] = thing
        tests.append({"if": {"properties": {tag: said}, "required": [tag]}, "then": {"required": [r.choice(NAMES)]}})
    shape = r.randrange(4)
    one: dict[str, Any] = {r.choice(["oneOf", "anyOf"]): [{"$ref": f"#/$defs/t{i}"} for i in range(count)]}
    if shape == 0:  # what is asked depends on the kind
        every = {"properties": {tag: {"enum": [f"k{i}" for i in range(count)]}, **base["properties"]}}
        one = {"type": "object", **every, "required": [tag], "allOf": tests[:12]}
    lists = {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 20}
    holder = {
        0: {"type": "object", "properties": {"steps": lists, "name": _small(r)}, "required": ["steps"]},
        1: {"type": "object", "additionalProperties": {"$ref": "#/$defs/one"}, "maxProperties": 5},
        2: {"oneOf": [{"type": "string", "maxLength": 9}, {"$ref": "#/$defs/one"}, lists]},
        3: {
            "type": "object",
            "patternProperties": {"^[a-z]+$": {"$ref": "#/$defs/one"}},
            "additionalProperties": False,
        },
    }[r.randrange(4)]
    return {**holder, "$defs": {"one": one, "base": base, **things}}


def bounded_numbers(r: random.Random) -> dict[str, Any]:
    low = r.choice([0, 1, -10, 0.5, -273.15, 1000, -1e6, 1e-3])
    made: dict[str, Any] = {"type": r.choice(["integer", "number"])}
    made[r.choice(["minimum", "exclusiveMinimum"])] = low
    if r.random() < 0.7:
        made[r.choice(["maximum", "exclusiveMaximum"])] = low + r.choice([3, 10, 99.5, 1e4, 86400, 2**31])
    if r.random() < 0.4:
        made["multipleOf"] = (
            r.choice([1, 5, 7, 60, 100]) if made["type"] == "integer" else r.choice([0.5, 0.01, 0.25, 5])
        )
    return {"type": "array", "items": made, "maxItems": 5} if r.random() < 0.3 else made


def recursive(r: random.Random) -> dict[str, Any]:
    leaf = r.choice([_small, counted_words, unanchored, bounded_numbers])(r)
    return r.choice(
        [
            {"type": "object", "properties": {"value": leaf, "next": {"$ref": "#"}}, "required": ["value"], "additionalProperties": False},
            {"type": "object", "properties": {"name": leaf, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 4}}, "required": ["name", "children"], "additionalProperties": False},
            {"$ref": "#/$defs/e", "$defs": {"e": {"oneOf": [{"type": "string", "maxLength": 9}, {"type": "array", "prefixItems": [{"enum": ["+", "*"]}, {"$ref": "#/$defs/e"}, {"$ref": "#/$defs/e"}], "items": False, "minItems": 3}]}}},
            {"type": "object", "additionalProperties": {"anyOf": [{"$ref": "#"}, leaf]}, "maxProperties": 3},
        ]
    )  # fmt: skip


def arrays(r: random.Random) -> dict[str, Any]:
    item = r.choice([_small, counted_words, unanchored, bounded_numbers, enums])(r)
    made: dict[str, Any] = {
        "type": "array",
        "items": item,
        "minItems": r.randrange(3),
        "maxItems": r.choice([3, 8, 30]),
    }
    if r.random() < 0.3:
        made = {"type": "array", "prefixItems": [_small(r), item], "items": r.choice([False, _small(r)])}
    elif r.random() < 0.3:
        made |= {
            "contains": item if r.random() < 0.5 else {"const": _word(r)},
            "items": True,
            "minContains": r.randrange(1, 3),
            "minItems": 0,
        }
    return made


Kind = Callable[[random.Random], dict[str, Any]]
KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        counted_words, unanchored, look_ahead, nested_repeats, character_classes, long_texts, several_patterns, formatted,
        enums, unique_items, patterned_names, limited_names, alternatives, bounded_numbers, recursive, arrays, any_keywords,
        catalogues,
    )
}  # fmt: skip
ALONE = ("recursive", "any_keywords", "catalogues")  # these refer to their root
USUAL = tuple(kind for kind in KINDS if kind != "catalogues")  # the 2,000 schemas stay those of earlier figures


def generated(r: random.Random, kind: str) -> dict[str, Any]:
    """A schema of one kind: by itself, in an array, or as properties of an object beside those of other kinds."""
    place = r.random()
    if kind in ALONE or place < 0.4:
        return KINDS[kind](r)
    if place < 0.5:
        return {"type": "array", "items": KINDS[kind](r), "maxItems": r.choice([2, 5, 20])}
    others = [KINDS[k] for k in r.sample([k for k in KINDS if k not in ALONE], 2)]
    made = _object(r, lambda r: r.choice([KINDS[kind], _small, *others])(r), 6)
    made["properties"]["the one"] = KINDS[kind](r)
    if r.random() < 0.2:
        return _object(r, lambda r: r.choice([_small(r), made]), 4)
    return made


def schemas(count: int, seed: int, kinds: tuple[str, ...] = USUAL) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name with its kind, schema): the same ones for the same arguments."""
    for number in range(count):
        kind = kinds[number % len(kinds)]
        yield f"{kind}-{number}", generated(random.Random(f"{seed}/{kind}/{number}"), kind)


# -- judging ----------------------------------------------------------------------------------------------------------

_SPACE = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACE}


@cache
def _category(name: str) -> str:
    """The code points of a Unicode category, as the inside of a class of ``re``."""
    ranges: list[list[int]] = []
    for code in range(0x110000):
        if unicodedata.category(chr(code)).startswith(name):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in ranges)


@cache
def ecma(pattern: str) -> "re.Pattern[str]":
    """A pattern of ECMA-262 for ``re``. Classes are ASCII there, ``$`` is the very end, ``.`` no line end of Unicode."""
    out, at, in_class = "", 0, False
    while at < len(pattern):
        c = pattern[at]
        found = re.compile(r"\\p\{(\w+)\}|\\([dwsDWS])").match(pattern, at)
        if found:
            inside = _category(found[1]) if found[1] else _CLASSES[found[2].lower()]
            if found[2] and found[2].isupper():
                assert not in_class, pattern
                out += f"[^{inside}]"
            else:
                out += inside if in_class else f"[{inside}]"
            at = found.end()
            continue
        if c == "\\":
            out += pattern[at : at + 2]
            at += 2
            continue
        if in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        out += c if in_class else {"$": r"\Z", ".": r"[^\n\r\u2028\u2029]"}.get(c, c)
        at += 1
    return re.compile(out)


def _is_date(text: str) -> bool:
    date.fromisoformat(text.replace("0000-", "2000-", 1))
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is not None


def _is_time(text: str) -> bool:
    found = re.fullmatch(r"(\d\d):(\d\d):(\d\d)(\.\d+)?([zZ]|[+-]\d\d:\d\d)", text, re.ASCII)
    return found is not None and int(found[1]) < 24 and int(found[2]) < 60 and int(found[3]) <= 60


FORMAT_CHECKS: dict[str, Callable[[str], bool]] = {
    "date": _is_date,
    "time": _is_time,
    "date-time": lambda text: _is_date(text[:10]) and _is_time(text[11:]),
    "email": lambda text: "@" in text,
    "ipv4": lambda text: bool(ipaddress.IPv4Address(text)) or True,
    "ipv6": lambda text: bool(ipaddress.IPv6Address(text)) or True,
    "uuid": lambda text: re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text) is not None,
}


class Judge:
    """``jsonschema`` with patterns as ECMA-262 has them, numbers as decimals, and the formats that grammars enforce."""

    def __init__(self, schema: Any) -> None:
        import jsonschema

        checker = jsonschema.FormatChecker(())
        for name, check in FORMAT_CHECKS.items():
            checker.checks(name, raises=ValueError)(
                lambda value, check=check: not isinstance(value, str) or check(value)
            )

        def pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
            if isinstance(value, str) and not ecma(pattern).search(value):
                yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")

        judge = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        self._validator = judge(exact, format_checker=checker)

    def fault(self, text: str) -> str | None:
        """Why ``jsonschema`` refuses the text; None if it does not.

        A text with a name twice in an object may be refused for that: then the fault is ``names written twice``.
        """
        value, has_twins = read_value(text, parse_float=Decimal)
        try:
            found = next(self._validator.iter_errors(value), None)
        except RecursionError:
            return "the reference refers to itself without end"
        if found is None:
            return None
        return "names written twice" if has_twins else f"invalid: {found.message[:200]}"


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Walked:
    """The walks of one schema. Times in microseconds; ``faults`` are (kind of fault, text)."""

    name: str
    schema: dict[str, Any]
    compile_us: float = 0.0
    refused: str = ""
    masks_us: list[float] = field(default_factory=list)
    accepts_us: list[float] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    valid: int = 0
    has_ending: bool = True  # one that closes an answer in time

    def slowest(self) -> float:
        return max(self.masks_us, default=0.0)


def walk(vocabulary: Vocabulary, name: str, schema: dict[str, Any], *, order: str, walks: int) -> Walked:
    """Compile the schema, and draw and judge texts of it."""
    found = Walked(name, schema)
    begin = time.thread_time_ns()
    try:
        grammar = compile("json_schema", json.dumps(schema), vocabulary, property_order=order)
    except GrammarError as error:
        found.refused = str(error)
        return found
    finally:
        found.compile_us = (time.thread_time_ns() - begin) / 1e3
    found.has_ending = grammar.least_tokens is not None
    judge = Judge(schema)
    texts = RandomTexts(grammar, property_names(schema))
    for number in range(walks):
        r = random.Random(f"{name}/{number}")
        matcher = TimedMatcher(grammar)
        text, problem = texts.draw(r, matcher=matcher, most=WANDERS[number % len(WANDERS)])
        found.masks_us += matcher.masks_us
        found.accepts_us += matcher.accepts_us
        problem = problem or judge.fault(text)
        if problem is None:
            found.valid += 1
        else:
            found.faults.append((problem, text))
    return found


def _reason(refusal: str) -> str:
    """A refusal without its place and its numbers."""
    return re.sub(r"'[^']*'|#\S*|[\d,]*\d", "..", refusal)[:140]


def summary(walked: list[Walked]) -> dict[str, Any]:
    slow = sorted((w for w in walked if w.slowest() > 0), key=Walked.slowest, reverse=True)
    return {
        "schemas": len(walked),
        "refused": dict(Counter(_reason(w.refused) for w in walked if w.refused).most_common()),
        "without_ending": [w.name for w in walked if not w.has_ending],
        "texts": sum(w.valid + len(w.faults) for w in walked),
        "valid": sum(w.valid for w in walked),
        "faults": dict(Counter(_reason(what) for w in walked for what, _ in w.faults).most_common()),
        "masks": sum(len(w.masks_us) for w in walked),
        "mask_us": percentiles([us for w in walked for us in w.masks_us]),
        "accept_us": percentiles([us for w in walked for us in w.accepts_us]),
        "compile_us": percentiles([w.compile_us for w in walked]),
        "schemas_with_a_mask_above": {
            f"{ms} ms": sum(w.slowest() > 1e3 * ms for w in slow) for ms in (1, 2, 5, 10, 100)
        },
        "slow_by_kind": dict(
            Counter(w.name.split("-")[0] for w in slow if w.slowest() > 1e3 * SLOW_MASK_MS).most_common()
        ),
        "slowest_masks": [{"ms": round(w.slowest() / 1e3, 1), "name": w.name} for w in slow[:20]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="so many schemas (default: 2000)")
    parser.add_argument("--seed", type=int, default=1, help="of the schemas (default: 1)")
    parser.add_argument("--walks", type=int, default=3, help="texts of each schema (default: 3)")
    parser.add_argument(
        "--kind",
        action="append",
        choices=sorted(KINDS),
        help="only schemas of this kind (repeatable; default: all but catalogues)",
    )
    parser.add_argument("--model", default="smollm2", help="whose tokens (default: smollm2)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/generated_schemas.json")
    args = parser.parse_args()
    about = print_header(seed=args.seed)
    vocabulary = load_tokenizer(resolve_model(args.model)).vocabulary()
    warm = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x?[a-c]{2}$", "maxLength": 9}}}
    walk(vocabulary, "warm", warm, order="any", walks=3)  # the compiled walks are loaded here, not timed
    gc.disable()  # a server collects between steps, not within one
    walked = []
    for number, (name, schema) in enumerate(schemas(args.count, args.seed, tuple(args.kind or USUAL))):
        order = "any" if number % 3 == 2 else "schema"
        walked.append(found := walk(vocabulary, name, schema, order=order, walks=args.walks))
        for what, text in found.faults:
            print(f"  {name}: {what}: {' '.join(text.split())[:200]}", flush=True)
        if number % 50 == 49:
            gc.collect()
    report = summary(walked)
    shown = {w.name: json.dumps(w.schema, ensure_ascii=False)[:300] for w in walked}
    for key, value in report.items():
        if key != "slowest_masks":
            print(f"{key}: {value}")
    for slow in report["slowest_masks"]:
        print(f"  {slow['ms']:>8} ms  {slow['name']}: {shown[slow['name']]}")
    if args.save:
        save(RESULTS / "generated_schemas.json", about | report)


if __name__ == "__main__":
    main()
