"""Walks of a token trie within a string of several languages at once, which need no states of the machine.

What may follow in such a string is a *joint*: a formula (and, or, not) over languages, and for each of them the set of
its parts (``part_sets``), 0 where no text of it is left. Compiled code follows the sets side by side. Whether a joint
can be completed is told by the formula where languages are lost, are every text, or have bounds on their lengths that
exclude each other, or that surely leave a text; else by a text that is found to be in it: one of a few short ones, or
the shortest text of one of its languages. Python is asked only where none of these tells.
"""

from collections.abc import Callable

import numpy as np

from ..expressions import LIKED, NOTHING, Expressions
from ..native_code import native, native_part
from ..vocabulary import Trie
from .part_sets import (
    BACKSLASH,
    BEFORE_U,
    BEHIND_BACKSLASH,
    BETWEEN,
    GAP,
    LACKS_RULES,
    LEFT,
    LETTER_U,
    M_BYTES,
    MOST,
    NEVER,
    NO_BOUND,
    NO_ROOM,
    NO_RULE,
    NOT_MADE,
    NUM_PARTS,
    QUOTE,
    REFUSED,
    ROUND,
    S_LACKED_IN,
    S_LEFT,
    S_MOST,
    S_PADDING,
    S_RANGE,
    S_WHOLE,
    S_WIDE,
    SLASH,
    WORK,
    Found,
    NoParts,
    PartSets,
    StringText,
    find_part,
    follow,
    make_step,
    members_of,
    row_slot,
    rule_of,
)  # fmt: skip
from .untouched import untouched

MAX_JOINTS = 4096
MAX_FORMULAS = 512
MOST_LANGUAGES = 8
MOST_OPERATIONS = 64
MOST_TRIED = 48  # bytes of a language's shortest text
MOST_PASSED = 256  # characters: of longer texts none is tried for its length
MOST_ASKED = 24  # joints, in one walk
MOST_FAMILIES = 4  # of texts that a formula is known to have
MAX_TOLD = 8192  # rows that are known to be completed
NOT, AND, OR = -1, -2, -3  # operations of a formula, in postfix order; from 0 on: the numbers of its languages
FALSE, TRUE, NOT_TOLD = 0, 1, 2
LACKS_ANSWER = LACKS_RULES - 100  # a step to a joint that is not known to be completed yet
NOTED = -1000  # a step of NOTED - n lacked something in round n
# Columns of a joint: whether it can be completed, may end, may go on with an escape; the last round in which something
# that it needs was missing.
J_ALIVE, J_ENDS, J_ESCAPES, J_ASKED_IN = range(4)
# LAST_TEXT, LAST_WAY: the text of ``TEXTS`` and the way (``has_tried_text``) that completed a joint last. ROOM: for so
# many joints.
NUM_JOINTS, NUM_ASKED, NUM_TOLD, WHOLE_SET, LAST_TEXT, LAST_WAY, ROOM = range(7)
TEXTS = (b"aaaa", b" a", b"0", b"-", b".", b"1234", b"\x80", b"\x80\x80", b"\x80\x80\x80")  # that are tried
MOST_TEXT = max(map(len, TEXTS))
ESCAPED_CHARS = bytes([QUOTE, BACKSLASH, 9, 10, 13, *(c for c in range(0x20) if c not in (9, 10, 13))])
TABLES = np.dtype(
    [
        ("counts", np.int64, 7),
        ("joints", np.int32, (MAX_JOINTS, 1 + MOST_LANGUAGES)),  # the formula, and the sets
        ("steps", np.int32, (MAX_JOINTS, 256)),
        ("about", np.int32, (MAX_JOINTS, 4)),
        ("table", np.int32, 4 * MAX_JOINTS),
        ("formulas", np.int32, (MAX_FORMULAS, 2 + MOST_OPERATIONS)),  # languages, operations, and these
        ("asked", np.int32, MAX_JOINTS),  # joints; negative where no text that was tried completes them
        ("stack", np.int64, (MOST_OPERATIONS, 3)),
        ("next", np.int32, 1 + MOST_LANGUAGES),  # a joint under way
        ("tried", np.int32, (1 + MOST_TRIED + MOST_PASSED + MOST_TEXT, 1 + MOST_LANGUAGES)),  # on the way of a text
        ("texts", np.uint8, (len(TEXTS), 1 + MOST_TEXT)),
        ("liked", np.uint8, len(LIKED)),
        ("escaped", np.uint8, len(ESCAPED_CHARS)),
        ("told", np.int32, (MAX_TOLD, 1 + MOST_LANGUAGES)),  # rows that can be completed
        ("told_table", np.int32, 4 * MAX_TOLD),
        ("families", np.int64, (MOST_OPERATIONS + 1, 2, 1 + MOST_FAMILIES, 3)),
    ],
    align=True,
)


