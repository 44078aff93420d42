"""JSON Schema 2020-12, with the spellings of draft 4 to 2019-09, as formulas. Never deals with bytes or states."""

import hashlib
import json
from collections.abc import Iterable
from decimal import Decimal

from .code_points import ANY
from .documents import Document, Json, Place, escape, read_json
from .formats import FORMATS
from .formulas import FALSE, TRUE
from .numbers import Bound
from .regex_syntax import compile_regex
from .spec import GrammarError, GrammarTooComplex
from .values import Kind, Values

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
COUNTS = tuple(low + what for what in ("Length", "Items", "Properties", "Contains") for low in ("min", "max"))
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_UNIQUE = 24  # values that items are kept apart among: 24 cost a quarter of a second to compile, 64 three
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
    )
)
OPTIONS = {
    "property_order": ("schema", "any"),
    "whitespace": ("flexible", "compact"),
    "format": ("enforce", "annotate"),
    "numbers": ("canonical", "any"),
    "on_unsupported": ("refuse", "check_after"),
}
FIRST_KINDS: dict[str, tuple[Kind, ...]] = {
    "object": ("object",),
    "array": ("array",),
    "string": ("string",),
    "integer": ("number",),
    "number": ("number",),
    "boolean": ("true",),
}
# Of a schema of no other keywords, a value of a type exists where none of the type's obstacles is present.
OBSTACLES: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("multipleOf", *BOUNDS),
    "integer": ("multipleOf", *BOUNDS),
    "array": ("minItems", "contains"),
    "object": ("required", "minProperties"),
}
SURE_KEYWORDS = ANNOTATIONS | {key for keys in OBSTACLES.values() for key in keys} | {
    "type", "items", "prefixItems", "additionalItems", "maxItems", "uniqueItems", "properties", "patternProperties",
    "additionalProperties", "propertyNames", "maxProperties", "dependentRequired", "$defs", "definitions",
}  # fmt: skip
Scalar = str | int | float | bool | None | Decimal


