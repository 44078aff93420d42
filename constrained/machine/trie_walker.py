"""Walks of a machine over the token trie: compiled code that is resumed until every entry it needs has been made."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ..spec import GrammarTooComplex
from ..vocabulary import Trie
from . import walk
from .kept_masks import KeptMasks
from .machine import Machine
from .text_slices import text_slices
from .walk import DEAD_STATE

MANY_ENTRIES = 8  # of a row: the whole row costs less


class TrieWalker:
    """One machine's walks, and the buffers that the compiled code reads and writes. Callers hold the machine's lock.

    ``room``: the entries of the largest buffers at first; they grow where a walk needs more. ``kept``: the masks that
    were made, at most ``num_kept``.
    """

    def __init__(self, machine: Machine, *, room: int | None = None, num_kept: int = 64) -> None:
        self.machine = machine
        self._control = machine.control.data  # Python reads and writes single entries faster here
        vocabulary = self.vocabulary = machine.vocabulary
        # Each turn of a walk reads its regions from one of these and writes the regions of the next turn to the other.
        self._pending = np.zeros((0, 5), np.int64)
        self._out = np.zeros((0, 5), np.int64)
        self._room_for_regions(room or 1024)
        self._wanted = np.zeros((2048, 3), np.int64)
        self._single_wanted = self._wanted.data
        machine.set_array(walk.WANTED, self._wanted)
        machine.control[walk.WANTED_SIZE] = len(self._wanted)
        self._exits = np.zeros((0, 5), np.int64)
        self._room_for_exits(256)
        self._noted = np.zeros(0, np.int64)
        self._room_for_notes(room or vocabulary.trie.num_nodes)  # pages that are never touched cost no memory
        # A continuation byte that is not a token may leave a character incomplete; then text is walked byte by byte.
        self.has_slices = bool(vocabulary.has_byte[0x80:0xC0].all())
        self.whole = self.addresses(vocabulary.trie)
        self.kept = KeptMasks(machine, num_kept)
        self._mask = np.zeros(vocabulary.num_words, np.uint32)  # the mask under way
        machine.set_array(walk.MASK, self._mask)
        machine.control[walk.NUM_WORDS] = vocabulary.num_words
        machine.control[walk.END_TOKEN] = vocabulary.eos
        self._load()

    def _load(self) -> None:
        """Load the compiled functions, so that no mask waits for them."""
        nothing = np.zeros_like(self._mask)
        exits = self.from_state(self.whole, nothing, DEAD_STATE, 0, 0)
        self._walk(self.whole, nothing, 0)
        self.at(DEAD_STATE, 0, 0)
        walk.mask_again(self.machine.control, self.whole, 0, DEAD_STATE, 0, 0)
        self.behind(self.whole, nothing, exits, 0, 0, DEAD_STATE, 0, 0)
        self.beside(nothing, DEAD_STATE, DEAD_STATE, 0)
        self.keep(nothing)
        walk.mask_again(self.machine.control, self.whole, 0, DEAD_STATE, 0, 0)
        walk.keep_mask(self.machine.control, DEAD_STATE, 0, 0)
        walk.allow_tokens(nothing, np.zeros(0, np.int32))
        walk.largest_need(np.zeros(1, np.uint16))

    def addresses(self, trie: Trie) -> np.ndarray:
        """The trie as ``walk_trie`` takes it: the addresses of its arrays, the same for all machines."""
        return self.vocabulary.shared(("addresses", trie), lambda: self._addresses(trie))[0]

    def _addresses(self, trie: Trie) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """The addresses, and the arrays that lie there."""
        nodes = (trie.node_byte, trie.node_depth, trie.node_end, trie.first_token, trie.num_tokens, trie.token_order)
        out = np.zeros(walk.TRIE_SIZE, np.int64)
        out[: len(nodes)] = [array.ctypes.data for array in nodes]
        out[walk.T_NODES] = trie.num_nodes
        out[walk.T_TOKENS] = len(trie.token_order)
        first_nodes = [0] if trie.num_nodes else []
        while first_nodes and trie.node_end[first_nodes[-1]] < trie.num_nodes:
            first_nodes.append(int(trie.node_end[first_nodes[-1]]))
        firsts = np.array(first_nodes, np.int32), trie.node_byte[first_nodes]
        out[walk.T_FIRST_NODES], out[walk.T_FIRST_BYTES] = (array.ctypes.data for array in firsts)
        out[walk.T_NUM_FIRST] = len(first_nodes)
        arrays: tuple[np.ndarray, ...] = nodes + firsts
        if self.has_slices:
            slices = text_slices(*nodes, self.vocabulary.has_byte)
            for slot, array in zip(
                (walk.T_INSIDE, walk.T_COVERED, walk.T_COVERED_BEFORE, walk.T_BOUNDARIES, walk.T_BOUNDARIES_BEFORE),
                slices,
                strict=True,
            ):
                out[slot] = array.ctypes.data
            arrays += slices
        return out, arrays

    def from_state(
        self, trie: np.ndarray, mask: np.ndarray, state: int, aux: int, stack: int, needs: np.ndarray | None = None
    ) -> np.ndarray:
        """Set the bits of the trie's tokens that a configuration allows; the exits [n, 5] that the walk met, in the
        order of their nodes. ``needs``: see ``walk_trie``."""
        control = self.machine.control
        control[walk.NEEDS] = 0 if needs is None else needs.ctypes.data
        try:
            count, num_wanted = walk.walk_state(control, trie, mask, state, aux, stack, self._pending, self._out)
            if count:
                self._resume(trie, mask, 1, count, num_wanted)
        finally:
            control[walk.NEEDS] = 0
        exits = self._exits[: int(control[walk.NUM_EXITS])]
        return exits[np.argsort(exits[:, 0])] if count else exits.copy()

    def from_regions(
        self, trie: np.ndarray, mask: np.ndarray, regions: np.ndarray, needs: np.ndarray | None = None
    ) -> np.ndarray:
        """As ``from_state``, of the regions int64 [n, 5] that ``walk_trie`` takes."""
        control = self.machine.control
        self.machine.begin()
        self._room_for_regions(len(regions))
        self._pending[: len(regions)] = regions
        control[walk.NEEDS] = 0 if needs is None else needs.ctypes.data
        try:
            self._walk(trie, mask, len(regions))
        finally:
            control[walk.NEEDS] = 0
        exits = self._exits[: int(control[walk.NUM_EXITS])]
        return exits[np.argsort(exits[:, 0])]

    # -- whole masks, with the end token: the numbers of kept masks, ``NOT_KEPT`` where ``room_to_keep`` is needed -----

    def at(self, state: int, aux: int, stack: int, *, at_once: bool = False) -> int:
        """The mask of a configuration. ``at_once``: negative where something has to be made first."""
        machine = self.machine
        count, num_wanted, kept = walk.mask_at(machine.control, self.whole, state, aux, stack)
        if at_once and kept < 0:
            return self._abandoned(num_wanted, kept)
        return kept if kept >= 0 else self._finish(self.whole, 1, count, num_wanted, kept, state, aux, stack)

    def beside(self, base: np.ndarray, state: int, beside: int, stack: int, *, at_once: bool = False) -> int:
        """The mask of a configuration, where ``base`` is that of the state ``beside`` on the same stack; see
        ``walk.mask_beside``; ``at_once`` as for ``at``."""
        machine = self.machine
        self._mask[:] = base
        while True:
            count, num_wanted, kept, num_regions = walk.mask_beside(machine.control, self.whole, state, beside, stack)
            if at_once and kept < 0:
                return self._abandoned(num_wanted, kept)
            if count != walk.SHORT_OF_REGIONS:
                break
            self._room_for_regions(4 * len(self._pending))
        return kept if kept >= 0 else self._finish(self.whole, num_regions, count, num_wanted, kept, state, 0, stack)

    def behind(
        self,
        trie: np.ndarray,
        base: np.ndarray,
        exits: np.ndarray,
        low: int,
        high: int,
        state: int,
        aux: int,
        stack: int,
        *,
        at_once: bool = False,
    ) -> int:
        """The mask of a configuration, where a walk above a barrier in the place of ``stack`` has allowed ``base`` and
        met the exits [n, 5]; ``low`` and ``high``: see ``walk_behind``; ``at_once`` as for ``at``."""
        machine = self.machine
        self._room_for_regions(len(exits))
        self._mask[:] = base
        while True:
            count, num_wanted, kept, num_regions = walk.mask_behind(
                machine.control, trie, exits, low, high, state, aux, stack
            )
            if at_once and kept < 0:
                return self._abandoned(num_wanted, kept)
            if count != walk.SHORT_OF_RETURNS:
                break
            self._supply(num_wanted)
        return kept if kept >= 0 else self._finish(trie, num_regions, count, num_wanted, kept, state, aux, stack)

    def _abandoned(self, num_wanted: int, kept: int) -> int:
        """Have the next walk ask again for what this one lacked; ``kept``, which is negative."""
        self._unask(self._wanted[:num_wanted].tolist())
        return kept

    def keep(self, row: np.ndarray) -> int:
        """The number of the kept mask that is equal to ``row``."""
        self._mask[:] = row
        return walk.keep_as_it_is(self.machine.control)

    def _finish(
        self,
        trie: np.ndarray,
        num_pending: int,
        count: int,
        num_wanted: int,
        kept: int,
        state: int,
        aux: int,
        stack: int,
    ) -> int:
        """Make what a walk of a mask lacked, and walk on where it did, until nothing is missing."""
        control = self.machine.control
        while count:
            num_pending = self._supply_walk(num_pending, count, num_wanted)
            count, num_wanted, kept = walk.mask_again(control, trie, num_pending, state, aux, stack)
        while kept == walk.LACKS_AFTER:
            self.machine.supply(walk.MISS_AFTER)
            kept = walk.keep_mask(control, state, aux, stack)
        return kept

    def under_way(self) -> np.ndarray:
        """The mask that was walked last."""
        return self._mask.copy()

    def ends_from(self, mask: np.ndarray, state: int) -> np.ndarray:
        """Set the bits of all tokens that a state allows on the empty stack; the inner nodes where the state reached
        accepts, valid until the next walk. A node may occur twice."""
        self.machine.begin()
        self.machine.control[walk.NUM_NOTED] = 0
        self._from_root(self.whole, mask, state, 0, 0)
        return self._notes()

    def ends_below(self, mask: np.ndarray, state: int, starts: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """As ``ends_from``, from the nodes ``nodes[starts[b]:starts[b + 1]]`` of each byte b, which ``state`` reads."""
        self.machine.begin()
        self.machine.control[walk.NUM_NOTED] = 0
        self._room_for_regions(len(nodes))
        count = walk.regions_at(self.machine.control, starts, nodes, state, self._pending)
        self._walk(self.whole, mask, count)
        return self._notes()

    def _notes(self) -> np.ndarray:
        control = self.machine.control
        count = int(control[walk.NUM_NOTED])
        control[walk.NUM_NOTED] = -1
        return self._noted[:count]

    def _from_root(self, trie: np.ndarray, mask: np.ndarray, state: int, aux: int, stack: int) -> None:
        self._pending[0] = (-1, state, aux, stack, 0)
        self._walk(trie, mask, 1)

    def _walk(self, trie: np.ndarray, mask: np.ndarray, num_pending: int) -> None:
        """Walk the pending regions."""
        self.machine.control[walk.NUM_EXITS] = 0
        count, num_wanted = self._walk_pending(trie, mask, num_pending)
        if count:
            self._resume(trie, mask, num_pending, count, num_wanted)

    def _walk_pending(self, trie: np.ndarray, mask: np.ndarray, num_pending: int) -> tuple[int, int]:
        return walk.walk_trie(self.machine.control, trie, mask, self._pending, num_pending, self._out)

    def _resume(self, trie: np.ndarray, mask: np.ndarray, num_pending: int, count: int, num_wanted: int) -> None:
        """Make the entries that a walk of ``num_pending`` regions lacked, and walk on where it did, until none is
        missing. ``count`` and ``num_wanted`` are what the walk returned."""
        while count:
            num_pending = self._supply_walk(num_pending, count, num_wanted)
            count, num_wanted = self._walk_pending(trie, mask, num_pending)

    def _supply_walk(self, num_pending: int, count: int, num_wanted: int) -> int:
        """Make what a walk of ``num_pending`` regions lacked: entries, or room. The number of regions to walk now."""
        control = self._control
        scratch = control[walk.SCRATCH]
        self._supply(num_wanted)
        control[walk.SCRATCH] = scratch
        if count >= 0:
            self._pending, self._out = self._out, self._pending
            control[walk.PENDING], control[walk.OUT] = control[walk.OUT], control[walk.PENDING]
            return count
        # A buffer was too small: enlarge it and walk the same regions again. Setting a bit twice does no harm.
        if count == walk.SHORT_OF_NOTES:
            self._room_for_notes(2 * len(self._noted))
        elif count == walk.SHORT_OF_EXITS:
            self._room_for_exits(4 * len(self._exits))
        else:
            self._room_for_regions(4 * len(self._out))
        return num_pending

    def _supply(self, num_wanted: int) -> None:
        """Make the rows and returns that a walk lacked."""
        machine = self.machine
        single, delta = self._single_wanted, machine.arrays[walk.DELTA]
        wanted = self._wanted[:num_wanted].tolist() if num_wanted != 1 else [(single[0, 0], single[0, 1], single[0, 2])]
        counts = Counter([a for _, a, _ in wanted]) if num_wanted > MANY_ENTRIES else {}
        try:
            for kind, a, b in wanted:
                if kind == walk.MISS_ROW:
                    if delta[a, b] == walk.ASKED:  # not made with another one
                        machine.entry(a, b, is_one_of_many=counts.get(a, 0) > MANY_ENTRIES)
                elif kind == walk.MISS_AFTER:
                    machine.make_row_after(a, b)
                else:
                    raise GrammarTooComplex("one token opens too many nested values")
        except BaseException:
            self._unask(wanted)
            raise

    def _unask(self, wanted: Iterable[Sequence[int]]) -> None:
        """Have the next walk ask for these again, as far as they were not made."""
        delta = self.machine.arrays[walk.DELTA]
        for kind, a, b in wanted:
            if kind == walk.MISS_ROW and delta[a, b] == walk.ASKED:
                delta[a, b] = walk.UNKNOWN

    def _room_for_regions(self, size: int) -> None:
        """Make room for so many regions; those that are pending are kept."""
        if size > len(self._pending):
            pending = np.zeros((size, 5), np.int64)
            pending[: len(self._pending)] = self._pending
            self._pending, self._out = pending, np.zeros((size, 5), np.int64)
            control = self.machine.control
            control[walk.PENDING], control[walk.OUT] = self._pending.ctypes.data, self._out.ctypes.data
            control[walk.ROOM] = size

    def _room_for_exits(self, size: int) -> None:
        self._exits = self._enlarged(self._exits, size, walk.EXITS, walk.EXITS_SIZE)

    def _room_for_notes(self, size: int) -> None:
        self._noted = self._enlarged(self._noted, size, walk.NOTED, walk.NOTED_SIZE)

    def _enlarged(self, old: np.ndarray, size: int, slot: int, size_slot: int) -> np.ndarray:
        new = np.zeros((size, *old.shape[1:]), np.int64)
        new[: len(old)] = old
        self.machine.set_array(slot, new)
        self.machine.control[size_slot] = size
        return new
