"""White space in JSON: what each style allows around a value and inside a bracket.

    flexible   any, as ``FLEXIBLE`` of ``machine.white_space`` limits it
    compact    none
    neat       as JSON writers write it: nothing before "," and ":", nothing or one space behind ":", and each bracket
               in one of three layouts, which its commas and its closing bracket keep to:
                 closed   [1,2] or [1, 2]; empty brackets are closed
                 spaced   [ 1, 2 ]
                 broken   each name or item and the closing bracket on a line of its own, indented by its depth
                          times 2 spaces, 4 spaces or a tab, the same unit throughout the text; the bracket around
                          a broken one is broken too

The states of a broken bracket know its depth and unit. Those of other brackets are the same at every depth, and those
of values without brackets are the same in every layout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..machine import COMPACT, FLEXIBLE, ONE_SPACE, Machine, indent, new_line

MAX_DEPTH = 64  # of broken brackets; those further inside stay on one line
SPACE, TAB, LINE_FEED = 0x20, 0x09, 0x0A
UNITS = ((SPACE, 2), (SPACE, 4), (TAB, 1))  # a byte, and how many of it are one level


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The white space inside one bracket, or around the root: codes of ``machine.white_space``.

    ``first``: before the first name or item, behind what chose the layout. ``closing``: a byte that comes before the
    closing bracket, with ``end`` between them; 0 for none.
    """

    number: int
    first: int
    after_comma: int
    after_colon: int
    before_mark: int = COMPACT  # before a comma, a colon or a closing bracket
    closing: int = 0
    end: int = COMPACT
    may_be_empty: bool = False
    unit: tuple[int, int] | None = None  # of a broken bracket
    depth: int = 0


class Layouts:
    """The layouts of one style on one machine. Each is one object, which belongs to this ``Layouts`` alone.

    ``root`` is around the text. ``plain`` is the one for values in which layouts do not matter. ``all``: by number.
    """

    def __init__(self, machine: Machine, style: str) -> None:
        self._machine = machine
        self.all: list[Layout] = []
        if style == "neat":
            self.plain = self._add(COMPACT, ONE_SPACE, ONE_SPACE, may_be_empty=True)
            spaced = self._add(COMPACT, indent(1), ONE_SPACE, closing=SPACE)
            self._on_one_line = (self.plain, spaced)
            self.root = self._add(ONE_SPACE, COMPACT, COMPACT)
            broken = tuple(self._add_broken(unit, 1) for unit in UNITS)
            self._inside = {self.root: (*self._on_one_line, *broken)}
        else:
            space = FLEXIBLE if style == "flexible" else COMPACT
            self.root = self.plain = self._add(space, space, space, space, may_be_empty=True)
            self._inside = {self.root: (self.root,)}

    def _add(
        self,
        first: int,
        after_comma: int,
        after_colon: int,
        before_mark: int = COMPACT,
        *,
        closing: int = 0,
        end: int = COMPACT,
        may_be_empty: bool = False,
        unit: tuple[int, int] | None = None,
        depth: int = 0,
    ) -> Layout:
        spaces = (first, after_comma, after_colon, before_mark)
        layout = Layout(len(self.all), *spaces, closing, end, may_be_empty, unit, depth)
        self.all.append(layout)
        return layout

    def _add_broken(self, unit: tuple[int, int], depth: int) -> Layout:
        byte, count = unit
        return self._add(
            COMPACT if depth == 1 else indent(count * depth, byte),  # the choice of the unit takes the first one
            new_line(count * depth, byte),
            ONE_SPACE,
            closing=LINE_FEED,
            end=indent(count * (depth - 1), byte) if depth > 1 else COMPACT,
            unit=unit,
            depth=depth,
        )

    def inside(self, layout: Layout) -> tuple[Layout, ...]:
        """The layouts that a bracket may have inside a layout. The first one needs no white space to be chosen."""
        found = self._inside.get(layout)
        if found is None:
            found = self._on_one_line
            if layout.unit is not None and layout.depth < MAX_DEPTH:
                found = (*found, self._add_broken(layout.unit, layout.depth + 1))
            self._inside[layout] = found
        return found

    def choose(self, row: np.ndarray, around: Layout, key: object, to: Callable[[Layout], int]) -> None:
        """Let white space behind an opening bracket choose the bracket's layout.

        ``row`` is the row of the state before the first name or item, in the first layout of ``inside(around)``.
        ``to(layout)`` is that state in another one; ``key`` says what it depends on besides.
        """
        match self.inside(around)[1:]:
            case (spaced,):
                row[SPACE] = to(spaced)
            case (spaced, broken):
                row[SPACE], row[LINE_FEED] = to(spaced), to(broken)
            case (spaced, two, four, tab):
                row[SPACE] = to(spaced)
                row[LINE_FEED] = self._choose_unit(key, two, four, tab, to)

    def _choose_unit(self, key: object, two: Layout, four: Layout, tab: Layout, to: Callable[[Layout], int]) -> int:
        """The state behind the first line feed of a text: the indentation that follows is the unit of the text, and
        leads to one of three layouts. What comes behind it is made with its row."""
        machine = self._machine

        def add(name: str, codes: dict[int, int], like: int | None = None) -> int:
            def fill(row: np.ndarray) -> None:
                if like is not None:
                    np.maximum(machine.row(like), 0, out=row)
                for byte, code in codes.items():
                    row[byte] = code

            ends = -1 if like is None else machine.result_of(like)
            return machine.state(("unit", name, self.root, key), lambda: machine.add_state(fill, ends=ends))

        def fill(row: np.ndarray) -> None:
            three_spaces = add("three spaces", {SPACE: to(four)})
            two_spaces = add("two spaces", {SPACE: three_spaces}, like=to(two))
            row[SPACE], row[TAB] = add("one space", {SPACE: two_spaces}), to(tab)

        return machine.state(("unit", self.root, key), lambda: machine.add_state(fill))

    def close(self, row: np.ndarray, layout: Layout, bracket: int, end: int) -> None:
        """Let a closing bracket lead to the state ``end``."""
        if not layout.closing:
            row[bracket] = end
            return

        def fill(row: np.ndarray) -> None:
            row[bracket] = end

        machine = self._machine
        key = ("close", bracket, layout.end, end)
        row[layout.closing] = machine.state(key, lambda: machine.add_state(fill, space=layout.end))