class Schemas:
    """The schemas met on one machine in one style. ``compile`` gives the formula of a document's root."""

    def __init__(self, values: Values, *, enforce_formats: bool) -> None:
        self.values = values
        self.ex = values.ex
        self.formulas = values.formulas
        self.enforce_formats = enforce_formats
        self.nodes: list[tuple[Document, str, Place]] = []
        self._ids: dict[object, int] = {}
        self._expanding: set[tuple[int, Kind]] = set()
        self._patterns: dict[tuple[str, bool], int] = {}
        values.source = self

    def compile(self, text: str, *, check_after: bool) -> tuple[int, list[str]]:
        """The root's formula, and what of it is left to check afterwards."""
        document = Document(read_json(text))
        unsupported: list[str] = []
        lock = self.values.machine.lock  # taken for a while at a time, so that masks are made in between
        for place in document.places:
            with lock:
                self._check(document, place, unsupported)
        if unsupported and not check_after:
            what, _, where = unsupported[0].rpartition(" at ")
            raise GrammarError(f'unsupported: {what}; on_unsupported="check_after" lets it pass unchecked', where=where)
        key = hashlib.sha256(text.encode()).hexdigest()
        with lock:
            root = self.node(document, key, document.root_place)
            if not self.values.satisfiable(root):
                raise GrammarError("no value satisfies the schema", where="#")
        return root, unsupported

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check(self, document: Document, place: Place, unsupported: list[str]) -> None:
        """Every keyword of one schema is well formed and known to be enforced."""
        schema, where = place.schema, place.pointer
        if "$ref" in schema and document.ref_stands_alone:
            self._check_ref(document, place)
            return
        for key, value in schema.items():
            if key in ANNOTATIONS:
                continue
            at = f"{where}/{escape(key)}"
            match key:
                case "type":
                    names = value if isinstance(value, list) else [value]
                    for name in names:
                        if name not in TYPES:
                            raise GrammarError(f"unknown type {json.dumps(name)}", where=at)
                case "enum":
                    if not isinstance(value, list):
                        raise GrammarError("enum must be a list", where=at)
                case "required":
                    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                        raise GrammarError("required must be a list of strings", where=at)
                case "pattern":
                    if not isinstance(value, str):
                        raise GrammarError("pattern must be a string", where=at)
                    self.pattern(value, at)
                case "patternProperties":
                    for pattern in value:
                        self.pattern(pattern, f"{at}/{escape(pattern)}")
                case "multipleOf":
                    if not _is_number(value) or value <= 0:
                        raise GrammarError(f"multipleOf must be a number above 0, not {value!r}", where=at)
                    self.values.numbers.multiple_of(Decimal(value), where=at)
                case "uniqueItems":
                    if not isinstance(value, bool):
                        raise GrammarError("uniqueItems must be true or false", where=at)
                    if value and not self._is_unique_anyway(schema):
                        unsupported.append(f"uniqueItems at {at}")
                case "$ref" | "$dynamicRef" | "$recursiveRef":
                    self._check_ref(document, place)
                case "format":
                    if not isinstance(value, str):
                        raise GrammarError("format must be a string", where=at)
                    if self.enforce_formats and value in FORMATS:
                        self.format(value)
                case _ if key in COUNTS:
                    if not _is_number(value) or value < 0 or value != int(value):
                        raise GrammarError(f"{key} must be a whole number of at least 0, not {value!r}", where=at)
                case _ if key in BOUNDS:
                    if not _is_number(value) and not (key.startswith("exclusive") and isinstance(value, bool)):
                        raise GrammarError(f"{key} must be a number, not {value!r}", where=at)
                case "dependentRequired" | "dependencies":
                    if not isinstance(value, dict):
                        raise GrammarError(f"{key} must be an object", where=at)
        bounds = _number_bounds(schema)
        if bounds != (None, None):
            self.values.numbers.between(*bounds, where=where)

    @staticmethod
    def _is_unique_anyway(schema: Json) -> bool:
        """Whether items can be kept apart: there is one at most, or they are of a few known values."""
        one_at_most = "maxItems" in schema and _is_number(schema["maxItems"]) and schema["maxItems"] <= 1
        return one_at_most or _item_values(schema) is not None

    def _check_ref(self, document: Document, place: Place) -> None:
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in place.schema:
                if not isinstance(place.schema[key], str):
                    raise GrammarError(f"{key} must be a string", where=place.pointer)
                self._target(document, place, key)

    def _target(self, document: Document, place: Place, key: str) -> Place:
        if key == "$recursiveRef" and any(p.schema.get("$recursiveAnchor") for p in document.places):
            raise GrammarError(
                "$recursiveRef with $recursiveAnchor is not supported; write $dynamicRef", where=place.pointer
            )
        return document.resolve(place.schema[key], place, dynamic=key == "$dynamicRef")

    def pattern(self, pattern: str, where: str) -> int:
        key = (pattern, True)
        found = self._patterns.get(key)
        if found is None:
            found = compile_regex(pattern, self.ex, anchored=False, where=where, ecma=True)
            self._patterns[key] = found
        return found

    def format(self, name: str) -> int:
        key = (name, False)
        found = self._patterns.get(key)
        if found is None:
            found = self._patterns[key] = compile_regex(FORMATS[name], self.ex, anchored=True, ecma=True)
        return found

    # -- nodes ----------------------------------------------------------------------------------------------------

    def node(self, document: Document, key: str, place: Place) -> int:
        """The formula that a value satisfies the schema."""
        schema = place.schema
        if schema is True or schema == {}:
            return TRUE
        if schema is False:
            return FALSE
        simple = _simple_key(schema)
        identity: object = ("simple", simple) if simple is not None else (key, place)
        found = self._ids.get(identity)
        if found is None:
            found = self._ids[identity] = len(self.nodes)
            self.nodes.append((document, key, place))
        return self.formulas.leaf("schema", found)

    def constant(self, value: Json) -> int:
        """The formula that a value equals ``value``."""
        text = json.dumps(value, sort_keys=True, default=str)
        document = Document({"const": value})
        return self.node(document, "const " + text + repr(type(value)), document.root_place)

    def kinds_first(self, node: int) -> tuple[Kind, ...]:
        """The kinds its ``type`` names (``values.Source``)."""
        return FIRST_KINDS.get(str(self.nodes[node][2].schema.get("type")), ())

    def is_surely_satisfiable(self, node: int) -> bool:
        """Whether some value satisfies the schema, as far as can be told at sight (``values.Source``)."""
        schema = self.nodes[node][2].schema
        if not SURE_KEYWORDS.issuperset(schema):
            return False
        types = schema.get("type", "null")
        return any(
            kind in ("null", "boolean") or not any(key in schema for key in OBSTACLES[kind])
            for kind in (types if isinstance(types, list) else [types])
        )

    def expand(self, node: int, kind: Kind) -> int:
        """The formula of leaves for values of one kind (``values.Source``)."""
        place = self.nodes[node][2]
        if not has_type(place.schema, kind) and not ("$ref" in place.schema and self.nodes[node][0].ref_stands_alone):
            return FALSE
        key = (node, kind)
        if key in self._expanding:
            raise GrammarError("the schema refers to itself without end", where=self.nodes[node][2].pointer)
        self._expanding.add(key)
        try:
            document, doc_key, place = self.nodes[node]
            return _Reader(self, document, doc_key, place, kind).read()
        except RecursionError:
            raise GrammarTooComplex("the schema's references nest too deep") from None
        finally:
            self._expanding.discard(key)


