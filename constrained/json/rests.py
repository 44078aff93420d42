"""How many tokens a JSON text that has begun may still need at most, and how many one token adds, told by its schema.

The first number is known where every value is bounded: objects have only listed properties, arrays have one schema for
each item, and no schema refers to itself. A text that ends inside a property's value needs the rest of that value, the
properties that are required after it, and the closing bracket.

The second number is the length of the longest part that one token may begin: a property that is not required, one
more item, a longer branch. One token may begin several values, one inside the other, as ``":[{"`` does: what up to
``LEVELS`` of them need is added up.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ..expressions import NO_TEXT
from ..rests import LONG_ESCAPE, NOT_KNOWN, Bounds, Rest, rest_of
from ..spec import GrammarTooComplex
from .formulas import FALSE, TRUE
from .inner_values import Kind
from .layouts import UNITS
from .names import spelled
from .values import Values

MAX_FORMULAS = 500
MAX_DEPTH = 8  # of brackets, as far as white space is counted where schemas refer to themselves
LEVELS = 3
OTHER_NAME = 8  # tokens of a name that is not listed, and of its colon
LITERAL = 5  # bytes of ``false``


class _Part(NamedTuple):
    """A value inside a bracket, or ``times`` equal ones. ``name``: the tokens of its name; ``most_name``: the most that
    the rest of the name takes, wherever in the name a token ends."""

    formula: int
    name: int = 0
    most_name: int = 0
    times: int = 1


class _Way(NamedTuple):
    """The values of one kind that satisfy one clause. In tokens, and without its parts: the length of the shortest
    text, the most that a text needs once it has begun, and the most that a choice inside it adds. Of the ``parts`` that
    a value may have, some are ``needed`` and others only ``allowed``."""

    least: int
    most: int
    added: int = 0
    is_bracket: bool = False
    parts: tuple[_Part, ...] = ()
    needed: tuple[_Part, ...] = ()
    allowed: tuple[_Part, ...] = ()


_ANY = (_Way(LITERAL, LITERAL), _Way(OTHER_NAME + 4, OTHER_NAME + 4))  # one token may begin a name


class Rests:
    """The rests of one ``Values``. ``costs_of(word)``: int32 [len(word) + 1], the tokens of each ``word[i:]``."""

    def __init__(self, values: Values, costs_of: Callable[[bytes], np.ndarray]) -> None:
        self._values = values
        self._costs_of = costs_of
        self._ways: dict[int, tuple[_Way, ...]] = {}  # by formula; parts come before what they are parts of
        self._reading: set[int] = set()
        self._names: dict[bytes, tuple[int, int]] = {}
        self._rests: dict[tuple[int, bool], Rest | None] = {}
        self._is_bounded = True

    def bounds(self, root: int) -> Bounds:
        """Of the texts of the values that satisfy a formula."""
        layouts = self._values.layouts
        try:
            self._read(root)
        except (GrammarTooComplex, RecursionError):
            return NOT_KNOWN
        mark = 0 if layouts.root is layouts.plain else self._mark_at(self._depth(root))
        least = self._least(mark)
        most = self._most(root, least, mark) if self._is_bounded else None
        begun = self._begun(least, mark)
        return Bounds(most, self._added(least, begun, mark), begun[root])

    # -- the values of a schema ---------------------------------------------------------------------------------------

    def _read(self, formula: int) -> None:
        """Find the ways of a formula and of all that it refers to."""
        if formula in self._ways:
            return
        if formula in self._reading:
            self._is_bounded = False
            return
        if formula <= TRUE or len(self._reading) + len(self._ways) >= MAX_FORMULAS:
            self._is_bounded = False
            self._ways[formula] = () if formula == FALSE else _ANY
            return
        self._reading.add(formula)
        values = self._values
        kinds = [kind for kind in values.kinds_of(formula) if values.satisfiable_kind(formula, kind)]
        ways = tuple([way for kind in kinds for way in self._ways_of(formula, kind)])
        for way in ways:
            for part in (*way.parts, *way.needed):
                self._read(part.formula)
        self._reading.discard(formula)
        self._ways[formula] = ways
        self._is_bounded &= bool(ways)

    def _ways_of(self, formula: int, kind: Kind) -> list[_Way]:
        values = self._values
        match kind:
            case "string":
                expr = values.expression(formula, kind)
                rest = self._rest(expr, values.ex.at_least(expr), in_json=True)
                return [_Way(rest.least + 2, rest.most + LONG_ESCAPE + 2, rest.added)]
            case "number":
                number = self._rest(values.spelled_number(formula), 1, in_json=False)
                return [_Way(number.least, number.most, number.added)]
            case "array":
                clauses = values.formulas.clauses(values.expand(formula, kind))
                return [way for clause in clauses if (way := self._array(clause)) is not None]
            case "object":
                return self._objects(values.objects.completions.settled(values.expand(formula, kind)))
        return [_Way(LITERAL, LITERAL)]

    def _rest(self, expr: int, least: int, *, in_json: bool) -> Rest:
        key = (expr, in_json)
        if key not in self._rests:
            self._rests[key] = rest_of(self._values.ex, expr, in_json=in_json)
        found = self._rests[key]
        self._is_bounded &= found is not None
        return Rest(least, least, least, 1) if found is None else found

    def _array(self, clause: tuple[tuple[int, bool], ...]) -> _Way | None:
        """None where no array satisfies the clause, as far as that is looked at."""
        nodes, arrays = self._values.formulas.nodes, self._values.arrays
        leaves = [nodes[part][1] for part, sign in clause if sign]
        self._is_bounded &= len(leaves) == len(clause) and all(leaf[0] in ("items", "min", "max") for leaf in leaves)
        low = max((leaf[1] for leaf in leaves if leaf[0] == "min"), default=0)
        high = min((leaf[1] for leaf in leaves if leaf[0] == "max"), default=-1)
        longest = max((len(leaf[1]) - leaf[3] for leaf in leaves if leaf[0] == "items"), default=0)
        items: list[int] = []
        while len(items) <= longest and len(items) != high:
            demand = arrays.demand_at(leaves, len(items))
            if demand == FALSE or not self._values.satisfiable(demand):
                break
            items.append(demand)
        if len(items) < min(low, longest + 1):
            self._is_bounded = False
            return None
        needed = list(map(_Part, items[:low]))
        if low > len(items):
            needed[-1] = _Part(items[-1], times=low - len(items) + 1)
        needed += [_Part(leaf[1], times=leaf[2]) for leaf in leaves if leaf[0] == "contains" and leaf[2] > 0]
        allowed = [] if low == high else items[low:] or items[-1:]
        return _bracket(map(_Part, items), needed, map(_Part, allowed))

    def _objects(self, formula: int) -> list[_Way]:
        values = self._values
        completions, properties = values.objects.completions, values.objects.properties
        partition = properties.partition((formula,))
        found: list[_Way] = []
        for literals in values.formulas.clauses(formula):
            clause = completions.clause(partition, literals)
            num_more = clause.low - clause.needed.bit_count()
            if clause.broken or not clause.rules or partition.patterns or num_more > 0:
                self._is_bounded = False
            needed: list[_Part] = []
            allowed: list[_Part] = []
            for cls in (*properties.other_classes(partition), *range(1, len(partition.names) + 1)):
                demand = completions.demanded(partition, clause.rules, cls) if clause.rules else TRUE
                is_needed = 1 <= cls <= len(partition.names) and bool(clause.needed >> (cls - 1) & 1)
                if demand == FALSE or not values.satisfiable(demand):
                    if is_needed:
                        break
                    continue
                name = partition.name_of(cls)
                costs = (OTHER_NAME, OTHER_NAME) if name is None else self._name(spelled(name))
                (needed if is_needed else allowed).append(_Part(demand, *costs))
            else:
                parts = (*needed, *allowed)
                if num_more > 0 and allowed:
                    needed.append(allowed[0]._replace(times=num_more))
                found.append(_bracket(parts, needed, allowed))
        return found

    def _name(self, name: bytes) -> tuple[int, int]:
        """The tokens of a name with its quotes and the colon, and the most that one needs from anywhere in it."""
        found = self._names.get(name)
        if found is None:
            costs = self._costs_of(name + b'":')
            found = self._names[name] = int(costs[0]) + 1, int(costs.max()) + 1
        return found

    # -- the bounds ---------------------------------------------------------------------------------------------------

    def _depth(self, root: int) -> int:
        """How deep brackets nest; ``MAX_DEPTH`` at most where schemas refer to themselves."""
        depths = dict.fromkeys(self._ways, 0)
        for _ in range(1 if self._is_bounded else MAX_DEPTH):
            for formula, ways in self._ways.items():
                inner = [max((depths[part.formula] for part in way.parts), default=0) for way in ways if way.is_bracket]
                depths[formula] = 1 + max(inner) if inner else 0
        return depths[root] if self._is_bounded else min(depths[root], MAX_DEPTH)

    def _mark_at(self, depth: int) -> int:
        """The most tokens of what stands behind a bracket or a comma, and before a bracket, in any layout."""
        runs = [b"\n" + bytes([byte]) * (count * (depth + 1)) for byte, count in UNITS]
        return max(int(self._costs_of(run).max()) for run in runs)

    def _least(self, mark: int) -> dict[int, int]:
        """The tokens of the shortest text of each formula; ``mark``: those of white space."""
        least = dict.fromkeys(self._ways, NO_TEXT)
        is_changed = True
        while is_changed:
            is_changed = False
            for formula, ways in self._ways.items():
                found = min([_least_of(way, least, mark) for way in ways], default=NO_TEXT)
                is_changed |= found < least[formula]
                least[formula] = found
        return least

    def _most(self, root: int, least: dict[int, int], mark: int) -> int:
        """The most that any beginning needs."""
        most: dict[int, int] = {}
        for formula, ways in self._ways.items():
            most[formula] = max(
                way.most
                if not way.is_bracket
                else _least_of(way, least, mark)
                + (1 + mark + max([part.most_name + most[part.formula] for part in way.parts], default=0))
                for way in ways
            )
        return most[root]

    def _begun(self, least: dict[int, int], mark: int) -> dict[int, int]:
        """The most that a value of each formula needs after the token that begins it, which may also begin values
        inside it."""
        begun = {formula: count if count < NO_TEXT else 0 for formula, count in least.items()}
        for _ in range(LEVELS):
            begun = {
                formula: max([self._begun_of(way, least, begun, mark) for way in ways], default=0)
                for formula, ways in self._ways.items()
            }
        return begun

    def _begun_of(self, way: _Way, least: dict[int, int], begun: dict[int, int], mark: int) -> int:
        shortest = _least_of(way, least, mark)
        if shortest >= NO_TEXT:
            return 0
        more = [begun[part.formula] - least[part.formula] for part in way.needed]
        return shortest + max([way.added, *more, self._more(way, begun, mark)])

    def _added(self, least: dict[int, int], begun: dict[int, int], mark: int) -> int:
        """The most that one token may add to what a text needs."""
        added = [begun[f] - (least[f] if len(ways) == 1 else 0) for f, ways in self._ways.items()]
        added += [self._more(way, begun, mark) for ways in self._ways.values() for way in ways]
        return max(added, default=0)

    def _more(self, way: _Way, begun: dict[int, int], mark: int) -> int:
        """The most that a part adds which the value does not need."""
        return max([1 + mark + part.name + begun[part.formula] for part in way.allowed], default=0)


def _least_of(way: _Way, least: dict[int, int], mark: int) -> int:
    if not way.is_bracket:
        return way.least
    parts = sum(part.times * (part.name + least[part.formula] + 1 + mark) for part in way.needed)
    return min(way.least + mark + parts, NO_TEXT)


def _bracket(parts: Iterable[_Part], needed: Iterable[_Part], allowed: Iterable[_Part]) -> _Way:
    return _Way(2, 2, 0, True, tuple(parts), tuple(needed), tuple(allowed))
