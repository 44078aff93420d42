"""A pushdown automaton over bytes that texts are led through. Never knows a grammar.

A configuration (state, aux, stack, item) is an int; ``advance`` remembers what it found for it. What states and frames
mean is in the tables. ``item`` is the text so far of an item that an ``ItemReader`` waits for; 0 where none does.
"""

from functools import partial

import numpy as np

from ..spec import GrammarTooComplex
from ..vocabulary import Vocabulary
from . import walk
from .masks import MASK_WORK, Masks
from .tables import DEAD_STATE, Tables, only
from .walk import PUSH

MAX_LEXEME_BYTES = 128 << 20


class Machine(Tables):
    """The automaton of one vocabulary. All public methods hold its lock."""

    def __init__(self, vocabulary: Vocabulary, *, max_states: int = 60_000, max_mask_bytes: int = 96 << 20) -> None:
        super().__init__(vocabulary, max_states=max_states)
        self.set_array(walk.TOKEN_BYTES, vocabulary.token_bytes)
        self.set_array(walk.TOKEN_OFFSETS, vocabulary.token_offsets)
        depth = vocabulary.trie.max_depth + 2
        for slot in (walk.STATE_AT, walk.AUX_AT, walk.STACK_AT):
            self.set_array(slot, np.zeros(depth, np.int64))

        self._stack_room = 1 << 16
        for slot in (walk.STACK_FRAME, walk.STACK_PARENT, walk.STACK_DEPTH):
            self.set_array(slot, np.zeros(2 * self._stack_room, np.int32))

        # Stacks as (frame, parent) pairs, id 0 the empty one; the mirror lists are for reading single entries fast.
        self.stack_frames = [0]
        self.stack_parents = [0]
        self.stack_depths = [0]
        self.item_stacks = [0]  # of each the one below it, or itself, whose top frame waits for an item's text
        self._stacks: dict[tuple[int, int], int] = {}
        self._items: dict[tuple[int, bytes], int] = {}
        self._item_parts: list[tuple[int, bytes]] = [(0, b"")]  # what came before, and what then
        self._configs: dict[tuple[int, int, int, int], int] = {}
        self.configs: list[tuple[int, int, int, int]] = []
        self._edges: dict[tuple[int, int], int] = {}
        self._may_end: dict[int, bool] = {}
        self.control[walk.NUM_NOTED] = -1
        self.masks = Masks(self, max_mask_bytes)

    @property
    def is_full(self) -> bool:
        """Whether it has grown so far that new grammars should begin on another."""
        return (
            self.num_states > self.max_states
            or len(self.expressions.nodes) > self.expressions.max_expressions // 2
            or len(self.configs) > 1_000_000
            or self.masks.lazy.num_bytes > MAX_LEXEME_BYTES
        )

    def stack(self, frame: int, parent: int) -> int:
        key = (frame, parent)
        found = self._stacks.get(key)
        if found is None:
            found = self._stacks[key] = len(self.stack_frames)
            self.stack_frames.append(frame)
            self.stack_parents.append(parent)
            self.stack_depths.append(self.stack_depths[parent] + 1)
            self.item_stacks.append(found if frame in self.item_readers else self.item_stacks[parent])
            if found + self._stack_room >= len(self.arrays[walk.STACK_FRAME]):
                for slot in (walk.STACK_FRAME, walk.STACK_PARENT, walk.STACK_DEPTH):
                    self._grow(slot, 2 * (found + self._stack_room))
            self.arrays[walk.STACK_FRAME][found] = frame
            self.arrays[walk.STACK_PARENT][found] = parent
            self.arrays[walk.STACK_DEPTH][found] = self.stack_depths[found]
        return found

    def config(self, state: int, aux: int, stack: int, item: int = 0) -> int:
        key = (state, aux, stack, item)
        found = self._configs.get(key)
        if found is None:
            found = self._configs[key] = len(self.configs)
            self.configs.append(key)
        return found

    def start(self, state: int, root_frame: int) -> int:
        """The configuration a text begins in."""
        with self.lock:
            return self.config(state, 0, self.stack(root_frame, 0))

    def start_after(self, text: bytes, config: int) -> int:
        """The configuration before ``text``, which leads to ``config``."""
        with self.lock:
            state, aux, stack, _ = self.configs[config]
            for byte in reversed(text):
                state = self.state(("literal", byte, state), partial(self.add_state, partial(only, byte, state)))
            return self.config(state, aux, stack)

    def begin(self) -> None:
        control = self.control
        room = len(self.stack_frames)
        control[walk.SCRATCH] = room
        control[walk.STACK_LIMIT] = len(self.arrays[walk.STACK_FRAME]) - 1
        control[walk.LOWEST] = 1 << 40

    def _keep_stack(self, stack: int) -> int:
        """A scratch stack as a lasting one."""
        kept = len(self.stack_frames)
        if stack < kept:
            return stack
        frames = []
        at = stack
        stack_frame, stack_parent = self.arrays[walk.STACK_FRAME], self.arrays[walk.STACK_PARENT]
        while at >= kept:
            frames.append(int(stack_frame[at]))
            at = int(stack_parent[at])
        for frame in reversed(frames):
            at = self.stack(frame, at)
        return at

    def _supply(self, status: int) -> None:
        control = self.control
        if status == walk.MISS_ROW:
            self.entry(int(control[walk.MISS_A]), int(control[walk.MISS_B]))
        elif status == walk.MISS_AFTER:
            self.after(int(control[walk.MISS_A]), int(control[walk.MISS_B]))
        else:
            raise GrammarTooComplex("one token opens too many nested values")

    def advance(self, config: int, token: int) -> int:
        """The configuration after a token; -1 if the grammar refuses it."""
        found = self._edges.get((config, token))
        if found is not None:
            return found
        with self.lock:
            if not self.vocabulary.is_text[token]:
                return -1
            if self.item_readers:
                return self._remember(config, token, self._read_on(config, self.vocabulary.tokens[token]))
            state, aux, stack, _ = self.configs[config]
            self.begin()
            at = 0
            control = self.control
            while True:
                status, at = walk.step_token(control, token, at, state, aux, stack)
                if status == walk.OK:
                    break
                if status == walk.DEAD:
                    return -1
                state, aux, stack = (int(control[i]) for i in (walk.OUT_STATE, walk.OUT_AUX, walk.OUT_STACK))
                stack = self._keep_stack(stack)
                self._supply(status)
                self.begin()
            out = self.config(
                int(control[walk.OUT_STATE]),
                int(control[walk.OUT_AUX]),
                self._keep_stack(int(control[walk.OUT_STACK])),
            )
            return self._remember(config, token, out)

    def _remember(self, config: int, token: int, out: int) -> int:
        if len(self._edges) > 1_000_000:
            self._edges.clear()
        if out >= 0:
            self._edges[(config, token)] = out
        return out

    def _read_on(self, config: int, data: bytes) -> int:
        """As ``advance_bytes``, byte by byte: an item that is waited for goes on as its text tells."""
        state, aux, stack, item = self.configs[config]
        begin = 0  # of what the item has got in these bytes
        for at, byte in enumerate(data):
            waiting = self.item_stacks[stack]
            if waiting == stack and waiting and self._ends_before(state, byte):  # a number, say
                text = self.item_text(item) + data[begin:at]
                after = self.after(self.stack_frames[stack], int(self.arrays[walk.ENDS][state]) - 1)
                state, aux, stack, waiting = self._after_item(waiting, after, text), 0, self.stack_parents[stack], 0
            stepped = self._step(state, aux, stack, byte)
            if stepped is None:
                return -1
            state, aux, stack = stepped
            if waiting and self.item_stacks[stack] == waiting:
                continue
            if waiting:
                text = self.item_text(item) + data[begin : at + 1]
                if text.strip() != b"]":  # which ends an array without items
                    state, aux, stack = self._after_item(waiting, state, text), 0, self.stack_parents[waiting]
                    if state == DEAD_STATE:
                        return -1
            item, begin = 0, at + 1
        return self.config(state, aux, stack, self._item(item, data[begin:]) if self.item_stacks[stack] else 0)

    def _item(self, before: int, part: bytes) -> int:
        if not part:
            return before
        found = self._items.get((before, part))
        if found is None:
            found = self._items[before, part] = len(self._item_parts)
            self._item_parts.append((before, part))
        return found

    def item_text(self, item: int) -> bytes:
        parts = []
        while item:
            item, part = self._item_parts[item]
            parts.append(part)
        return b"".join(reversed(parts))

    def _ends_before(self, state: int, byte: int) -> bool:
        return self.arrays[walk.ENDS][state] > 0 and int(self.row(state)[byte]) < 0

    def _after_item(self, stack: int, state: int, text: bytes) -> int:
        with self.fuel.at_most(MASK_WORK):
            return self.item_readers[self.stack_frames[stack]].after(state, text)

    def _step(self, state: int, aux: int, stack: int, byte: int) -> tuple[int, int, int] | None:
        """The state, aux and stack after a byte; None if it is refused."""
        array = np.array([byte], np.uint8)
        control = self.control
        while True:
            self.begin()
            status, _ = walk.step_bytes(control, array, 0, state, aux, stack)
            if status == walk.DEAD:
                return None
            if status == walk.OK:
                kept = self._keep_stack(int(control[walk.OUT_STACK]))
                return int(control[walk.OUT_STATE]), int(control[walk.OUT_AUX]), kept
            self._supply(status)

    def advance_bytes(self, config: int, data: bytes) -> int:
        """As ``advance``, for bytes."""
        with self.lock:
            if self.item_readers:
                return self._read_on(config, data)
            state, aux, stack, _ = self.configs[config]
            array = np.frombuffer(data, np.uint8)
            at = 0
            control = self.control
            while True:
                self.begin()
                status, at = walk.step_bytes(control, array, at, state, aux, stack)
                state, aux, stack = (int(control[i]) for i in (walk.OUT_STATE, walk.OUT_AUX, walk.OUT_STACK))
                stack = self._keep_stack(stack)
                if status == walk.OK:
                    return self.config(state, aux, stack)
                if status == walk.DEAD:
                    return -1
                self._supply(status)

    def forced_bytes(self, config: int, limit: int = 4096) -> bytes:
        """The bytes that must follow: as long as there is one way only, and the text may not end."""
        with self.lock:
            out = bytearray()
            control = self.control
            while len(out) < limit and not self.may_end(config):
                state, aux, stack, _ = self.configs[config]
                self.begin()
                byte, status = walk.only_byte(control, state, aux, stack)
                if byte == -2:
                    self._supply(status)
                    continue
                if byte < 0:
                    break
                config = self.advance_bytes(config, bytes([byte]))
                out.append(byte)
            return bytes(out)

    def may_end(self, config: int) -> bool:
        """Whether the text may end here."""
        found = self._may_end.get(config)
        if found is None:
            with self.lock:
                state, aux, stack, _ = self.configs[config]
                found = False
                while True:
                    lazy = self.lazy.get(state)
                    if state in self.accepting or (lazy is not None and lazy.accepts()):
                        found = True
                        break
                    result = int(self.arrays[walk.ENDS][state]) - 1
                    if result < 0 or stack == 0 or (aux and self.arrays[walk.SPACE][state]):
                        break
                    state = self.after(self.stack_frames[stack], result)
                    stack = self.stack_parents[stack]
                    if state >= PUSH:
                        break  # the frame goes on
                self._may_end[config] = found
        return found
