"""How many tokens a JSON text that has begun may still need at most, told by its schema.

It is known where every value is bounded: objects have only listed properties, arrays have one schema for each item, and
no schema refers to itself. A text that ends inside a property's value needs the rest of that value, the properties that
are required after it, and the closing bracket.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..rests import LONG_ESCAPE, Rest, rest_of
from ..spec import GrammarTooComplex
from .formulas import FALSE, TRUE
from .inner_values import Kind
from .layouts import UNITS
from .names import spelled
from .values import Values

MAX_FORMULAS = 500
OTHER_NAME = 8  # tokens of a name that is not listed, and of its colon
LITERAL = 5  # bytes of ``false``


class _Unknown(Exception):
    """Something in a value has no bound, or is none that is looked for."""


class _Value(NamedTuple):
    """Upper bounds in tokens, of the shortest text and of what any beginning needs, and the depth of its brackets."""

    least: int
    most: int
    depth: int


class Rests:
    """The rests of one ``Values``. ``costs_of(word)``: int32 [len(word) + 1], the tokens of each ``word[i:]``."""

    def __init__(self, values: Values, costs_of: Callable[[bytes], np.ndarray]) -> None:
        self._values = values
        self._costs_of = costs_of
        self._known: dict[tuple[int, int], _Value | None] = {}  # by formula and mark; None: it is being looked for
        self._names: dict[bytes, tuple[int, int]] = {}
        self._mark = 0
        self._left = 0

    def most(self, root: int) -> int | None:
        """The most tokens that a text which has begun needs, of the values that satisfy a formula; None: not known."""
        layouts = self._values.layouts
        try:
            found = self._bound(root, 0)
            if layouts.root is not layouts.plain:
                found = self._bound(root, self._mark_at(found.depth))
        except (_Unknown, GrammarTooComplex, RecursionError):
            return None
        finally:
            self._known.clear()
        return found.most

    def _bound(self, root: int, mark: int) -> _Value:
        self._mark, self._left = mark, MAX_FORMULAS
        return self._of(root)

    def _mark_at(self, depth: int) -> int:
        """The most tokens of what stands behind a bracket or a comma, and before a bracket, in any layout."""
        runs = [b"\n" + bytes([byte]) * (count * (depth + 1)) for byte, count in UNITS]
        return max(int(self._costs_of(run).max()) for run in runs)

    def _of(self, formula: int) -> _Value:
        key = (formula, self._mark)
        found = self._known.get(key)
        if found is None:
            if key in self._known or formula <= TRUE or self._left <= 0:
                raise _Unknown
            self._left -= 1
            self._known[key] = None
            values = self._values
            kinds = [kind for kind in values.kinds_of(formula) if values.satisfiable_kind(formula, kind)]
            found = self._known[key] = _either([self._of_kind(formula, kind) for kind in kinds])
        return found

    def _of_kind(self, formula: int, kind: Kind) -> _Value:
        values = self._values
        match kind:
            case "string":
                text = _known(rest_of(values.ex, values.expression(formula, kind), in_json=True))
                return _Value(text.least + 2, text.most + LONG_ESCAPE + 2, 0)
            case "number":
                number = _known(rest_of(values.ex, values.spelled_number(formula)))
                return _Value(number.least, number.most, 0)
            case "array":
                return _either(
                    [self._array(clause) for clause in values.formulas.clauses(values.expand(formula, kind))]
                )
            case "object":
                return self._objects(values.objects.completions.settled(values.expand(formula, kind)))
        return _Value(LITERAL, LITERAL, 0)

    def _arrays(self, formula: int) -> _Value:
        return _either([self._array(clause) for clause in self._values.formulas.clauses(formula)])

    def _array(self, clause: tuple[tuple[int, bool], ...]) -> _Value:
        nodes, arrays = self._values.formulas.nodes, self._values.arrays
        leaves = [nodes[part][1] for part, sign in clause if sign]
        if len(leaves) < len(clause) or any(leaf[0] not in ("items", "min", "max") for leaf in leaves):
            raise _Unknown
        low = max((leaf[1] for leaf in leaves if leaf[0] == "min"), default=0)
        high = min((leaf[1] for leaf in leaves if leaf[0] == "max"), default=-1)
        longest = max((len(leaf[1]) - leaf[3] for leaf in leaves if leaf[0] == "items"), default=0)
        items: list[_Value] = []
        while len(items) <= longest and len(items) != high:
            demand = arrays.demand_at(leaves, len(items))
            if demand == FALSE or not self._values.satisfiable(demand):
                break
            items.append(self._of(demand))
        if len(items) < min(low, longest + 1):
            raise _Unknown  # no array satisfies the clause
        of_least = [items[min(i, longest)].least for i in range(low)]
        return self._bracket(of_least, [item.most for item in items], [item.depth for item in items])

    def _bracket(self, needed: list[int], most: list[int], depths: list[int]) -> _Value:
        """A bracket of parts: the least tokens of those that it needs, the most of any part, and their depths."""
        least = 2 + self._mark + sum(needed) + len(needed) * (1 + self._mark)
        return _Value(least, least + 1 + self._mark + max(most, default=0), 1 + max(depths, default=0))

    def _objects(self, formula: int) -> _Value:
        values = self._values
        completions, properties = values.objects.completions, values.objects.properties
        partition = properties.partition((formula,))
        found: list[_Value] = []
        for literals in values.formulas.clauses(formula):
            clause = completions.clause(partition, literals)
            num_needed = clause.needed.bit_count()
            if clause.broken or not clause.rules or partition.patterns or clause.low > num_needed:
                raise _Unknown
            needed, most, depths = [], [], []
            for cls in (0, *range(1, len(partition.names) + 1)):
                demand = completions.demanded(partition, clause.rules, cls)
                is_needed = cls > 0 and bool(clause.needed >> (cls - 1) & 1)
                if demand == FALSE or not values.satisfiable(demand):
                    if is_needed:
                        break
                    continue
                value = self._of(demand)
                name = partition.name_of(cls)
                cost, most_cost = (OTHER_NAME, OTHER_NAME) if name is None else self._name(spelled(name))
                if is_needed:
                    needed.append(cost + value.least)
                most.append(most_cost + value.most)
                depths.append(value.depth)
            if len(needed) == num_needed:  # else no object satisfies the clause
                found.append(self._bracket(needed, most, depths))
        return _either(found)

    def _name(self, name: bytes) -> tuple[int, int]:
        """The tokens of a name with its quotes and the colon, and the most that one needs from anywhere in it."""
        found = self._names.get(name)
        if found is None:
            costs = self._costs_of(name + b'":')
            found = self._names[name] = int(costs[0]) + 1, int(costs.max()) + 1
        return found


def _known(rest: Rest | None) -> Rest:
    if rest is None:
        raise _Unknown
    return rest


def _either(found: list[_Value]) -> _Value:
    if not found:
        raise _Unknown
    return _Value(min(v.least for v in found), max(v.most for v in found), max(v.depth for v in found))
