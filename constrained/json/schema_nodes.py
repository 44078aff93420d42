"""The schemas met on one machine, numbered: each is a leaf of formulas."""

import json

from ..expressions import Expressions
from ..regex_syntax import compile_regex
from .documents import Document, Json, Place
from .formats import format_language
from .formulas import FALSE, TRUE, Formulas
from .inner_values import KINDS, Kind
from .keywords import ANNOTATIONS, is_surely_satisfiable, kinds_of

BESIDE_REFERENCES = ANNOTATIONS | {"$ref", "$defs", "definitions"}
NOT_ASKING = ANNOTATIONS | {"$id", "id"}
LISTS_OF_SCALARS = frozenset(("enum", "required", "type"))
MAX_REFERENCES = 16  # one after the other; a longer chain, or a circle, is followed keyword by keyword


class SchemaNodes:
    """Schemas by number. Equal schemas of scalars have one number, wherever they stand; other schemas one a place."""

    def __init__(self, formulas: Formulas, expressions: Expressions, *, enforce_formats: bool) -> None:
        self.formulas = formulas
        self.ex = expressions
        self.enforce_formats = enforce_formats
        self.nodes: list[tuple[Document, str, Place]] = []  # with the key of the document
        self.kinds: list[tuple[Kind, ...]] = []  # of the values that each schema lets pass: see ``kinds_of``
        self.branches: dict[tuple[int, str], list[int]] = {}  # formulas, by schema and keyword; of those read so far
        self._leaves: dict[object, int] = {}  # formulas
        self._patterns: dict[str, int] = {}
        self._formats: dict[str, int] = {}

    def node(self, document: Document, key: str, place: Place) -> int:
        """The formula that a value satisfies the schema at ``place``."""
        if isinstance(place.schema, dict) and "$ref" in place.schema:
            place = self._referred(document, place)
        schema = place.schema
        if schema is True or schema == {}:
            return TRUE
        if schema is False:
            return FALSE
        is_kept = document.keeps_unique_items or "uniqueItems" not in schema
        simple = _simple_key(schema) if is_kept else None
        identity: object = ("simple", simple, place.dialect.is_draft4) if simple is not None else (key, place.key)
        found = self._leaves.get(identity)
        if found is None:
            found = self._leaves[identity] = self.formulas.leaf("schema", len(self.nodes))
            self.nodes.append((document, key, place))
            self.kinds.append(KINDS if "$ref" in schema and place.dialect.ref_stands_alone else kinds_of(schema))
        return found

    def _referred(self, document: Document, place: Place) -> Place:
        """Where the references lead of which a schema consists; the place itself for any other schema."""
        at = place
        for _ in range(MAX_REFERENCES):
            schema = at.schema
            if not isinstance(schema, dict) or "$ref" not in schema:
                return at
            if not at.dialect.ref_stands_alone and not BESIDE_REFERENCES.issuperset(schema):
                return at
            at = self.target(document, at, "$ref")
        return place

    def constant(self, value: Json) -> int:
        """The formula that a value equals ``value``."""
        text = json.dumps(value, sort_keys=True, default=str)
        document = Document({"const": value})
        return self.node(document, "const " + text + repr(type(value)), document.root_place)

    def pointer(self, node: int) -> str:
        """Where the schema stands in its document."""
        return self.nodes[node][2].pointer

    def schema_of(self, formula: int) -> dict[str, Json]:
        """The schema that is the formula; an empty one if it is not one schema."""
        node = self.formulas.nodes[formula]
        found: dict[str, Json] = self.nodes[node[1][1]][2].schema if node[0] == "leaf" else {}
        return found

    def is_surely_satisfiable(self, node: int) -> bool:
        """Whether the schema's keywords alone show that some value satisfies it."""
        return is_surely_satisfiable(self.nodes[node][2].schema)

    def target(self, document: Document, place: Place, key: str) -> Place:
        """Where the reference under ``key`` leads."""
        return document.resolve(place, key)

    def pattern(self, pattern: str, where: str) -> int:
        """The expression of the texts in which the pattern matches somewhere."""
        found = self._patterns.get(pattern)
        if found is None:
            found = self._patterns[pattern] = compile_regex(pattern, self.ex, anchored=False, where=where, ecma=True)
        return found

    def format(self, name: str) -> int:
        """The expression of the texts of a format in ``FORMATS``."""
        found = self._formats.get(name)
        if found is None:
            found = self._formats[name] = format_language(name, self.ex)
        return found


def _simple_key(schema: Json) -> frozenset[tuple[object, ...]] | None:
    """A key by content for schemas of scalars only, so that equal ones have one number in all grammars."""
    items: list[tuple[object, ...]] = []
    for key, value in schema.items():
        if key in NOT_ASKING:
            continue
        kind = type(value)
        if kind is dict or key.startswith("$"):
            return None
        if kind is list:
            kinds = tuple(map(type, value))
            if key not in LISTS_OF_SCALARS or dict in kinds or list in kinds:
                return None
            items.append((key, kinds, tuple(value)))
        else:
            items.append((key, kind, value))
    return frozenset(items)
