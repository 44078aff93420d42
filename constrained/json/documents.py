"""A JSON Schema document: its subschemas, resources, anchors and references."""

import json
import re
from decimal import Decimal
from functools import cache
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import msgspec

from ..spec import GrammarError
from .standard import standard_document

Json = Any
MAX_MAGNITUDE = 400  # exponent of ten; a number is spelled out digit by digit
MAX_DEPTH = 200
RECURSIVE = ""  # the name under which a resource with ``$recursiveAnchor`` stands among the dynamic anchors
KNOWN_DIALECTS = r"https?://(json-schema\.org/(draft[-/][0-9-]+/(hyper-)?)?schema|spec\.openapis\.org/oas/)"

ONE, LIST, MAP = "a schema", "a list", "an object"  # what holds the schemas under a keyword
HOLDERS = {
    **dict.fromkeys((
        "not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "additionalItems", "items",
        "unevaluatedProperties", "unevaluatedItems"), ONE),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), LIST),
    **dict.fromkeys(
        ("properties", "patternProperties", "definitions", "$defs", "dependentSchemas", "dependencies"), MAP),
}  # fmt: skip
NAMING = frozenset(("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"))


class Dialect(msgspec.Struct, frozen=True):
    """What ``$schema`` says about the schemas of a resource.

    ``ref_stands_alone``: ``$ref`` makes the keywords beside it mean nothing. ``is_draft4``: ``id`` names a resource,
    and an integer has no point.
    """

    uri: str
    ref_stands_alone: bool = False
    is_draft4: bool = False
    is_known: bool = True


@cache
def dialect_of(uri: str) -> Dialect:
    """The dialect that a ``$schema`` names."""
    return Dialect(
        uri,
        ref_stands_alone=any(f"draft-0{n}" in uri for n in "34567"),
        is_draft4="draft-04" in uri or "draft-03" in uri,
        is_known=not uri or re.match(KNOWN_DIALECTS, uri) is not None,
    )


class Place(msgspec.Struct, frozen=True, eq=False):
    """A schema inside a document, told from others by ``key``. Thousands are made: a struct costs least.

    ``scope``: the resources entered on the way whose dynamic anchors no resource before them has.
    """

    schema: Json
    pointer: str
    base: str
    scope: tuple[str, ...] = ()
    dialect: Dialect = Dialect("")

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        return self.pointer, self.base, self.scope


def _number(text: str) -> Decimal:
    found = Decimal(text)
    if abs(found.adjusted()) > MAX_MAGNITUDE:
        raise GrammarError(
            f"the number {text[:40]} is out of range: numbers go from 1e-{MAX_MAGNITUDE} to 1e{MAX_MAGNITUDE}"
        )
    return found


def _constant(name: str) -> None:
    raise GrammarError(f"{name} is not JSON")


_READER = json.JSONDecoder(parse_float=_number, parse_constant=_constant)


def read_json(text: str) -> Json:
    """Parse JSON; numbers with a point or exponent become exact decimals. Raises GrammarError."""
    try:
        return _READER.decode(text)
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
    return part.replace("~", "~0").replace("/", "~1") if "~" in part or "/" in part else part


