"""The states of JSON objects: brackets, names, colons and commas; the values inside are ``InnerValues``."""

from functools import reduce
from operator import and_

import numpy as np

from .completions import Completions, ObjectContext
from .inner_values import InnerValues
from .layouts import Layout
from .names import NameTrie, spelled
from .properties import NamePartition, Properties
from .scalars import one_of_tagged

QUOTE = 0x22


class Objects:
    """The objects of one ``Values``."""

    def __init__(self, values: InnerValues, *, any_order: bool) -> None:
        self.values = values
        self.ex = values.ex
        self.formulas = values.formulas
        self.properties = Properties(values, any_order=any_order)
        self.completions = Completions(values, self.properties)
        self._tries: dict[NamePartition, NameTrie] = {}
        self._beginnings: dict[tuple[ObjectContext, Layout], int] = {}

    def open(self, formulas: tuple[int, ...], around: Layout) -> int:
        """The row code of ``{`` in the layout ``around`` it; 0 if no object satisfies the first formula. The other
        formulas are observers."""
        formulas = (self.completions.settled(formulas[0]), *formulas[1:])
        partition = self.properties.partition(formulas)
        context = ObjectContext(partition, 0, formulas)
        if not self.completions.is_alive(partition, 0, formulas[0]):
            return 0
        machine, layouts = self.values.machine, self.values.layouts
        layout = layouts.inside(around)[0]

        def fill(row: np.ndarray) -> None:
            row[QUOTE] = self._begin_name(context, layout)
            if row[QUOTE]:
                layouts.choose(row, around, key, lambda chosen: self._before_name(context, chosen, chosen.first))
            if self.properties.ends(formulas[0]):
                layouts.close(row, layout, ord("}"), self._result(context))

        def make() -> int:
            state = machine.add_state(fill, space=layout.first)
            if self.completions.num_distinct(context) > 1:
                machine.counted_objects.add(state)
            return state

        key = ("open object", around, context)
        return machine.state(key, make)

    def _result(self, context: ObjectContext) -> int:
        bits = sum(1 << i for i, formula in enumerate(context.formulas[1:]) if self.properties.ends(formula))
        return self.values.machine.end_state(self.values.machine.result(bits))

    def _begin_name(self, context: ObjectContext, layout: Layout) -> int:
        """The row code of the quote before a name; 0 if no further property is allowed."""
        found = self._beginnings.get((context, layout))
        if found is None:
            found = self._beginnings[context, layout] = self._make_beginning(context, layout)
        return found

    def _make_beginning(self, context: ObjectContext, layout: Layout) -> int:
        names, others = self.completions.allowed(context)
        if not names and not others:
            return 0
        machine, partition = self.values.machine, context.partition
        if partition.patterns:
            return self._begin_patterned(context, layout, names, others)
        trie = self._trie(partition)
        filter_at = trie.filter(names, bool(others))
        frame = machine.add_frame(
            lambda result: self._colon(context, layout, result, names, others),
            filter_at=filter_at,
            closing=lambda: self._closing_name(context, names),
            distinct=self.completions.num_distinct(context),
        )
        return machine.push(frame, trie.start)

    def _trie(self, partition: NamePartition) -> NameTrie:
        found = self._tries.get(partition)
        if found is None:
            found = self._tries[partition] = NameTrie(
                self.values.machine, self.values.scalars.key_text, partition.names
            )
        return found

    def _begin_patterned(self, context: ObjectContext, layout: Layout, names: int, others: tuple[int, ...]) -> int:
        ex, partition = self.ex, context.partition
        machine, values = self.values.machine, self.values
        must = ex.alive(self._allowed_names(partition, names, others))
        frame = machine.add_frame(
            lambda result: self._colon(context, layout, machine.bits(result), names, others),
            closing=lambda: self._closing_name(context, names),
            distinct=self.completions.num_distinct(context),
        )
        tagged = one_of_tagged(ex, [n.encode() for n in partition.names])
        return machine.push(frame, values.scalars.key(must, tagged, partition.patterns))

    def _allowed_names(self, partition: NamePartition, names: int, others: tuple[int, ...]) -> int:
        """The language of the names that may come, and of listed ones that ``_colon`` refuses if each of them begins
        other names that may come."""
        ex, patterns = self.ex, partition.patterns
        classes = self.properties.other_classes(partition)
        if set(others) == set(classes):
            return ex.text
        words = [n.encode() for n in partition.names]
        listed = [w for i, w in enumerate(words) if names >> i & 1]
        if not others:
            return ex.one_of(listed)
        # Of the names that are not listed, those may come that match all patterns of ``common``, perhaps one more, and
        # not all of any of ``clashes``: these ask for values that there are not.
        matched, possible = ({cls - len(words) if cls else 0 for cls in some} for some in (others, classes))
        common = reduce(and_, matched)
        allowed = {bits for bits in possible if bits & common == common}
        clashes: list[int] = []
        for bits in sorted(allowed - matched - {common}, key=int.bit_count):
            if not any(bits & clash == clash for clash in clashes):
                clashes.append(bits)
        told = {bits for bits in allowed if not any(bits & clash == clash for clash in clashes)}

        def of(bits: int) -> list[int]:
            return [p for i, p in enumerate(patterns) if bits >> i & 1]

        more = [of(clash & ~common) for clash in clashes]
        if matched not in (told, told - {common}) or any(
            all(ex.matches(p, w) for p in some) for some in more for w in listed
        ):
            free = [self.properties.other_names(partition, cls) for cls in others]
            return ex.union(ex.one_of(listed), *free)
        asked = [ex.union(ex.one_of(listed), p) for p in of(common)]
        asked += [ex.text_without(ex.intersect(*some)) for some in more]
        if common not in matched:
            asked.append(ex.union(ex.one_of(listed), *of(~common)))
        refused = [w for i, w in enumerate(words) if not names >> i & 1]
        return ex.intersect(ex.text_without(ex.one_of(refused)), *asked)

    def _closing_name(self, context: ObjectContext, names: int) -> bytes:
        """The property to write next where the object is to end soon: the first required one, else the first one.

        Where only other names are left, the number of properties that are missing is one, so that names mostly differ.
        """
        index = context.partition.index
        leaves = [leaf for _, leaf in self.formulas.leaves(context.formulas[0])]
        required = sum({1 << index[leaf[1]] for leaf in leaves if leaf[0] == "has"}) & names
        chosen = required & -required or names & -names
        if chosen:
            return spelled(context.partition.names[chosen.bit_length() - 1]) + b'"'
        missing = self.properties.num_counted(context.formulas)
        return b'%d"' % missing if missing > 1 else b""

    def _colon(self, context: ObjectContext, layout: Layout, cls: int, names: int, others: tuple[int, ...]) -> int:
        """The row code after a name's closing quote."""
        allowed = names >> (cls - 1) & 1 if 1 <= cls <= len(context.partition.names) else cls in others
        if not allowed:
            return 0
        machine, values = self.values.machine, self.values
        must, observed = self.completions.allowed_demand(context, cls)
        frame = machine.add_frame(
            lambda result: self._after(context, layout, cls, observed, result), decides=bool(observed)
        )
        inner = values.layout_of(must, layout)

        def fill(row: np.ndarray) -> None:
            state = row[ord(":")] = values.value(must, observed, layout=inner, space=inner.after_colon)
            machine.row(state)  # a walk that gets here looks at it next, and would ask for it

        key = ("colon", inner, must, observed)  # the same in every object; what differs is the frame
        return machine.push(frame, machine.state(key, lambda: machine.add_state(fill, space=inner.before_mark)))

    def _after(self, context: ObjectContext, layout: Layout, cls: int, observed: tuple[int, ...], result: int) -> int:
        """The state after a property's value."""
        partition = context.partition
        formulas = self.completions.after_plain(context, cls) or self._after_any(context, cls, observed, result)
        following = ObjectContext(partition, self.properties.seen_after(partition, context.seen, cls), formulas)
        machine, values = self.values.machine, self.values

        def fill(row: np.ndarray) -> None:
            if self._begin_name(following, layout):
                state = row[ord(",")] = self._before_name(following, layout, layout.after_comma)
                machine.row(state)  # a walk that gets here looks at it next, and would ask for it
            if self.properties.ends(formulas[0]):
                values.layouts.close(row, layout, ord("}"), self._result(following))

        key = ("after property", layout, following)
        return machine.state(key, lambda: machine.add_state(fill, space=layout.before_mark))

    def _after_any(self, context: ObjectContext, cls: int, observed: tuple[int, ...], result: int) -> tuple[int, ...]:
        partition = context.partition
        bits = self.values.machine.bits(result)
        plain = self.formulas.positive_clause(context.formulas[0]) is not None
        true = {schema for i, schema in enumerate(observed) if bits >> i & 1}
        certain: set[int] = set()
        if plain:
            leaves = self.formulas.leaves(context.formulas[0])
            certain = {self.properties.asked(leaf, partition, cls) for _, leaf in leaves}
        return (
            self.properties.step(context.formulas[0], partition, context.seen, cls, None if plain else true),
            *[self.properties.step(f, partition, context.seen, cls, true | certain) for f in context.formulas[1:]],
        )

    def _before_name(self, context: ObjectContext, layout: Layout, space: int) -> int:
        machine = self.values.machine

        def fill(row: np.ndarray) -> None:
            row[QUOTE] = self._begin_name(context, layout)

        key = ("before name", layout, space, context)
        return machine.state(key, lambda: machine.add_state(fill, space=space))
