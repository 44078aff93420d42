"""JSON values under boolean formulas of schemas: their satisfiability, and their states on a machine.

A value has to satisfy a *must* formula. *Observers* are further formulas: the value's result has a bit for each that
it satisfies. Every text that a state allows can be completed, because a state is made only if some value is left.
"""

from collections.abc import Callable, Hashable, Sequence, Set
from contextlib import suppress
from decimal import Decimal
from itertools import islice

import numpy as np

from ..expressions import NOTHING
from ..machine import Machine
from ..spec import GrammarError, GrammarTooComplex
from .arrays import CLOSE, OPENED, Arrays
from .documents import Json
from .formulas import FALSE, TRUE
from .inner_values import KINDS, Kind, Scalar
from .layouts import Layout, Layouts
from .numbers import Numbers
from .objects import Objects
from .scalars import Scalars
from .schema_nodes import SchemaNodes

MAX_CASES = 256  # of the answers to observed schemas
PREPARE_WORK = 500_000  # fuel for one value whose states are made when its schema is compiled
FIRST_NAMES = 5  # of an object whose properties are looked at then
FIRST_VALUES = 2  # of these, whose first rows are made: masks take 5% less at p99 (benchmarks.constrained)
HARD_PARTS = 24  # of an expression; see ``Expressions.num_parts``
FEW_CASES = 16  # with more, schemas that exclude each other are looked for
COMPOUND_KINDS: tuple[Kind, ...] = ("array", "object")
LITERALS: tuple[tuple[Kind, bool | None], ...] = (("null", None), ("true", True), ("false", False))
NUM_VALUES_DEPTH = 3  # levels of arrays and objects in which ``num_values`` counts


