"""JSON objects under formulas of what they are asked. Never deals with a value's bytes.

Leaves: ``("props", rule)`` every property satisfies the rule's schema for its name; ``("has", name)``; ``("minp", n)``
and ``("maxp", n)`` more properties; ``("names", schema)`` every name satisfies ``schema``.

A property's *class* is an int: 0 a name of no note, 1..n the n names of note, n + m (m >= 1) another name that matches
the patterns whose bits are set in m. No name of note is written twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .expressions import NOTHING
from .formulas import FALSE, TRUE, Leaf
from .names import NameTrie
from .spec import GrammarTooComplex

if TYPE_CHECKING:
    from .values import Values

MAX_PATTERNS = 6
MAX_PLACINGS = 5_000
QUOTE = 0x22


@dataclass(frozen=True, slots=True)
class Rule:
    """``properties``, ``patternProperties`` and ``additionalProperties`` of one schema; values are formulas."""

    names: tuple[tuple[str, int], ...]
    patterns: tuple[tuple[int, int], ...]
    additional: int
    by_name: dict[str, int] = field(compare=False, hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """The names and patterns that tell an object's properties apart. Equal ones are one object."""

    names: tuple[str, ...]
    patterns: tuple[int, ...]
    index: dict[str, int]


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain conjunction taken apart: rules on names and values, names still missing, and how many may come."""

    rules: tuple[int, ...]
    missing: int  # bits
    low: int
    room: int


@dataclass(frozen=True, slots=True)
class Context:
    """An object at some point: ``seen`` has a bit per name that may not come again."""

    shape: Shape
    seen: int
    formulas: tuple[int, ...]


class Objects:
    def __init__(self, values: "Values", *, any_order: bool) -> None:
        self.values = values
        self.ex = values.ex
        self.formulas = values.formulas
        self.any_order = any_order
        self._rules: dict[Rule, int] = {}
        self._rule_list: list[Rule] = []
        self._shapes: dict[tuple[int, ...], Shape] = {}
        self._equal_shapes: dict[tuple[tuple[str, ...], tuple[int, ...]], Shape] = {}
        self._asks: dict[tuple[Leaf, Shape, int], int] = {}
        self._demands: dict[tuple[Context, int], tuple[int, tuple[int, ...]]] = {}
        self._classes: dict[Shape, tuple[int, ...]] = {}
        self._tries: dict[Shape, NameTrie] = {}
        self._plains: dict[tuple[Shape, int], Plain | None] = {}
        self._plain_demands: dict[tuple[Shape, tuple[int, ...], int], int] = {}
        self._beginnings: dict[Context, int] = {}
        self._clause_alive: dict[tuple, bool] = {}

    # -- formulas -------------------------------------------------------------------------------------------------

    def properties(self, names: dict[str, int], patterns: Iterable[tuple[int, int]], additional: int) -> int:
        rule = Rule(tuple(names.items()), tuple(patterns), additional, names)
        if additional == TRUE and not names and all(f == TRUE for _, f in rule.patterns):
            return TRUE
        found = self._rules.get(rule)
        if found is None:
            found = self._rules[rule] = len(self._rule_list)
            self._rule_list.append(rule)
        return self.formulas.leaf("props", found)

    def has(self, name: str) -> int:
        return self.formulas.leaf("has", name)

    def at_least(self, n: int) -> int:
        return TRUE if n <= 0 else self.formulas.leaf("minp", n)

    def at_most(self, n: int) -> int:
        return FALSE if n < 0 else self.formulas.leaf("maxp", n)

    def names(self, schema: int) -> int:
        return TRUE if schema == TRUE else self.formulas.leaf("names", schema)

    def _shape(self, formulas: tuple[int, ...]) -> Shape:
        found = self._shapes.get(formulas)
        if found is not None:
            return found
        names: dict[str, None] = {}
        patterns: dict[int, None] = {}
        leaves = [leaf for _, leaf in self.formulas.leaves(*formulas)]
        for leaf in leaves:
            if leaf[0] == "props":
                rule = self._rule_list[leaf[1]]
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
                f"{len(patterns)} patterns of property names apply to one object; the limit is {MAX_PATTERNS}"
            )
        listed = tuple(names)
        key = (listed, tuple(patterns))
        found = self._equal_shapes.get(key)
        if found is None:
            found = self._equal_shapes[key] = Shape(*key, {name: i for i, name in enumerate(listed)})
        self._shapes[formulas] = found
        return found

    def _matches(self, pattern: int, shape: Shape, cls: int) -> bool:
        """Whether the names of a class match a pattern of the shape."""
        if pattern == self.ex.text:
            return True
        if pattern == NOTHING:
            return False
        count = len(shape.names)
        if 1 <= cls <= count:
            return self.ex.matches(pattern, shape.names[cls - 1].encode())
        bits = cls - count if cls else 0
        return bool(bits >> shape.patterns.index(pattern) & 1)

    def _asked(self, leaf: Leaf, shape: Shape, cls: int) -> int:
        """The schema whose answer the leaf needs for the value of a property of this class; TRUE if none."""
        if leaf[0] != "props":
            return TRUE
        key = (leaf, shape, cls)
        found = self._asks.get(key)
        if found is None:
            rule = self._rule_list[leaf[1]]
            parts = []
            is_named = 1 <= cls <= len(shape.names) and shape.names[cls - 1] in rule.by_name
            if is_named:
                parts.append(rule.by_name[shape.names[cls - 1]])
            matched = [f for p, f in rule.patterns if self._matches(p, shape, cls)]
            parts += matched
            found = self.formulas.conjunction(parts) if is_named or matched else rule.additional
            self._asks[key] = found
        return found

    def _step(self, formula: int, shape: Shape, cls: int, true: "set[int] | None") -> int:
        """What remains of a formula after a property whose value satisfies the schemas in ``true`` (None: all)."""
        name = shape.names[cls - 1] if 1 <= cls <= len(shape.names) else None

        def change(leaf: Leaf) -> int:
            match leaf[0]:
                case "props":
                    asked = self._asked(leaf, shape, cls)
                    if asked == FALSE or (true is not None and asked != TRUE and asked not in true):
                        return FALSE
                case "has":
                    if leaf[1] == name:
                        return TRUE
                case "minp":
                    return self.at_least(leaf[1] - 1)
                case "maxp":
                    return self.at_most(leaf[1] - 1)
                case "names":
                    if not self._matches(self.values.expression(leaf[1], "string"), shape, cls):
                        return FALSE
            return self.formulas.leaf(*leaf)

        return self.formulas.replace(formula, change)

    def ends(self, formula: int) -> bool:
        def change(leaf: Leaf) -> int:
            return FALSE if leaf[0] in ("has", "minp") else TRUE

        return formula == TRUE or self.formulas.replace(formula, change) == TRUE

    # -- what can be completed --------------------------------------------------------------------------------------

    def alive_at_start(self, formula: int) -> bool:
        if formula <= TRUE:
            return formula == TRUE
        return self._alive(self._shape((formula,)), 0, formula)

    def _alive(self, shape: Shape, seen: int, formula: int) -> bool:
        """Whether the object can be completed from here."""
        if formula == FALSE:
            return False
        if formula == TRUE or self.ends(formula):
            return True
        key = ("object", shape, seen, formula)
        return self.values.prove(
            key, lambda: self.formulas.some_clause(formula, lambda c: self._clause_is_alive(shape, seen, c))
        )

    def _other_classes(self, shape: Shape) -> tuple[int, ...]:
        """The classes of names that are not of note which hold any name at all."""
        found = self._classes.get(shape)
        if found is None:
            ex = self.ex
            others = ex.text_without(ex.one_of([n.encode() for n in shape.names])) if shape.names else ex.text
            kept = []
            for bits in range(1 << len(shape.patterns)):
                parts = [p if bits >> i & 1 else ex.complement(p) for i, p in enumerate(shape.patterns)]
                if ex.is_nonempty(ex.intersect(others, *parts)):
                    kept.append(len(shape.names) + bits if bits else 0)
            found = self._classes[shape] = tuple(kept)
        return found

    def _all_classes(self, shape: Shape, seen: int) -> list[int]:
        unseen = [i + 1 for i in range(len(shape.names)) if not seen >> i & 1]
        return unseen + list(self._other_classes(shape))

    def _seen_after(self, shape: Shape, seen: int, cls: int) -> int:
        count = len(shape.names)
        if 1 <= cls <= count:
            return seen | (1 << (cls - 1)) if self.any_order else seen | ((1 << cls) - 1)
        return seen if self.any_order else (1 << count) - 1

    def _clause_is_alive(self, shape: Shape, seen: int, clause: tuple[tuple[int, bool], ...]) -> bool:
        formulas, values = self.formulas, self.values
        rules: list[Leaf] = []
        broken: list[Leaf] = []
        needed: set[str] = set()
        banned: set[str] = set()
        low, high = 0, 1 << 30
        name_rules: list[tuple[int, bool]] = []
        for formula, sign in clause:
            leaf = formulas.nodes[formula][1]
            match leaf[0], sign:
                case "props", True:
                    rules.append(leaf)
                case "props", False:
                    broken.append(leaf)
                case "has", True:
                    needed.add(leaf[1])
                case "has", False:
                    banned.add(leaf[1])
                case ("minp", True) | ("maxp", False):
                    low = max(low, leaf[1] if sign else leaf[1] + 1)
                case ("maxp", True) | ("minp", False):
                    high = min(high, leaf[1] if sign else leaf[1] - 1)
                case "names", _:
                    name_rules.append((values.expression(leaf[1], "string"), sign))
        count = len(shape.names)

        def demand(cls: int) -> int:
            return formulas.conjunction([self._asked(leaf, shape, cls) for leaf in rules])

        def possible(cls: int) -> bool:
            if 1 <= cls <= count and shape.names[cls - 1] in banned:
                return False
            if not all(self._matches(expr, shape, cls) for expr, sign in name_rules if sign):
                return False
            return values.satisfiable(demand(cls))

        if len(needed) > high:
            return False
        for name in needed:
            at = shape.index[name]
            if seen >> at & 1 or not possible(at + 1):
                return False
        used = {shape.index[name] + 1 for name in needed}
        # Broken rules and names need a property that breaks them: one of those needed anyway, or one more.
        wanted: list[list[tuple[int, int]]] = []
        others = [c for c in self._all_classes(shape, seen) if c not in used and (broken or name_rules) and possible(c)]
        for leaf in broken:
            asks = {cls: self._asked(leaf, shape, cls) for cls in (*sorted(used), *others)}
            if any(values.is_surely_impossible(formulas.conjunction([demand(cls), asks[cls]])) for cls in used):
                continue  # broken whatever is written there
            breaking = {cls: formulas.negation(asked) for cls, asked in asks.items()}
            wanted.append(
                [(cls, b) for cls, b in breaking.items() if values.satisfiable(formulas.conjunction([demand(cls), b]))]
            )
        for expr, sign in name_rules:
            if not sign:
                classes = (*sorted(used), *others)
                wanted.append([(cls, TRUE) for cls in classes if not self._matches(expr, shape, cls)])
        if wanted or low > len(used):
            wanted.sort(key=len)
            return self._place(shape, seen, wanted, used, {}, low, high, demand, possible, [0])
        return True

    def _place(self, shape, seen, wanted, used, extra, low, high, demand, possible, fuel) -> bool:
        """Whether properties can be chosen that break all of ``wanted`` and are between low and high in number.

        ``wanted``: for each thing to break the classes that can, with what their value must satisfy.
        """
        formulas = self.formulas
        if len(used) > high:
            return False
        if not wanted:
            if len(used) >= low:
                return True
            count = len(shape.names)
            more = 0
            for cls in self._all_classes(shape, seen):
                if not 1 <= cls <= count:  # any number of names
                    if possible(cls):
                        return low <= high
                elif cls not in used and possible(cls):
                    more += 1
            return low <= min(high, len(used) + more)
        fuel[0] += 1
        if fuel[0] > MAX_PLACINGS:
            raise GrammarTooComplex(
                f"an object that must break several schemas can do so in more than {MAX_PLACINGS:,} ways; "
                "use fewer negations (not, oneOf, if) of object schemas"
            )
        for cls, breaking in wanted[0]:
            further = {**extra, cls: formulas.conjunction([extra.get(cls, TRUE), breaking])}
            if breaking != TRUE and not self.values.satisfiable(formulas.conjunction([demand(cls), further[cls]])):
                continue
            if self._place(shape, seen, wanted[1:], used | {cls}, further, low, high, demand, possible, fuel):
                return True
        return False

    def _demand(self, context: Context, cls: int) -> tuple[int, tuple[int, ...]]:
        """What the value of a property of this class must satisfy, and which schemas it is observed for."""
        key = (context, cls)
        found = self._demands.get(key)
        if found is not None:
            return found
        formulas = self.formulas
        shape, must = context.shape, context.formulas[0]
        seen = self._seen_after(shape, context.seen, cls)

        def asked_by(*which: int) -> set[int]:
            return {self._asked(leaf, shape, cls) for _, leaf in formulas.leaves(*which)} - {TRUE, FALSE}

        plain = formulas.positive_clause(must)
        certain: set[int] = set()
        if plain is not None:
            after = self._step(must, shape, cls, None)
            certain = asked_by(must)
            demand = formulas.conjunction(certain) if self._alive(shape, seen, after) else FALSE
            observed = asked_by(*context.formulas[1:]) - certain
        else:
            asked = sorted(asked_by(must))
            observed = asked_by(*context.formulas)
            parts = []
            signs = formulas.polarities(must)
            wanted = {self._asked(formulas.nodes[p][1], shape, cls) for p, sign in signs if sign}
            refused = {self._asked(formulas.nodes[p][1], shape, cls) for p, sign in signs if not sign}
            if self._alive(shape, seen, self._step(must, shape, cls, refused - wanted)) and not (
                (wanted & refused) - {TRUE, FALSE}
            ):
                demand = TRUE  # alive even if every answer is the worse one
            elif all(sign or formulas.nodes[p][1][0] != "props" for p, sign in signs):
                for clause in formulas.clauses(must):
                    whole = formulas.conjunction([p if sign else formulas.negation(p) for p, sign in clause])
                    if self._alive(shape, seen, self._step(whole, shape, cls, None)):
                        parts.append(formulas.conjunction(asked_by(whole)))
                demand = formulas.disjunction(parts)
            else:
                ways = self.values.answers(asked, "one property")
                parts = [f for true, f in ways if self._alive(shape, seen, self._step(must, shape, cls, true))]
                demand = TRUE if len(parts) == len(ways) else formulas.disjunction(parts)
        if not self.values.satisfiable(demand):
            demand = FALSE
        found = self._demands[key] = demand, tuple(sorted(observed))
        return found

    def _allowed_demand(self, context: Context, cls: int) -> tuple[int, tuple[int, ...]]:
        """``_demand`` for a class known to be allowed."""
        plain = self._plain(context.shape, context.formulas[0])
        if plain is None or len(context.formulas) > 1:
            return self._demand(context, cls)
        key = (context.shape, plain.rules, cls)
        found = self._plain_demands.get(key)
        if found is None:
            asked = [self._asked(self.formulas.nodes[p][1], context.shape, cls) for p in plain.rules]
            found = self._plain_demands[key] = self.formulas.conjunction(asked)
        return found, ()

    def _after_plain(self, context: Context, cls: int) -> tuple[int, ...] | None:
        """The formulas after a property of a plain object without observers."""
        shape, (formula, *others) = context.shape, context.formulas
        plain = self._plain(shape, formula)
        if plain is None or others or plain.low or plain.room < 1 << 30:
            return None
        if not 1 <= cls <= len(shape.names) or not plain.missing >> (cls - 1) & 1:
            return context.formulas
        done = self.has(shape.names[cls - 1])
        return (self.formulas.conjunction([p for p in self.formulas.positive_clause(formula) or () if p != done]),)

    def demands_at_start(self, formula: int) -> list[int]:
        """What the values of the properties of note must satisfy that may come first."""
        context = Context(self._shape((formula,)), 0, (formula,))
        names, _ = self._allowed(context)
        count = len(context.shape.names)
        return [self._allowed_demand(context, cls)[0] for cls in range(1, count + 1) if names >> (cls - 1) & 1]

    # -- states ---------------------------------------------------------------------------------------------------

    def open(self, formulas: tuple[int, ...]) -> int:
        """The row code of ``{``; 0 if no object fits."""
        shape = self._shape(formulas)
        context = Context(shape, 0, formulas)
        if not self._alive(shape, 0, formulas[0]):
            return 0
        machine, values = self.values.machine, self.values

        def fill(row: np.ndarray) -> None:
            row[QUOTE] = self._begin_name(context)
            if self.ends(formulas[0]):
                row[ord("}")] = self._result(context)

        key = ("open object", values.style, context)
        return machine.state(key, lambda: machine.add_state(fill, space=values.space))

    def _result(self, context: Context) -> int:
        bits = sum(1 << i for i, formula in enumerate(context.formulas[1:]) if self.ends(formula))
        return self.values.machine.end_state(self.values.machine.result(bits))

    def _allowed(self, context: Context) -> tuple[int, tuple[int, ...]]:
        """The names that may come next, as bits, and the other classes that may."""
        fast = self._allowed_plain(context)
        if fast is not None:
            return fast
        names, others = 0, []
        for cls in self._all_classes(context.shape, context.seen):
            if self._demand(context, cls)[0] != FALSE:
                if 1 <= cls <= len(context.shape.names):
                    names |= 1 << (cls - 1)
                else:
                    others.append(cls)
        return names, tuple(others)

    def _allowed_plain(self, context: Context) -> tuple[int, tuple[int, ...]] | None:
        """As ``_allowed`` for a plain conjunction without lower counts, in a few operations on bits."""
        plain = self._plain(context.shape, context.formulas[0])
        if plain is None or plain.low:
            return None
        missing, room = plain.missing, plain.room
        possible, others = self._possible(context.shape, plain.rules)
        names = possible & ~context.seen
        if room == 0:
            return 0, ()
        if room <= missing.bit_count():
            names &= missing
            others = ()
        if missing and not self.any_order:
            names &= ((missing & -missing) << 1) - 1
            others = ()
        return names, others

    def _plain(self, shape: Shape, formula: int) -> Plain | None:
        key = (shape, formula)
        if key in self._plains:
            return self._plains[key]
        leaves = self.formulas.positive_clause(formula)
        found = None
        if leaves is not None:
            rules, missing, low, room = [], 0, 0, 1 << 30
            for p in leaves:
                leaf = self.formulas.nodes[p][1]
                if leaf[0] == "has":
                    missing |= 1 << shape.index[leaf[1]]
                elif leaf[0] == "maxp":
                    room = min(room, leaf[1])
                elif leaf[0] == "minp":
                    low = max(low, leaf[1])
                else:
                    rules.append(p)
            found = Plain(tuple(rules), missing, low, room)
        self._plains[key] = found
        return found

    def _possible(self, shape: Shape, rules: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        key = ("possible", shape, rules)
        found = self._clause_alive.get(key)
        if found is None:
            names = sum(1 << (c - 1) for c in range(1, len(shape.names) + 1) if self._fits(shape, rules, c))
            found = names, tuple(c for c in self._other_classes(shape) if self._fits(shape, rules, c))  # type: ignore[assignment]
            self._clause_alive[key] = found  # type: ignore[assignment]
        return found  # type: ignore[return-value]

    def _fits(self, shape: Shape, rules: tuple[int, ...], cls: int) -> bool:
        """Whether a property of this class may stand in an object of these rules, and has a value."""
        asked = []
        for rule in rules:
            leaf = self.formulas.nodes[rule][1]
            if leaf[0] == "names" and not self._matches(self.values.expression(leaf[1], "string"), shape, cls):
                return False
            asked.append(self._asked(leaf, shape, cls))
        return self.values.satisfiable(self.formulas.conjunction(asked))

    def _begin_name(self, context: Context) -> int:
        """The row code of the quote before a name; 0 if the object has to close."""
        found = self._beginnings.get(context)
        if found is None:
            found = self._beginnings[context] = self._make_beginning(context)
        return found

    def _make_beginning(self, context: Context) -> int:
        names, others = self._allowed(context)
        if not names and not others:
            return 0
        machine, shape = self.values.machine, context.shape
        if shape.patterns:
            return self._begin_patterned(context, names, others)
        trie = self._trie(shape)
        filter_at = trie.filter(names, bool(others))
        frame = machine.add_frame(lambda result: self._colon(context, result, names, others), filter_at=filter_at)
        return machine.push(frame, trie.start)

    def _trie(self, shape: Shape) -> NameTrie:
        found = self._tries.get(shape)
        if found is None:
            found = self._tries[shape] = NameTrie(self.values.machine, self.values.scalars.key_text, shape.names)
        return found

    def _begin_patterned(self, context: Context, names: int, others: tuple[int, ...]) -> int:
        ex, shape = self.ex, context.shape
        machine, values = self.values.machine, self.values
        words = [n.encode() for n in shape.names]
        rest = ex.text_without(ex.one_of(words)) if words else ex.text
        parts = [ex.one_of([w for i, w in enumerate(words) if names >> i & 1])]
        if set(others) == set(self._other_classes(shape)):
            parts.append(rest)
        else:
            for cls in others:
                bits = cls - len(words) if cls else 0
                marks = [p if bits >> i & 1 else ex.complement(p) for i, p in enumerate(shape.patterns)]
                parts.append(ex.intersect(rest, *marks))
        must = ex.alive(ex.union(*parts))
        frame = machine.add_frame(lambda result: self._colon(context, machine.bits(result), names, others))
        return machine.push(frame, values.scalars.key(must, ex.one_of_tagged(words), shape.patterns))

    def _colon(self, context: Context, cls: int, names: int, others: tuple[int, ...]) -> int:
        """The row code after a name's closing quote."""
        allowed = names >> (cls - 1) & 1 if 1 <= cls <= len(context.shape.names) else cls in others
        if not allowed:
            return 0
        machine, values = self.values.machine, self.values
        must, observed = self._allowed_demand(context, cls)
        frame = machine.add_frame(lambda result: self._after(context, cls, observed, result))

        def fill(row: np.ndarray) -> None:
            row[ord(":")] = values.value(must, observed)

        key = ("colon", values.style, must, observed)  # the same in every object; what differs is the frame
        return machine.push(frame, machine.state(key, lambda: machine.add_state(fill, space=values.space)))

    def _after(self, context: Context, cls: int, observed: tuple[int, ...], result: int) -> int:
        """The state after a property's value."""
        shape = context.shape
        formulas = self._after_plain(context, cls) or self._after_any(context, cls, observed, result)
        following = Context(shape, self._seen_after(shape, context.seen, cls), formulas)
        machine, values = self.values.machine, self.values

        def fill(row: np.ndarray) -> None:
            if self._begin_name(following):
                row[ord(",")] = self._before_name(following)
            if self.ends(formulas[0]):
                row[ord("}")] = self._result(following)

        key = ("after property", values.style, following)
        return machine.state(key, lambda: machine.add_state(fill, space=values.space))

    def _after_any(self, context: Context, cls: int, observed: tuple[int, ...], result: int) -> tuple[int, ...]:
        shape = context.shape
        bits = self.values.machine.bits(result)
        plain = self.formulas.positive_clause(context.formulas[0]) is not None
        true = {schema for i, schema in enumerate(observed) if bits >> i & 1}
        certain: set[int] = set()
        if plain:
            leaves = self.formulas.leaves(context.formulas[0])
            certain = {self._asked(leaf, shape, cls) for _, leaf in leaves}
        return (
            self._step(context.formulas[0], shape, cls, None if plain else true),
            *[self._step(f, shape, cls, true | certain) for f in context.formulas[1:]],
        )

    def _before_name(self, context: Context) -> int:
        machine, values = self.values.machine, self.values

        def fill(row: np.ndarray) -> None:
            row[QUOTE] = self._begin_name(context)

        key = ("before name", values.style, context)
        return machine.state(key, lambda: machine.add_state(fill, space=values.space))
