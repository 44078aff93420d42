"""JSON arrays: the conditions on their items, as leaves of formulas, and their states.

The leaves speak of the items still to come:
    ("items", prefix, rest, at)        item i >= ``at`` satisfies ``prefix[i]``, or ``rest`` past its end
    ("min", n), ("max", n)             there are at least, at most n items
    ("contains", schema, need, room)   at least ``need`` and at most ``room`` items (-1: any number) satisfy ``schema``
    ("unique", has_items)              no item equals another one or one read before; ``has_items``: one was read
    ("distinct", members, seen)        the same where every item is one of a list's; ``seen`` has the bits of those read

A state does not hold the items read before: an ``ItemReader`` knows them. It leads an item that repeats another to the
state where ``unique`` is false. Where items are bound to a list of strings, numbers and literals, states do hold them,
as bits (``Members``).
"""

import json
from collections.abc import Callable, Sequence, Set
from decimal import Decimal
from itertools import pairwise

import numpy as np

from ..machine import COMPACT, Machine, Seen, known_value
from ..spec import GrammarTooComplex
from .documents import read_json
from .formulas import FALSE, TRUE, Leaf
from .inner_values import InnerValues, Scalar
from .layouts import Layout
from .names import NameTrie
from .number_list import NumberList

CLOSE = 1 << 30  # the result where the closing bracket stands in the place of the first item
OPENED = 1 << 29  # OPENED + i: the result where white space before the first item chose layout i of ``Layouts.all``
Answers = Callable[[int], bool]
Count = Callable[[int, int], int]  # a lower bound of how many values satisfy a formula, at most the second argument


class UniqueItems:
    """Reads the items of an array with ``uniqueItems`` (``machine.ItemReader``)."""

    def __init__(self, arrays: "Arrays", context: tuple[int, ...]) -> None:
        self._arrays, self._context = arrays, context
        formulas = arrays.formulas
        parts = formulas.parts(context[0], "and")
        self.spaces_close = arrays.values.layouts.plain.before_mark == COMPACT
        self.is_plain = any(formulas.nodes[p][0] == "leaf" and formulas.nodes[p][1][0] == "unique" for p in parts)

    def after(self, state: int, text: bytes, seen: Seen) -> tuple[int, Seen | None]:
        return self._arrays.after_item(state, text, seen)

    def has_others(self, count: int) -> bool:
        return self._arrays.has_others(self._arrays.context_after(self._context), count)

    def has_others_after(self, state: int, count: int) -> bool:
        context = self._arrays.context_of(state)
        return context is None or self._arrays.has_others(context, count)


