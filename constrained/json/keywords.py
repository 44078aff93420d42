"""The keywords of JSON Schema: which values they take, and what some of them tell without being compiled."""

import json
from decimal import Decimal

from ..spec import GrammarError
from .documents import Json, escape
from .inner_values import KINDS, Kind
from .numbers import Bound

COUNTS = frozenset(low + what for what in ("Length", "Items", "Properties", "Contains") for low in ("min", "max"))
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
TEXTS = frozenset(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$id"))
CHECKED = TEXTS | COUNTS | BOUNDS | {
    "type", "enum", "required", "multipleOf", "uniqueItems", "dependentRequired", "dependencies", "patternProperties",
}  # fmt: skip
CHECKED_BESIDE_TYPE = CHECKED - {"type"}
ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly",
    "$schema",
))  # fmt: skip
KINDS_OF_TYPE: dict[str, tuple[Kind, ...]] = {
    "null": ("null",),
    "boolean": ("true", "false"),
    "object": ("object",),
    "array": ("array",),
    "number": ("number",),
    "string": ("string",),
    "integer": ("number",),
}
TYPES = tuple(KINDS_OF_TYPE)
# If a schema has only SURE_KEYWORDS, a value of a type exists where none of the type's obstacles is present.
OBSTACLES: dict[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(("multipleOf", *BOUNDS)),
    "integer": frozenset(("multipleOf", *BOUNDS)),
    "array": frozenset(("minItems", "contains")),
    "object": frozenset(("required", "minProperties")),
}
BESIDE_REQUIRED = frozenset((  # what may forbid a required property
    "minProperties", "maxProperties", "patternProperties", "propertyNames", "dependentRequired",
))  # fmt: skip
SURE_KEYWORDS = ANNOTATIONS | {key for keys in OBSTACLES.values() for key in keys} | {
    "type", "items", "prefixItems", "additionalItems", "maxItems", "uniqueItems", "properties", "patternProperties",
    "additionalProperties", "propertyNames", "maxProperties", "dependentRequired", "$defs", "definitions",
}  # fmt: skip


def check_keyword(key: str, value: Json, where: str) -> None:
    """Raise GrammarError if the keyword does not take such a value. Keywords outside ``CHECKED`` take any."""
    match key:
        case "type":
            for name in value if isinstance(value, list) else [value]:
                if name not in TYPES:
                    shown = json.dumps(name, default=str)
                    raise GrammarError(f"unknown type {shown}; there are {', '.join(TYPES)}", where=where)
        case "enum":
            _expect(isinstance(value, list), key, "a list", value, where)
        case "required":
            is_names = isinstance(value, list) and all(isinstance(v, str) for v in value)
            _expect(is_names, key, "a list of strings", value, where)
        case _ if key in TEXTS:
            _expect(isinstance(value, str), key, "a string", value, where)
        case "multipleOf":
            _expect(is_number(value) and value > 0, key, "a number above 0", value, where)
        case "uniqueItems":
            _expect(isinstance(value, bool), key, "true or false", value, where)
        case "dependentRequired" | "dependencies":
            _expect(isinstance(value, dict), key, "an object", value, where)
            for name, needs in value.items():
                if key == "dependentRequired" or isinstance(needs, list):
                    check_keyword("required", needs, f"{where}/{escape(name)}")
        case _ if key in COUNTS:
            is_count = is_number(value) and value >= 0 and value == int(value)
            _expect(is_count, key, "a whole number of at least 0", value, where)
        case _ if key in BOUNDS:
            is_flag = isinstance(value, bool) and key.startswith("exclusive")  # draft 4
            _expect(is_number(value) or is_flag, key, "a number", value, where)


def is_plain_type(schema: Json) -> bool:
    """Whether the schema has no keyword to check but one type that there is: most have."""
    kind = schema.get("type")
    return type(kind) is str and kind in KINDS_OF_TYPE and CHECKED_BESIDE_TYPE.isdisjoint(schema)


def _expect(is_right: bool, key: str, what: str, value: Json, where: str) -> None:
    if not is_right:
        shown = json.dumps(value, default=str)
        raise GrammarError(f"{key} must be {what}, not {shown[:40]}{'...' * (len(shown) > 40)}", where=where)


def is_surely_satisfiable(schema: Json) -> bool:
    """Whether the keywords of the schema, and of the schemas of its required properties, show that a value exists."""
    if isinstance(schema, bool):
        return schema
    if not SURE_KEYWORDS.issuperset(schema):
        return False
    types = schema.get("type", "null")
    if isinstance(types, list):
        return any(OBSTACLES[kind].isdisjoint(schema) for kind in types) or (
            "object" in types and _has_required(schema)
        )
    return OBSTACLES[types].isdisjoint(schema) or (types == "object" and _has_required(schema))


def _has_required(schema: Json) -> bool:
    """Whether the schemas of the required properties show that an object can have them all."""
    if not BESIDE_REQUIRED.isdisjoint(schema):
        return False
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(is_surely_satisfiable(properties.get(name, others)) for name in schema["required"])


def kinds_of(schema: Json, *, depth: int = 2) -> tuple[Kind, ...]:
    """The kinds of values that the schema's ``type``, ``const`` and ``enum`` let pass, and those of the branches of
    ``anyOf`` and ``oneOf``, down to ``depth``."""
    types = schema.get("type")
    found = KINDS if types is None else KINDS_OF_TYPE[types] if isinstance(types, str) else _kinds_of_types(types)
    if "const" in schema:
        found = tuple([kind for kind in found if kind == kind_of(schema["const"])])
    if "enum" in schema:
        listed = set(map(kind_of, schema["enum"]))
        found = tuple([kind for kind in found if kind in listed])
    for key in ("anyOf", "oneOf") if depth else ():
        if key in schema and len(found) > 1:
            let_pass = _kinds_of_branches(schema[key], depth - 1)
            found = tuple([kind for kind in found if kind in let_pass])
    return found


def _kinds_of_branches(branches: list[Json], depth: int) -> set[Kind]:
    found: set[Kind] = set()
    for branch in branches:
        if len(found) == len(KINDS) or branch is True or (branch and "$ref" in branch):
            return set(KINDS)
        if branch is not False:
            found.update(kinds_of(branch, depth=depth))
    return found


def _kinds_of_types(types: list[str]) -> tuple[Kind, ...]:
    named = {kind for name in types for kind in KINDS_OF_TYPE[name]}
    return tuple([kind for kind in KINDS if kind in named])


def kind_of(value: Json) -> Kind:
    match value:
        case str():
            return "string"
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case dict():
            return "object"
        case list():
            return "array"
    return "number"


def is_number(value: Json) -> bool:
    """Whether the value is a JSON number: in Python a bool is an int."""
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def number_bounds(schema: Json) -> tuple[Bound | None, Bound | None]:
    """The lower and the upper bound, of which draft 4 spells the exclusive ones by a flag."""

    def tightest(plain: str, exclusive: str, sign: int) -> Bound | None:
        bounds = []
        strict = schema.get(exclusive)
        if is_number(schema.get(plain)):
            bounds.append(Bound(Decimal(schema[plain]), strict is not True))  # draft 4: a flag
        if is_number(strict):
            bounds.append(Bound(Decimal(strict), False))
        return max(bounds, key=lambda b: (sign * b.value, not b.is_inclusive), default=None)

    return tightest("minimum", "exclusiveMinimum", 1), tightest("maximum", "exclusiveMaximum", -1)