class JointSets:
    """The joints of one store, forgotten where there is no more room. Callers hold the machine's lock."""

    def __init__(self, part_sets: PartSets) -> None:
        self.ex: Expressions = part_sets.ex
        self._part_sets = part_sets
        self._age = -1
        self._numbers: dict[tuple[int, ...], int] = {}
        self._joint_of: dict[int, int] = {}  # by expression
        self._rests: dict[int, int] = {}  # by joint
        self._unsuitable: set[tuple[int, ...]] = set()  # formulas of which too many joints were asked
        tables = self.tables = untouched((1,), TABLES)[0]
        self._counts, self._joints, self._about = tables["counts"], tables["joints"], tables["about"]
        self._formulas, self._asked, self._next = tables["formulas"], tables["asked"], tables["next"]
        self._table, self._told_table = tables["table"], tables["told_table"]
        for row, text in zip(tables["texts"], TEXTS, strict=True):
            row[0], row[1 : 1 + len(text)] = len(text), list(text)
        tables["liked"], tables["escaped"] = list(LIKED), list(ESCAPED_CHARS)
        self._counts[ROOM] = MAX_JOINTS
        self._path = np.zeros((0, 2), np.int64)
        try_asked(part_sets.tables, self.tables)  # loads compiled code

    @property
    def num_told(self) -> int:
        """How many rows on the way of a text are known to be completed."""
        return int(self._counts[NUM_TOLD]) - 1

    def walk(self, trie: Trie, text: StringText, mask: np.ndarray) -> Found:
        """As ``PartSets.walk``, of a string that is not counted, also right behind a backslash. A ``/`` there is not
        walked either where it may be allowed."""
        self._make_room()
        if len(self._path) < trie.max_depth + 2:
            self._path = np.zeros((trie.max_depth + 2, 2), np.int64)
        try:
            return self._walk(trie, text, mask)
        except BaseException:
            self._part_sets.forget()
            raise

    def read(self, expr: int, data: bytes, most_rules: int) -> tuple[int, int, int]:
        """As ``PartSets.read``, of a string that is not counted."""
        self._make_room()
        parts = self._part_sets
        number = self._joint_of.get(expr)
        if number is None:
            number = self._make_joint(expr, parts.set_of if most_rules else parts.known_set)
            self._joint_of[expr] = number
        array = np.frombuffer(bytearray(data), np.uint8)
        while True:
            parts.begin_round()
            size, after = read_joints(parts.tables, self.tables, number, array)
            made = parts.finish_reading(most_rules)
            self._counts[NUM_ASKED] = 0
            if not made:
                return size, 0, self._rest(after)
            most_rules -= made

    def _make_room(self) -> None:
        parts = self._part_sets
        parts.make_room()
        if self._age != parts.age or 2 * self._counts[NUM_JOINTS] > MAX_JOINTS or 2 * len(self._numbers) > MAX_FORMULAS:
            self._forget()

    def _forget(self) -> None:
        self._age = self._part_sets.age
        self._joint_of.clear()
        self._rests.clear()
        self._numbers.clear()
        self._table[:] = 0
        self._told_table[:] = 0
        self._counts[:LAST_TEXT] = 1, 0, 1, self._part_sets.set_of(self.ex.text)  # the number 0 is no joint and no row

    def _walk(self, trie: Trie, text: StringText, mask: np.ndarray) -> Found:
        nodes = (trie.node_byte, trie.node_depth, trie.node_end, trie.first_token, trie.num_tokens, trie.token_order)
        parts, room = self._part_sets, self._part_sets.room
        place = BEHIND_BACKSLASH if text.is_escaping else BETWEEN
        pending = room.begin(trie.num_nodes, self._joint(text.expr), place)
        exits: list[np.ndarray] = []
        regions: list[tuple[int, int, int]] = []
        num_asked = 0
        while len(pending):
            parts.begin_round()
            num_exits, num_out = walk_joints(
                *nodes, parts.is_missing, parts.escapes, parts.tables, self.tables, self._path, pending, mask,
                room.exits, room.out,
            )  # fmt: skip
            if num_out < 0:
                raise NoParts
            exits.append(room.exits[:num_exits].copy())
            pending, apart = room.left(num_out)
            regions += [(node, self._rest(joint), 0) for node, joint, _, _ in apart]
            parts.finish_round()
            num_asked += self._tell(num_asked)
        whole = np.concatenate(exits)
        return Found(whole[np.argsort(whole[:, 0])], regions)

    def _tell(self, num_asked: int) -> int:
        """Tell of each joint that was asked whether it can be completed: by texts, of which rules may be missing, or by
        a search. How many were searched; ``num_asked`` were before."""
        parts, counts = self._part_sets, self._counts
        while (self._asked[: counts[NUM_ASKED]] > 0).any():
            parts.begin_round()
            if try_asked(parts.tables, self.tables) == NO_ROOM:
                raise NoParts
            parts.finish_round()
        asked = (-self._asked[: counts[NUM_ASKED]]).tolist()
        counts[NUM_ASKED] = 0
        if num_asked + len(asked) > MOST_ASKED:
            number = self._joints[asked[0], 0]
            self._unsuitable.add(tuple(self._formulas[number, 2 : 2 + self._formulas[number, 1]].tolist()))
            raise NoParts
        for joint in asked:
            self._about[joint, J_ALIVE] = TRUE if self.ex.is_nonempty(self._rest(joint)) else FALSE
        return len(asked)

    def _joint(self, expr: int) -> int:
        """The number of the joint of an expression."""
        found = self._joint_of.get(expr)
        if found is None:
            found = self._joint_of[expr] = self._make_joint(expr, self._part_sets.set_of)
        return found

    def _make_joint(self, expr: int, set_of: Callable[[int], int]) -> int:
        languages: dict[int, int] = {}
        operations: list[int] = []
        nodes = self.ex.nodes

        def add(expr: int) -> None:
            node = nodes[expr]
            if self.ex.is_plain[expr]:
                operations.append(languages.setdefault(expr, len(languages)))
            elif node[0] == "not":
                add(node[1])
                operations.append(NOT)
            elif node[0] in ("and", "or"):
                add(node[1])
                for part in node[2:]:
                    add(part)
                    operations.append(AND if node[0] == "and" else OR)
            else:
                raise NoParts

        add(expr)
        if len(languages) > MOST_LANGUAGES or len(operations) > MOST_OPERATIONS:
            raise NoParts
        key = tuple(operations)
        if key in self._unsuitable:
            raise NoParts
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._formulas[number, : 2 + len(key)] = len(languages), len(key), *key
        self._next[:] = 0
        self._next[0] = number
        for i, language in enumerate(languages):
            self._next[1 + i] = 0 if language == NOTHING else set_of(language)
        found: int = find_joint(self._part_sets.tables, self.tables)
        if found == NO_ROOM:
            raise NoParts
        self._about[found, J_ALIVE] = TRUE
        return found

    def _rest(self, joint: int) -> int:
        """The expression of what may follow in a joint."""
        found = self._rests.get(joint)
        if found is None:
            found = self._rests[joint] = self._make_rest(joint)
            self._joint_of.setdefault(found, joint)
            if self._about[joint, J_ALIVE] == TRUE:
                self.ex.note_nonempty(found)
        return found

    def _make_rest(self, joint: int) -> int:
        ex = self.ex
        formula, *sets = self._joints[joint].tolist()
        stack: list[int] = []
        for operation in self._formulas[formula, 2 : 2 + self._formulas[formula, 1]].tolist():
            if operation >= 0:
                stack.append(self._part_sets.rest(sets[operation]) if sets[operation] else NOTHING)
            elif operation == NOT:
                stack.append(ex.complement(stack.pop()))
            else:
                one, other = stack.pop(), stack.pop()
                stack.append(ex.intersect(one, other) if operation == AND else ex.union(one, other))
        return stack[0]


