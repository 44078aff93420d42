"""The conditions on an object's properties, as leaves of formulas, and how each property changes them.

The leaves speak of the properties still to come:
    ("props", rule)            the value of each satisfies the rule's schema for its name
    ("has", name)              one has this name
    ("minp", n), ("maxp", n)   there are at least, at most n
    ("names", schema)          each name satisfies ``schema``

Property names fall into *classes*, which are ints: 1..n are the n listed names; n + m (m >= 1) are the other names that
match just the patterns whose bits are set in m; 0 are the names that are not listed and match no pattern. No listed
name is written twice. Other names may be, save where properties are counted, or where an object may have to hold a
value that breaks a rule: a later property of the same name would replace that value. There the machine compares names,
and each class has as many names as are needed, since those of smaller classes are listed.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple

from ..expressions import NOTHING
from ..spec import GrammarTooComplex
from .formulas import FALSE, TRUE, Leaf
from .inner_values import InnerValues

MAX_PATTERNS = 40
ASKS_FOR_MORE = ("has", "minp")  # leaves that an object's end leaves unfulfilled
MAX_CLASSES = 64  # of names, by the patterns that they match
MAX_LISTED = 10_000  # names of a class that are listed because it has too few
FEW_NAMES = 64  # classes with no more are listed where all names of an object have to differ


class Rule(NamedTuple):
    """``properties``, ``patternProperties`` and ``additionalProperties`` of one schema; values are formulas."""

    by_name: dict[str, int]
    patterns: tuple[tuple[int, int], ...]
    additional: int

    @property
    def values(self) -> tuple[int, ...]:
        return (*self.by_name.values(), *(value for _, value in self.patterns), self.additional)


@dataclass(frozen=True, slots=True, eq=False)
class NamePartition:
    """The listed names and the patterns that tell an object's properties apart. Equal partitions are one object."""

    names: tuple[str, ...]
    patterns: tuple[int, ...]
    index: dict[str, int]
    all_differ: bool  # no name comes twice, whether it is listed or not

    def name_of(self, cls: int) -> str | None:
        """The listed name that is the class; None for a class of other names."""
        return self.names[cls - 1] if 1 <= cls <= len(self.names) else None