class Document:
    """The subschemas of a document by URI. Raises GrammarError for a part that is not a schema.

    References to documents of the standard add these to it.
    """

    def __init__(self, root: Json, *, keeps_unique_items: bool = True) -> None:
        """Without ``keeps_unique_items`` that keyword is not enforced."""
        self.root = root
        self.keeps_unique_items = keeps_unique_items
        self.resources: dict[str, Place] = {}
        self.anchors: dict[tuple[str, str], Place] = {}
        self.dynamic: dict[tuple[str, str], Place] = {}
        self.dynamic_names: dict[str, set[str]] = {}  # by resource
        self.places: list[Place] = []
        self._resolved: dict[tuple[str, str, tuple[str, ...], bool], Place] = {}
        self.root_place = self._index_root(Place(root, "#", ""))
        self.resources.setdefault("", self.root_place)

    def _index_root(self, root: Place) -> Place:
        """Index a whole document. Its root, with its own URI, dialect and scope."""
        uri = root.schema.get("$schema") if isinstance(root.schema, dict) else None
        if isinstance(uri, str):
            root = msgspec.structs.replace(root, dialect=dialect_of(uri))
        self._index(root, 0)
        return self._entered(_own(root), ())

    def _index(self, place: Place, depth: int) -> None:
        schema, pointer = place.schema, place.pointer
        if not isinstance(schema, dict):
            if not isinstance(schema, bool):
                shown = json.dumps(schema, default=str)[:40]
                raise GrammarError(f"a schema must be an object, true or false, not {shown}", where=pointer)
            return
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema nests deeper than {MAX_DEPTH}", where=pointer)
        if not NAMING.isdisjoint(schema):
            place = self._named(place, is_root=depth == 0)
        self.places.append(place)
        if HOLDERS.keys().isdisjoint(schema):
            return
        for key, value in schema.items():
            holder = HOLDERS.get(key)
            if holder is None:
                continue
            if holder == MAP:
                if not isinstance(value, dict):
                    raise GrammarError(f"{key} must be an object", where=pointer)
                for name, inner in value.items():
                    if key != "dependencies" or not isinstance(inner, list):
                        self._index(_below(place, inner, f"{key}/{escape(name)}"), depth + 1)
            elif holder == LIST or (key == "items" and isinstance(value, list)):
                if not isinstance(value, list):
                    raise GrammarError(f"{key} must be a list", where=pointer)
                for i, inner in enumerate(value):
                    self._index(_below(place, inner, f"{key}/{i}"), depth + 1)
            else:
                self._index(_below(place, value, key), depth + 1)

    def _named(self, place: Place, *, is_root: bool) -> Place:
        """The place with its own URI and dialect, entered by its names."""
        schema, outer = place.schema, place.base
        place = _own(place)
        base = place.base
        found = _id(schema, place.dialect)
        if found is not None:
            if base != outer or is_root:
                self.resources.setdefault(base, place)
            fragment = urldefrag(found).fragment if "#" in found else ""
            if fragment:
                self.anchors.setdefault((base, fragment), place)
        name = schema.get("$anchor")
        if isinstance(name, str):
            self.anchors.setdefault((base, name), place)
        name = schema.get("$dynamicAnchor")
        if isinstance(name, str):
            self.anchors.setdefault((base, name), place)
            self._add_dynamic(base, name, place)
        if schema.get("$recursiveAnchor") is True and (base != outer or is_root):
            self._add_dynamic(base, RECURSIVE, place)
        return place

    def _add_dynamic(self, base: str, name: str, place: Place) -> None:
        if (base, name) not in self.dynamic:
            self.dynamic[base, name] = place
            self.dynamic_names.setdefault(base, set()).add(name)

    def resolve(self, place: Place, key: str) -> Place:
        """The schema that the reference under ``key`` of the schema at ``place`` leads to.

        Raises GrammarError if it leads to a document that is not of the standard.
        """
        reference = place.schema[key]
        known = (reference, place.base, place.scope, key != "$ref")
        found = self._resolved.get(known)
        if found is None:
            found = self._resolved[known] = self._entered(self._resolve(reference, place, key), place.scope)
        return found

    def _resolve(self, reference: str, place: Place, key: str) -> Place:
        url, fragment = _joined(place.base, reference)
        fragment = unquote(fragment)
        target = self._resource(url)
        if target is None:
            raise GrammarError(
                f"$ref {reference!r} leads outside the schema; only references within it, and to the meta-schemas of "
                "JSON Schema's drafts 4 to 2020-12, are followed",
                where=place.pointer,
            )
        if not fragment:
            return self._outermost(target, RECURSIVE, place) if key == "$recursiveRef" else target
        if fragment.startswith("/"):
            return self._pointed(target, fragment, reference, place)
        anchored = self.anchors.get((target.base, fragment))
        if anchored is None:
            raise GrammarError(f"$ref {reference!r}: the schema has no such anchor", where=place.pointer)
        return self._outermost(anchored, fragment, place) if key == "$dynamicRef" else anchored

    def _resource(self, url: str) -> Place | None:
        found = self.resources.get(url)
        if found is None:
            root = standard_document(url)
            if root is not None:
                found = self._index_root(Place(root, f"{url}#", url))
                self.resources.setdefault(url, found)
        return found

    def _outermost(self, found: Place, name: str, place: Place) -> Place:
        """``found``, or if that is a dynamic anchor, the outermost one of its name in the scope of ``place``."""
        if (found.base, name) not in self.dynamic:
            return found
        return next((self.dynamic[base, name] for base in place.scope if (base, name) in self.dynamic), found)

    def _entered(self, place: Place, scope: tuple[str, ...]) -> Place:
        """The place, entered from a schema with this scope."""
        names = self.dynamic_names.get(place.base)
        if names is not None and not all(any((base, name) in self.dynamic for base in scope) for name in names):
            scope = (*scope, place.base)
        return msgspec.structs.replace(place, scope=scope) if scope != place.scope else place

    def child(self, schema: Json, path: str, place: Place) -> Place:
        """The place of a subschema of the schema at ``place``; ``path`` leads from one to the other."""
        below = _own(_below(place, schema, path))
        return self._entered(below, place.scope) if self.dynamic_names else below

    def _pointed(self, target: Place, fragment: str, reference: str, place: Place) -> Place:
        found, at = target, target.schema
        for part in fragment[1:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and part in at:
                at = at[part]
            elif isinstance(at, list) and part.isdecimal() and int(part) < len(at):
                at = at[int(part)]
            else:
                there = f"{found.pointer}/{escape(part)}"
                raise GrammarError(f"$ref {reference!r}: there is nothing at {there}", where=place.pointer)
            found = _own(_below(found, at, escape(part)))
        if not isinstance(at, (dict, bool)):
            raise GrammarError(f"$ref {reference!r} does not lead to a schema", where=place.pointer)
        return found


def _own(place: Place) -> Place:
    """A subschema's place as the schema around it gives it, with its own URI and dialect if it is a resource."""
    schema = place.schema
    if not isinstance(schema, dict) or ("$id" not in schema and "id" not in schema):
        return place
    dialect = place.dialect
    if isinstance(schema.get("$schema"), str):
        dialect = dialect_of(schema["$schema"])
    found = _id(schema, dialect)
    if found is None or (dialect.ref_stands_alone and "$ref" in schema):
        return place
    return Place(schema, place.pointer, _joined(place.base, found)[0], place.scope, dialect)


def _joined(base: str, reference: str) -> tuple[str, str]:
    """The URI and the fragment that a reference leads to. ``urljoin`` joins nothing to a ``urn:``."""
    if reference.startswith("#"):
        return base, reference[1:]
    if not base and "#" not in reference:
        return reference, ""
    url, fragment = urldefrag(urljoin(base, reference))
    return url, fragment


def _id(schema: Json, dialect: Dialect) -> str | None:
    found = schema.get("id" if dialect.is_draft4 else "$id") if isinstance(schema, dict) else None
    return found if isinstance(found, str) else None


def _below(place: Place, schema: Json, path: str) -> Place:
    return Place(schema, f"{place.pointer}/{path}", place.base, place.scope, place.dialect)