_FIRST = np.int64(0)  # not a literal, for which numba would compile a function once more


@native
def evaluated(about_sets, formulas, joint, is_end, stack):
    """The formula of the row ``joint``: whether a text that ends here is in it; or, unless ``is_end``, TRUE where every
    text that follows is, FALSE where none is, and NOT_TOLD.

    Beside a value, ``stack`` has bounds on the lengths of its texts.
    """
    formula = joint[0]
    top = 0
    for at in range(2, 2 + formulas[formula, 1]):
        operation = formulas[formula, at]
        if operation >= 0:
            s = joint[1 + operation]
            if is_end:
                stack[top, 0] = TRUE if s > 0 and about_sets[s, S_PADDING] != NEVER else FALSE
            else:
                stack[top, 0] = FALSE if s == 0 else TRUE if about_sets[s, S_WHOLE] != 0 else NOT_TOLD
                stack[top, 1], stack[top, 2] = about_sets[s, S_LEFT], about_sets[s, S_MOST]
            top += 1
            continue
        last = top - 1
        if operation == NOT:
            if stack[last, 0] != NOT_TOLD:
                stack[last, 0] = TRUE - stack[last, 0]
            stack[last, 1], stack[last, 2] = 0, NEVER
            continue
        top -= 1
        one, other = stack[last - 1, 0], stack[last, 0]
        if operation == AND:
            value = FALSE if one == FALSE or other == FALSE else TRUE if one == TRUE and other == TRUE else NOT_TOLD
            stack[last - 1, 1] = max(stack[last - 1, 1], stack[last, 1])
            stack[last - 1, 2] = min(stack[last - 1, 2], stack[last, 2])
            if value == NOT_TOLD and not is_end and stack[last - 1, 1] > stack[last - 1, 2]:
                value = FALSE
        else:
            value = TRUE if one == TRUE or other == TRUE else FALSE if one == FALSE and other == FALSE else NOT_TOLD
            if one == FALSE:
                stack[last - 1, 1], stack[last - 1, 2] = stack[last, 1], stack[last, 2]
            elif other != FALSE:
                stack[last - 1, 1] = min(stack[last - 1, 1], stack[last, 1])
                stack[last - 1, 2] = max(stack[last - 1, 2], stack[last, 2])
        stack[last - 1, 0] = value
    return stack[0, 0]