class _Reader:
    """One schema, read for one kind of value."""

    def __init__(self, schemas: Schemas, document: Document, key: str, place: Place, kind: Kind) -> None:
        self.schemas = schemas
        self.values = schemas.values
        self.formulas = schemas.formulas
        self.document = document
        self.key = key
        self.place = place
        self.schema = place.schema
        self.kind = kind

    def sub(self, schema: Json, *path: str | int) -> int:
        """The formula of a subschema."""
        pointer = "/".join([self.place.pointer, *[escape(str(p)) for p in path]])
        return self.schemas.node(self.document, self.key, self.document.child(schema, pointer, self.place))

    def inside(self, formula: int) -> int:
        return self.values.expand(formula, self.kind)

    def read(self) -> int:
        schema = self.schema
        if "$ref" in schema and self.document.ref_stands_alone:
            return self.inside(self.target("$ref"))
        parts: list[int] = []
        if "const" in schema:
            parts.append(self._equals_any([schema["const"]]))
        if "enum" in schema:
            parts.append(self._equals_any(schema["enum"]))
        if FALSE in parts:
            return FALSE
        match self.kind:
            case "string":
                parts.append(self._string())
            case "number":
                parts.append(self._number())
            case "array":
                parts += self._array()
            case "object":
                parts += self._object()
        if FALSE in parts:
            return FALSE
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in schema:
                parts.append(self.inside(self.target(key)))
        for i, branch in enumerate(schema.get("allOf", ())):
            parts.append(self.inside(self.sub(branch, "allOf", i)))
        if "anyOf" in schema:
            parts.append(self.formulas.disjunction([self.inside(b) for b in self.branches("anyOf")]))
        if "oneOf" in schema:
            parts.append(self._one_of())
        if "not" in schema:
            parts.append(self.formulas.negation(self.inside(self.sub(schema["not"], "not"))))
        if "if" in schema and ("then" in schema or "else" in schema):
            test = self.inside(self.sub(schema["if"], "if"))
            then = self.inside(self.sub(schema["then"], "then")) if "then" in schema else TRUE
            other = self.inside(self.sub(schema["else"], "else")) if "else" in schema else TRUE
            f = self.formulas
            parts.append(f.disjunction([f.conjunction([test, then]), f.conjunction([f.negation(test), other])]))
        if self.kind == "object" and "unevaluatedProperties" in schema:
            parts.append(self._unevaluated("unevaluatedProperties"))
        if self.kind == "array" and "unevaluatedItems" in schema:
            parts.append(self._unevaluated("unevaluatedItems"))
        return self.formulas.conjunction(parts)

    def target(self, key: str) -> int:
        place = self.schemas._target(self.document, self.place, key)
        return self.schemas.node(self.document, self.key, place)

    def branches(self, key: str) -> list[int]:
        return [self.sub(branch, key, i) for i, branch in enumerate(self.schema[key])]

    def _one_of(self) -> int:
        """Exactly one; branches that cannot hold together need no negations."""
        parts = [self.inside(b) for b in self.branches("oneOf")]
        live = [p for p in parts if p != FALSE]
        if len(live) <= 1 or self._are_disjoint(live):
            return self.formulas.disjunction(live)
        return self.formulas.exactly_one(live)

    def _are_disjoint(self, parts: list[int]) -> bool:
        """Whether no value can satisfy two of the formulas, told by a property all of them need, with constants."""
        if self.kind != "object":
            return False
        tags: list[dict[str, frozenset[str]]] = []
        for part in parts:
            leaves = self.formulas.positive_clause(part)
            if leaves is None:
                return False
            data = [self.formulas.nodes[p][1] for p in leaves]
            needed = {leaf[1] for leaf in data if leaf[0] == "has"}
            found: dict[str, frozenset[str]] = {}
            for leaf in data:
                if leaf[0] == "props":
                    rule = self.values.objects.properties.rules[leaf[1]]
                    for name in needed & set(rule.by_name):
                        constants = self._constants(rule.by_name[name])
                        if constants is not None:
                            found[name] = constants
            tags.append(found)
        for name in tags[0]:
            sets = [t.get(name) for t in tags]
            if all(s is not None for s in sets):
                total = sum(len(s) for s in sets if s is not None)
                if len(frozenset().union(*[s for s in sets if s is not None])) == total:
                    return True
        return False

    def _constants(self, formula: int) -> frozenset[str] | None:
        """The strings a schema is bound to, if only strings and listed."""
        node = self.formulas.nodes[formula]
        if node[0] != "leaf":
            return None
        schema = self.schemas.nodes[node[1][1]][2].schema
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is None or not all(isinstance(v, str) for v in values):
            return None
        return frozenset(values)

    def _equals_any(self, options: list[Json]) -> int:
        kind, formulas = self.kind, self.formulas
        match kind:
            case "null":
                return TRUE if any(v is None for v in options) else FALSE
            case "true" | "false":
                return TRUE if any(v is (kind == "true") for v in options) else FALSE
            case "string":
                words = [v.encode() for v in options if isinstance(v, str) and _is_encodable(v)]
                return formulas.leaf("string", self.schemas.ex.one_of(words)) if words else FALSE
            case "number":
                exprs = [self.values.numbers.equal_to(Decimal(v)) for v in options if _is_number(v)]
                return formulas.leaf("number", self.schemas.ex.union(*exprs)) if exprs else FALSE
            case "array":
                arrays = self.values.arrays
                return formulas.disjunction(
                    [
                        formulas.conjunction(
                            [
                                arrays.items(tuple(self.schemas.constant(x) for x in v), FALSE),
                                arrays.at_least(len(v)),
                                arrays.at_most(len(v)),
                            ]
                        )
                        for v in options
                        if isinstance(v, list)
                    ]
                )
        properties = self.values.objects.properties
        return formulas.disjunction(
            [
                formulas.conjunction(
                    [
                        properties.rule({k: self.schemas.constant(x) for k, x in v.items()}, (), FALSE),
                        *[properties.has(k) for k in v],
                    ]
                )
                for v in options
                if isinstance(v, dict)
            ]
        )

    def _string(self) -> int:
        schema, ex = self.schema, self.schemas.ex
        parts = []
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        if low or high is not None:
            if high is not None and high < low:
                return FALSE
            parts.append(ex.repeat(ex.chars(ANY), low, None if high is None else int(high)))
        if "pattern" in schema:
            parts.append(self.schemas.pattern(schema["pattern"], self.place.pointer))
        if self.schemas.enforce_formats and schema.get("format") in FORMATS:
            parts.append(self.schemas.format(schema["format"]))
        whole = ex.intersect(*parts) if parts else ex.text
        return TRUE if whole == ex.text else self.formulas.leaf("string", whole)

    def _number(self) -> int:
        schema, numbers = self.schema, self.values.numbers
        types = schema.get("type")
        types = types if isinstance(types, list) else [types]
        integer = "integer" in types and "number" not in types
        low, high = _number_bounds(schema)
        if "multipleOf" in schema:
            expr = numbers.multiple_of(Decimal(schema["multipleOf"]), integer=integer)
            if low is not None or high is not None:
                expr = self.schemas.ex.intersect(expr, numbers.between(low, high, integer=integer))
            return self.formulas.leaf("number", expr)
        if low is not None or high is not None:
            return self.formulas.leaf("number", numbers.between(low, high, integer=integer))
        return self.formulas.leaf("number", numbers.integer) if integer else TRUE

    def _array(self) -> list[int]:
        schema, arrays = self.schema, self.values.arrays
        parts = []
        prefix, rest = self._item_schemas()
        if prefix or rest != TRUE:
            parts.append(arrays.items(prefix, rest))
        parts.append(arrays.at_least(int(schema.get("minItems", 0))))
        if "maxItems" in schema:
            parts.append(arrays.at_most(int(schema["maxItems"])))
        if schema.get("uniqueItems") is True:
            for value in _item_values(schema) or ():
                parts.append(arrays.contains(self.schemas.constant(value), 0, 1))
        if "contains" in schema:
            asked = self.sub(schema["contains"], "contains")
            need = int(schema.get("minContains", 1))
            room = int(schema.get("maxContains", -1))
            if room >= 0 and need > room:
                return [FALSE]
            if asked == TRUE:
                parts.append(arrays.at_least(need))
                if room >= 0:
                    parts.append(arrays.at_most(room))
            elif asked == FALSE:
                if need > 0:
                    return [FALSE]
            else:
                parts.append(arrays.contains(asked, need, room))
        return parts

    def _item_schemas(self) -> tuple[tuple[int, ...], int]:
        schema = self.schema
        if isinstance(schema.get("items"), list):
            prefix = tuple(self.sub(s, "items", i) for i, s in enumerate(schema["items"]))
            rest = self.sub(schema["additionalItems"], "additionalItems") if "additionalItems" in schema else TRUE
            return prefix, rest
        prefix = tuple(self.sub(s, "prefixItems", i) for i, s in enumerate(schema.get("prefixItems", ())))
        return prefix, self.sub(schema["items"], "items") if "items" in schema else TRUE

    def _object(self) -> list[int]:
        schema, properties, formulas = self.schema, self.values.objects.properties, self.formulas
        parts = []
        if "properties" in schema or "patternProperties" in schema or "additionalProperties" in schema:
            names = {k: self.sub(v, "properties", k) for k, v in schema.get("properties", {}).items()}
            patterns = [
                (self.schemas.pattern(k, self.place.pointer), self.sub(v, "patternProperties", k))
                for k, v in schema.get("patternProperties", {}).items()
            ]
            additional = (
                self.sub(schema["additionalProperties"], "additionalProperties")
                if "additionalProperties" in schema
                else TRUE
            )
            parts.append(properties.rule(names, patterns, additional))
        parts += [properties.has(name) for name in schema.get("required", ())]
        parts.append(properties.at_least(int(schema.get("minProperties", 0))))
        if "maxProperties" in schema:
            parts.append(properties.at_most(int(schema["maxProperties"])))
        if "propertyNames" in schema:
            parts.append(properties.names(self.sub(schema["propertyNames"], "propertyNames")))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in schema.get(key, {}).items():
                if isinstance(needs, list):
                    consequence = formulas.conjunction([properties.has(n) for n in needs])
                else:
                    consequence = self.inside(self.sub(needs, key, name))
                parts.append(formulas.disjunction([formulas.negation(properties.has(name)), consequence]))
        return parts

    def _unevaluated(self, key: str) -> int:
        from .evaluated import Evaluated

        rest = self.sub(self.schema[key], key)
        evaluated = Evaluated(self.kind)
        cases = evaluated.cases(self, skip=key)
        parts = []
        for condition, known in cases:
            if known.everything:
                parts.append(condition)
                continue
            if self.kind == "object":
                leaf = self.values.objects.properties.rule(
                    dict.fromkeys(sorted(known.names), TRUE), [(p, TRUE) for p in sorted(known.patterns)], rest
                )
            else:
                each = self.formulas.disjunction([rest, *known.contains])
                leaf = self.values.arrays.items((TRUE,) * known.prefix, each)
            parts.append(self.formulas.conjunction([condition, leaf]))
        return self.formulas.disjunction(parts)