class Properties:
    """The leaves and classes of one ``Values``. Unless ``any_order``, listed properties come in the schema's order."""

    def __init__(self, values: InnerValues, *, any_order: bool) -> None:
        self.values = values
        self.ex = values.ex
        self.formulas = values.formulas
        self.any_order = any_order
        self.rules: list[Rule] = []
        self._rule_ids: dict[tuple[object, ...], int] = {}
        self._partitions: dict[tuple[int, ...], NamePartition] = {}
        self._equal_partitions: dict[tuple[tuple[str, ...], tuple[int, ...], bool], NamePartition] = {}
        self._asks: dict[tuple[Leaf, NamePartition, int], int] = {}
        self._classes: dict[NamePartition, tuple[int, ...]] = {}
        self._asking: dict[tuple[int, NamePartition], int] = {}
        self._counted: dict[tuple[int, ...], int] = {}  # see ``num_counted``
        self._ends: dict[int, bool] = {}
        self._unchanged: dict[tuple[NamePartition, int], dict[int, bool]] = {}  # see ``is_unchanged``; by formula

    # -- leaves ---------------------------------------------------------------------------------------------------

    def rule(self, names: dict[str, int], patterns: Iterable[tuple[int, int]], additional: int) -> int:
        """The formula that the value of each property satisfies the schema for its name."""
        listed = tuple(patterns)
        if additional == TRUE and not names and all(f == TRUE for _, f in listed):
            return TRUE
        key = (tuple(names.items()), listed, additional)
        found = self._rule_ids.get(key)
        if found is None:
            found = self._rule_ids[key] = len(self.rules)
            self.rules.append(Rule(names, listed, additional))
        return self.formulas.leaf("props", found)

    def has(self, name: str) -> int:
        return self.formulas.leaf("has", name)

    def at_least(self, n: int) -> int:
        return TRUE if n <= 0 else self.formulas.leaf("minp", n)

    def at_most(self, n: int) -> int:
        return FALSE if n < 0 else self.formulas.leaf("maxp", n)

    def names(self, schema: int) -> int:
        return TRUE if schema == TRUE else self.formulas.leaf("names", schema)

    # -- classes --------------------------------------------------------------------------------------------------

    def partition(self, formulas: tuple[int, ...]) -> NamePartition:
        """The partition of names that the formulas need."""
        found = self._partitions.get(formulas)
        if found is not None:
            return found
        names: dict[str, None] = {}
        patterns: dict[int, None] = {}
        leaves = [leaf for _, leaf in self.formulas.leaves(*formulas)]
        for leaf in leaves:
            if leaf[0] == "props":
                rule = self.rules[leaf[1]]
                names.update(dict.fromkeys(rule.by_name))
                patterns.update(dict.fromkeys(p for p, _ in rule.patterns))
        for leaf in leaves:
            if leaf[0] == "has":
                names[leaf[1]] = None
            elif leaf[0] == "names":
                expr = self.values.expression(leaf[1], "string")
                words = self.ex.words_of(expr)
                if words is not None:
                    names.update(dict.fromkeys(w.decode() for w in words))
                patterns[expr] = None
        patterns.pop(self.ex.text, None)
        patterns.pop(NOTHING, None)
        if len(patterns) > MAX_PATTERNS:
            raise GrammarTooComplex(
                f"{len(patterns)} patterns of property names apply to one object; the limit is {MAX_PATTERNS}: join "
                "those with equal schemas by |"
            )
        compares = self.values.machine.compares_names
        all_differ = compares and self._asks_for_wrong_values(formulas)
        found = self._partition(tuple(names), tuple(patterns), all_differ)
        if patterns and compares:
            few = self._names_of_small_classes(found, max(self.num_counted(formulas), FEW_NAMES * all_differ))
            if few:
                found = self._partition((*names, *few), tuple(patterns), all_differ)
        self._partitions[formulas] = found
        return found

    def _partition(self, names: tuple[str, ...], patterns: tuple[int, ...], all_differ: bool) -> NamePartition:
        found = self._equal_partitions.get((names, patterns, all_differ))
        if found is None:
            found = NamePartition(names, patterns, {name: i for i, name in enumerate(names)}, all_differ)
            self._equal_partitions[names, patterns, all_differ] = found
        return found

    def _names_of_small_classes(self, partition: NamePartition, least: int) -> tuple[str, ...]:
        """The names of the classes that have no more than ``least``."""
        if least < 2:
            return ()
        found: list[str] = []
        for cls in self.other_classes(partition):
            names = self.other_names(partition, cls)
            num_names = self.ex.num_texts(names, least + 1)
            if MAX_LISTED < num_names < least:
                raise GrammarTooComplex(f"minProperties {least:,} where a pattern has {num_names:,} names; lower it")
            found += [text.decode() for text in self.ex.texts(names)] if num_names <= min(least, MAX_LISTED) else []
        return tuple(found)

    def num_counted(self, formulas: tuple[int, ...]) -> int:
        """How many of the properties to come have to have different names for ``formulas``, what must hold and the
        observers, to be judged right."""
        found = self._counted.get(formulas)
        if found is None:
            leaves = self._signed_leaves(formulas)
            counts = [leaf[1] for leaf, sign in leaves if leaf[0] == "minp" and sign]
            counts += [leaf[1] + 1 for leaf, sign in leaves if leaf[0] == "maxp" and not sign]
            found = self._counted[formulas] = max(counts, default=0)
        return found

    def _asks_for_wrong_values(self, formulas: tuple[int, ...]) -> bool:
        """Whether a property whose name is not listed may be the one that has to break a rule, by its value."""
        broken = [
            self.rules[leaf[1]] for leaf, sign in self._signed_leaves(formulas) if leaf[0] == "props" and not sign
        ]
        values = [f for rule in broken for f in (*[value for _, value in rule.patterns], rule.additional)]
        return not all(f in (TRUE, FALSE) for f in values)

    def _signed_leaves(self, formulas: tuple[int, ...]) -> list[tuple[Leaf, bool]]:
        """The leaves of what must hold and of the observers, and whether they are to hold; of observers both ways."""
        must, *observers = formulas
        signed = self.formulas.polarities(must)
        signed += [(p, sign) for p, _ in self.formulas.polarities(*observers) for sign in (True, False)]
        return [(self.formulas.nodes[p][1], sign) for p, sign in signed]

    def other_classes(self, partition: NamePartition) -> tuple[int, ...]:
        """The classes of names that are not listed; classes without a name are left out."""
        found = self._classes.get(partition)
        if found is None:
            ex = self.ex
            if not partition.patterns and ex.any_char != NOTHING:  # there are more names than any list has
                self._classes[partition] = (0,)
                return (0,)
            others = ex.text_without(ex.one_of([n.encode() for n in partition.names])) if partition.names else ex.text
            kept = {0: others}  # split by one pattern after the other: most classes of many patterns are empty
            for i, pattern in enumerate(partition.patterns):
                parts = [(bits | 1 << i, ex.intersect(rest, pattern)) for bits, rest in kept.items()]
                parts += [(bits, ex.intersect(rest, ex.complement(pattern))) for bits, rest in kept.items()]
                kept = {bits: rest for bits, rest in parts if ex.is_nonempty(rest)}
                if len(kept) > MAX_CLASSES:
                    raise GrammarTooComplex(
                        f"the {len(partition.patterns)} patterns of one object's property names overlap in more than "
                        f"{MAX_CLASSES} ways; make them exclude each other, or join those with equal schemas by |"
                    )
            classes = sorted(len(partition.names) + bits if bits else 0 for bits in kept)
            found = self._classes[partition] = tuple(classes)
        return found

    def other_names(self, partition: NamePartition, cls: int) -> int:
        """The expression of the names of a class other than the listed ones."""
        ex = self.ex
        bits = cls - len(partition.names) if cls else 0
        marks = [p if bits >> i & 1 else ex.complement(p) for i, p in enumerate(partition.patterns)]
        return ex.intersect(ex.text_without(ex.one_of([n.encode() for n in partition.names])), *marks)

    def unseen_classes(self, partition: NamePartition, seen: int) -> list[int]:
        """The classes of which a property may still be written, given the bits of the listed names in ``seen``."""
        unseen = [i + 1 for i in range(len(partition.names)) if not seen >> i & 1]
        return unseen + list(self.other_classes(partition))

    def seen_after(self, partition: NamePartition, seen: int, cls: int) -> int:
        """``seen`` after a property of a class: the bits of the listed names that may not be written from here on."""
        count = len(partition.names)
        if 1 <= cls <= count:
            return seen | (1 << (cls - 1)) if self.any_order else seen | ((1 << cls) - 1)
        return seen if self.any_order else (1 << count) - 1

    def matches(self, pattern: int, partition: NamePartition, cls: int) -> bool:
        """Whether the names of a class match a pattern of the partition."""
        if pattern == self.ex.text:
            return True
        if pattern == NOTHING:
            return False
        name = partition.name_of(cls)
        if name is not None:
            return self.ex.matches(pattern, name.encode())
        bits = cls - len(partition.names) if cls else 0
        return bool(bits >> partition.patterns.index(pattern) & 1)

    # -- one property ---------------------------------------------------------------------------------------------

    def asked(self, leaf: Leaf, partition: NamePartition, cls: int) -> int:
        """The schema that the leaf asks of the value of a property of this class; TRUE if it asks none."""
        if leaf[0] != "props":
            return TRUE
        if not partition.patterns:
            rule = self.rules[leaf[1]]
            return rule.by_name.get(partition.names[cls - 1], rule.additional) if cls else rule.additional
        key = (leaf, partition, cls)
        found = self._asks.get(key)
        if found is None:
            rule = self.rules[leaf[1]]
            name = partition.name_of(cls)
            parts = [rule.by_name[name]] if name is not None and name in rule.by_name else []
            parts += [f for p, f in rule.patterns if self.matches(p, partition, cls)]
            found = self._asks[key] = self.formulas.conjunction(parts) if parts else rule.additional
        return found

    def step(
        self,
        formula: int,
        partition: NamePartition,
        seen: int,
        cls: int,
        true: Set[int] | None,
        true_negated: Set[int] | None = None,
    ) -> int:
        """The formula after a property whose value satisfies the schemas in ``true`` (None: all).

        ``seen`` has the bits of the listed names that may not be written, before the property. Negated leaves go by
        ``true_negated`` where that is given.
        """
        name = partition.name_of(cls)
        seen = self.seen_after(partition, seen, cls)

        def change(leaf: Leaf, known: Set[int] | None) -> int:
            match leaf[0]:
                case "props":
                    asked = self.asked(leaf, partition, cls)
                    if asked == FALSE or (known is not None and asked != TRUE and asked not in known):
                        return FALSE
                    bits = self._asking_names(leaf[1], partition)
                    if bits >= 0 and not bits & ~seen:
                        return TRUE
                case "has":
                    if leaf[1] == name:
                        return TRUE
                case "minp":
                    return self.at_least(leaf[1] - 1)
                case "maxp":
                    return self.at_most(leaf[1] - 1)
                case "names":
                    if not self.matches(self.values.expression(leaf[1], "string"), partition, cls):
                        return FALSE
            return self.formulas.leaf(*leaf)

        change_negated = None if true_negated is None else lambda leaf: change(leaf, true_negated)
        is_kept = self._unchanged_in(partition, cls, formula)
        return self.formulas.replace(formula, lambda leaf: change(leaf, true), change_negated, is_kept)

    def _asking_names(self, number: int, partition: NamePartition) -> int:
        """The bits of the listed names of whose values the rule asks something; -1 if it asks something of others."""
        key = (number, partition)
        found = self._asking.get(key)
        if found is None:
            rule = self.rules[number]
            asks_others = rule.additional != TRUE or any(asked != TRUE for _, asked in rule.patterns)
            bits = [1 << partition.index[name] for name, asked in rule.by_name.items() if asked != TRUE]
            found = self._asking[key] = -1 if asks_others else sum(bits)
        return found

    def with_name(self, formula: int, partition: NamePartition, cls: int) -> int:
        """The formula, and that one of the properties to come has the name of the class, a listed one."""
        name = partition.name_of(cls)
        assert name is not None

        def change(leaf: Leaf) -> int:
            if leaf[0] == "has" and leaf[1] == name:
                return TRUE
            if leaf[0] == "props" and self.asked(leaf, partition, cls) == FALSE:
                return FALSE
            return self.formulas.leaf(*leaf)

        is_kept = self._unchanged_in(partition, cls, formula)
        return self.formulas.conjunction([self.formulas.replace(formula, change, None, is_kept), self.has(name)])

    def is_unchanged(self, partition: NamePartition, cls: int, formula: int) -> bool:
        """Whether a property of the class changes nothing of what the formula asks, whatever the value is."""
        return self._unchanged_in(partition, cls, formula)(formula)

    def _unchanged_in(self, partition: NamePartition, cls: int, formula: int) -> Callable[[int], bool]:
        """``is_unchanged`` of the formula and all its parts, looked up."""
        known = self._unchanged.get((partition, cls))
        if known is None:
            known = self._unchanged[partition, cls] = {FALSE: True, TRUE: True}

        def visit(at: int) -> bool:
            found = known.get(at)
            if found is None:
                node = self.formulas.nodes[at]
                match node[0]:
                    case "and" | "or":
                        found = sum([visit(part) for part in node[1:]]) == len(node) - 1  # all are looked at
                    case "not":
                        found = visit(node[1])
                    case _:
                        found = self._is_unchanged(node[1], partition, cls)
                known[at] = found
            return found

        visit(formula)
        return known.__getitem__

    def _is_unchanged(self, leaf: Leaf, partition: NamePartition, cls: int) -> bool:
        match leaf[0]:
            case "props":
                return self.asked(leaf, partition, cls) == TRUE
            case "has":
                return leaf[1] != partition.name_of(cls)
            case "names":
                return self.matches(self.values.expression(leaf[1], "string"), partition, cls)
        return False

    def ends(self, formula: int) -> bool:
        """Whether an object that ends here satisfies the formula."""
        found = self._ends.get(formula)
        if found is None:
            nodes, plain = self.formulas.nodes, self.formulas.positive_clause(formula)
            if plain is not None:
                found = not any(nodes[p][1][0] in ASKS_FOR_MORE for p in plain)
            else:
                found = self.formulas.holds(formula, lambda leaf: leaf[0] not in ASKS_FOR_MORE)
            self._ends[formula] = found
        return found
