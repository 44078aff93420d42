"""JSON Schema 2020-12, with the spellings of draft 4 to 2019-09, as formulas. Never deals with bytes or states."""

import hashlib
import json
from decimal import Decimal

from ..regex_syntax import compile_regex
from ..spec import GrammarError, GrammarTooComplex
from .documents import Document, Json, Place, escape, read_json
from .formats import FORMATS
from .formulas import FALSE, TRUE
from .keywords import (
    ANNOTATIONS,
    BOUNDS,
    FIRST_KINDS,
    OBSTACLES,
    SURE_KEYWORDS,
    check_shape,
    has_type,
    number_bounds,
)
from .schema_reader import Reader
from .unheld import unheld_unique_items
from .values import Kind, Values

UNHELD = (
    "uniqueItems that may have to be broken: under not, if or contains, in a branch of oneOf that others overlap, "
    "beside contains, or within the items of such an array"
)


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
        lock = self.values.machine.lock  # taken for a while at a time, so that masks are made in between
        for place in document.places:
            with lock:
                self._check(document, place)
        key = hashlib.sha256(text.encode()).hexdigest()
        unsupported: list[tuple[str, str]] = []  # what, where
        if not document.is_of_known_dialect:
            unsupported.append((f"the dialect $schema {document.dialect!r}", "#/$schema"))
        with lock:
            root = self.node(document, key, document.root_place)
            if any("uniqueItems" in place.schema for place in document.places):
                unheld = unheld_unique_items(self, root)
                unsupported += [(UNHELD, where) for where in unheld]
                if unheld and check_after:
                    document = Document(document.root, keeps_unique_items=False)
                    root = self.node(document, f"{key} without uniqueItems", document.root_place)
            if unsupported and not check_after:
                what, where = unsupported[0]
                way_out = 'on_unsupported="check_after" lets it pass unchecked'
                raise GrammarError(f"unsupported: {what}; {way_out}", where=where)
            if not self.values.satisfiable(root):
                raise GrammarError("no value satisfies the schema", where="#")
        return root, [f"{what} at {where}" for what, where in unsupported]

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check(self, document: Document, place: Place) -> None:
        """Every keyword of one schema is well formed and known to be enforced."""
        schema, where = place.schema, place.pointer
        if "$ref" in schema and document.ref_stands_alone:
            check_shape("$ref", schema["$ref"], f"{where}/$ref")
            self.target(document, place, "$ref")
            return
        for key, value in schema.items():
            if key in ANNOTATIONS:
                continue
            at = f"{where}/{escape(key)}"
            check_shape(key, value, at)
            match key:
                case "pattern":
                    self.pattern(value, at)
                case "patternProperties":
                    for pattern in value:
                        self.pattern(pattern, f"{at}/{escape(pattern)}")
                case "multipleOf":
                    self.values.numbers.multiple_of(Decimal(value), where=at)
                case "$ref" | "$dynamicRef" | "$recursiveRef":
                    self.target(document, place, key)
                case "format":
                    if self.enforce_formats and value in FORMATS:
                        self.format(value)
        if not BOUNDS.isdisjoint(schema):
            self.values.numbers.between(*number_bounds(schema), where=where)

    def target(self, document: Document, place: Place, key: str) -> Place:
        """Where the reference under ``key`` leads."""
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

    def pointer(self, node: int) -> str:
        """Where the schema stands in its document (``values.Source``)."""
        return self.nodes[node][2].pointer

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
            return Reader(self, document, doc_key, place, kind).read()
        except RecursionError:
            raise GrammarTooComplex("the schema's references nest too deep") from None
        except GrammarTooComplex as error:
            raise error.at(place.pointer) from None
        finally:
            self._expanding.discard(key)


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