def has_type(schema: Json, kind: Kind) -> bool:
    """Whether the schema's ``type`` lets values of a kind pass."""
    types = schema.get("type")
    if types is None:
        return True
    if kind in ("true", "false"):
        return "boolean" in types if isinstance(types, list) else types == "boolean"
    if isinstance(types, list):
        return kind in types or (kind == "number" and "integer" in types)
    return types == kind or (kind == "number" and types == "integer")


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def _item_values(schema: Json) -> list[Json] | None:
    """The scalars that items are bound to, if listed, few, and there are no other items."""
    items = schema.get("items")
    if not isinstance(items, dict) or "prefixItems" in schema:
        return None
    if "const" in items:
        listed = [items["const"]]
    elif "enum" in items:
        listed = items["enum"]
    elif items.get("type") == "boolean":
        listed = [False, True]
    elif items.get("type") == "null":
        listed = [None]
    else:
        return None
    if not isinstance(listed, list) or any(isinstance(v, (dict, list)) for v in listed):
        return None
    values = list({(type(v) is bool, v): v for v in listed}.values())  # 1 and 1.0 are one, 1 and true are not
    return values if len(values) <= MAX_UNIQUE else None


def _is_encodable(text: str) -> bool:
    return not any(0xD800 <= ord(c) < 0xE000 for c in text)


