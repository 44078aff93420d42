"""One schema for values of one kind, keyword by keyword, as a formula of leaves."""

from dataclasses import dataclass
from decimal import Decimal

from ..code_points import ANY
from ..machine import key_of, known_value
from ..spec import GrammarTooComplex
from .documents import Json, escape
from .formats import FORMATS
from .formulas import FALSE, TRUE
from .inner_values import KINDS, Kind, Scalar
from .keywords import is_number, number_bounds
from .values import Values

MAX_CASES = 256
_SCALAR_KINDS = frozenset(KINDS) - {"array", "object"}


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What other keywords have evaluated: names and patterns of an object; of an array the first ``prefix`` items and
    those that satisfy a formula of ``contains``."""

    everything: bool = False
    names: frozenset[str] = frozenset()
    patterns: frozenset[int] = frozenset()
    prefix: int = 0
    contains: tuple[int, ...] = ()

    def __or__(self, other: "Evaluated") -> "Evaluated":
        return Evaluated(
            self.everything or other.everything,
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.prefix, other.prefix),
            tuple(dict.fromkeys(self.contains + other.contains)),
        )


NOTHING_EVALUATED = Evaluated()
Case = tuple[int, Evaluated]  # a formula that holds in this case, and what is evaluated then


class SchemaReader:
    """One schema, by its number, read for one kind of value."""

    def __init__(self, values: Values, schema: int, kind: Kind) -> None:
        self.values = values
        self.schemas = values.schemas
        self.formulas = values.formulas
        self.number = schema
        self.document, self.key, self.place = self.schemas.nodes[schema]
        self.schema = self.place.schema
        self.kind = kind

    def sub(self, schema: Json, key: str, part: str | int | None = None) -> int:
        """The formula of a subschema: the one under a keyword, or a part of a list or map there."""
        path = key if part is None else f"{key}/{escape(part) if isinstance(part, str) else part}"
        return self.schemas.node(self.document, self.key, self.document.child(schema, path, self.place))

    def optional(self, key: str) -> int:
        """The formula of the subschema under a keyword; TRUE if there is none."""
        return self.sub(self.schema[key], key) if key in self.schema else TRUE

    def inside(self, formula: int) -> int:
        """A formula over schemas as one over leaves."""
        return self.values.expand(formula, self.kind)

    def read(self) -> int:
        """The formula of leaves that the values satisfy."""
        schema = self.schema
        if "$ref" in schema and self.place.dialect.ref_stands_alone:
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
        if "allOf" in schema:
            parts += [self.inside(b) for b in self.branches("allOf")]
        if "anyOf" in schema:
            parts.append(self.formulas.disjunction([self.inside(b) for b in self.branches("anyOf")]))
        if "oneOf" in schema:
            parts.append(self._one_of())
        if "not" in schema:
            parts.append(self.formulas.negation(self.inside(self.sub(schema["not"], "not"))))
        if "if" in schema and ("then" in schema or "else" in schema):
            test = self.inside(self.sub(schema["if"], "if"))
            then, other = self.inside(self.optional("then")), self.inside(self.optional("else"))
            parts.append(self._if_then_else(test, then, other))
        if self.kind == "object" and "unevaluatedProperties" in schema:
            parts.append(self._unevaluated("unevaluatedProperties"))
        if self.kind == "array" and "unevaluatedItems" in schema:
            parts.append(self._unevaluated("unevaluatedItems"))
        return self.formulas.conjunction(parts)

    def _if_then_else(self, test: int, then: int, other: int) -> int:
        f = self.formulas
        fails = f.negation(test)
        if other == TRUE:
            return f.disjunction([fails, then])
        if then == TRUE:
            return f.disjunction([test, other])
        # the third part is implied; it holds where the answer to the test is not known yet
        return f.disjunction([f.conjunction([test, then]), f.conjunction([fails, other]), f.conjunction([then, other])])

    def target(self, key: str) -> int:
        """The formula of the schema that the reference under ``key`` leads to."""
        place = self.schemas.target(self.document, self.place, key)
        return self.schemas.node(self.document, self.key, place)

    def branches(self, key: str) -> list[int]:
        """The formulas of the subschemas in the list under a keyword; they are the same for every kind of value."""
        known = self.schemas.branches
        found = known.get((self.number, key))
        if found is None:
            found = known[self.number, key] = [self.sub(branch, key, i) for i, branch in enumerate(self.schema[key])]
        return found

    def _one_of(self) -> int:
        """Exactly one branch; negations are left out where no value satisfies two branches."""
        parts = [self.inside(b) for b in self.branches("oneOf")]
        live = [p for p in parts if p != FALSE]
        if len(live) <= 1 or self._are_disjoint(live):
            return self.formulas.disjunction(live)
        return self.formulas.exactly_one(live)

    def _are_disjoint(self, parts: list[int]) -> bool:
        """Whether all formulas require one property, with different constants: then no value satisfies two of them."""
        if self.kind != "object":
            return False
        tags: list[dict[str, frozenset[Scalar]]] = []
        for part in parts:
            leaves = self.formulas.positive_clause(part)
            if leaves is None:
                return False
            data = [self.formulas.nodes[p][1] for p in leaves]
            needed = {leaf[1] for leaf in data if leaf[0] == "has"}
            found: dict[str, frozenset[Scalar]] = {}
            for leaf in data:
                if leaf[0] == "props":
                    rule = self.values.objects.properties.rules[leaf[1]]
                    for name in needed & set(rule.by_name):
                        constants = self._constants(rule.by_name[name])
                        if constants is not None:
                            found[name] = constants
            tags.append(found)
        for name in tags[0]:
            sets = [tag[name] for tag in tags if name in tag]
            if len(sets) == len(tags) and len(frozenset().union(*sets)) == sum(map(len, sets)):
                return True
        return False

    def _constants(self, formula: int) -> frozenset[Scalar] | None:
        """The values that the formula lists; None if it lets others pass, or arrays or objects, which may hold what is
        being read."""
        if not _SCALAR_KINDS.issuperset(self.values.kinds_of(formula)):
            return None
        listed = self.values.listed(formula)
        return None if listed is None else frozenset(listed)

    def _equals_any(self, options: list[Json]) -> int:
        kind, formulas = self.kind, self.formulas
        match kind:
            case "null":
                return TRUE if any(v is None for v in options) else FALSE
            case "true" | "false":
                return TRUE if any(v is (kind == "true") for v in options) else FALSE
            case "string":
                words = [w for v in options if isinstance(v, str) and (w := _encoded(v)) is not None]
                return formulas.leaf("string", self.schemas.ex.one_of(words)) if words else FALSE
            case "number":
                values = [Decimal(v) for v in options if is_number(v)]
                return formulas.leaf("number", self.values.numbers.equal_to_any(values)) if values else FALSE
            case "array":
                lists = [v for v in options if isinstance(v, list) and (not self._is_unique() or _are_different(v))]
                return formulas.disjunction(list(map(self._this_array, lists)))
        return formulas.disjunction([self._this_object(v) for v in options if isinstance(v, dict)])

    def _this_array(self, items: list[Json]) -> int:
        arrays, constants = self.values.arrays, tuple(map(self.schemas.constant, items))
        parts = [arrays.items(constants, FALSE), arrays.at_least(len(items)), arrays.at_most(len(items))]
        return self.formulas.conjunction(parts)

    def _this_object(self, members: dict[str, Json]) -> int:
        properties = self.values.objects.properties
        rule = properties.rule({k: self.schemas.constant(v) for k, v in members.items()}, (), FALSE)
        return self.formulas.conjunction([rule, *map(properties.has, members)])

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
        low, high = number_bounds(schema)
        parts = [numbers.pointless_integer] if integer and self.place.dialect.is_draft4 else []
        if "multipleOf" in schema:
            parts.append(numbers.multiple_of(Decimal(schema["multipleOf"]), integer=integer))
        if low is not None or high is not None:
            parts.append(numbers.between(low, high, integer=integer))
        if not parts:
            return self.formulas.leaf("number", numbers.integer) if integer else TRUE
        return self.formulas.leaf("number", numbers.intersect(*parts))

    def _array(self) -> list[int]:
        schema, arrays = self.schema, self.values.arrays
        parts = []
        prefix, rest = self._item_schemas()
        if prefix or rest != TRUE:
            parts.append(arrays.items(prefix, rest))
        parts.append(arrays.at_least(int(schema.get("minItems", 0))))
        if "maxItems" in schema:
            parts.append(arrays.at_most(int(schema["maxItems"])))
        if self._is_unique() and schema.get("maxItems", 2) > 1 and schema.keys().isdisjoint(("const", "enum")):
            parts.append(arrays.unique())
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

    def _is_unique(self) -> bool:
        return self.schema.get("uniqueItems") is True and self.document.keeps_unique_items

    def _item_schemas(self) -> tuple[tuple[int, ...], int]:
        schema = self.schema
        if isinstance(schema.get("items"), list):
            prefix = tuple(self.sub(s, "items", i) for i, s in enumerate(schema["items"]))
            return prefix, self.optional("additionalItems")
        prefix = tuple(self.sub(s, "prefixItems", i) for i, s in enumerate(schema.get("prefixItems", ())))
        return prefix, self.optional("items")

    def _object(self) -> list[int]:
        schema, properties, formulas = self.schema, self.values.objects.properties, self.formulas
        parts = []
        if "properties" in schema or "patternProperties" in schema or "additionalProperties" in schema:
            names = {k: self.sub(v, "properties", k) for k, v in schema.get("properties", {}).items()}
            parts.append(properties.rule(names, self._patterns(), self.optional("additionalProperties")))
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

    def _patterns(self) -> list[tuple[int, int]]:
        """``patternProperties``: languages of names, each with the schema of their values; no schema comes twice."""
        found: dict[int, list[int]] = {}
        for pattern, schema in self.schema.get("patternProperties", {}).items():
            value = self.sub(schema, "patternProperties", pattern)
            found.setdefault(value, []).append(self.schemas.pattern(pattern, self.place.pointer))
        return [(self.schemas.ex.union(*patterns), value) for value, patterns in found.items()]

    # -- unevaluated ----------------------------------------------------------------------------------------------

    def _unevaluated(self, key: str) -> int:
        rest = self.sub(self.schema[key], key)
        parts = []
        for condition, evaluated in self._cases(skip=key):
            if evaluated.everything:
                parts.append(condition)
                continue
            if self.kind == "object":
                leaf = self.values.objects.properties.rule(
                    dict.fromkeys(sorted(evaluated.names), TRUE), [(p, TRUE) for p in sorted(evaluated.patterns)], rest
                )
            else:
                each = self.formulas.disjunction([rest, *evaluated.contains])
                leaf = self.values.arrays.items((TRUE,) * evaluated.prefix, each)
            parts.append(self.formulas.conjunction([condition, leaf]))
        return self.formulas.disjunction(parts)

    def _cases(self, *, skip: str = "") -> list[Case]:
        """What the keywords but ``skip`` evaluate, case by case.

        Each value that satisfies the schema is in exactly one case.
        """
        schema, formulas = self.schema, self.formulas
        found: list[Case] = [(TRUE, self._evaluated_here(skip))]
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in schema:
                found = self._join(found, self._cases_of(self.target(key)))
        if "$ref" in schema and self.place.dialect.ref_stands_alone:
            return found
        for i, branch in enumerate(schema.get("allOf", ())):
            found = self._join(found, self._cases_of(self.sub(branch, "allOf", i)))
        for key in ("anyOf", "oneOf"):
            for i, branch in enumerate(schema.get(key, ())):
                found = self._join(found, self._cases_if_true(self.sub(branch, key, i)))
        if "if" in schema:
            test = self.sub(schema["if"], "if")
            then = self._cases_of(test)
            if "then" in schema:
                then = self._join(then, self._cases_of(self.sub(schema["then"], "then")))
            other: list[Case] = [(TRUE, NOTHING_EVALUATED)]
            if "else" in schema:
                other = self._cases_of(self.sub(schema["else"], "else"))
            if any(evaluated != NOTHING_EVALUATED for _, evaluated in then + other):
                holds = self.inside(test)
                fails = formulas.negation(holds)
                split = [(formulas.conjunction([holds, c]), k) for c, k in then]
                split += [(formulas.conjunction([fails, c]), k) for c, k in other]
                found = self._join(found, split)
        if self.kind == "object":
            for key in ("dependentSchemas", "dependencies"):
                for name, needs in schema.get(key, {}).items():
                    if isinstance(needs, list):
                        continue
                    has = self.values.objects.properties.has(name)
                    inner = self._cases_of(self.sub(needs, key, name))
                    split = [(formulas.conjunction([has, c]), k) for c, k in inner]
                    found = self._join(found, [*split, (formulas.negation(has), NOTHING_EVALUATED)])
        return found

    def _evaluated_here(self, skip: str) -> Evaluated:
        """What the schema's own keywords on items and properties evaluate."""
        schema = self.schema
        if self.kind == "object":
            everything = any(k in schema and k != skip for k in ("additionalProperties", "unevaluatedProperties"))
            patterns = frozenset(pattern for pattern, _ in self._patterns())
            return Evaluated(everything, frozenset(schema.get("properties", {})), patterns)
        items = schema.get("items")
        prefix = len(schema.get("prefixItems", ()))
        everything = "unevaluatedItems" in schema and skip != "unevaluatedItems"
        if isinstance(items, list):
            prefix = len(items)
            everything = everything or "additionalItems" in schema
        elif items is not None:
            everything = True
        contains = (self.sub(schema["contains"], "contains"),) if "contains" in schema else ()
        return Evaluated(everything, prefix=prefix, contains=contains)

    def _cases_of(self, formula: int) -> list[Case]:
        """The cases of another schema, given as its formula."""
        node = self.formulas.nodes[formula]
        if node[0] != "leaf":
            return [(TRUE, NOTHING_EVALUATED)]
        return SchemaReader(self.values, node[1][1], self.kind)._cases()

    def _cases_if_true(self, formula: int) -> list[Case]:
        """The cases of a schema that need not hold."""
        formulas = self.formulas
        inner = self._cases_of(formula)
        if all(evaluated == NOTHING_EVALUATED for _, evaluated in inner):
            return [(TRUE, NOTHING_EVALUATED)]
        holds = self.inside(formula)
        split = [(formulas.conjunction([holds, condition]), evaluated) for condition, evaluated in inner]
        return [*split, (formulas.negation(holds), NOTHING_EVALUATED)]

    def _join(self, left: list[Case], right: list[Case]) -> list[Case]:
        joined = [(self.formulas.conjunction([a, b]), j | k) for a, j in left for b, k in right]
        if len(joined) > MAX_CASES:
            raise GrammarTooComplex(
                f"unevaluatedProperties or unevaluatedItems depends on more than {MAX_CASES} cases of the branches "
                "beside it; name the properties in one place, or use additionalProperties"
            )
        return joined


def _are_different(items: list[Json]) -> bool:
    return len({key_of(known_value(item)) for item in items}) == len(items)


def _encoded(text: str) -> bytes | None:
    """The string in UTF-8; None if it has a surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None
