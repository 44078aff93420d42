"""JSON Schema 2020-12, with the spellings of draft 4 to 2019-09: a document's text to the formula of its root."""

import hashlib
import re
from contextlib import suppress
from decimal import Decimal

from ..machine import Machine
from ..spec import GrammarError, GrammarTooComplex
from .documents import Document, Json, Place, escape, read_json
from .formats import FORMATS
from .formulas import FALSE, TRUE, Formulas
from .inner_values import Kind
from .keywords import BOUNDS, CHECKED, KINDS_OF_TYPE, check_keyword, is_plain_type, number_bounds
from .scalars import Scalars
from .schema_nodes import SchemaNodes
from .schema_reader import SchemaReader
from .values import Values

OF_NO_VALUE = ("has", "names", "minp", "maxp")  # leaves that ask nothing of the values of properties
BRANCHING = frozenset(("allOf", "anyOf", "oneOf", "not", "if"))
# Keywords that make strings hard to follow.
COMBINED = BRANCHING | {"pattern"}
HARD = COMBINED | {"format", "patternProperties"}
MANY_BRANCHES = 8
PREPARED_VALUES = 5  # of those with branches, whose first rows are made when a document is compiled
BRANCH_WORK = 20_000  # fuel, for the rows of the others
BRANCH = re.compile(r".*/((allOf|anyOf|oneOf)/\d+|not|if|then|else)")  # places whose schemas say only part of a value
# Places of values below the root that are not in definitions.
REACHED = re.compile(r"#(/properties/[^/]+|/items|/items/\d+|/prefixItems/\d+|/additionalProperties)+")
UNENFORCED = (
    "uniqueItems where an array may have to repeat an item (under not, if, contains or an overlapping branch of "
    "oneOf), beside contains, prefixItems or several schemas of the items"
)


class Schemas:
    """The schemas compiled on one machine in one style."""

    def __init__(
        self,
        machine: Machine,
        scalars: Scalars,
        *,
        white_space: str,
        any_order: bool,
        canonical: bool,
        enforce_formats: bool,
    ) -> None:
        self.formulas = Formulas(fuel=machine.fuel)
        self._nodes = SchemaNodes(self.formulas, machine.expressions, enforce_formats=enforce_formats)
        self.values = Values(
            machine,
            scalars,
            self._nodes,
            self._read,
            white_space=white_space,
            any_order=any_order,
            canonical=canonical,
        )
        self._reading: set[tuple[int, Kind]] = set()

    def compile(self, text: str, *, check_after: bool) -> tuple[int, list[str], list[int]]:
        """The formula of the root, the parts of the schema that it does not enforce, and the row codes of the opening
        quotes of strings and names that many states may follow.

        Raises GrammarError for those parts unless ``check_after``.
        """
        document = Document(read_json(text))
        lock = self.values.machine.lock  # held for one schema at a time, so that matchers make masks in between
        for place in document.places:
            if not is_plain_type(place.schema):
                with lock:
                    self._check(document, place)
        key = hashlib.sha256(text.encode()).hexdigest()
        unsupported: list[tuple[str, str]] = []  # what, where
        dialects = {place.dialect: place for place in [*document.resources.values(), document.root_place]}
        for dialect, place in dialects.items():
            if not dialect.is_known:
                unsupported.append((f"the dialect $schema {dialect.uri!r}", f"{place.pointer}/$schema"))
        with lock:
            root = self._nodes.node(document, key, document.root_place)
            if any("uniqueItems" in place.schema for place in document.places):
                unenforced = _unenforced_unique_items(self.values, root)
                unsupported += [(UNENFORCED, where) for where in unenforced]
                if unenforced and check_after:
                    document, key = Document(document.root, keeps_unique_items=False), f"{key} without uniqueItems"
                    root = self._nodes.node(document, key, document.root_place)
            if unsupported and not check_after:
                what, where = unsupported[0]
                way_out = 'on_unsupported="check_after" lets it pass unchecked'
                raise GrammarError(f"unsupported: {what}; {way_out}", where=where)
            if not self.values.satisfiable(root):
                raise GrammarError("no value satisfies the schema", where="#")
        self._prepare_branches(document, key, max(BRANCH_WORK, len(text)))
        return root, [f"{what} at {where}" for what, where in unsupported], self._hard_texts(document, key)

    def _prepare_branches(self, document: Document, key: str, most_work: int) -> None:
        """Make the first rows of values with many branches, and find which others have values at all: that takes
        milliseconds for some, and no mask then waits for it.

        Rows are made of the first values with any branches that a text surely may have; GrammarTooComplex is raised for
        these. What is wrong with the others is told by the mask that needs them: perhaps none does. They together take
        ``most_work`` fuel.
        """
        values, most = self.values, PREPARED_VALUES
        fuel = values.machine.fuel
        seen: set[int] = set()
        for place in document.places:
            if BRANCHING.isdisjoint(place.schema) and "$ref" not in place.schema:
                continue
            if BRANCH.fullmatch(place.pointer):
                continue
            with values.machine.lock:
                formula = self._nodes.node(document, key, place)
                schema = self._nodes.schema_of(formula)
                if formula in seen or BRANCHING.isdisjoint(schema):
                    continue
                seen.add(formula)
                if most > 0 and REACHED.fullmatch(place.pointer):
                    most -= 1
                    values.prepare(formula)
                elif most_work > 0:
                    before = fuel.spent
                    with suppress(GrammarError, RecursionError), fuel.at_most(most_work):
                        if _num_branches(schema) < MANY_BRANCHES:
                            values.satisfiable(formula)
                        else:
                            values.prepare(formula)
                    most_work -= fuel.spent - before

    def _hard_texts(self, document: Document, key: str) -> list[int]:
        """See ``compile``."""
        found: dict[int, None] = {}
        seen: set[int] = set()
        for place in document.places:
            if HARD.isdisjoint(place.schema):
                continue
            is_named = len(place.schema.get("patternProperties", ())) > 1
            is_text = not place.schema.keys().isdisjoint(COMBINED) and not place.pointer.endswith("/propertyNames")
            name = place.schema.get("format")
            has_format = self._nodes.enforce_formats and isinstance(name, str) and name in FORMATS
            if not is_named and not is_text and not has_format:
                continue
            with self.values.machine.lock:
                formula = self._nodes.node(document, key, place)
                if formula not in seen and formula > TRUE and (is_text or has_format):
                    seen.add(formula)
                    found[self.values.hard_string(formula)] = None
                if formula > TRUE and is_named:
                    found[self.values.first_name(formula)] = None
        return [code for code in found if code > 0]

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check(self, document: Document, place: Place) -> None:
        """Raise GrammarError if a keyword of one schema is malformed, or its value cannot be enforced."""
        schema, where = place.schema, place.pointer
        if "$ref" in schema and place.dialect.ref_stands_alone:
            check_keyword("$ref", schema["$ref"], f"{where}/$ref")
            self._nodes.target(document, place, "$ref")
            return
        for key, value in schema.items():
            if key not in CHECKED or (key == "type" and isinstance(value, str) and value in KINDS_OF_TYPE):
                continue
            at = f"{where}/{key}"
            check_keyword(key, value, at)
            match key:
                case "pattern":
                    self._nodes.pattern(value, at)
                case "patternProperties":
                    for pattern in value:
                        self._nodes.pattern(pattern, f"{at}/{escape(pattern)}")
                case "multipleOf":
                    self.values.numbers.multiple_of(Decimal(value), where=at)
                case "$ref" | "$dynamicRef" | "$recursiveRef":
                    self._nodes.target(document, place, key)
                case "format":
                    if self._nodes.enforce_formats and value in FORMATS:
                        self._nodes.format(value)
        if not BOUNDS.isdisjoint(schema):
            self.values.numbers.between(*number_bounds(schema), where=where)

    def _read(self, schema: int, kind: Kind) -> int:
        """The formula of leaves that a schema, by its number, means for values of one kind."""
        if kind not in self._nodes.kinds[schema]:
            return FALSE
        place = self._nodes.nodes[schema][2]
        key = (schema, kind)
        if key in self._reading:
            raise GrammarError("the schema refers to itself without end", where=place.pointer)
        self._reading.add(key)
        try:
            return SchemaReader(self.values, schema, kind).read()
        except RecursionError:
            raise GrammarTooComplex("the schema's references nest too deep") from None
        except GrammarTooComplex as error:
            raise error.at(place.pointer) from None
        finally:
            self._reading.discard(key)