class Values:
    """All JSON values in one style of white space, spelling and property order, on one machine."""

    def __init__(
        self,
        machine: Machine,
        scalars: Scalars,
        schemas: SchemaNodes,
        read: Callable[[int, Kind], int],
        *,
        white_space: str,
        any_order: bool,
        canonical: bool,
    ) -> None:
        """``read(schema, kind)``: the formula of leaves that a schema, by its number, means for values of a kind."""
        self.machine = machine
        self.ex = machine.expressions
        self.scalars = scalars
        self.numbers = Numbers(self.ex)
        self.schemas = schemas
        self.formulas = schemas.formulas
        self._read = read
        self.canonical = canonical  # integers are spelled one way only
        # A layout is in the keys of states, so that another ``Values``, with other formulas, does not share them.
        self.layouts = Layouts(machine, white_space)
        self.arrays = Arrays(self)
        self.objects = Objects(self, any_order=any_order)
        self._expanded: dict[tuple[int, Kind], int] = {}
        self._exprs: dict[tuple[int, Kind], int] = {}
        self._proved: dict[Hashable, bool] = {}
        self._active: dict[Hashable, int] = {}
        self._assumed = 1 << 30

    # -- formulas -------------------------------------------------------------------------------------------------

    def expand(self, formula: int, kind: Kind) -> int:
        """A formula over schemas as a formula over leaves for values of one kind."""
        if formula <= TRUE:
            return formula
        key = (formula, kind)
        found = self._expanded.get(key)
        if found is None:
            node = self.formulas.nodes[formula]
            if node[0] == "leaf":
                found = self._read(node[1][1], kind)
            else:
                found = self.formulas.replace(formula, lambda leaf: self._read(leaf[1], kind))
            self._expanded[key] = found
        return found

    def expression(self, formula: int, kind: Kind) -> int:
        """The language of a formula's strings (their content) or numbers."""
        key = (formula, kind)
        found = self._exprs.get(key)
        if found is None:
            found = self._exprs[key] = self._expression(self.expand(formula, kind), kind == "string")
        return found

    def _expression(self, formula: int, is_string: bool) -> int:
        ex = self.ex
        node = self.formulas.nodes[formula]
        match node[0]:
            case "leaf":
                return node[1][1]
            case "not":
                inner = self._expression(node[1], is_string)
                return ex.text_without(inner) if is_string else ex.intersect(self.numbers.plain, ex.complement(inner))
            case "or":
                return ex.union(*[self._expression(p, is_string) for p in node[1:]])
        everything = ex.text if is_string else self.numbers.any
        parts = {self._expression(p, is_string) for p in node[1:]} - {everything}
        if self.numbers.plain in parts and len(parts) > 1 and not is_string:
            parts.discard(self.numbers.plain)  # the other languages hold plain numbers only
            if parts <= {self.numbers.integer}:
                parts = {self.numbers.plain_integer}
        return ex.intersect(*parts) if parts else everything

    def constant(self, value: Json) -> int:
        """The formula that a value equals ``value``."""
        return self.schemas.constant(value)

    def satisfiable(self, formula: int) -> bool:
        """Whether any value satisfies the formula."""
        if formula <= TRUE:
            return formula == TRUE
        known = self._proved.get(formula)
        if known is not None:
            return known
        node = self.formulas.nodes[formula]
        if node[0] == "leaf" and self.schemas.is_surely_satisfiable(node[1][1]):
            self._proved[formula] = True
            return True
        return self.prove(formula, lambda: self._satisfiable(formula))

    def is_surely_impossible(self, formula: int) -> bool:
        """Whether no value satisfies the formula, told without looking into arrays and objects."""
        for kind in self.kinds_of(formula):
            if kind in COMPOUND_KINDS:
                if self.expand(formula, kind) != FALSE:
                    return False
            elif self.satisfiable_kind(formula, kind):
                return False
        return True

    def weakest(self, asked: Sequence[int], holds: Callable[[Set[int], Set[int], bool], bool], what: str) -> int:
        """The formula of the values that meet a condition on their answers to the schemas in ``asked``.

        ``holds(true, unknown, at_worst)``: whether values meet it that satisfy the schemas in ``true`` and no schema
        outside the two sets: for all answers to ``unknown`` (``at_worst``), or for some.
        Raises GrammarTooComplex, which names ``what`` is asked, after ``MAX_CASES`` cases.
        """
        formulas = self.formulas
        parts: list[int] = []
        num_cases = 0

        def split(true: frozenset[int], false: frozenset[int], implied: frozenset[int]) -> bool:
            """Whether all values with these answers meet the condition. Adds those that do to ``parts``.

            ``implied`` are false because those in ``true`` exclude them.
            """
            nonlocal num_cases
            num_cases += 1
            if num_cases > MAX_CASES:
                raise GrammarTooComplex(
                    f"{what} is asked {len(asked)} schemas at once, whose answers fall into more than {MAX_CASES} "
                    "cases; make the schemas exclude each other, or ask fewer"
                )
            if num_cases > FEW_CASES:
                for schema in everything - true - false - implied:
                    if not self.satisfiable(formulas.conjunction([*true, schema])):
                        implied |= {schema}
            unknown = everything - true - false - implied
            if holds(true, unknown, True):
                if false and holds(true, unknown | false, True):
                    false = frozenset()  # true for all answers to these too
                parts.append(formulas.conjunction([*sorted(true), *map(formulas.negation, sorted(false))]))
                return True
            if not unknown or not holds(true, unknown, False):
                return False
            if not self.satisfiable(formulas.conjunction([*true, *map(formulas.negation, false)])):
                return True
            schema = min(unknown)
            everywhere = split(true | {schema}, false, implied)
            return split(true, false | {schema}, implied) and everywhere

        everything = frozenset(asked)
        return TRUE if split(frozenset(), frozenset(), frozenset()) else formulas.disjunction(parts)

    def _satisfiable(self, formula: int) -> bool:
        try:
            return any(self.satisfiable_kind(formula, kind) for kind in self.kinds_of(formula))
        except GrammarTooComplex as error:
            raise error.at(self._pointer(formula)) from None

    def kinds_of(self, formula: int) -> tuple[Kind, ...]:
        """The kinds of the values that may satisfy the formula, as far as the schemas' ``kinds`` tell."""
        nodes, kinds = self.formulas.nodes, self.schemas.kinds
        node = nodes[formula]
        if node[0] == "leaf":
            return kinds[node[1][1]]
        found = KINDS
        for part in node[1:] if node[0] == "and" else ():
            if nodes[part][0] == "leaf":
                asked = kinds[nodes[part][1][1]]
                found = asked if found is KINDS else tuple([kind for kind in found if kind in asked])
        return found

    def _pointer(self, formula: int) -> str:
        """Where the first schema of the formula stands in its document."""
        return next((self.schemas.pointer(leaf[1]) for _, leaf in self.formulas.leaves(formula)), "")

    def satisfiable_kind(self, formula: int, kind: Kind) -> bool:
        """Whether a value of one kind satisfies the formula."""
        if kind in ("string", "number"):
            return self.ex.is_nonempty(self.expression(formula, kind))
        inner = self.expand(formula, kind)
        if kind == "array":
            return self.arrays.alive(inner)
        if kind == "object":
            return self.objects.completions.is_alive_at_start(inner)
        return inner == TRUE

    def num_values(self, formula: int, most: int) -> int:
        """A lower bound of how many different values satisfy the formula, at most ``most``."""
        return self._num_values(formula, most, NUM_VALUES_DEPTH)

    def _num_values(self, formula: int, most: int, depth: int) -> int:
        total = 0
        for kind in KINDS:
            if total < most and formula != FALSE:
                total += self._num_values_of(formula, kind, most - total, depth)
        return total

    def num_of_each_kind(self, formula: int, most: int) -> int:
        """A lower bound of how many values of each kind, literals aside, satisfy the formula, at most ``most``.

        Kinds without such a value do not count; 0 if there is none.
        """
        kinds: tuple[Kind, ...] = ("string", "number", "array", "object")
        live = [kind for kind in kinds if formula != FALSE and self.satisfiable_kind(formula, kind)]
        return min((self._num_values_of(formula, kind, most, NUM_VALUES_DEPTH) for kind in live), default=0)

    def listed(self, formula: int) -> tuple[Scalar, ...] | None:
        """The values that satisfy the formula if they are all of a list of strings, literals and numbers; else None."""
        if formula <= TRUE:
            return () if formula == FALSE else None
        words = self.ex.words_of(self.expression(formula, "string"))
        if words is None or any(self.expand(formula, kind) != FALSE for kind in COMPOUND_KINDS):
            return None
        numbers = self.numbers.listed(self.spelled_number(formula))
        if numbers is None:
            return None
        literals = [value for kind, value in LITERALS if self.expand(formula, kind) == TRUE]
        return (*(word.decode() for word in words), *literals, *numbers)

    def spellings(self, formula: int, number: Decimal) -> int:
        """The language of the spellings of one of the numbers that satisfy the formula."""
        return self.ex.alive(self.ex.intersect(self.spelled_number(formula), self.numbers.equal_to(number)))

    def spelled_number(self, formula: int) -> int:
        """The language of the numbers that satisfy the formula, in the spellings that are written."""
        return self._written(formula, self.expression(formula, "number"))

    def _written(self, formula: int, number: int) -> int:
        """Of a language of numbers that satisfy the formula, the spellings that are written."""
        if not self.canonical or number == NOTHING:
            return number
        leaves = self.formulas.leaves(self.expand(formula, "number"))
        return self.numbers.canonical(number, self.numbers.digits_for(*(leaf[1] for _, leaf in leaves)))

    def _num_values_of(self, formula: int, kind: Kind, most: int, depth: int) -> int:
        inner = self.expand(formula, kind)
        if inner == FALSE:
            return 0
        match kind:
            case "string":
                return self.ex.num_texts(self.expression(formula, kind), most)
            case "number":
                distinct = self.ex.intersect(self.expression(formula, kind), self.numbers.distinct)
                return self.ex.num_texts(distinct, most)
            case "array" | "object":
                if inner == TRUE:
                    return most
                if not self.satisfiable_kind(formula, kind):
                    return 0

                def count(formula: int, most: int) -> int:
                    return self._num_values(formula, most, depth - 1) if depth else int(self.satisfiable(formula))

                counted = self.arrays if kind == "array" else self.objects.completions
                return counted.num_values(inner, most, count)
        return 1

    def prove(self, key: Hashable, rule: Callable[[], bool]) -> bool:
        """The answer of ``rule``, remembered by ``key``: the least fixpoint where the question leads back to itself.

        A question met again while it is being answered is answered False. Answers that rest on such an assumption about
        a question further out are not remembered.
        """
        known = self._proved.get(key)
        if known is not None:
            return known
        if key in self._active:
            self._assumed = min(self._assumed, self._active[key])
            return False
        depth = self._active[key] = len(self._active)
        outer, self._assumed = self._assumed, 1 << 30
        try:
            answer = rule()
        finally:
            del self._active[key]
            inner, self._assumed = self._assumed, outer
        if answer or inner >= depth:
            self._proved[key] = answer
        else:
            self._assumed = min(outer, inner)
        return answer

    # -- states ---------------------------------------------------------------------------------------------------

    def layout_of(self, must: int, around: Layout) -> Layout:
        """``around``, or the plain layout if no value that satisfies the formula has a bracket."""
        if around is self.layouts.plain:
            return around
        kinds = self.kinds_of(must)
        has_brackets = any(kind in kinds and self.expand(must, kind) != FALSE for kind in COMPOUND_KINDS)
        return around if has_brackets else self.layouts.plain

    def value(
        self,
        must: int,
        observers: tuple[int, ...] = (),
        *,
        layout: Layout,
        space: int,
        choices: Layout | None = None,
        or_close: bool = False,
    ) -> int:
        """The state before a value.

        ``layout`` is that of the bracket around the value, ``space`` the white space before it. The first item of an
        array: with ``or_close`` a ``]`` may stand in its place (result ``CLOSE``); with ``choices``, the layout around
        the array, white space may choose another layout inside it (result ``OPENED`` + its number).
        """
        layout = self.layout_of(must, layout)
        key = ("value", layout, space, must, observers, choices, or_close)

        def fill(row: np.ndarray) -> None:
            try:
                self._fill_value(row, must, observers, layout)
            except GrammarTooComplex as error:
                raise error.at(self._pointer(must)) from None
            if or_close:
                row[ord("]")] = self.machine.end_state(CLOSE)
            if choices is not None:
                self.layouts.choose(
                    row, choices, "array", lambda chosen: self.machine.end_state(OPENED + chosen.number)
                )

        return self.machine.state(key, lambda: self.machine.add_state(fill, space=space))

    def prepare_root(self, must: int) -> None:
        """Make what the first masks of a text need, for none to wait for it or to find it too complex: the root's first
        row, that after its opening brace, what its first properties are asked, and the first rows of their values."""
        self._prepare(must, lambda: self.accept_root(must)[0])

    def prepare(self, must: int) -> None:
        """As ``prepare_root``, for a value behind a colon."""
        plain = self.layouts.plain
        self._prepare(must, lambda: self.value(must, layout=plain, space=plain.after_colon))

    def _prepare(self, must: int, state: Callable[[], int]) -> None:
        machine, plain = self.machine, self.layouts.plain
        try:
            with machine.fuel.at_most(PREPARE_WORK):
                if not self.satisfiable(must):
                    return
                row = machine.row(state())
                if row[ord("{")] > 0:
                    machine.row(int(row[ord("{")]))
                    demands = self.objects.completions.demands_at_start(self.expand(must, "object"))
                    first = list(islice(demands, FIRST_NAMES))
                    with suppress(GrammarError, RecursionError):  # a text may be without these properties
                        for demand in first[:FIRST_VALUES]:
                            machine.row(self.value(demand, layout=plain, space=plain.after_colon))
        except GrammarTooComplex as error:
            raise error.at(self._pointer(must)) from None

    def hard_string(self, must: int) -> int:
        """The row code of the opening quote of a string that satisfies the formula, if many states may follow it; 0 if
        few do, or if no string satisfies it."""
        if "string" not in self.kinds_of(must):
            return 0
        try:
            with self.machine.fuel.at_most(PREPARE_WORK):
                text = self.expression(must, "string")
                is_hard = text != self.ex.text and self.ex.num_parts(text) >= HARD_PARTS
                return self.scalars.string(text) if is_hard else 0
        except GrammarTooComplex as error:
            raise error.at(self._pointer(must)) from None

    def first_name(self, must: int) -> int:
        """The row code of the opening quote of the first name of an object that satisfies the formula; 0 if none."""
        if "object" not in self.kinds_of(must):
            return 0
        try:
            with self.machine.fuel.at_most(PREPARE_WORK):
                state = self.objects.open((self.expand(must, "object"),), self.layouts.root)
                return int(self.machine.row(state)[ord('"')]) if state else 0
        except GrammarTooComplex as error:
            raise error.at(self._pointer(must)) from None

    def _fill_value(self, row: np.ndarray, must: int, observers: tuple[int, ...], layout: Layout) -> None:
        for kind in self.kinds_of(must):
            match kind:
                case "string":
                    text = self.expression(must, kind)
                    if text != NOTHING:
                        watched = tuple([self.expression(o, kind) for o in observers])
                        row[ord('"')] = self.scalars.string(text, watched)
                case "number":
                    number = self.expression(must, kind)
                    if number != NOTHING:
                        watched = tuple([self.expression(o, kind) for o in observers])
                        if any(w not in (self.numbers.any, NOTHING) for w in watched):
                            number = self.numbers.without_exponents(number)  # observers judge plain spellings only
                        self.scalars.fill_number(row, self._written(must, number), watched)
                case "array":
                    array = self.expand(must, kind)
                    if array != FALSE:
                        row[ord("[")] = self.arrays.open((array, *[self.expand(o, kind) for o in observers]), layout)
                case "object":
                    members = self.expand(must, kind)
                    if members != FALSE:
                        inner = (members, *[self.expand(o, kind) for o in observers])
                        row[ord("{")] = self.objects.open(inner, layout)
                case _:
                    if self.expand(must, kind) == TRUE:
                        bits = sum(1 << i for i, o in enumerate(observers) if self.expand(o, kind) == TRUE)
                        end = self.machine.end_state(self.machine.result(bits))
                        row[ord(kind[0])] = self.machine.literal(kind[1:].encode(), end)

    def accept_root(self, must: int) -> tuple[int, int]:
        """The state and the root frame of a text that is one value that satisfies the formula."""
        machine = self.machine
        done = machine.state("done", lambda: machine.add_state(None, accepting=True))
        frame = machine.frame("root", lambda: machine.add_frame(lambda result: done))
        state = machine.state(
            ("root value", self.layouts.root, must),
            lambda: machine.add_state(lambda row: self._fill_value(row, must, (), self.layouts.root)),
        )
        return state, frame
