"""Boolean formulas, hash-consed: over schemas, and over conditions on arrays and objects.

A formula is an int; equal ints are equal formulas. Negations stand at leaves only. A formula of an array or object is
derived item by item, as a regular expression is derived byte by byte: each leaf asks a schema of the next item, the
answer turns the leaf into what it asks of the items after it, and at the closing bracket each leaf is true or false.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod

from ..fuel import Fuel
from ..spec import GrammarTooComplex

FALSE, TRUE = 0, 1
MAX_CLAUSES = 512
FEW_CASES = 8  # with more, ``some_clause`` first drops the alternatives that fail by themselves
SOME_CASES = 64  # of one alternative, before it does so within the alternative
Leaf = tuple  # ("kind", ...)
SignedLeaf = tuple[int, bool]  # a leaf's formula; False: the leaf is negated


def _too_many_cases(limit: int) -> GrammarTooComplex:
    return GrammarTooComplex(
        f"the schema's alternatives multiply to more than {limit:,} cases; give each branch of anyOf and oneOf "
        "a const or an enum that the others exclude, or use fewer branches"
    )


class _OutOfFuel(Exception):
    """``holds`` was asked too often."""


class Formulas:
    """The formulas of one set of schemas. ``fuel`` counts the work; ``max_formulas`` bounds the store."""

    def __init__(self, *, fuel: Fuel, max_formulas: int = 500_000) -> None:
        self.fuel = fuel
        self.max_formulas = max_formulas
        self.nodes: list[tuple] = [("or",), ("and",)]
        self._ids: dict[tuple, int] = {("or",): FALSE, ("and",): TRUE}
        self._negations: dict[int, int] = {FALSE: TRUE, TRUE: FALSE}
        self._clauses: dict[int, list[tuple[SignedLeaf, ...]]] = {}
        self._leaves: dict[tuple[int, ...], list[tuple[int, Leaf]]] = {}

    def _make(self, node: tuple) -> int:
        found = self._ids.get(node)
        if found is None:
            if len(self.nodes) >= self.max_formulas:
                raise GrammarTooComplex(f"the schema needs more than {self.max_formulas:,} formulas; use a smaller one")
            found = self._ids[node] = len(self.nodes)
            self.nodes.append(node)
        return found

    @property
    def is_half_full(self) -> bool:
        return 2 * len(self.nodes) > self.max_formulas

    def leaf(self, *data: object) -> int:
        return self._make(("leaf", data))

    def conjunction(self, parts: Iterable[int]) -> int:
        return self._join("and", parts, TRUE, FALSE)

    def disjunction(self, parts: Iterable[int]) -> int:
        return self._join("or", parts, FALSE, TRUE)

    def _join(self, op: str, parts: Iterable[int], unit: int, zero: int) -> int:
        flat: dict[int, None] = {}
        for part in parts:
            if part == unit:
                continue
            if part == zero:
                return zero
            node = self.nodes[part]
            if node[0] == op:
                for inner in node[1:]:
                    flat[inner] = None
            else:
                flat[part] = None
        if not flat:
            return unit
        if len(flat) == 1:
            return next(iter(flat))
        for part in flat:
            if self._negations.get(part, -1) in flat:
                return zero
        # absorption: a & (a | b) = a
        other = "or" if op == "and" else "and"
        nodes = self.nodes
        inner = [p for p in flat if nodes[p][0] == other]
        self.fuel.spend(len(flat) + sum([len(nodes[p]) for p in inner]))
        present = flat.keys()
        absorbed = [p for p in inner if not present.isdisjoint(nodes[p])]  # the name of an operator is no formula
        kept = present - absorbed if absorbed else present
        if len(kept) == 1:
            return next(iter(kept))
        return self._make((op, *sorted(kept)))

    def negation(self, formula: int) -> int:
        found = self._negations.get(formula)
        if found is None:
            node = self.nodes[formula]
            if node[0] == "and":
                found = self.disjunction([self.negation(p) for p in node[1:]])
            elif node[0] == "or":
                found = self.conjunction([self.negation(p) for p in node[1:]])
            else:
                found = self._make(("not", formula))
            self._negations[formula] = found
            self._negations[found] = formula
        return found

    def exactly_one(self, parts: Sequence[int]) -> int:
        if len(parts) > 64:
            raise GrammarTooComplex(
                f"oneOf with {len(parts)} branches that overlap (the limit is 64); give each a const of its own"
            )
        return self.disjunction(
            [
                self.conjunction([p, *[self.negation(q) for j, q in enumerate(parts) if j != i]])
                for i, p in enumerate(parts)
            ]
        )

    def replace(
        self,
        formula: int,
        change: Callable[[Leaf], int],
        change_negated: Callable[[Leaf], int] | None = None,
        is_kept: Callable[[int], bool] | None = None,
    ) -> int:
        """The formula with ``change(leaf)`` for every leaf; if given, ``change_negated(leaf)`` for negated ones.

        A part of which ``is_kept`` is true stays as it is.
        """
        known: dict[int, int] = {}

        def visit(at: int) -> int:
            found = known.get(at)
            if found is None and is_kept is not None and is_kept(at):
                found = known[at] = at
            if found is None:
                self.fuel.spend(1)
                node = self.nodes[at]
                match node[0]:
                    case "leaf":
                        found = change(node[1])
                    case "not" if change_negated is not None:
                        found = self.negation(change_negated(self.nodes[node[1]][1]))
                    case "not":
                        found = self.negation(visit(node[1]))
                    case "and":
                        found = self.conjunction([visit(p) for p in node[1:]])
                    case _:
                        found = self.disjunction([visit(p) for p in node[1:]])
                known[at] = found
            return found

        return visit(formula)

    def holds(self, formula: int, is_true: Callable[[Leaf], bool]) -> bool:
        """Whether the formula holds, given which leaves are true."""
        nodes = self.nodes
        known: dict[int, bool] = {}

        def visit(at: int) -> bool:
            found = known.get(at)
            if found is None:
                self.fuel.spend(1)
                node = nodes[at]
                match node[0]:
                    case "leaf":
                        found = is_true(node[1])
                    case "not":
                        found = not visit(node[1])
                    case "and":
                        found = all(map(visit, node[1:]))
                    case _:
                        found = any(map(visit, node[1:]))
                known[at] = found
            return found

        return visit(formula)

    def leaves(self, *formulas: int) -> list[tuple[int, Leaf]]:
        """Every leaf of the formulas, once, with its formula. The list is kept; callers leave it as it is."""
        found = self._leaves.get(formulas)
        if found is None:
            numbers = dict.fromkeys([leaf for leaf, _ in self.polarities(*formulas)])
            found = self._leaves[formulas] = [(leaf, self.nodes[leaf][1]) for leaf in numbers]
        return found

    def clauses(self, formula: int) -> list[tuple[SignedLeaf, ...]]:
        """The disjunctive normal form: the formula holds where all leaves of some clause do.

        Raises GrammarTooComplex for more than ``MAX_CLAUSES`` clauses.
        """
        found = self._clauses.get(formula)
        if found is None:
            node = self.nodes[formula]
            match node[0]:
                case "leaf" | "not":
                    found = [(self._literal(formula),)]
                case "or":
                    found = [clause for part in node[1:] for clause in self.clauses(part)]
                case _:
                    joined: list[dict[int, bool]] = [{}]
                    for part in sorted(node[1:], key=lambda p: len(self.clauses(p))):
                        options = self.clauses(part)
                        following = []
                        for clause in joined:
                            self.fuel.spend(len(options))
                            for option in options:
                                merged = dict(clause)
                                if all(merged.setdefault(leaf, sign) == sign for leaf, sign in option):
                                    following.append(merged)
                        joined = following
                        if len(joined) > MAX_CLAUSES:
                            break
                    found = [tuple(sorted(clause.items())) for clause in joined]
            found = list(dict.fromkeys(found))
            if len(found) > MAX_CLAUSES:
                raise _too_many_cases(MAX_CLAUSES)
            self._clauses[formula] = found
        return found

    def some_clause(self, formula: int, holds: Callable[[tuple[SignedLeaf, ...]], bool], *, fuel: int = 4096) -> bool:
        """Whether ``holds`` is true of any clause. Clauses are made one by one until one holds.

        ``holds`` must be monotone: if it is true of a clause, it is true of every part of the clause. So where many
        clauses fail, the parts of clauses that fail are not continued.
        Raises GrammarTooComplex where ``holds`` is asked more than ``fuel`` times.
        """
        budget = [fuel]

        def spend() -> None:
            budget[0] -= 1
            if budget[0] < 0:
                raise _OutOfFuel

        def is_held(chosen: dict[int, bool]) -> bool:
            spend()
            return holds(tuple(sorted(chosen.items())))

        def search(todo: tuple[int, ...], chosen: dict[int, bool], checks_parts: bool) -> bool:
            while todo:
                self.fuel.spend(1)
                at, todo = todo[0], todo[1:]
                node = self.nodes[at]
                if node[0] == "and":
                    single = [p for p in node[1:] if self.nodes[p][0] != "or"]
                    todo = (*single, *todo, *[p for p in node[1:] if self.nodes[p][0] == "or"])
                    continue
                if node[0] == "or":
                    options = node[1:]
                    if any(chosen.get(leaf) == sign for leaf, sign in map(self._literal, options)):
                        continue  # a chosen leaf makes this part true
                    if checks_parts and not is_held(chosen):
                        return False
                    return any(search((p, *todo), dict(chosen), checks_parts) for p in options)
                leaf, sign = self._literal(at)
                if chosen.setdefault(leaf, sign) != sign:
                    if not checks_parts:  # with it, what goes on has been held
                        spend()
                    return False
            return is_held(chosen)

        def search_within(most: int, at: int, checks_parts: bool) -> bool | None:
            """None where ``most`` questions do not tell."""
            left = budget[0]
            budget[0] = most = min(most, left)
            try:
                return search((at,), {}, checks_parts)
            except _OutOfFuel:
                return None
            finally:
                budget[0] = left - most + max(budget[0], 0)

        def is_some(at: int) -> bool:
            """Whether ``holds`` is true of any clause of an alternative."""
            found = search_within(SOME_CASES, at, True)
            return solve(at) if found is None else found

        def solve(at: int) -> bool:
            node = self.nodes[at]
            parts = node[1:] if node[0] == "and" else (at,)
            choices = [p for p in parts if self.nodes[p][0] == "or"]
            is_short = prod(len(self.nodes[p]) - 1 for p in choices) <= FEW_CASES
            if is_short and node[0] == "and":
                return search((at,), {}, False)
            found = search_within(FEW_CASES, at, False)
            if found is not None:
                return found
            if node[0] == "or":
                return any(map(is_some, node[1:]))
            certain = tuple(p for p in parts if self.nodes[p][0] != "or")
            alone = [
                self.disjunction([p for p in self.nodes[choice][1:] if search((*certain, p), {}, True)])
                for choice in choices
            ]
            left = self.conjunction([*certain, *alone])
            if left == FALSE:
                return False
            found = search_within(FEW_CASES, left, False)
            return search((left,), {}, True) if found is None else found

        try:
            return solve(formula)
        except _OutOfFuel:
            raise _too_many_cases(fuel) from None

    def _literal(self, formula: int) -> SignedLeaf:
        node = self.nodes[formula]
        return (node[1], False) if node[0] == "not" else (formula, True)

    def polarities(self, *formulas: int) -> list[SignedLeaf]:
        """Every leaf of the formulas, once for each sign it appears with."""
        found: dict[SignedLeaf, None] = {}
        stack, seen = list(reversed(formulas)), set()
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            node = self.nodes[at]
            if node[0] in ("and", "or"):
                stack.extend(reversed(node[1:]))
            else:
                found[self._literal(at)] = None
        return list(found)

    def parts(self, formula: int, op: str) -> tuple[int, ...]:
        """The parts of the formula if it is an ``op`` (``and`` or ``or``); otherwise the formula itself."""
        node = self.nodes[formula]
        return node[1:] if node[0] == op else (formula,)

    def without(self, formula: int, part: int) -> int:
        """A conjunction of leaves without one of them."""
        left = [p for p in self.parts(formula, "and") if p != part]
        return left[0] if len(left) == 1 else self._make(("and", *left))

    def positive_clause(self, formula: int) -> tuple[int, ...] | None:
        """The leaves of a conjunction of leaves without negations; None for any other formula."""
        node = self.nodes[formula]
        if node[0] == "leaf":
            return (formula,)
        if node[0] == "and" and all(self.nodes[p][0] == "leaf" for p in node[1:]):
            return node[1:]
        return None