@native_part
def add_family(families, s, least, most):
    """Add the texts of the set ``s``, 0 for any text, that have ``least`` to ``most`` characters to ``families``
    [1 + MOST_FAMILIES, 3], whose first entry is their number."""
    count = families[0, 0]
    if least <= most and count < MOST_FAMILIES:
        families[0, 0] = count + 1
        families[count + 1, 0], families[count + 1, 1], families[count + 1, 2] = s, least, most


@native_part
def add_common(one, other, into):
    """Add the texts that are in a family of ``one`` and in one of ``other``, where both are of one set."""
    for i in range(1, 1 + one[0, 0]):
        for j in range(1, 1 + other[0, 0]):
            a, b = one[i, 0], other[j, 0]
            if a == 0 or b == 0 or a == b:
                add_family(into, max(a, b), max(one[i, 1], other[j, 1]), min(one[i, 2], other[j, 2]))


@native_part
def add_all(families, into):
    for i in range(1, 1 + families[0, 0]):
        add_family(into, families[i, 0], families[i, 1], families[i, 2])


@native_part
def add_language(about_sets, s, own):
    """Add families of a language's set to ``own[0]``, and families of what is not in it to ``own[1]``."""
    if s == 0:
        add_family(own[1], 0, 0, NEVER)
        return
    least, most = np.int64(about_sets[s, S_LEFT]), np.int64(about_sets[s, S_MOST])
    is_range = about_sets[s, S_WHOLE] != 0 or about_sets[s, S_RANGE] != 0
    most = np.int64(NEVER) if most >= NO_BOUND else most
    add_family(own[0], 0 if is_range else s, least, most)
    add_family(own[1], 0, 0, least - 1)
    add_family(own[1], 0, most + 1, NEVER)


@native_part
def has_text_of(tables, s, least, most):
    """Whether a part of a set surely has a text of ``least`` to ``most`` characters."""
    about_sets, parts, sets = tables.about_sets, tables.parts, tables.sets
    if s == 0 or least <= about_sets[s, S_LEFT] <= most:
        return True
    for w in range((tables.counts[NUM_PARTS] + 63) >> 6):
        bits, part = sets[s, w], w << 6
        while bits != 0:
            if bits & np.uint64(1):
                left, gap = parts[part, LEFT], parts[part, GAP]
                if left <= most and parts[part, MOST] >= least and (left >= least or gap <= most - least + 1):
                    return True
            bits >>= np.uint64(1)
            part += 1
    return False


