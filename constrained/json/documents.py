"""A JSON Schema document: its subschemas, resources, anchors and references."""

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ..spec import GrammarError

Json = Any
MAX_MAGNITUDE = 400  # exponent of ten; a number is spelled out digit by digit
MAX_DEPTH = 200
KNOWN_DIALECTS = r"https?://(json-schema\.org/(draft[-/][0-9-]+/(hyper-)?)?schema|spec\.openapis\.org/oas/)"

ONE = ("not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "additionalItems",
       "unevaluatedProperties", "unevaluatedItems")  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "definitions", "$defs", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class Place:
    """A schema inside a document. ``scope``: the resources entered on the way, which dynamic references search."""

    schema: Json = field(compare=False, hash=False)
    pointer: str
    base: str
    scope: tuple[str, ...] = ()


def read_json(text: str) -> Json:
    """Parse JSON; numbers with a point or exponent become exact decimals. Raises GrammarError."""

    def number(text: str) -> Decimal:
        found = Decimal(text)
        if abs(found.adjusted()) > MAX_MAGNITUDE:
            raise GrammarError(
                f"the number {text[:40]} is out of range: numbers go from 1e-{MAX_MAGNITUDE} to 1e{MAX_MAGNITUDE}"
            )
        return found

    def constant(name: str) -> None:
        raise GrammarError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_float=number, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("the schema nests too deep") from None
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None