def _num_branches(schema: Json) -> int:
    return sum(len(schema[key]) for key in ("allOf", "anyOf", "oneOf") if key in schema)


def _unenforced_unique_items(values: Values, root: int) -> list[str]:
    """Where ``uniqueItems`` stands but cannot be enforced, because what an array has to repeat cannot be followed.

    Raises GrammarTooComplex for arrays that need more different items than were found.
    """
    formulas, arrays = values.formulas, values.arrays
    found: dict[str, None] = {}
    todo = [(root, True)]
    seen: set[tuple[int, bool]] = set()

    def is_positive(formula: int) -> bool:
        literals = [(formulas.nodes[p][1][0], sign) for p, sign in formulas.polarities(formula)]
        return all(leaf != "contains" and (sign or leaf in OF_NO_VALUE) for leaf, sign in literals)

    for formula, is_asked in todo:
        is_asked = is_asked and is_positive(formula)
        for schema, (_, node) in formulas.leaves(formula):
            if (schema, is_asked) in seen:
                continue
            seen.add((schema, is_asked))
            members, array = values.expand(schema, "object"), values.expand(schema, "array")
            rules = [leaf[1] for _, leaf in formulas.leaves(members) if leaf[0] == "props"]
            of_members = is_asked and is_positive(members)
            todo += [(inner, of_members) for rule in rules for inner in values.objects.properties.rules[rule].values]
            leaves = [leaf for _, leaf in formulas.leaves(array)]
            of_items = is_asked and is_positive(array)
            if not all(map(arrays.can_follow_repeats, (array,) if is_asked else (array, formulas.negation(array)))):
                found[values.schemas.pointer(node)] = None
            else:
                arrays.check_different(array)
            todo += [(inner, of_items) for leaf in leaves if leaf[0] == "items" for inner in (*leaf[1], leaf[2])]
            todo += [(leaf[1], False) for leaf in leaves if leaf[0] == "contains"]
    return list(found)