@native_part
def shows_text(tables, joint_tables, joint):
    """Whether the row of a joint surely has a text: families of texts that are in a formula, and of texts that are not,
    follow from those of its parts."""
    about_sets, formulas, families = tables.about_sets, joint_tables.formulas, joint_tables.families
    formula = joint[0]
    top = 0
    for at in range(2, 2 + formulas[formula, 1]):
        operation = formulas[formula, at]
        if operation == NOT:
            for i in range(1 + MOST_FAMILIES):
                for k in range(3):
                    one = families[top - 1, 0, i, k]
                    families[top - 1, 0, i, k] = families[top - 1, 1, i, k]
                    families[top - 1, 1, i, k] = one
            continue
        made = families[top]  # behind the operands
        made[0, 0, 0] = made[1, 0, 0] = 0
        if operation >= 0:
            add_language(about_sets, np.int64(joint[1 + operation]), made)
            top += 1
            continue
        side = 0 if operation == AND else 1
        one, other = families[top - 2], families[top - 1]
        add_common(one[side], other[side], made[side])
        add_all(one[1 - side], made[1 - side])
        add_all(other[1 - side], made[1 - side])
        for i in range(2):
            for k in range(1 + MOST_FAMILIES):
                for n in range(3):
                    one[i, k, n] = made[i, k, n]
        top -= 1
    shows = False
    for i in range(1, 1 + families[0, 0, 0, 0]):
        shows = shows or has_text_of(tables, families[0, 0, i, 0], families[0, 0, i, 1], families[0, 0, i, 2])
    return shows


@native
def find_joint(tables, joint_tables):
    """The number of the joint under way, a new one if there is none; NO_ROOM if there is no room."""
    counts, joints, steps, about = joint_tables.counts, joint_tables.joints, joint_tables.steps, joint_tables.about
    table, formulas, stack, wanted = joint_tables.table, joint_tables.formulas, joint_tables.stack, joint_tables.next
    slot = row_slot(table, joints, wanted)
    if table[slot] > 0:
        return np.int64(table[slot])
    number = counts[NUM_JOINTS]
    if number == counts[ROOM]:
        return np.int64(NO_ROOM)
    counts[NUM_JOINTS] = number + 1
    table[slot] = number
    for i in range(len(wanted)):
        joints[number, i] = wanted[i]
    for b in range(256):
        steps[number, b] = NOT_MADE
    ends = evaluated(tables.about_sets, formulas, wanted, True, stack)
    about[number, J_ALIVE], about[number, J_ENDS] = TRUE if ends == TRUE else NOT_TOLD, ends
    about[number, J_ESCAPES], about[number, J_ASKED_IN] = NOT_TOLD, 0
    return number


@native_part
def step_sets(tables, joint, byte, num_languages, whole, into):
    """Write the row of a joint after a byte; NO_ROOM, LACKS_RULES, else 0. ``whole``: the set of every text."""
    counts, steps, about_sets = tables.counts, tables.steps, tables.about_sets
    lacks = False
    into[0] = joint[0]
    for i in range(1, 1 + num_languages):
        s = np.int64(joint[i])
        step = np.int64(0)
        if s > 0:
            step = np.int64(steps[s, byte])
            if step == NOT_MADE:
                is_noted = about_sets[s, S_LACKED_IN] == counts[ROUND]
                step = np.int64(LACKS_RULES) if is_noted else make_step(tables, s, byte)
            if step == NO_ROOM:
                return np.int64(NO_ROOM)
            lacks = lacks or step == LACKS_RULES
        into[i] = whole if step > 0 and about_sets[step, S_WHOLE] != 0 else max(step, 0)
    for i in range(1 + num_languages, len(into)):
        into[i] = 0
    return np.int64(LACKS_RULES) if lacks else np.int64(0)


@native_part
def told_of(tables, joint_tables, joint):
    """Whether the row of a joint can be completed: TRUE, FALSE, or NOT_TOLD where only a text may tell."""
    formulas, stack = joint_tables.formulas, joint_tables.stack
    told, table = joint_tables.told, joint_tables.told_table
    value = evaluated(tables.about_sets, formulas, joint, False, stack)
    if value != NOT_TOLD:
        return value
    if evaluated(tables.about_sets, formulas, joint, True, stack) == TRUE or table[row_slot(table, told, joint)] > 0:
        return np.int64(TRUE)
    return np.int64(TRUE if shows_text(tables, joint_tables, joint) else NOT_TOLD)


@native_part
def note_told(joint_tables, count):
    """Note that the first ``count`` rows of ``tried`` can be completed."""
    counts, tried, told, table = joint_tables.counts, joint_tables.tried, joint_tables.told, joint_tables.told_table
    for i in range(count):
        slot = row_slot(table, told, tried[i])
        if table[slot] == 0 and counts[NUM_TOLD] < len(told):
            for k in range(1 + MOST_LANGUAGES):
                told[counts[NUM_TOLD], k] = tried[i, k]
            table[slot] = counts[NUM_TOLD]
            counts[NUM_TOLD] += 1