class Arrays:
    """The arrays of one ``Values``. A *context* is a tuple of formulas: what must hold, then the observers."""

    def __init__(self, values: InnerValues) -> None:
        self.values = values
        self.formulas = values.formulas
        self._ends: dict[int, bool] = {}
        self._plans: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        self._places: dict[int, tuple[tuple[int, ...], Layout]] = {}  # by the state after an item
        self._num_others: dict[tuple[int, ...], tuple[int, int]] = {}  # counted values, and up to how many
        self._have_to_repeat: dict[tuple[int, ...], bool] = {}
        self._checked: set[int] = set()
        self._lists: list[Members] = []
        self._list_ids: dict[tuple[tuple[tuple[type, Scalar], ...], tuple[int, ...]], int] = {}
        self._chosen: dict[tuple[int, int], int] = {}
        self._bound: dict[tuple[int, ...], tuple[int, ...]] = {}

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

    def unique(self) -> int:
        """The formula that no two items are equal."""
        return self.formulas.leaf("unique", False)

    def contains(self, schema: int, need: int, room: int) -> int:
        """The formula that ``need`` to ``room`` items satisfy the schema; room -1: any number."""
        if need <= 0 and room < 0:
            return TRUE
        return self.formulas.leaf("contains", schema, max(need, 0), room)

    def _asked(self, leaf: Leaf) -> int:
        """The schema that the leaf asks of the next item; TRUE if it asks none."""
        if leaf[0] == "items":
            return leaf[1][leaf[3]] if leaf[3] < len(leaf[1]) else leaf[2]
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
            case ("unique", _):  # the item repeats none; ``_after_repeat`` is for one that does
                return self.formulas.leaf("unique", True)
            case ("distinct", _, _):  # ``_returns_member`` knows which item it is
                return self.formulas.leaf(*leaf)
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
        found = self._ends.get(formula)
        if found is None:
            found = self._ends[formula] = self.formulas.holds(
                formula, lambda leaf: leaf[0] != "min" and (leaf[0] != "contains" or leaf[2] == 0)
            )
        return found

    def alive(self, formula: int) -> bool:
        """Whether the array can be completed from here."""
        if formula == FALSE:
            return False
        if formula == TRUE or self.ends(formula):
            return True
        return self.values.prove(("array", formula), lambda: self._alive(formula))

    def _alive(self, formula: int) -> bool:
        unique = self._unique_of(formula)
        if unique >= 0:  # no item repeats another, or one will: the first item that may is the second
            with_repeat = self.formulas.conjunction([self._assume(formula, FALSE), self.at_least(2 - unique)])
            return self.alive(self._assume(formula, TRUE)) or self.alive(with_repeat)
        leaves = self.formulas.positive_clause(formula)
        if leaves is not None:
            known = [self.formulas.nodes[p][1] for p in leaves]
            if not any(leaf[0] == "contains" for leaf in known):
                need = max((leaf[1] for leaf in known if leaf[0] == "min"), default=0)
                room = min((leaf[1] for leaf in known if leaf[0] == "max"), default=need)
                if need > room:
                    return False
                longest = max((len(leaf[1]) - leaf[3] for leaf in known if leaf[0] == "items"), default=0)
                return all(self.values.satisfiable(self.demand_at(known, i)) for i in range(min(need, longest + 1)))
        return self._some_item_leads_on(formula, frozenset(), self._all_asked(formula))

    def demand_at(self, leaves: Sequence[Leaf], i: int) -> int:
        """What the lists of items among the leaves ask of the item that comes after ``i`` others."""
        lists = [leaf for leaf in leaves if leaf[0] == "items"]
        return self.formulas.conjunction(
            [leaf[1][leaf[3] + i] if leaf[3] + i < len(leaf[1]) else leaf[2] for leaf in lists]
        )

    def num_values(self, formula: int, most: int, count: Count) -> int:
        """A lower bound of how many arrays satisfy the formula, at most ``most``; ``count`` counts items."""
        options = self.formulas.parts(formula, "or")
        found = 1 if self._unique_of(formula) < 0 else 0  # unique items may be too few for any array
        clauses = [clause for option in options if (clause := self.formulas.positive_clause(option)) is not None]
        for clause in clauses:
            leaves = [self.formulas.nodes[p][1] for p in clause]
            if found < most and all(leaf[0] != "contains" for leaf in leaves):
                found = max(found, self._num_values(leaves, most, count))
        return found if found >= most else max(found, count(self.first_demand(formula), most))

    def _num_values(self, leaves: Sequence[Leaf], most: int, count: Count) -> int:
        low = max((leaf[1] for leaf in leaves if leaf[0] == "min"), default=0)
        high = min((leaf[1] for leaf in leaves if leaf[0] == "max"), default=low + most)
        longest = max((len(leaf[1]) - leaf[3] for leaf in leaves if leaf[0] == "items"), default=0)
        is_unique = any(leaf[0] == "unique" for leaf in leaves)
        total, product, num_items = int(low == 0), 1, 0
        for length in range(1, high + 1):
            if length <= longest + 1:
                num_items = count(self.demand_at(leaves, length - 1), most + low if is_unique else most)
            product = min(most, product * (max(0, num_items - length + 1) if is_unique else num_items))
            total += product if length >= low else 0
            if not product or total >= most:
                break
        return min(total, most)

    # -- unique items ---------------------------------------------------------------------------------------------

    def _unique_of(self, *formulas: int) -> int:
        """1 if the formulas ask whether items are unique and items were read, 0 if none was read, -1 if none asks."""
        return max((int(leaf[1]) for _, leaf in self.formulas.leaves(*formulas) if leaf[0] == "unique"), default=-1)

    def _assume(self, formula: int, unique: int) -> int:
        """The formula with TRUE or FALSE for whether the items are unique."""
        return self.formulas.replace(formula, lambda f: unique if f[0] == "unique" else self.formulas.leaf(*f))

    def can_follow_repeats(self, formula: int) -> bool:
        """Whether arrays that have to repeat an item can always be completed: where nothing but the number of items and
        one schema for all of them is asked as well."""
        if self._unique_of(formula) < 0:
            return True
        for clause in self.formulas.clauses(formula):
            literals = [(self.formulas.nodes[p][1], sign) for p, sign in clause]
            if any(leaf[0] == "unique" and not sign for leaf, sign in literals) and not all(
                leaf[0] in ("min", "max", "unique") or (leaf[0] == "items" and sign and not leaf[1])
                for leaf, sign in literals
            ):
                return False
        return True

    def check_different(self, formula: int) -> None:
        """Raise GrammarTooComplex where too few values for unique items are found: an array might have no end."""
        if formula in self._checked or self._unique_of(formula) < 0:
            return
        for clause in self.formulas.clauses(formula):
            literals = [(self.formulas.nodes[p][1], sign) for p, sign in clause]
            if any(leaf[0] == "unique" and sign for leaf, sign in literals):
                self._check_different(literals)
        self._checked.add(formula)

    def _check_different(self, literals: list[tuple[Leaf, bool]]) -> None:
        negation = self.formulas.negation
        lists = [leaf for leaf, sign in literals if sign and leaf[0] == "items"]
        longest = max((len(leaf[1]) - leaf[3] for leaf in lists), default=0)
        need = 0
        excluded: list[int] = []  # what items may have to leave out
        wanted: list[Leaf] = []
        for leaf, sign in literals:
            match leaf, sign:
                case (("min", n), True):
                    need = max(need, n)
                case (("max", n), False):
                    need = max(need, n + 1)
                case (("contains", asked, low, high), True):
                    if low > 0:
                        wanted.append(leaf)
                    if high >= 0:
                        excluded.append(negation(asked))
                case (("contains", asked, 1, -1), False):
                    excluded.append(negation(asked))
                case (("contains", _, _, _), False):
                    wanted += [leaf, leaf]
        if len(wanted) > 1:
            raise GrammarTooComplex("uniqueItems beside several contains; keep one of them")
        for leaf in wanted:
            others = [part for part in excluded if part != negation(leaf[1])]
            if leaf[2] > 1 or others:
                rest = self.formulas.conjunction([leaf[1], self.demand_at(lists, longest), *others])
                self._check_enough(rest, leaf[2], "minContains")
        if need > 1:
            for i in range(min(need, longest + 1)):
                demand = self.formulas.conjunction([self.demand_at(lists, i), *excluded])
                self._check_enough(demand, need if i == longest else i + 1, "minItems")

    def _check_enough(self, demand: int, need: int, keyword: str) -> None:
        """Raise GrammarTooComplex unless ``need`` different values are found: an array might have no end."""
        if self.values.num_values(demand, need) < need:
            raise GrammarTooComplex(
                f"uniqueItems with {keyword} {need}: fewer than {need} different values for each item were found; "
                f"lower {keyword}, or allow more values"
            )

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
        observed = {self._asked(leaf) for _, leaf in formulas.leaves(*rest)} - {TRUE, FALSE} - certain
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
        if self._unique_of(*context) >= 0:
            if not self.can_follow_repeats(context[0]):
                raise GrammarTooComplex(
                    "uniqueItems where an array has to repeat an item, beside contains, prefixItems or several schemas "
                    "of the items; ask for the items in one schema"
                )
            self.check_different(context[0])
            context = self._with_members(context)
        return self._first(context, self.values.layouts.inside(around)[0], around)

    def _first(self, context: tuple[int, ...], layout: Layout, choices: Layout | None = None) -> int:
        """The row code that leads to the first item. ``choices``: see ``Values.value``."""
        values = self.values
        or_close = layout.may_be_empty and self.ends(context[0])
        distinct = self._distinct_of(context)
        if distinct is not None:
            return self._push_member(context[0], distinct, layout, layout.first, choices=choices, or_close=or_close)
        must, observed = self._plan(context)
        if not values.satisfiable(must):
            must, observed, choices = FALSE, (), None
        state = values.value(must, observed, layout=layout, space=layout.first, choices=choices, or_close=or_close)
        return values.machine.push(self._frame(context, layout), state)

    def _frame(self, context: tuple[int, ...], layout: Layout) -> int:
        machine = self.values.machine
        key = ("array", layout, context)
        reader = UniqueItems(self, context) if self._unique_of(*context) >= 0 else None
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
        return self._after(tuple(self._step(f, lambda a: a != FALSE and known.get(a, True)) for f in context), layout)

    def _after(self, context: tuple[int, ...], layout: Layout, seen: tuple[int, ...] = ()) -> int:
        """The state after an item. ``seen``: formulas of the items that may have to be repeated; () for any item."""
        machine, values = self.values.machine, self.values

        def fill(row: np.ndarray) -> None:
            distinct = self._distinct_of(context)
            if distinct is not None:
                row[ord(",")] = self._push_member(context[0], distinct, layout, layout.after_comma)
            else:
                must, observed = self._plan(context)
                if self._may_have_to_repeat(context):
                    repeated = [self._demand_of_repeat(context)]
                    repeated += [self.formulas.disjunction(seen)] if seen else []
                    must = self.formulas.disjunction([must, self.formulas.conjunction(repeated)])
                if values.satisfiable(must):
                    state = values.value(must, observed, layout=layout, space=layout.after_comma)
                    row[ord(",")] = machine.push(self._frame(context, layout), state)
            if self.ends(context[0]):
                values.layouts.close(row, layout, ord("]"), self._result(context))

        key = ("after item", layout, context, seen)
        state = machine.state(key, lambda: machine.add_state(fill, space=layout.before_mark))
        self._places[state] = context, layout
        return state

    # -- items known by their texts -------------------------------------------------------------------------------

    def after_item(self, state: int, text: bytes, seen: Seen) -> tuple[int, Seen | None]:
        """See ``machine.ItemReader.after``."""
        context, layout = self._places[state]
        if self._unique_of(*context) < 0:
            return state, None
        value = read_json(text.decode())
        known = known_value(value)
        if seen.has(known):
            context = tuple(self._assume(formula, FALSE) for formula in context)
            if not self.alive(context[0]):
                return 0, None
            return self._after(context, layout), None
        seen = seen.with_item(known, value)
        if self._may_have_to_repeat(context):
            return self._after(context, layout, tuple(map(self.values.constant, seen.originals()))), seen
        return state, seen

    def _demand_of_repeat(self, context: tuple[int, ...]) -> int:
        """What the next item must satisfy if it repeats another one."""
        must = self._assume(context[0], FALSE)
        return self._plan((must,))[0] if self.alive(must) else FALSE

    def _may_have_to_repeat(self, context: tuple[int, ...]) -> bool:
        """Whether some value may be the next item only if it repeats another one."""
        formulas = self.formulas
        found = self._have_to_repeat.get(context)
        if found is None:
            repeat = self._demand_of_repeat(context)
            found = repeat != FALSE and self.values.satisfiable(
                formulas.conjunction([repeat, formulas.negation(self._plan(context)[0])])
            )
            self._have_to_repeat[context] = found
        return found

    def context_of(self, state: int) -> tuple[int, ...] | None:
        """The context after an item; None before a closing bracket on a line of its own."""
        place = self._places.get(state)
        return place[0] if place is not None else None

    def context_after(self, context: tuple[int, ...]) -> tuple[int, ...]:
        """The context after an item that satisfies all that is asked of it."""
        return tuple(self._step(formula, lambda asked: True) for formula in context)

    def has_others(self, context: tuple[int, ...], count: int) -> bool:
        """Whether more than ``count`` values of each kind may be the next item, and there is such a kind."""
        if self._may_have_to_repeat(context):
            return False
        num, counted = self._num_others.get(context, (0, 0))
        if num == counted and num <= count:
            counted = max(64, 2 * count)
            num = self.values.num_of_each_kind(self._plan(context)[0], counted)
            self._num_others[context] = num, counted
        return num > count

    # -- items of a list ------------------------------------------------------------------------------------------

    def _with_members(self, context: tuple[int, ...]) -> tuple[int, ...]:
        """The context with bits for the items read, if all items are of a list of strings, numbers and literals."""
        found = self._bound.get(context)
        if found is None:
            found = self._bound[context] = self._bind_to_members(context)
        return found

    def _bind_to_members(self, context: tuple[int, ...]) -> tuple[int, ...]:
        formulas = self.formulas
        parts = formulas.positive_clause(context[0])
        if parts is None or len(context) > 1:
            return context
        leaves = [formulas.nodes[p][1] for p in parts]
        if any(leaf[0] == "contains" for leaf in leaves):
            return context
        lists = [leaf for leaf in leaves if leaf[0] == "items"]
        for leaf in lists:
            options = [self.values.listed(schema) for schema in (*leaf[1], leaf[2])]
            if None not in options:
                members = tuple(dict.fromkeys((type(v), v) for option in options for v in option or ()))
                break
        else:
            return context
        spellings: tuple[int, ...] = ()
        if any(isinstance(v, Decimal) for _, v in members):
            if len(lists) > 1 or leaf[1]:
                return context  # several schemas may allow different spellings of a number
            spellings = tuple(self.values.spellings(leaf[2], v) for _, v in members if isinstance(v, Decimal))
        number = self._list_ids.get((members, spellings))
        if number is None:
            number = self._list_ids[members, spellings] = len(self._lists)
            self._lists.append(Members(tuple(v for _, v in members), spellings))
        distinct = formulas.leaf("distinct", number, 0)
        return (
            formulas.conjunction(
                [distinct if leaf[0] == "unique" else p for p, leaf in zip(parts, leaves, strict=True)]
            ),
        )

    def _distinct_of(self, context: tuple[int, ...]) -> Leaf | None:
        if len(context) > 1:
            return None
        parts = self.formulas.parts(context[0], "and")
        leaves = [self.formulas.nodes[p][1] for p in parts if self.formulas.nodes[p][0] == "leaf"]
        return next((leaf for leaf in leaves if leaf[0] == "distinct"), None)

    def _with_distinct(self, formula: int, distinct: int) -> int:
        return self.formulas.replace(formula, lambda f: distinct if f[0] == "distinct" else self.formulas.leaf(*f))

    def _push_member(
        self,
        must: int,
        distinct: Leaf,
        layout: Layout,
        space: int,
        *,
        choices: Layout | None = None,
        or_close: bool = False,
    ) -> int:
        """The row code before an item of a list, as of ``Values.value``; 0 if none is left and ``]`` is not allowed."""
        machine, layouts = self.values.machine, self.values.layouts
        _, number, seen = distinct
        members = self._lists[number]
        left = self._chosen_of(number, self._plan((self._with_distinct(must, TRUE),))[0]) & ~seen
        if not left and not or_close:
            return 0
        names = left & ((1 << len(members.names)) - 1)
        has_numbers = left >> members.first_number > 0
        literals = tuple(i for i, _ in members.literals if left >> i & 1)
        trie, numbers = members.states(machine)

        def fill(row: np.ndarray) -> None:
            if names:
                row[ord('"')] = trie.start
            if has_numbers:
                numbers.begin(row)
            for i, text in members.literals:
                if i in literals:
                    row[text[0]] = machine.literal(text[1:], machine.end_state(i + 1))
            if or_close:
                row[ord("]")] = machine.end_state(CLOSE)
            if choices is not None and left:
                layouts.choose(row, choices, "array", lambda chosen: machine.end_state(OPENED + chosen.number))

        key = ("member", layouts.plain, space, number, bool(names), has_numbers, literals, choices, or_close)
        state = machine.state(key, lambda: machine.add_state(fill, space=space))
        frame = machine.frame(
            ("array of members", layout, must),
            lambda: machine.add_frame(
                lambda result: self._returns_member(must, distinct, layout, left, result),
                filter_at=members.filter(left),
                decides=members.has_prefixes,
            ),
        )
        return machine.push(frame, state)

    def _chosen_of(self, number: int, demand: int) -> int:
        """The bits of the members of a list that satisfy a formula."""
        found = self._chosen.get((number, demand))
        if found is None:
            members = self._lists[number]
            wanted = {(type(v), v) for v in self.values.listed(demand) or ()}
            found = sum(1 << i for i, v in enumerate(members.values) if (type(v), v) in wanted)
            self._chosen[number, demand] = found
        return found

    def _returns_member(self, must: int, distinct: Leaf, layout: Layout, left: int, result: int) -> int:
        if result == CLOSE:
            return self._result((must,))
        if result >= OPENED:
            return self._first((must,), self.values.layouts.all[result - OPENED])
        if not left >> (result - 1) & 1:
            return 0
        _, number, seen = distinct
        after = self.formulas.leaf("distinct", number, seen | 1 << (result - 1))
        return self._after((self._with_distinct(self._step(must, lambda asked: True), after),), layout)


