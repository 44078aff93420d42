"""Whether an object can be completed, and which next properties keep it so."""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

from ..spec import GrammarTooComplex
from .formulas import FALSE, TRUE, Leaf, SignedLeaf
from .inner_values import InnerValues
from .properties import NamePartition, Properties

MAX_PLACINGS = 5_000
MANY = 1 << 30  # as an upper count: none


class ObjectContext(NamedTuple):
    """An object between two properties.

    ``formulas`` are what must hold, then the observers; ``seen`` has the bits of the names that may not come any more.
    """

    partition: NamePartition
    seen: int
    formulas: tuple[int, ...]


@dataclass(slots=True)
class Clause:
    """What a clause asks of the properties to come: each keeps all rules; each rule in ``broken`` is broken by one."""

    rules: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    needed: int = 0  # bits of required names
    banned: int = 0  # bits of forbidden names
    low: int = 0  # least number of properties
    high: int = MANY  # greatest number of properties


class Completions:
    """The questions about objects of one ``Values``. States are made by ``Objects``."""

    def __init__(self, values: InnerValues, properties: Properties) -> None:
        self.values = values
        self.ex = values.ex
        self.formulas = values.formulas
        self.properties = properties
        self._plains: dict[tuple[NamePartition, int], Clause | None] = {}
        self._possible: dict[tuple[NamePartition, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
        self._demands: dict[tuple[ObjectContext, int], tuple[int, tuple[int, ...]]] = {}
        self._settled: dict[int, int] = {}
        self._sure_breaks: dict[tuple[int, int], bool] = {}
        self._allowed_names: dict[tuple[NamePartition, int, int], tuple[int, frozenset[int]]] = {}
        self._rule_demands: dict[tuple[NamePartition, tuple[int, ...], int], int] = {}

    # -- whole objects --------------------------------------------------------------------------------------------

    def settled(self, formula: int) -> int:
        """An equivalent formula without the negations that always hold.

        A ``oneOf`` whose branches a required property tells apart becomes the disjunction of its branches.
        """
        found = self._settled.get(formula)
        if found is None:
            found = self._settled[formula] = self._settle(formula)
        return found

    def _settle(self, formula: int) -> int:
        formulas = self.formulas
        nodes = formulas.nodes
        if not any(not sign and nodes[p][1][0] == "props" for p, sign in formulas.polarities(formula)):
            return formula
        partition = self.properties.partition((formula,))
        parts = formulas.parts(formula, "and")
        certain = [p for p in parts if nodes[p][0] == "leaf"]
        settled = []
        for part in parts:
            options = formulas.parts(part, "or")
            settled.append(formulas.disjunction([self._without_sure_breaks(p, certain, partition) for p in options]))
        return formulas.conjunction(settled)

    def _without_sure_breaks(self, formula: int, certain: list[int], partition: NamePartition) -> int:
        """The formula without the negated rules that its required properties break, given ``certain`` leaves."""
        nodes = self.formulas.nodes
        leaves = {*certain, *(p for p in self.formulas.parts(formula, "and") if nodes[p][0] == "leaf")}
        clause = self.clause(partition, tuple((p, True) for p in sorted(leaves)))
        rules, used = clause.rules, classes_of(clause.needed)

        def change_negated(leaf: Leaf) -> int:
            found = self.formulas.leaf(*leaf)
            is_broken = leaf[0] == "props" and self._is_sure_to_be_broken(found, partition, rules, used)
            return FALSE if is_broken else found

        return self.formulas.replace(formula, lambda leaf: self.formulas.leaf(*leaf), change_negated)

    def is_alive_at_start(self, formula: int) -> bool:
        """Whether any object satisfies the formula."""
        if formula <= TRUE:
            return formula == TRUE
        formula = self.settled(formula)
        return self.is_alive(self.properties.partition((formula,)), 0, formula)

    def is_alive(self, partition: NamePartition, seen: int, formula: int) -> bool:
        """Whether the object can be completed from here."""
        if formula == FALSE:
            return False
        if formula == TRUE or self.properties.ends(formula):
            return True
        key = ("object", partition, seen, formula)
        return self.values.prove(
            key, lambda: self.formulas.some_clause(formula, lambda c: self._clause_is_alive(partition, seen, c))
        )

    def clause(self, partition: NamePartition, literals: tuple[SignedLeaf, ...]) -> Clause:
        out = Clause()
        for formula, is_positive in literals:
            leaf = self.formulas.nodes[formula][1]
            match leaf[0], is_positive:
                case (("props" | "names"), True):
                    out.rules += (formula,)
                case (("props" | "names"), False):
                    out.broken += (formula,)
                case "has", True:
                    out.needed |= 1 << partition.index[leaf[1]]
                case "has", False:
                    out.banned |= 1 << partition.index[leaf[1]]
                case ("minp", True) | ("maxp", False):
                    out.low = max(out.low, leaf[1] if is_positive else leaf[1] + 1)
                case ("maxp", True) | ("minp", False):
                    out.high = min(out.high, leaf[1] if is_positive else leaf[1] - 1)
        return out

    def _clause_is_alive(self, partition: NamePartition, seen: int, literals: tuple[SignedLeaf, ...]) -> bool:
        clause = self.clause(partition, literals)
        rules = clause.rules
        self.formulas.fuel.spend(len(literals) + len(rules) + len(clause.broken))
        if clause.needed & (seen | clause.banned) or clause.needed.bit_count() > clause.high:
            return False
        used = classes_of(clause.needed)
        if not all(self._fits(partition, rules, cls) for cls in used):
            return False
        if not clause.broken and clause.low <= len(used):
            return True
        # A rule is broken by a required property or by an additional one.
        unseen = self.properties.unseen_classes(partition, seen | clause.banned | clause.needed)
        broken = [rule for rule in clause.broken if not self._is_sure_to_be_broken(rule, partition, rules, used)]
        if clause.low <= len(used) and self._break_greedily(broken, partition, rules, used, unseen, clause.high):
            return True
        free = [cls for cls in unseen if self._fits(partition, rules, cls)]
        wanted = []
        for rule in broken:
            asks = [(cls, self._asked(rule, partition, cls)) for cls in (*used, *free)]
            ways = [(cls, asked) for cls, asked in asks if self._can_break(self.demanded(partition, rules, cls), asked)]
            if not ways:
                return False
            wanted.append([(cls, self.formulas.negation(asked)) for cls, asked in ways])
        wanted.sort(key=len)
        has_others = bool(free) and partition.name_of(free[-1]) is None  # other names: any number of properties
        most = min(clause.high, MANY if has_others else len(used) + len(free))
        return clause.low <= most and self._can_place(partition, rules, wanted, most, frozenset(used))

    def _can_place(
        self,
        partition: NamePartition,
        rules: tuple[int, ...],
        wanted: list[list[tuple[int, int]]],
        most: int,
        used: frozenset[int],
    ) -> bool:
        """Whether at most ``most`` properties, one of each class in ``used`` among them, break what has to be broken.

        ``wanted`` has for each rule the classes that can break it, each with what its value must satisfy for that.
        """
        conjunction = self.formulas.conjunction
        num_tried = 0

        def place(at: int, used: frozenset[int], extra: dict[int, int]) -> bool:
            nonlocal num_tried
            if len(used) > most:
                return False
            if at == len(wanted):
                return True
            num_tried += 1
            if num_tried > MAX_PLACINGS:
                raise GrammarTooComplex(
                    f"an object can violate several negated schemas in more than {MAX_PLACINGS:,} ways; "
                    "use fewer negations (not, oneOf, if) of object schemas"
                )
            for cls, breaking in wanted[at]:
                further = conjunction([extra.get(cls, TRUE), breaking])
                demand = conjunction([self.demanded(partition, rules, cls), further])
                if breaking != TRUE and not self.values.satisfiable(demand):
                    continue
                if place(at + 1, used | {cls}, {**extra, cls: further}):
                    return True
            return False

        return place(0, used, {})

    def _break_greedily(
        self,
        broken: list[int],
        partition: NamePartition,
        rules: tuple[int, ...],
        used: list[int],
        free: list[int],
        most: int,
    ) -> bool:
        """Whether a greedy choice breaks all rules: each by the first property that can still break it."""
        extra: dict[int, int] = {}
        conjunction = self.formulas.conjunction
        for rule in broken:
            for cls in (*used, *free):
                self.formulas.fuel.spend(1)
                asked = self._asked(rule, partition, cls)
                demand = self.demanded(partition, rules, cls)
                if self._can_break(conjunction([demand, extra[cls]]) if cls in extra else demand, asked):
                    extra[cls] = conjunction([extra.get(cls, TRUE), self.formulas.negation(asked)])
                    break
            else:
                return False
        return len(extra.keys() | used) <= most

    def _is_sure_to_be_broken(
        self, rule: int, partition: NamePartition, rules: tuple[int, ...], used: list[int]
    ) -> bool:
        """Whether every value of some required property breaks the rule."""
        for cls in used:
            key = (self.demanded(partition, rules, cls), self._asked(rule, partition, cls))
            found = self._sure_breaks.get(key)
            if found is None:
                found = self.values.is_surely_impossible(self.formulas.conjunction(key))
                self._sure_breaks[key] = found
            if found:
                return True
        return False

    def _can_break(self, demand: int, asked: int) -> bool:
        """Whether some value satisfies ``demand`` and not ``asked``."""
        formulas = self.formulas

        def rule() -> bool:
            return self.values.satisfiable(formulas.conjunction([demand, formulas.negation(asked)]))

        return self.values.prove(("breaks", demand, asked), rule)

    def _asked(self, rule: int, partition: NamePartition, cls: int) -> int:
        """The schema that a rule on names or values asks of a property's value; FALSE if the rule forbids the name."""
        leaf = self.formulas.nodes[rule][1]
        if leaf[0] != "names":
            return self.properties.asked(leaf, partition, cls)
        return TRUE if self.properties.matches(self.values.expression(leaf[1], "string"), partition, cls) else FALSE

    def demanded(self, partition: NamePartition, rules: tuple[int, ...], cls: int) -> int:
        """The formula that rules on names and values together ask of a property's value."""
        if len(rules) == 1:
            return self._asked(rules[0], partition, cls)
        key = (partition, rules, cls)
        found = self._rule_demands.get(key)
        if found is None:
            found = self._rule_demands[key] = self.formulas.conjunction(
                [self._asked(rule, partition, cls) for rule in rules]
            )
        return found

    def _fits(self, partition: NamePartition, rules: tuple[int, ...], cls: int) -> bool:
        """Whether the rules allow a property of this class with some value."""
        return self.values.satisfiable(self.demanded(partition, rules, cls))

    # -- the next property ----------------------------------------------------------------------------------------

    def demand(self, context: ObjectContext, cls: int) -> tuple[int, tuple[int, ...]]:
        """What the value of a property of this class must satisfy, and the schemas that observe it."""
        key = (context, cls)
        found = self._demands.get(key)
        if found is not None:
            return found
        formulas = self.formulas
        partition, must = context.partition, context.formulas[0]
        certain: set[int] = set()
        if formulas.positive_clause(must) is not None:
            seen = self.properties.seen_after(partition, context.seen, cls)
            certain = self._asked_by(partition, cls, must)
            is_alive = self.is_alive(partition, seen, self.properties.step(must, partition, context.seen, cls, None))
            demand = formulas.conjunction(certain) if is_alive else FALSE
            observed = self._asked_by(partition, cls, *context.formulas[1:]) - certain
        else:
            demand = self._weakest_demand(context, cls)
            observed = self._asked_by(partition, cls, *context.formulas)
        if not self.values.satisfiable(demand):
            demand = FALSE
        found = self._demands[key] = demand, tuple(sorted(observed))
        return found

    def _asked_by(self, partition: NamePartition, cls: int, *formulas: int) -> set[int]:
        asked = {self.properties.asked(leaf, partition, cls) for _, leaf in self.formulas.leaves(*formulas)}
        return asked - {TRUE, FALSE}

    def _weakest_demand(self, context: ObjectContext, cls: int) -> int:
        """The weakest condition on the next property's value after which the object can still be completed."""
        formulas, properties = self.formulas, self.properties
        partition, before, must = context.partition, context.seen, context.formulas[0]
        seen = properties.seen_after(partition, before, cls)

        def is_alive(true: Set[int], unknown: Set[int], at_worst: bool) -> bool:
            either = true | unknown
            after = properties.step(must, partition, before, cls, *((true, either) if at_worst else (either, true)))
            return self.is_alive(partition, seen, after)

        parts = formulas.parts(must, "and")
        changed = [p for p in parts if not properties.is_unchanged(partition, cls, p)]
        rest = [p for p in parts if properties.is_unchanged(partition, cls, p)]
        signs = formulas.polarities(*changed)
        asked = self._asked_by(partition, cls, *changed)
        if any(formulas.nodes[p][1][0] == "props" and not sign for p, sign in signs):
            return self.values.weakest(sorted(asked), is_alive, "one property")
        if is_alive(set(), asked, True):
            return TRUE
        # only what asks something of the value is multiplied out
        asking = [p for p in changed if self._asked_by(partition, cls, p)]
        rest += [p for p in changed if p not in asking]
        demands = []
        for clause in formulas.clauses(formulas.conjunction(asking)):
            chosen = formulas.conjunction([p if sign else formulas.negation(p) for p, sign in clause])
            whole = formulas.conjunction([chosen, *rest])
            if self.is_alive(partition, seen, properties.step(whole, partition, before, cls, None)):
                demands.append(formulas.conjunction(self._asked_by(partition, cls, chosen)))
        return formulas.disjunction(demands)

    def allowed_demand(self, context: ObjectContext, cls: int) -> tuple[int, tuple[int, ...]]:
        """As ``demand``, for a class that ``allowed`` has returned: for plain objects without the checks."""
        plain = self._plain(context.partition, context.formulas[0])
        if plain is None or len(context.formulas) > 1:
            return self.demand(context, cls)
        return self.demanded(context.partition, plain.rules, cls), ()

    def num_values(self, formula: int, most: int, count: Callable[[int, int], int]) -> int:
        """A lower bound of how many objects satisfy a formula that one does, at most ``most``.

        ``count(formula, most)`` is the same of the properties' values.
        """
        if self.has_free_names(formula):
            return most
        formula = self.settled(formula)
        partition = self.properties.partition((formula,))
        found = 1
        for option in self._alternatives(formula):
            plain = self._plain(partition, option)
            if plain is not None and found < most:
                found = max(found, self._num_plain(partition, plain, most, count))
        if self._plain(partition, formula) is None:
            for demand in self.demands_at_start(formula):
                found = max(found, count(demand, most)) if found < most else most
        return found

    def _num_plain(self, partition: NamePartition, plain: Clause, most: int, count: Callable[[int, int], int]) -> int:
        """As ``num_values``, of a conjunction without negations."""
        possible, others = self._possible_of(partition, plain.rules)
        least, room = plain.needed.bit_count(), plain.high
        if plain.needed & ~possible or max(least, plain.low) > room:
            return 0
        if 0 in others and room > least:
            return most
        product = 1
        for cls in classes_of(plain.needed):
            if product < most:
                product = min(most, product * count(self.demanded(partition, plain.rules, cls), most))
        of_size = [0] * least + [product]  # so many objects, by their number of properties

        def with_one_more(values: int) -> list[int]:
            """``of_size`` where one more name may be there, with so many values."""
            pairs = zip([*of_size, 0], [0, *of_size], strict=True)
            return [min(most, without + values * less) for without, less in pairs][: room + 1]

        def total() -> int:
            return min(most, sum(of_size[plain.low :]))

        for cls in (*classes_of(possible & ~plain.needed), *others):
            if total() < most:
                values = count(self.demanded(partition, plain.rules, cls), most)
                is_listed = partition.name_of(cls) is not None
                enough = most + plain.low
                others_of = self.properties.other_names
                for _ in range(1 if is_listed else self.ex.num_texts(others_of(partition, cls), enough)):
                    of_size = with_one_more(values)
                    if total() >= most:
                        break
        return total()

    def num_distinct(self, context: ObjectContext) -> int:
        """How many names from here on have to differ, where names that are not listed may come; where all of them have
        to, 2: this one and the next. 0 on machines that do not compare names."""
        found = self.properties.num_counted(context.formulas) if self.values.machine.compares_names else 0
        found = max(found, 2 * context.partition.all_differ)
        plain = self._plain(context.partition, context.formulas[0]) if found else None
        return found if plain is None or self._possible_of(context.partition, plain.rules)[1] else 0

    def demands_at_start(self, formula: int) -> Iterator[int]:
        """The conditions on the values of the listed properties that may come first."""
        context = self._start(formula)
        names, _ = self.allowed(context)
        return (self.allowed_demand(context, cls)[0] for cls in classes_of(names))

    def has_free_names(self, formula: int) -> bool:
        """Whether the first property may have a name of class 0, of which there are any number."""
        return 0 in self.allowed(self._start(formula))[1]

    def _start(self, formula: int) -> ObjectContext:
        formula = self.settled(formula)
        return ObjectContext(self.properties.partition((formula,)), 0, (formula,))

    def allowed(self, context: ObjectContext) -> tuple[int, tuple[int, ...]]:
        """The listed names that may come next, as bits, and the other classes that may."""
        fast = self._allowed_plain(context)
        if fast is not None:
            return fast
        names, others = self._allowed(context.partition, context.seen, context.formulas[0])
        return names, tuple(cls for cls in self.properties.other_classes(context.partition) if cls in others)

    def _allowed(self, partition: NamePartition, seen: int, formula: int) -> tuple[int, frozenset[int]]:
        """As ``allowed``, for a formula that some object may satisfy or not."""
        key = (partition, seen, formula)
        found = self._allowed_names.get(key)
        if found is None:
            found = self._allowed_names[key] = self._find_allowed(partition, seen, formula)
        return found

    def _find_allowed(self, partition: NamePartition, seen: int, formula: int) -> tuple[int, frozenset[int]]:
        names, others = 0, frozenset[int]()
        unsure: list[ObjectContext] = []  # alternatives that may allow more than was found
        for option in self._alternatives(formula):
            clause = self._alive_clause(partition, seen, option)
            if clause is None:
                continue
            context = ObjectContext(partition, seen, (option,))
            fast = self._allowed_plain(context)
            if fast is None:
                unsure.append(context)
            more_names, more_others = fast or self._allowed_beside(context, clause)
            names, others = names | more_names, others.union(more_others)
        for cls in self.properties.unseen_classes(partition, seen):
            name = partition.name_of(cls)
            for context in unsure:
                if cls in others or (name is not None and names >> (cls - 1) & 1):
                    break
                if name is None:
                    if self.demand(context, cls)[0] != FALSE:
                        others |= {cls}
                    continue
                before = seen if self.properties.any_order else seen | (1 << (cls - 1)) - 1
                with_name = self.properties.with_name(context.formulas[0], partition, cls)
                clause = self._alive_clause(partition, before, with_name)
                if clause is not None:
                    more_names, more_others = self._allowed_beside(context, clause)
                    names, others = names | more_names | 1 << (cls - 1), others.union(more_others)
        return names, others

    def _alternatives(self, formula: int) -> list[int]:
        """Formulas of which one holds where the formula does: of a conjunction with one disjunction, its parts."""
        formulas = self.formulas
        found, todo = [], [formula]
        while todo:
            at = todo.pop()
            parts = formulas.parts(at, "and")
            choices = [p for p in parts if formulas.nodes[p][0] == "or"]
            if len(choices) != 1:
                found.append(at)
                continue
            rest = [p for p in parts if p != choices[0]]
            todo += [formulas.conjunction([option, *rest]) for option in formulas.parts(choices[0], "or")]
        return found

    def _alive_clause(self, partition: NamePartition, seen: int, formula: int) -> Clause | None:
        """A clause of the formula that an object can satisfy from here; None if there is none."""
        found: list[Clause] = []

        def holds(literals: tuple[SignedLeaf, ...]) -> bool:
            if self._clause_is_alive(partition, seen, literals):
                found.append(self.clause(partition, literals))
                return True
            return False

        return found[-1] if self.formulas.some_clause(formula, holds) else None

    def _allowed_beside(self, context: ObjectContext, clause: Clause) -> tuple[int, tuple[int, ...]]:
        """Listed names, as bits, and other classes of which a property leaves a clause alive that is alive without it.

        Those are the ones that the clause's rules allow, if the clause does not count properties; in the schema's
        order, those that come before what the clause needs.
        """
        if clause.high < MANY or (clause.low and not self.properties.any_order):
            return 0, ()
        possible, others = self._possible_of(context.partition, clause.rules)
        names = possible & ~(context.seen | clause.banned)
        if self.properties.any_order:
            return names, others
        if clause.broken:
            return 0, ()
        first = clause.needed & -clause.needed
        return (names & ((first << 1) - 1), ()) if first else (names, others)

    # -- conjunctions without negations, by a few operations on bits ----------------------------------------------

    def _plain(self, partition: NamePartition, formula: int) -> Clause | None:
        """What a conjunction without negations asks; None for any other formula."""
        key = (partition, formula)
        if key in self._plains:
            return self._plains[key]
        leaves = self.formulas.positive_clause(formula)
        found = None if leaves is None else self.clause(partition, tuple((p, True) for p in leaves))
        self._plains[key] = found
        return found

    def _allowed_plain(self, context: ObjectContext) -> tuple[int, tuple[int, ...]] | None:
        """As ``allowed``, for a conjunction without negations; None for any other."""
        plain = self._plain(context.partition, context.formulas[0])
        if plain is None:
            return None
        missing, room = plain.needed, plain.high
        if room == 0:
            return 0, ()
        possible, others = self._possible_of(context.partition, plain.rules)
        names = possible & ~context.seen
        if room <= missing.bit_count():
            names &= missing
            others = ()
        if missing and not self.properties.any_order:
            names &= ((missing & -missing) << 1) - 1
            others = ()
        return self._leaving_enough(context, plain, names), others

    def _leaving_enough(self, context: ObjectContext, plain: Clause, names: int) -> int:
        """Of the listed names that may come next, those after which the least number of properties is still reached."""
        possible, others = self._possible_of(context.partition, plain.rules)
        left = possible & ~context.seen
        if others or plain.low <= 1 or (self.properties.any_order and plain.low <= left.bit_count()):
            return names
        if self.properties.any_order:
            return 0
        while names and (left >> (names.bit_length() - 1)).bit_count() < plain.low:
            names ^= 1 << (names.bit_length() - 1)
        return names

    def _possible_of(self, partition: NamePartition, rules: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """The listed names, as bits, and the other classes of which the rules allow a property."""
        key = (partition, rules)
        found = self._possible.get(key)
        if found is None:
            demands = [self.demanded(partition, rules, cls) for cls in range(1, len(partition.names) + 1)]
            fitting = {demand for demand in dict.fromkeys(demands) if self.values.satisfiable(demand)}
            names = sum([1 << i for i, demand in enumerate(demands) if demand in fitting])
            others = tuple(c for c in self.properties.other_classes(partition) if self._fits(partition, rules, c))
            found = self._possible[key] = names, others
        return found

    def after_plain(self, context: ObjectContext, cls: int) -> tuple[int, ...] | None:
        """The formulas after a property if they are one conjunction without negations and counts; else None."""
        partition, (formula, *others) = context.partition, context.formulas
        plain = self._plain(partition, formula)
        if plain is None or others or plain.low or plain.high < MANY:
            return None
        name = partition.name_of(cls)
        if name is None or not plain.needed >> (cls - 1) & 1:
            return context.formulas
        following = self.formulas.without(formula, self.properties.has(name))
        if (partition, following) not in self._plains:
            needed = plain.needed & ~(1 << (cls - 1))
            self._plains[partition, following] = Clause(plain.rules, plain.broken, needed, plain.banned)
        return (following,)


def classes_of(names: int) -> list[int]:
    """The classes of the listed names whose bits are set."""
    found = []
    while names:
        low = names & -names
        found.append(low.bit_length())
        names ^= low
    return found
