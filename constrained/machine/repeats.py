"""The tokens of a mask that would repeat an item of an array with ``uniqueItems``, or a name of an object that counts
its properties, or leave nothing but repeats.

A mask is first made as if items might repeat. Two kinds of tokens may then be wrong: those that go on, or end, as an
item that was read before; and those that end one item and begin the next. They are found by walking the token trie
along the known items, and by the few tokens that hold a comma; each is tried.
"""

from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from . import walk
from .agreement import DONE, SPACES, Agreement, agreement_with
from .item_texts import Crossing, Levels, crossing_tokens
from .machine import MASK_WORK, Machine
from .recent import Recent

STEP_FUEL = 10  # of one byte tried on the way to another value
QUOTE = 0x22


class Repeats:
    """The tokens to be removed from the masks of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._children: dict[int, dict[int, int]] = {}
        self._after_space: dict[int, list[int]] = {}
        self._spaces: np.ndarray | None = None  # made when first needed
        self._dead: Recent[int, bool] = Recent(20_000)  # by configuration
        machine.only_repeats = self.is_dead

    @cached_property
    def _crossing(self) -> Crossing:
        vocabulary = self.machine.vocabulary
        return vocabulary.shared(crossing_tokens, lambda: crossing_tokens(vocabulary))

    def prepare(self) -> None:
        """Find the tokens that may cross items ahead of time."""
        _ = self._crossing

    def removed(self, config: int, row: np.ndarray) -> np.ndarray:
        """``row`` [ceil(V / 32)], the mask of a configuration where items may repeat, without the wrong tokens."""
        machine = self.machine
        state, _, stack, reading = machine.place(config)
        levels = machine.items.levels(reading)
        if not levels:
            return _without(row, self._wrong(config, _tokens_in(row, [self._opening(state)])))
        is_inside = machine.is_in_item(levels, stack)
        suspects = self._crossing_of(levels, state, stack, is_inside)
        refused: list[np.ndarray] = []
        judged: list[np.ndarray] = []  # the mask says nothing of them: a repeated item may be allowed
        for level in levels if is_inside else levels[:-1]:
            agreement = machine.items.agreement(level)
            if agreement is not None:
                is_plain = level == levels[-1] and (level.is_object or machine.item_readers[level.frame].is_plain)
                self._follow(config, agreement, suspects, refused if is_plain else judged)
                if not agreement.is_in_string and machine.item_readers[level.frame].spaces_close:
                    suspects.append(self._tokens_of_space())
        if levels[-1].is_object and stack == levels[-1].base:
            names = agreement_with(levels[-1].seen.values())
            if names is not None:
                self._follow(config, names, suspects, refused)
        if judged:
            row = row.copy()
            tokens = np.unique(np.concatenate(judged))
            np.bitwise_or.at(row, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))
            suspects.append(tokens)
        row = _without(row, _tokens_in(row, refused))
        return _without(row, self._wrong(config, _tokens_in(row, suspects)))

    def agreeing(self, config: int) -> np.ndarray:
        """The tokens after which an item or a name under way still agrees with one before it, and maybe some more."""
        machine = self.machine
        _, _, stack, reading = machine.place(config)
        levels = machine.items.levels(reading)
        agreements = list(self._agreements(config))
        if levels and not machine.is_in_item(levels, stack) and (next_item := agreement_with(levels[-1].seen.values())):
            agreements.append(next_item)
        found: list[np.ndarray] = [np.zeros(0, np.int32)]
        for agreement in agreements:
            self._follow(config, agreement, found, found, loops=True)
        return np.concatenate(found)

    def _crossing_of(self, levels: Levels, state: int, stack: int, is_inside: bool) -> list[np.ndarray]:
        """The tokens that may end the innermost array's item and go on behind it, and those that open an array."""
        machine, crossing = self.machine, self._crossing
        assert crossing is not None
        level = levels[-1]
        if level.is_object:
            return [crossing.into_names, self._opening(state), *[crossing.commas_after_bracket][: len(levels) - 1]]
        first = machine.items.first_byte(level.text) if is_inside else 0
        if is_inside:
            while machine.stack_parents[stack] != level.base:
                stack = machine.stack_parents[stack]
            has_others = machine.item_readers[machine.stack_frames[stack]].has_others(level.seen.count + 1)
        else:
            has_others = machine.item_readers[level.frame].has_others_after(state, level.seen.count)
        if first == QUOTE:
            found = crossing.into_next_after_quote if has_others else crossing.commas_after_quote
        elif first and machine.inside_string[state]:
            found = crossing.commas_after_both
        elif first in b"[{":
            found = crossing.into_next_after_bracket if has_others else crossing.commas_after_bracket
        else:
            found = crossing.into_next if has_others else crossing.commas
        out = [found]
        if first != QUOTE:
            out.append(self._opening(state))
        if len(levels) > 1:
            out.append(crossing.commas_after_bracket)
        return out

    def _opening(self, state: int) -> np.ndarray:
        """The tokens that may open an array and end its first item."""
        machine, crossing = self.machine, self._crossing
        assert crossing is not None
        is_in_string = bool(machine.inside_string[state] or machine.counted[state])
        return crossing.whole_after_quote if is_in_string else crossing.whole

    def _wrong(self, config: int, tokens: np.ndarray) -> np.ndarray:
        """int32 [n]: those of the tokens that are refused."""
        return np.array([token for token in tokens.tolist() if self.machine.advance(config, token) < 0], np.int32)

    # -- tokens that agree with known items -----------------------------------------------------------------------

    def _follow(
        self,
        config: int,
        agreement: Agreement,
        suspects: list[np.ndarray],
        repeats: list[np.ndarray],
        *,
        loops: bool = False,
    ) -> None:
        """Walk the trie along the known items: tokens that agree with one are ``suspects``, or ``repeats`` if they end.

        Tokens that lead back to an open-ended state within the string under way are no suspects without ``loops``.
        """
        trie, fuel = self.machine.vocabulary.trie, self.machine.fuel
        num_nodes, num_tokens = trie.num_nodes, len(trie.token_order)
        todo: list[tuple[list[int], bytes, Agreement, bytes]] = []  # nodes, the bytes to them, what stays in the state

        def step(nodes: list[int], path: bytes, before: Agreement, byte: int, looping: bytes) -> None:
            fuel.spend(1)
            following = before.step(byte)
            if following is None:
                return
            if following.mode == DONE:
                for node in nodes:
                    end = int(trie.node_end[node])
                    last = int(trie.first_token[end]) if end < num_nodes else num_tokens
                    repeats.append(trie.token_order[trie.first_token[node] : last])
                return
            path += bytes([byte])
            if byte not in looping:
                looping = b""
                for node in nodes:
                    if trie.num_tokens[node]:
                        first = trie.first_token[node]
                        suspects.append(trie.token_order[first : first + trie.num_tokens[node]])
            if following.is_in_string and not before.is_in_string and not loops:
                after = self.machine.read_on(config, path)
                looping = self._looping_bytes(after) if after >= 0 else b""  # white space may be missing
            todo.append((nodes, path, following, looping))

        looping = self._looping_bytes(config) if agreement.is_in_string and not loops else b""
        for byte in agreement.agreeing_bytes():
            nodes = [] if agreement.is_in_scalar else self._nodes_after_space(byte)
            if agreement.is_in_scalar and byte in self._children_of(-1):
                nodes = [self._children_of(-1)[byte]]
            if nodes:
                step(nodes, b"", agreement, byte, looping)
        while todo:
            nodes, path, before, looping = todo.pop()
            children = [found for node in nodes if (found := self._children_of(node))]
            if not children:
                continue
            agreeing = before.agreeing_bytes() if before.is_in_string else before.agreeing_bytes() | SPACES
            for byte in agreeing:
                below = [found[byte] for found in children if byte in found]
                if below:
                    step(below, path, before, byte, looping)

    def _nodes_after_space(self, byte: int) -> list[int]:
        """The trie's nodes of a byte, at the root or behind nothing but white space."""
        if not self._after_space:
            todo = [-1]
            while todo:
                for first, child in self._children_of(todo.pop()).items():
                    self._after_space.setdefault(first, []).append(child)
                    if first in SPACES:
                        todo.append(child)
        return self._after_space.get(byte, [])

    def _tokens_of_space(self) -> np.ndarray:
        """The tokens of nothing but white space."""
        if self._spaces is None:
            trie, todo = self.machine.vocabulary.trie, [-1]
            spaces: list[int] = []
            while todo:
                for byte, child in self._children_of(todo.pop()).items():
                    if byte in SPACES:
                        first = int(trie.first_token[child])
                        spaces += trie.token_order[first : first + int(trie.num_tokens[child])].tolist()
                        todo.append(child)
            self._spaces = np.array(spaces, np.int32)
        return self._spaces

    def _children_of(self, node: int) -> dict[int, int]:
        """The children of a node of the trie, by their bytes; node -1 is the root."""
        found = self._children.get(node)
        if found is None:
            trie = self.machine.vocabulary.trie
            found = self._children[node] = {}
            at, end = node + 1, int(trie.node_end[node]) if node >= 0 else trie.num_nodes
            while at < end:
                found[int(trie.node_byte[at])] = at
                at = int(trie.node_end[at])
        return found

    def _looping_bytes(self, config: int) -> bytes:
        """The bytes that lead back to the configuration's state: if there are any, values have no end there."""
        machine = self.machine
        state, aux, stack, _ = machine.place(config)
        if state in machine.lazy:
            return b""
        if machine.counted[state]:
            high = machine.frame_highs[machine.stack_frames[stack]]
            if high - aux <= machine.vocabulary.trie.max_depth:
                return b""
        return np.flatnonzero(machine.row(state) == state).astype(np.uint8).tobytes()

    # -- values left ----------------------------------------------------------------------------------------------

    def _agreements(self, config: int) -> tuple[Agreement, ...]:
        """Those of all items under way that agree with an item before them."""
        machine = self.machine
        _, _, stack, reading = machine.place(config)
        levels = machine.items.levels(reading)
        if not machine.is_in_item(levels, stack):
            levels = levels[:-1]
        found = [machine.items.agreement(level) for level in levels]
        return tuple(agreement for agreement in found if agreement is not None)

    def is_dead(self, config: int) -> bool:
        """Whether every way to complete the items under way repeats an item.

        Searches the bytes that agree with known items; one that agrees with none leads to another value.
        """
        if not self._agreements(config):
            return False
        found = self._dead.get(config)
        if found is None:
            met: list[tuple[int, bytes]] = []
            way = self._way_apart(config, met=met)
            found = way is None
            for passed, before in met:  # on the way to another value there are no dead ends
                if way is not None and way.startswith(before):
                    self._dead.put(passed, False)
            self._dead.put(config, found)
        return found

    def way_apart(self, config: int) -> bytes:
        """Bytes after which no item under way agrees with one before it; b"" if there are none or none are needed."""
        if not self._agreements(config):
            return b""
        with self.machine.fuel.at_most(MASK_WORK):
            return self._way_apart(config) or b""

    def _way_apart(self, start: int, *, met: list[tuple[int, bytes]] | None = None) -> bytes | None:
        """About the fewest bytes that lead to another value. Among ways of the same length, the search first tries the
        bytes that the fewest known items have next, so that it tries few bytes beside thousands of items.

        With ``met`` not the fewest: it gets the configurations looked at, each with the bytes to it, and the bytes may
        lead just into a string that may go on, or to a configuration that is known to have a way.
        """
        machine = self.machine
        sign = 1 if met is None else -1  # breadth first, or depth first
        tick = 0
        todo: list[tuple[int, int, int, int, bytes]] = [(0, 0, 0, start, b"")]  # length, items, order, before, way
        seen = set()
        while todo:
            _, _, _, config, way = heappop(todo)
            if way:
                machine.fuel.spend(STEP_FUEL)
                config = machine.read_on(config, way[-1:])
                if config < 0:
                    continue
            agreements = self._agreements(config)
            if not agreements:
                return way
            if met is not None:
                is_dead = self._dead.get(config)
                if is_dead:
                    continue
                met.append((config, way))
                if is_dead is False or (agreements[-1].is_in_string and self._looping_bytes(config)):
                    return way
            state, aux, stack, _ = machine.place(config)
            key = (state, aux, stack, tuple(a.key for a in agreements))
            if key in seen:
                continue
            seen.add(key)
            num_items = agreements[-1].items_by_byte()
            for byte in self._bytes_of(state, agreements):
                tick += 1
                heappush(todo, (sign * (len(way) + 1), num_items[byte], tick, config, way + bytes([byte])))
        return None

    def _bytes_of(self, state: int, agreements: tuple[Agreement, ...]) -> list[int]:
        """The bytes to try, in order: one for each next state where no known item agrees, those where some does, and
        white space.

        A number gets no exponent, so that the search has an end: one that differs has a spelling without.
        """
        machine = self.machine
        agreeing = frozenset().union(*[agreement.agreeing_bytes() for agreement in agreements])
        row = machine.row(state) if state not in machine.lazy else np.zeros(256, np.int32)
        left_out = b"eE" if agreements[-1].is_in_number else b""
        allowed = [b for b in np.flatnonzero(row > 0).tolist() if b not in left_out]
        spaces: list[int] = []
        if not agreements[-1].is_in_string:
            spaces = list(b"\t\n ") if machine.arrays[walk.SPACE][state] else [b for b in allowed if b in SPACES]
            allowed = [b for b in allowed if b not in SPACES]
        apart = {int(row[b]): b for b in allowed if b not in agreeing and b != 0x5C}
        ends = [b for b in b",]}" if row[b] <= 0] if machine.arrays[walk.ENDS][state] else []
        return [*apart.values(), *ends, *(b for b in allowed if b in agreeing or b == 0x5C), *spaces]


def _tokens_in(row: np.ndarray, tokens: list[np.ndarray]) -> np.ndarray:
    """int32 [n]: those of the tokens that the mask allows, each once; those of each array differ."""
    if not tokens:
        return np.zeros(0, np.int32)
    found = np.concatenate(tokens) if len(tokens) > 1 else tokens[0]
    found = found[(row.view(np.uint8)[found >> 3] >> (found & 7).astype(np.uint8) & 1).view(np.bool_)]
    return np.unique(found) if len(tokens) > 1 and len(found) > 1 else found


def _without(row: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The mask without the tokens [n]."""
    if not len(tokens):
        return row
    row = row.copy()
    np.bitwise_and.at(row, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
    row.flags.writeable = False
    return row