def _number_bounds(schema: Json) -> tuple[Bound | None, Bound | None]:
    def tightest(plain: str, exclusive: str, sign: int) -> Bound | None:
        bounds = []
        strict = schema.get(exclusive)
        if _is_number(schema.get(plain)):
            bounds.append(Bound(Decimal(schema[plain]), strict is not True))  # draft 4: a flag
        if _is_number(strict):
            bounds.append(Bound(Decimal(strict), False))
        return max(bounds, key=lambda b: (sign * b.value, not b.is_inclusive), default=None)

    return tightest("minimum", "exclusiveMinimum", 1), tightest("maximum", "exclusiveMaximum", -1)


def _simple_key(schema: Json) -> tuple | None:
    """A key by content for schemas of scalars only, so that equal ones are one in all grammars."""
    items: list[tuple[str, object]] = []
    for key, value in schema.items():
        if key in ANNOTATIONS or key in ("$id", "id"):
            continue
        if key.startswith("$"):
            return None
        if isinstance(value, dict):
            return None
        if isinstance(value, list):
            if key not in ("enum", "required", "type") or any(isinstance(v, (dict, list)) for v in value):
                return None
            items.append((key, tuple((type(v).__name__, v) for v in value)))
        else:
            items.append((key, (type(value).__name__, value)))
    return tuple(sorted(items, key=lambda item: item[0]))


def option_values(options: dict[str, object], allowed: Iterable[str]) -> dict[str, str]:
    """The options of a grammar with their defaults (the first of each), or a refusal by name."""
    known = {name: OPTIONS[name] for name in allowed}
    for name, value in options.items():
        if name not in known:
            raise GrammarError(f"unknown option {name!r}; there are {', '.join(known)}")
        if value not in known[name]:
            raise GrammarError(f"option {name} is {value!r}; it can be {' or '.join(map(repr, known[name]))}")
    return {name: str(options.get(name, choices[0])) for name, choices in known.items()}


__all__ = ["Schemas", "option_values"]
