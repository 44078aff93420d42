"""JSON arrays: the conditions on their items, as leaves of formulas, and their states.

The leaves speak of the items still to come:
    ("items", prefix, rest, at)        item i >= ``at`` satisfies ``prefix[i]``, or ``rest`` past its end
    ("min", n), ("max", n)             there are at least, at most n items
    ("contains", schema, need, room)   at least ``need`` and at most ``room`` items (-1: any number) satisfy ``schema``
    ("unique", seen)                   no item equals another one or one of ``seen``
"""

from collections.abc import Callable, Set

import numpy as np

from ..spec import GrammarTooComplex
from .documents import read_json
from .formulas import FALSE, TRUE, Leaf
from .inner_values import InnerValues
from .layouts import Layout

CLOSE = 1 << 30  # the result where the closing bracket stands in the place of the first item
OPENED = 1 << 29  # OPENED + i: the result where white space before the first item chose layout i of ``Layouts.all``
Answers = Callable[[int], bool]


class UniqueItems:
    """Reads the items of an array with ``uniqueItems`` (``machine.ItemReader``)."""

    def __init__(self, arrays: "Arrays", context: tuple[int, ...]) -> None:
        self._arrays, self._context = arrays, context
        self._has_others: bool | None = None
        self.is_sole = len(context) == 1 and arrays.formulas.positive_clause(context[0]) is not None

    def after(self, state: int, text: bytes) -> int:
        return self._arrays.after_value(state, self._arrays.values.constant(read_json(text.decode())))

    def has_others(self) -> bool:
        if self._has_others is None:
            self._has_others = self._arrays.may_go_on(self._context[0])
        return self._has_others