class Members:
    """The values of a list that items are bound to: member i has bit i, strings before literals before numbers.

    Each string is the end of a trie, each number that of a ``NumberList``; the array's frame has a filter for those
    that are left. ``spellings``: the language of each number.
    """

    def __init__(self, values: Sequence[Scalar], spellings: tuple[int, ...]) -> None:
        self.names = tuple(v for v in values if isinstance(v, str))
        literals = tuple(v for v in values if v is None or isinstance(v, bool))
        numbers = tuple(v for v in values if isinstance(v, Decimal))
        self.values = (*self.names, *literals, *numbers)
        self.first_number = len(self.names) + len(literals)
        self.literals = [(i, json.dumps(v).encode()) for i, v in enumerate(literals, len(self.names))]
        ordered = sorted(self.names)  # a string stands right before those that begin with it
        self.has_prefixes = bool(numbers) or any(b.startswith(a) for a, b in pairwise(ordered))
        self._spellings = spellings
        self._states: tuple[NameTrie, NumberList] | None = None

    def states(self, machine: Machine) -> tuple[NameTrie, NumberList]:
        """The states of the strings and of the numbers, made the first time."""
        if self._states is None:
            trie = NameTrie(machine, 0, self.names)
            self._states = trie, NumberList(machine, self._spellings, self.first_number, trie.num_nodes + 1)
        return self._states

    def filter(self, left: int) -> int:
        """The frame filter that allows the members whose bits are set; ``states`` have been made."""
        assert self._states is not None
        trie, numbers = self._states
        names = left & ((1 << len(self.names)) - 1)
        if left == names and not numbers.num_states:
            return trie.filter(names, False)
        return trie.machine.add_filter(np.concatenate([trie.allowed(names), numbers.allowed(left)]))