@native_part
def try_byte(tables, joint_tables, at, byte):
    """Write the row of ``tried`` behind row ``at``, after a byte, and tell of it as ``told_of``; NO_ROOM, LACKS_RULES.
    Where it can be completed, that is noted of all rows before it."""
    tried = joint_tables.tried
    num_languages, whole = np.int64(joint_tables.formulas[tried[at, 0], 0]), joint_tables.counts[WHOLE_SET]
    step = step_sets(tables, tried[at], byte, num_languages, whole, tried[at + 1])
    if step != 0:
        return step
    told = told_of(tables, joint_tables, tried[at + 1])
    if told == TRUE:
        note_told(joint_tables, at + 2)
    return told


@native_part
def has_listed_text(tables, joint_tables, at):
    """TRUE if one of ``TEXTS`` leads from row ``at`` of ``tried`` to what can be completed, else FALSE; NO_ROOM,
    LACKS_RULES."""
    texts = joint_tables.texts
    lacks = False
    last = joint_tables.counts[LAST_TEXT]
    for i in range(len(texts)):
        t = (last + i) % len(texts)
        for n in range(texts[t, 0]):
            told = try_byte(tables, joint_tables, at + n, np.int64(texts[t, 1 + n]))
            if told == NO_ROOM:
                return told
            if told == TRUE:
                joint_tables.counts[LAST_TEXT] = t
                return told
            lacks = lacks or told == LACKS_RULES
            if told != NOT_TOLD:
                break
    return np.int64(LACKS_RULES) if lacks else np.int64(FALSE)


@native_part
def has_shortest_text(tables, joint_tables, language, least):
    """As ``has_listed_text`` from row 0, of the shortest text of a language, and of that with one of ``TEXTS`` behind;
    of a text of about ``least`` characters where the shortest one has fewer."""
    counts, parts, bounds = tables.counts, tables.parts, tables.bounds
    shapes, rules, moves, has_byte = tables.shapes, tables.rules, tables.moves, tables.has_byte
    members, following = tables.members, tables.following
    tried, liked = joint_tables.tried, joint_tables.liked
    s = np.int64(tried[0, 1 + language])
    num_members = members_of(tables, s) if s > 0 else np.int64(0)
    if num_members <= 0:
        return np.int64(FALSE) if num_members == 0 else np.int64(LACKS_RULES)
    part = np.int64(members[0])
    for m in range(num_members):
        if parts[members[m], LEFT] < parts[part, LEFT]:
            part = np.int64(members[m])
    at = _FIRST  # the row of ``tried`` that the text has led to
    count = 0  # characters
    for _ in range(MOST_TRIED + least):
        is_long = count + parts[part, LEFT] >= least
        if is_long and parts[part, LEFT] == 0:
            break
        rule = rule_of(tables, part)
        if rule == NO_RULE:
            return np.int64(LACKS_RULES)
        counts[WORK] += rules[rule, 1]
        best, to = np.int64(-1), np.int64(-1)
        for m in range(rules[rule, 0], rules[rule, 0] + rules[rule, 1]):
            follow(moves, m, bounds, part, shapes, following[0])
            after = find_part(tables, following[0])
            if after == NO_ROOM:
                return np.int64(NO_ROOM)
            column = LEFT if to < 0 or is_long or parts[after, MOST] == parts[to, MOST] else MOST
            if to < 0 or (parts[after, column] < parts[to, column]) == (column == LEFT):
                best, to = np.int64(m), after
        if best < 0:
            return np.int64(FALSE)
        n = 0
        while has_byte[moves[best, M_BYTES], liked[n]] == 0:
            n += 1
        count += liked[n] < 0x80 or liked[n] >= 0xC0
        told = try_byte(tables, joint_tables, at, np.int64(liked[n]))
        if told != NOT_TOLD:
            return told
        at += 1
        part = to
    return has_listed_text(tables, joint_tables, at)