class Arrays:
    """The arrays of one ``Values``. A *context* is a tuple of formulas: what must hold, then the observers."""

    def __init__(self, values: InnerValues) -> None:
        self.values = values
        self.formulas = values.formulas
        self._plans: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        self._places: dict[int, tuple[tuple[int, ...], Layout]] = {}  # by the state after an item

    # -- leaves ---------------------------------------------------------------------------------------------------

    def items(self, prefix: tuple[int, ...], rest: int, at: int = 0) -> int:
        """The formula that every item from ``at`` on satisfies its schema."""
        while prefix and prefix[-1] == rest:
            prefix = prefix[:-1]
        at = min(at, len(prefix))
        if at == len(prefix):
            prefix, at = (), 0
        if not prefix and rest == TRUE:
            return TRUE
        return self.formulas.leaf("items", prefix, rest, at)

    def at_least(self, n: int) -> int:
        return TRUE if n <= 0 else self.formulas.leaf("min", n)

    def at_most(self, n: int) -> int:
        return FALSE if n < 0 else self.formulas.leaf("max", n)

    def unique(self, seen: tuple[int, ...] = ()) -> int:
        """The formula that no two items are equal, and none equals one of ``seen`` (formulas, ascending).

        A formula that must hold may not negate it.
        """
        return self.formulas.leaf("unique", seen)

    def contains(self, schema: int, need: int, room: int) -> int:
        """The formula that ``need`` to ``room`` items satisfy the schema; room -1: any number."""
        if need <= 0 and room < 0:
            return TRUE
        return self.formulas.leaf("contains", schema, max(need, 0), room)

    def _asked(self, leaf: Leaf) -> int:
        """The schema that the leaf asks of the next item; TRUE if it asks none."""
        if leaf[0] == "items":
            return leaf[1][leaf[3]] if leaf[3] < len(leaf[1]) else leaf[2]
        if leaf[0] == "unique":
            return self.formulas.conjunction([self.formulas.negation(value) for value in leaf[1]])
        return leaf[1] if leaf[0] == "contains" else TRUE

    def _change(self, leaf: Leaf, answer: bool) -> int:
        """The leaf after an item, given whether the item satisfies what the leaf asked."""
        match leaf:
            case ("items", prefix, rest, at):
                return self.items(prefix, rest, at + 1) if answer else FALSE
            case ("min", n):
                return self.at_least(n - 1)
            case ("max", n):
                return self.at_most(n - 1)
            case ("unique", _):  # ``after_value`` adds the item to those seen
                return self.formulas.leaf(*leaf) if answer else FALSE
            case ("contains", schema, need, room):
                if not answer:
                    return self.formulas.leaf(*leaf)
                return FALSE if room == 0 else self.contains(schema, need - 1, room - 1 if room > 0 else -1)
        raise AssertionError(leaf)

    def _step(self, formula: int, answers: Answers) -> int:
        return self.formulas.replace(formula, lambda leaf: self._change(leaf, answers(self._asked(leaf))))

    def _step_unsure(self, formula: int, true: Set[int], unknown: Set[int], at_worst: bool) -> int:
        """The formula after an item of which some answers are unknown.

        With ``at_worst`` it implies each formula that the answers can lead to; without, each of them implies it.
        """

        def change(leaf: Leaf, at_worst: bool) -> int:
            asked = self._asked(leaf)
            if asked in unknown and leaf[0] == "contains" and leaf[3] > 0:
                return FALSE if at_worst else TRUE  # which answer is better depends on the items to come
            if asked in unknown and leaf[0] == "contains" and leaf[3] == 0:
                return self._change(leaf, at_worst)
            return self._change(leaf, asked == TRUE or asked in true or (asked in unknown and not at_worst))

        return self.formulas.replace(
            formula, lambda leaf: change(leaf, at_worst), lambda leaf: change(leaf, not at_worst)
        )

    def ends(self, formula: int) -> bool:
        """Whether an array that ends here satisfies the formula."""

        def change(leaf: Leaf) -> int:
            if leaf[0] == "min":
                return FALSE
            if leaf[0] == "contains":
                return TRUE if leaf[2] == 0 else FALSE
            return TRUE

        return self.formulas.replace(formula, change) == TRUE

    def alive(self, formula: int) -> bool:
        """Whether the array can be completed from here."""
        if formula == FALSE:
            return False
        if formula == TRUE or self.ends(formula):
            return True
        return self.values.prove(("array", formula), lambda: self._alive(formula))

    def _alive(self, formula: int) -> bool:
        leaves = self.formulas.positive_clause(formula)
        if leaves is not None:
            known = [self.formulas.nodes[p][1] for p in leaves]
            if not any(leaf[0] == "contains" for leaf in known):
                need = max((leaf[1] for leaf in known if leaf[0] == "min"), default=0)
                room = min((leaf[1] for leaf in known if leaf[0] == "max"), default=need)
                if need > room:
                    return False
                lists = [leaf for leaf in known if leaf[0] == "items"]
                apart = [leaf for leaf in known if leaf[0] == "unique"]
                longest = max((len(leaf[1]) - leaf[3] for leaf in lists), default=0)
                for i in range(min(need, longest + 1)):
                    asked = [leaf[1][leaf[3] + i] if leaf[3] + i < len(leaf[1]) else leaf[2] for leaf in lists]
                    demand = self.formulas.conjunction([*asked, *map(self._asked, apart)])
                    if not self.values.satisfiable(demand):
                        return False
                    if need > 1 and apart and not apart[0][1]:
                        self._check_enough(demand, need)
                return True
        return self._some_item_leads_on(formula, frozenset(), self._all_asked(formula))

    def _check_enough(self, demand: int, need: int) -> None:
        """Raise GrammarTooComplex unless ``need`` different values are found: an array might have no end."""
        if self.values.num_values(demand, need) < need:
            raise GrammarTooComplex(
                f"uniqueItems with minItems {need}: fewer than {need} different values for each item were found; lower "
                "minItems, or allow more values"
            )

    def check_clauses(self, formula: int) -> None:
        """Raise GrammarTooComplex if unique items may run out in some clause of a formula without negations."""
        for clause in self.formulas.clauses(formula):
            self.alive(self.formulas.conjunction([p for p, _ in clause]))

    def _some_item_leads_on(self, formula: int, true: frozenset[int], unknown: tuple[int, ...]) -> bool:
        """Whether the array can be completed after an item that satisfies, of all schemas asked, those in ``true`` and
        some of the ``unknown``."""
        after = self._step_unsure(formula, true, frozenset(unknown), False)
        if after == FALSE or not self.values.satisfiable(self.formulas.conjunction(true)):
            return False
        if unknown:
            schema, *rest = unknown
            return any(self._some_item_leads_on(formula, chosen, tuple(rest)) for chosen in (true | {schema}, true))
        if after == formula:
            return False
        refused = [self.formulas.negation(schema) for schema in self._all_asked(formula) if schema not in true]
        return self.values.satisfiable(self.formulas.conjunction([*true, *refused])) and self.alive(after)

    def _all_asked(self, formula: int) -> tuple[int, ...]:
        return tuple(sorted({self._asked(leaf) for _, leaf in self.formulas.leaves(formula)} - {TRUE, FALSE}))

    # -- states ---------------------------------------------------------------------------------------------------

    def _plan(self, context: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """What the next item must satisfy, and the schemas that observe it."""
        found = self._plans.get(context)
        if found is not None:
            return found
        formulas = self.formulas
        must = context[0]
        if any(not sign and formulas.nodes[p][1][0] == "unique" for p, sign in formulas.polarities(must)):
            raise GrammarTooComplex("uniqueItems cannot be negated")  # ``json_schema`` refuses such schemas
        plain = formulas.positive_clause(must)
        certain: set[int] = set()
        if plain is not None and not any(formulas.nodes[p][1][0] == "contains" for p in plain):
            asked = [self._asked(formulas.nodes[p][1]) for p in plain]
            demand = formulas.conjunction(asked) if self.alive(self._step(must, lambda a: True)) else FALSE
            certain = set(asked)
            rest = context[1:]
        else:
            demand = self._demand(must)
            rest = context
        leaves = [
            leaf for _, leaf in formulas.leaves(*rest) if leaf[0] != "unique"
        ]  # ``UniqueItems`` asks the item's text
        observed = {self._asked(leaf) for leaf in leaves} - {TRUE, FALSE} - certain
        found = self._plans[context] = demand, tuple(sorted(observed))
        return found

    def _demand(self, must: int) -> int:
        """The weakest condition on the next item after which ``must`` can still be satisfied."""
        formulas = self.formulas
        asked = self._all_asked(must)

        def is_alive(true: Set[int], unknown: Set[int], at_worst: bool) -> bool:
            return self.alive(self._step_unsure(must, true, unknown, at_worst))

        if is_alive(set(), set(asked), True):
            return TRUE
        if all(sign and formulas.nodes[p][1][0] != "contains" for p, sign in formulas.polarities(must)):
            parts = []
            for clause in formulas.clauses(must):
                whole = formulas.conjunction([p for p, _ in clause])
                if self.alive(self._step(whole, lambda a: True)):
                    parts.append(formulas.conjunction([self._asked(formulas.nodes[p][1]) for p, _ in clause]))
            return formulas.disjunction(parts)
        return self.values.weakest(asked, is_alive, "one array item")

    def first_demand(self, formula: int) -> int:
        """The condition on the first item of an array."""
        return self._plan((formula,))[0]

    def open(self, context: tuple[int, ...], around: Layout) -> int:
        """The row code of ``[`` in the layout ``around`` it; 0 if no array satisfies the formula."""
        if not self.alive(context[0]):
            return 0
        return self._first(context, self.values.layouts.inside(around)[0], around)

    def _first(self, context: tuple[int, ...], layout: Layout, choices: Layout | None = None) -> int:
        """The row code that leads to the first item. ``choices``: see ``Values.value``."""
        values = self.values
        must, observed = self._plan(context)
        if not values.satisfiable(must):
            must, observed, choices = FALSE, (), None
        or_close = layout.may_be_empty and self.ends(context[0])
        state = values.value(must, observed, layout=layout, space=layout.first, choices=choices, or_close=or_close)
        return values.machine.push(self._frame(context, layout), state)

    def _frame(self, context: tuple[int, ...], layout: Layout) -> int:
        machine = self.values.machine
        key = ("array", layout, context)
        is_unique = any(leaf[0] == "unique" for _, leaf in self.formulas.leaves(*context))
        reader = UniqueItems(self, context) if is_unique else None
        return machine.frame(
            key,
            lambda: machine.add_frame(
                lambda result: self._returns(context, layout, result),
                reader=reader,
                decides=bool(self._plan(context)[1]),
            ),
        )

    def _result(self, context: tuple[int, ...]) -> int:
        bits = sum(1 << i for i, formula in enumerate(context[1:]) if self.ends(formula))
        return self.values.machine.end_state(self.values.machine.result(bits))

    def _returns(self, context: tuple[int, ...], layout: Layout, result: int) -> int:
        if result == CLOSE:
            return self._result(context)
        if result >= OPENED:
            return self._first(context, self.values.layouts.all[result - OPENED])
        _, observed = self._plan(context)
        bits = self.values.machine.bits(result)
        known = {schema: bool(bits >> i & 1) for i, schema in enumerate(observed)}
        after = tuple(self._step(f, lambda a: a != FALSE and known.get(a, True)) for f in context)
        return self._after(after, layout)

    def after_value(self, state: int, value: int) -> int:
        """The state instead of ``state`` after an item that equals ``value`` (a formula); 0 if it repeats an item."""

        def change(leaf: Leaf) -> int:
            if leaf[0] != "unique":
                return self.formulas.leaf(*leaf)
            return FALSE if value in leaf[1] else self.unique(tuple(sorted((*leaf[1], value))))

        context, layout = self._places[state]
        context = tuple(self.formulas.replace(formula, change) for formula in context)
        return self._after(context, layout) if context[0] != FALSE else 0

    def may_go_on(self, must: int) -> bool:
        """Whether, whatever the next item is, another one can follow it, of each kind that items may be of."""
        demand, _ = self._plan((self._step(must, lambda asked: True),))
        return self.values.has_another_of_each_kind(demand)

    def _after(self, context: tuple[int, ...], layout: Layout) -> int:
        """The state after an item."""
        machine, values = self.values.machine, self.values

        def fill(row: np.ndarray) -> None:
            must, observed = self._plan(context)
            if values.satisfiable(must):
                state = values.value(must, observed, layout=layout, space=layout.after_comma)
                row[ord(",")] = machine.push(self._frame(context, layout), state)
            if self.ends(context[0]):
                values.layouts.close(row, layout, ord("]"), self._result(context))

        key = ("after item", layout, context)
        state = machine.state(key, lambda: machine.add_state(fill, space=layout.before_mark))
        self._places[state] = context, layout
        return state
