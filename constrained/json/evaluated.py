"""Which properties or items a schema's other keywords have evaluated, case by case: for ``unevaluated*``.

Never decides what the rest must satisfy.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..spec import GrammarTooComplex
from .formulas import TRUE

if TYPE_CHECKING:
    from .schema_reader import Reader

MAX_CASES = 256


@dataclass(frozen=True, slots=True)
class Known:
    """What is evaluated: names and patterns of an object; the first items and those that match, of an array."""

    everything: bool = False
    names: frozenset[str] = frozenset()
    patterns: frozenset[int] = frozenset()
    prefix: int = 0
    contains: tuple[int, ...] = ()

    def __or__(self, other: "Known") -> "Known":
        return Known(
            self.everything or other.everything,
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.prefix, other.prefix),
            tuple(dict.fromkeys(self.contains + other.contains)),
        )


NOTHING_KNOWN = Known()
Case = tuple[int, Known]  # a formula that holds in this case, and what is evaluated then


class Evaluated:
    def __init__(self, kind: str) -> None:
        self.is_object = kind == "object"

    def cases(self, reader: "Reader", *, skip: str = "") -> list[Case]:
        """The cases, which exclude each other and leave none out (given that the schema itself holds)."""
        schema = reader.schema
        formulas = reader.formulas
        found: list[Case] = [(TRUE, self._own(reader, skip))]
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in schema:
                found = self._join(formulas, found, self._cases_of(reader, reader.target(key)))
        if "$ref" in schema and reader.document.ref_stands_alone:
            return found
        for i, branch in enumerate(schema.get("allOf", ())):
            found = self._join(formulas, found, self._cases_of(reader, reader.sub(branch, "allOf", i)))
        for key in ("anyOf", "oneOf"):
            for i, branch in enumerate(schema.get(key, ())):
                found = self._join(formulas, found, self._if_true(reader, reader.sub(branch, key, i)))
        if "if" in schema:
            test = reader.sub(schema["if"], "if")
            then = self._cases_of(reader, test)
            if "then" in schema:
                then = self._join(formulas, then, self._cases_of(reader, reader.sub(schema["then"], "then")))
            other: list[Case] = [(TRUE, NOTHING_KNOWN)]
            if "else" in schema:
                other = self._cases_of(reader, reader.sub(schema["else"], "else"))
            if any(known != NOTHING_KNOWN for _, known in then + other):
                holds = reader.inside(test)
                fails = formulas.negation(holds)
                split = [(formulas.conjunction([holds, c]), k) for c, k in then]
                split += [(formulas.conjunction([fails, c]), k) for c, k in other]
                found = self._join(formulas, found, split)
        if self.is_object:
            for key in ("dependentSchemas", "dependencies"):
                for name, needs in schema.get(key, {}).items():
                    if isinstance(needs, list):
                        continue
                    has = reader.values.objects.properties.has(name)
                    inner = self._cases_of(reader, reader.sub(needs, key, name))
                    split = [(formulas.conjunction([has, c]), k) for c, k in inner]
                    found = self._join(formulas, found, [*split, (formulas.negation(has), NOTHING_KNOWN)])
        return found

    def _own(self, reader: "Reader", skip: str) -> Known:
        schema = reader.schema
        if self.is_object:
            everything = any(k in schema and k != skip for k in ("additionalProperties", "unevaluatedProperties"))
            patterns = [reader.schemas.pattern(p, reader.place.pointer) for p in schema.get("patternProperties", {})]
            return Known(everything, frozenset(schema.get("properties", {})), frozenset(patterns))
        items = schema.get("items")
        prefix = len(schema.get("prefixItems", ()))
        everything = "unevaluatedItems" in schema and skip != "unevaluatedItems"
        if isinstance(items, list):
            prefix = len(items)
            everything = everything or "additionalItems" in schema
        elif items is not None:
            everything = True
        contains = (reader.sub(schema["contains"], "contains"),) if "contains" in schema else ()
        return Known(everything, prefix=prefix, contains=contains)

    def _cases_of(self, reader: "Reader", formula: int) -> list[Case]:
        node = reader.formulas.nodes[formula]
        if node[0] != "leaf":
            return [(TRUE, NOTHING_KNOWN)]
        document, key, place = reader.schemas.nodes[node[1][1]]
        return self.cases(reader.of(document, key, place))

    def _if_true(self, reader: "Reader", formula: int) -> list[Case]:
        formulas = reader.formulas
        inner = self._cases_of(reader, formula)
        if all(known == NOTHING_KNOWN for _, known in inner):
            return [(TRUE, NOTHING_KNOWN)]
        holds = reader.inside(formula)
        split = [(formulas.conjunction([holds, condition]), known) for condition, known in inner]
        return [*split, (formulas.negation(holds), NOTHING_KNOWN)]

    @staticmethod
    def _join(formulas, left: list[Case], right: list[Case]) -> list[Case]:
        joined = [(formulas.conjunction([a, b]), j | k) for a, j in left for b, k in right]
        if len(joined) > MAX_CASES:
            raise GrammarTooComplex(
                f"what unevaluatedProperties or unevaluatedItems leave depends on more than {MAX_CASES} cases of the "
                "branches beside them; name the properties in one place, or use additionalProperties"
            )
        return joined
