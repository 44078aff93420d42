"""Reorder the properties of JSON values, to find out whether a grammar refuses a value only because of their order."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from phloem.constrained import Vocabulary, compile
from phloem.constrained.machine import Machine

REFUSED = -1
MAX_TRIED = 20_000  # properties that the search may write
IN_PLACE = ("allOf", "anyOf", "oneOf")


def is_order_alone(vocabulary: Vocabulary, schema: str, text: str, options: dict[str, str]) -> bool:
    """Whether the grammar of a schema accepts the value of a JSON text in some order of its properties."""
    grammar = compile("json_schema", schema, vocabulary, **options)
    value = json.loads(text)
    config, found = Reordering(grammar.machine, json.loads(schema)).write(grammar.start, value)
    return config != REFUSED and grammar.machine.may_end(config) and json.loads(found) == value


class Reordering:
    """Texts of values on one machine, spelled as ``json.dumps`` does with ``ensure_ascii`` off.

    Properties are tried in the order in which the subschemas that may apply have them; the machine decides.
    """

    def __init__(self, machine: Machine, schema: Any) -> None:
        self.machine = machine
        self.root = schema
        self._num_tried = 0

    def write(self, config: int, value: Any, schemas: Iterable[Any] | None = None) -> tuple[int, str]:
        """The configuration after the value, and the value's text; ``REFUSED`` if no order is accepted."""
        applied = list(self._applied([self.root] if schemas is None else schemas))
        if isinstance(value, dict) and value:
            names = [name for schema in applied for name in schema.get("properties", ())]
            rank = {name: i for i, name in reversed(list(enumerate(names)))}
            left = tuple(sorted(value, key=lambda name: rank.get(name, len(names))))
            return self._write_properties(config, "{", left, value, applied)
        if isinstance(value, list) and value:
            out = ""
            for i, item in enumerate(value):
                begin = ", " if i else "["
                config, text = self._write_after(config, begin, item, [*_items(applied, i)])
                out += text
            return self._advance(config, "]"), out + "]"
        text = json.dumps(value, ensure_ascii=False)
        return self._advance(config, text), text

    def _write_properties(
        self, config: int, begin: str, left: tuple[str, ...], value: dict[str, Any], applied: list[Any]
    ) -> tuple[int, str]:
        if not left:
            return self._advance(config, "}"), "}"
        for name in left:
            self._num_tried += 1
            if self._num_tried > MAX_TRIED:
                break
            key = f"{begin}{json.dumps(name, ensure_ascii=False)}: "
            after, text = self._write_after(config, key, value[name], [*_values(applied, name)])
            if after != REFUSED:
                rest = tuple(other for other in left if other != name)
                after, following = self._write_properties(after, ", ", rest, value, applied)
                if after != REFUSED:
                    return after, text + following
        return REFUSED, ""

    def _write_after(self, config: int, begin: str, value: Any, schemas: list[Any]) -> tuple[int, str]:
        config = self._advance(config, begin)
        if config == REFUSED:
            return REFUSED, ""
        config, text = self.write(config, value, schemas)
        return config, begin + text

    def _advance(self, config: int, text: str) -> int:
        return self.machine.advance_bytes(config, text.encode()) if config != REFUSED else REFUSED

    def _applied(self, schemas: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """The schemas, and the subschemas that they apply to the same value, each once."""
        todo, seen = [*schemas], set()
        for schema in todo:
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            inner = [self._pointed(schema["$ref"])] if "$ref" in schema else []
            inner += [part for key in IN_PLACE for part in schema.get(key, ())]
            inner += [schema[key] for key in ("if", "then", "else") if key in schema]
            todo += inner

    def _pointed(self, reference: str) -> Any:
        at = self.root
        for part in reference.removeprefix("#").split("/")[1:]:
            at = at.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(at, dict) else {}
        return at


def _values(applied: list[Any], name: str) -> Iterator[Any]:
    """The schemas that may apply to a property's value."""
    for schema in applied:
        if name in schema.get("properties", {}):
            yield schema["properties"][name]
        yield from schema.get("patternProperties", {}).values()
        yield schema.get("additionalProperties")


def _items(applied: list[Any], at: int) -> Iterator[Any]:
    """The schemas that may apply to an item."""
    for schema in applied:
        items, prefix = schema.get("items"), schema.get("prefixItems", ())
        yield from items[at : at + 1] if isinstance(items, list) else [items]
        yield from prefix[at : at + 1]
        yield schema.get("additionalItems")