def escape(part: str) -> str:
    """A name as a part of a JSON pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")


class Document:
    """The subschemas of a document by URI. Raises GrammarError for a part that is not a schema."""

    def __init__(self, root: Json, *, keeps_unique_items: bool = True) -> None:
        """Without ``keeps_unique_items`` that keyword is not enforced."""
        self.root = root
        self.keeps_unique_items = keeps_unique_items
        dialect = root.get("$schema", "") if isinstance(root, dict) else ""
        self.dialect = dialect = dialect if isinstance(dialect, str) else ""
        self.ref_stands_alone = any(f"draft-0{n}" in dialect for n in "34567")
        self.is_draft4 = "draft-04" in dialect or "draft-03" in dialect
        self.resources: dict[str, Place] = {}
        self.anchors: dict[tuple[str, str], Place] = {}
        self.dynamic: dict[tuple[str, str], Place] = {}
        self.places: list[Place] = []
        self._resolved: dict[tuple[str, str, tuple[str, ...], bool], Place] = {}
        self._index(root, "#", "", 0)
        self.resources.setdefault("", Place(root, "#", self._base_of(root, "")))
        self.root_place = Place(root, "#", self._base_of(root, ""), (self._base_of(root, ""),) if self.dynamic else ())

    @property
    def is_of_known_dialect(self) -> bool:
        return not self.dialect or re.match(KNOWN_DIALECTS, self.dialect) is not None

    def _id(self, schema: Json) -> str | None:
        found = schema.get("id" if self.is_draft4 else "$id") if isinstance(schema, dict) else None
        return found if isinstance(found, str) else None

    def _base_of(self, schema: Json, base: str) -> str:
        found = self._id(schema)
        if found is None or (self.ref_stands_alone and "$ref" in schema):
            return base
        return urldefrag(urljoin(base, found)).url

    def _index(self, schema: Json, pointer: str, base: str, depth: int) -> None:
        if not isinstance(schema, dict):
            if not isinstance(schema, bool):
                shown = json.dumps(schema, default=str)[:40]
                raise GrammarError(f"a schema must be an object, true or false, not {shown}", where=pointer)
            return
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema nests deeper than {MAX_DEPTH}", where=pointer)
        found = self._id(schema)
        if found is not None:
            outer = base
            base = self._base_of(schema, base)
            if base != outer or depth == 0:
                self.resources.setdefault(base, Place(schema, pointer, base))
            fragment = urldefrag(found).fragment
            if fragment:
                self.anchors.setdefault((base, fragment), Place(schema, pointer, base))
        for key, table in (("$anchor", self.anchors), ("$dynamicAnchor", self.dynamic)):
            name = schema.get(key)
            if isinstance(name, str):
                place = Place(schema, pointer, base)
                table.setdefault((base, name), place)
                self.anchors.setdefault((base, name), place)
        self.places.append(Place(schema, pointer, base))
        for key, value in schema.items():
            if key in MAPS or key == "dependencies":
                if not isinstance(value, dict):
                    raise GrammarError(f"{key} must be an object", where=pointer)
                for name, inner in value.items():
                    if key != "dependencies" or not isinstance(inner, list):
                        self._index(inner, f"{pointer}/{key}/{escape(name)}", base, depth + 1)
            elif key in LISTS or (key == "items" and isinstance(value, list)):
                if not isinstance(value, list):
                    raise GrammarError(f"{key} must be a list", where=pointer)
                for i, inner in enumerate(value):
                    self._index(inner, f"{pointer}/{key}/{i}", base, depth + 1)
            elif key in ONE or key == "items":
                self._index(value, f"{pointer}/{key}", base, depth + 1)

    def resolve(self, reference: str, place: Place, *, dynamic: bool = False) -> Place:
        """The schema that a reference at ``place`` leads to. Raises GrammarError if it leads outside the document."""
        key = (reference, place.base, place.scope, dynamic)
        found = self._resolved.get(key)
        if found is None:
            found = self._resolved[key] = self._resolve(reference, place, dynamic)
        return found

    def _resolve(self, reference: str, place: Place, dynamic: bool) -> Place:
        url, fragment = urldefrag(urljoin(place.base, reference))
        if reference.startswith("#"):
            url, fragment = place.base, reference[1:]
        fragment = unquote(fragment)
        target = self.resources.get(url)
        if target is None:
            raise GrammarError(
                f"$ref {reference!r} leads outside the schema; only references within it are followed",
                where=place.pointer,
            )
        if not fragment:
            found = target
        elif fragment.startswith("/"):
            found = self._pointed(target, fragment, reference, place)
        else:
            anchored = self.anchors.get((target.base, fragment))
            if anchored is None:
                raise GrammarError(f"$ref {reference!r}: the schema has no such anchor", where=place.pointer)
            found = anchored
            if dynamic and (target.base, fragment) in self.dynamic:
                for resource in place.scope:
                    if (resource, fragment) in self.dynamic:
                        found = self.dynamic[(resource, fragment)]
                        break
        return self.enter(found, place)

    def enter(self, found: Place, origin: Place) -> Place:
        """``found`` with the scope of a reference from ``origin``."""
        if not self.dynamic:
            return found
        scope = origin.scope if found.base in origin.scope else (*origin.scope, found.base)
        return Place(found.schema, found.pointer, found.base, scope)

    def child(self, schema: Json, pointer: str, place: Place) -> Place:
        """The place of a subschema of the schema at ``place``."""
        base = self._base_of(schema, place.base)
        scope = place.scope
        if self.dynamic and base not in scope:
            scope = (*scope, base)
        return Place(schema, pointer, base, scope)

    def _pointed(self, target: Place, fragment: str, reference: str, place: Place) -> Place:
        at, base, pointer = target.schema, target.base, target.pointer
        for part in fragment[1:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            pointer = f"{pointer}/{escape(part)}"
            if isinstance(at, dict) and part in at:
                at = at[part]
            elif isinstance(at, list) and part.isdecimal() and int(part) < len(at):
                at = at[int(part)]
            else:
                raise GrammarError(f"$ref {reference!r}: there is nothing at {pointer}", where=place.pointer)
            base = self._base_of(at, base)
        if not isinstance(at, (dict, bool)):
            raise GrammarError(f"$ref {reference!r} does not lead to a schema", where=place.pointer)
        return Place(at, pointer, base)