@native_part
def has_tried_text(tables, joint_tables, number):
    """TRUE if one of the texts that are tried completes the joint, FALSE if none of them does; NO_ROOM, LACKS_RULES."""
    about_sets, joints = tables.about_sets, joint_tables.joints
    formulas, tried = joint_tables.formulas, joint_tables.tried
    num_languages = np.int64(formulas[joints[number, 0], 0])
    for i in range(1 + MOST_LANGUAGES):
        tried[0, i] = joints[number, i]
    num_ways = 1 + (num_languages + 1) * num_languages
    lacks = False
    for i in range(num_ways):
        way = (joint_tables.counts[LAST_WAY] + i) % num_ways
        if way == 0:
            told = has_listed_text(tables, joint_tables, _FIRST)
        else:  # a text of ``language`` that is longer than all of the language ``bound``
            bound, language = (way - 1) // num_languages - 1, (way - 1) % num_languages
            least = np.int64(0)
            if bound >= 0:
                s = joints[number, 1 + bound]
                least = np.int64(about_sets[s, S_MOST]) + 1
                if s == 0 or language == bound or least > MOST_PASSED:
                    continue
            told = has_shortest_text(tables, joint_tables, language, least)
        if told == TRUE:
            joint_tables.counts[LAST_WAY] = way
        if told in (TRUE, NO_ROOM):
            return told
        lacks = lacks or told == LACKS_RULES
    return np.int64(LACKS_RULES) if lacks else np.int64(FALSE)


@native
def try_asked(tables, joint_tables):
    """Try texts for each joint that was asked, for which rules may have been missing; those that need a search become
    negative, those that still lack rules stay. NO_ROOM, else 0."""
    counts, about, asked = joint_tables.counts, joint_tables.about, joint_tables.asked
    left = 0
    for i in range(counts[NUM_ASKED]):
        joint = np.int64(asked[i])
        if joint > 0:
            told = has_tried_text(tables, joint_tables, joint)
            if told == NO_ROOM:
                return told
            if told == TRUE:
                about[joint, J_ALIVE] = TRUE
                continue
            joint = -joint if told == FALSE else joint
        asked[left] = joint
        left += 1
    counts[NUM_ASKED] = left
    return np.int64(0)


@native_part
def note_step(tables, joint, steps, byte, step):
    """Note the step of the row of a joint by a byte, and by the bytes after which all its sets are the same; return
    it."""
    set_steps, alike = tables.steps, tables.alike
    for b in range(256):
        alike[b] = 1
    for i in range(1, len(joint)):
        if joint[i] > 0:
            row = set_steps[joint[i]]
            for b in range(256):
                alike[b] &= row[b] == row[byte]
    for b in range(256):
        if alike[b]:
            steps[b] = step
    return np.int64(step)


@native_part
def step_joint(tables, joint_tables, number, byte):
    """The joint after a byte, which is noted; REFUSED, LACKS_RULES, LACKS_ANSWER, NO_ROOM."""
    counts, joints, steps, about = joint_tables.counts, joint_tables.joints, joint_tables.steps, joint_tables.about
    formulas, asked, stack, wanted = joint_tables.formulas, joint_tables.asked, joint_tables.stack, joint_tables.next
    step = np.int64(steps[number, byte])
    noted = NOTED - tables.counts[ROUND]
    if step == noted:
        return np.int64(LACKS_ANSWER)
    if step > NOTED and step != NOT_MADE:
        return step
    step = step_sets(tables, joints[number], byte, np.int64(formulas[joints[number, 0], 0]), counts[WHOLE_SET], wanted)
    if step != 0:
        if step == LACKS_RULES:
            steps[number, byte] = noted
        return step
    if evaluated(tables.about_sets, formulas, wanted, False, stack) == FALSE:
        return note_step(tables, joints[number], steps[number], byte, REFUSED)
    found = find_joint(tables, joint_tables)
    if found == NO_ROOM:
        return found
    if about[found, J_ALIVE] == NOT_TOLD:
        told = np.int64(LACKS_ANSWER)
        if about[found, J_ASKED_IN] != tables.counts[ROUND]:
            told = told_of(tables, joint_tables, wanted)
            told = has_tried_text(tables, joint_tables, found) if told == NOT_TOLD else told
            if told == NO_ROOM:
                return told
            if told != TRUE:
                about[found, J_ASKED_IN] = tables.counts[ROUND]
                asked[counts[NUM_ASKED]] = -found if told == FALSE else found
                counts[NUM_ASKED] += 1
        if told != TRUE:
            note_step(tables, joints[number], steps[number], byte, noted)
            return np.int64(LACKS_ANSWER)
        about[found, J_ALIVE] = TRUE
    return note_step(tables, joints[number], steps[number], byte, found if about[found, J_ALIVE] == TRUE else REFUSED)


@native
def read_joints(tables, joint_tables, joint, data):
    """Follow the bytes ``data`` from a joint, up to one that is refused or whose step is not told. Returns how many
    were followed, and the joint behind them."""
    joint = np.int64(joint)
    for at in range(len(data)):
        step = step_joint(tables, joint_tables, joint, np.int64(data[at]))
        if step < 0:
            return np.int64(at), joint
        joint = step
    return np.int64(len(data)), joint


@native
def may_escape(tables, joint_tables, number):
    """Whether a character that cannot stand for itself may follow, which is noted: TRUE, FALSE; LACKS_RULES,
    LACKS_ANSWER, NO_ROOM."""
    about, escaped = joint_tables.about, joint_tables.escaped
    lacks = np.int64(0)
    for i in range(len(escaped)):
        step = np.int64(joint_tables.steps[number, escaped[i]])
        if step == NOT_MADE or step <= NOTED:
            step = step_joint(tables, joint_tables, number, np.int64(escaped[i]))
        if step == NO_ROOM:
            return step
        if step >= 0:
            about[number, J_ESCAPES] = TRUE
            return np.int64(TRUE)
        if step != REFUSED:
            lacks = step
    if lacks != 0:
        return lacks
    about[number, J_ESCAPES] = FALSE
    return np.int64(FALSE)


@native
def walk_joints(
    node_byte, depths, ends, first, count, order, is_missing, escapes, tables, joint_tables, path, pending, mask, exits,
    out,
):  # fmt: skip
    """Walk the regions in ``pending`` [n, 4] (node, joint, 0, place), node -1 for the whole trie.

    Returns the numbers of exits and of regions that are left, which are in ``out``: those where something is missing,
    and those at a ``u`` or ``/`` behind a backslash. The last is negative where there is no room, or too much work.
    """
    about_sets, joints, steps, about = tables.about_sets, joint_tables.joints, joint_tables.steps, joint_tables.about
    noted = NOTED - tables.counts[ROUND]
    num_exits = num_out = 0
    for p in range(len(pending)):
        node = np.int64(pending[p, 0])
        at = max(node, np.int64(0))
        end = len(node_byte) if node < 0 else np.int64(ends[at])
        if at >= end:
            continue
        base = np.int64(depths[at]) - 1
        path[base, 0], path[base, 1] = pending[p, 1], pending[p, 3]
        while at < end:
            d = np.int64(depths[at])
            joint, place = path[d - 1, 0], path[d - 1, 1]
            byte = np.int64(node_byte[at])
            step = np.int64(REFUSED)
            char = np.int64(-1)  # whose step is looked for
            after = np.int64(BETWEEN)
            if is_missing[byte] != 0 or (place != BEHIND_BACKSLASH and byte < 0x20):
                pass
            elif place == BEHIND_BACKSLASH:
                is_left = byte == LETTER_U
                for i in range(1, joints.shape[1] if byte == SLASH else 0):
                    is_left = is_left or (joints[joint, i] > 0 and about_sets[joints[joint, i], S_WIDE] != 0)
                if is_left:
                    out[num_out, 0], out[num_out, 1], out[num_out, 2], out[num_out, 3] = at, joint, 0, BEFORE_U
                    num_out += 1
                elif byte != SLASH and escapes[byte] != 0:
                    char = np.int64(escapes[byte])
            elif byte == QUOTE:
                if about[joint, J_ENDS] == TRUE:
                    exits[num_exits, 0], exits[num_exits, 1], exits[num_exits, 2] = at, 0, 1
                    exits[num_exits, 3], exits[num_exits, 4] = 0, 0
                    num_exits += 1
            elif byte == BACKSLASH:
                told = np.int64(about[joint, J_ESCAPES])
                if told == NOT_TOLD:
                    told = may_escape(tables, joint_tables, joint)
                step = joint if told == TRUE else np.int64(REFUSED) if told == FALSE else told
                after = np.int64(BEHIND_BACKSLASH)
            else:
                char = byte
            if char >= 0:
                step = np.int64(steps[joint, char])
                if step == NOT_MADE or (step <= NOTED and step != noted):
                    step = step_joint(tables, joint_tables, joint, char)
            if step >= 0:
                path[d, 0], path[d, 1] = step, after
                for i in range(first[at], first[at] + count[at]):
                    token = order[i]
                    mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
                at += 1
                continue
            if step in (LACKS_RULES, LACKS_ANSWER, noted):
                out[num_out, 0], out[num_out, 1], out[num_out, 2], out[num_out, 3] = at, joint, 0, place
                num_out += 1
            elif step == NO_ROOM:
                return num_exits, -1
            at = np.int64(ends[at])
    return num_exits, num_out
