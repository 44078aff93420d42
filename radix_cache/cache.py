"""The prefix cache and its leases: every KV slot is free, in the radix tree, or private to a lease.

    num_slots = num_free + num_cached + num_leased             num_cached = num_locked + num_evictable

It counts slots and never reads the KV pool's tensors. Not thread-safe: only the engine's loop uses it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .blocks import BlockNames, Follower
from .contents import Contents
from .events import BlockEvents, BlockSnapshot, Event
from .history import History
from .node import Namespace, RadixNode
from .pins import Pins
from .policies import WITH_HISTORY, Policy, program_aware
from .slots import OutOfSlots, SlotPool
from .tiers import Tiers
from .tree import RadixTree, as_tokens

log = logging.getLogger(__name__)

MAX_PROGRAMS = 4  # that an outline names of each node


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """Since the cache was made. ``hits`` are lookups that matched at least one token; all other fields count tokens."""

    lookups: int
    hits: int
    looked_up_tokens: int
    matched_tokens: int
    evicted_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A copy of a node. ``num_hidden`` counts the nodes below it that the snapshot leaves out."""

    namespace: Namespace
    num_tokens: int
    first_tokens: tuple[int, ...]
    lock_count: int
    is_pinned: bool
    last_use: int
    hits: int
    programs: tuple[str, ...]
    children: tuple[NodeSnapshot, ...]
    num_hidden: int


class NodeOutline(NamedTuple):
    """A node for a drawing that is made again and again.

    ``id`` names it for as long as it is in the tree: no other node has its first slot. ``parent`` is the parent's id;
    below a root it is -1 minus the root's place in the outline's namespaces.
    """

    id: int
    parent: int
    num_tokens: int
    lock_count: int
    is_pinned: bool
    hits: int
    last_use: int
    first_tokens: list[int]
    programs: list[str]


class RadixCache:
    """``policy`` orders eviction (see ``policies``). With ``reuse=False`` no prefix is matched or kept; with
    ``kept="last"`` a released lease's path alone is kept, besides paths of other leases and pins (``policy`` is then
    ``lru``, or the path may go instead of an older one).

    A namespace separates prefixes that must not be shared: equal tokens under another model, adapter or salt have other
    KV. It is a string, or a tuple of strings, bytes, integers and None. Pins may keep up to ``pin_share`` of
    the slots; ``clock`` (seconds) only times pins. ``on_event`` and ``tiers`` follow whole blocks of ``block_len``
    tokens; with a store ``on_event`` is also called on the tiers' threads. ``contents`` describes the
    ids of contents, for the blocks' names.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        policy: Policy = program_aware,
        reuse: bool = True,
        kept: Literal["all", "last"] = "all",
        pin_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[Event], None] | None = None,
        tiers: Tiers | None = None,
        block_len: int = 64,
        contents: Contents | None = None,
    ) -> None:
        if not 0.0 <= pin_share <= 1.0:
            raise ValueError(f"pin_share={pin_share}: the share of slots that pins may keep must be between 0 and 1")
        self.reuse = reuse
        self.kept = kept
        self.num_slots = num_slots
        self._pool = SlotPool(num_slots)
        followers: list[Follower] = []
        self._events = None if on_event is None else BlockEvents(on_event)
        if self._events is not None:
            followers.append(self._events)
        if tiers is not None:
            if tiers.block_len != block_len:
                raise ValueError(f"block_len={block_len}, but the tiers keep blocks of {tiers.block_len} tokens")
            followers.append(tiers)
            tiers.contents = contents
            if self._events is not None:
                tiers.tell(self._events)
        self.tiers = tiers
        self.history = History(num_slots) if policy in WITH_HISTORY and reuse else None
        observer = BlockNames(block_len, followers, contents=contents) if followers else None
        self.tree = RadixTree(policy, observer, history=self.history)
        self.pins = Pins(self.tree, max_tokens=int(pin_share * num_slots), clock=clock)
        self._leases: set[Lease] = set()
        self._num_leased = 0
        self._num_lookups = self._num_hits = self._num_looked_up = 0
        self._num_matched = 0
        self._evicted: Counter[str] = Counter()

    # -- leases -------------------------------------------------------------------------------------------------------

    def acquire(
        self,
        tokens: np.ndarray,
        *,
        namespace: Namespace = "",
        limit: int | None = None,
        program: str = "",
        priority: int = 0,
        is_repeated: bool = False,
    ) -> Lease:
        """A lease on the longest prefix of ``tokens`` in the tree, cut to ``limit`` tokens.

        ``program`` and ``priority`` (a lower number is more urgent) are noted on the path for the eviction policy. The
        history counts the lookup unless it ``is_repeated`` for the same sequence.
        """
        self.pins.expire()
        self._num_lookups += 1
        self._num_looked_up += len(tokens)
        node, turn = self.tree.root(namespace), 0
        if self.reuse:
            tokens = as_tokens(tokens)
            if self.history is not None and not is_repeated:
                turn = self.history.count(namespace, tokens, now=self.tree.now)
            found, equal = self.tree.find(node, tokens[:limit])
            if equal:
                node = self.tree.node_at(found, equal)
                self._num_hits += 1
                self._num_matched += equal
        lease = self._lease(node, hits=1, program=program, priority=priority)
        lease.turn = turn
        return lease

    def insert(
        self, tokens: np.ndarray, *, start: int, namespace: Namespace, load: Callable[[np.ndarray], None]
    ) -> bool:
        """Put the KV of ``tokens`` from position ``start`` on into the tree; unlocked, so pin it before the next step.

        ``load`` fills the slots that it is given, int32 [tokens - start]. False, without a change, where the tree does
        not hold all tokens before ``start``, or where too few slots are free or evictable.
        """
        tokens = as_tokens(tokens)
        found, equal = self.tree.find(self.tree.root(namespace), tokens[:start])
        lease = self._lease(self.tree.node_at(found, equal), hits=0, program="", priority=0)
        try:
            if equal < start or len(tokens) - start > self.num_free + self.num_evictable:
                return False
            lease.extend(len(tokens) - start)
            load(lease.slot_ids[start:])
            lease.commit(tokens)
        finally:
            lease.release()
        return True

    def extend_all(self, leases: Sequence[Lease], n: int) -> np.ndarray:
        """Extend each of ``leases`` by ``n`` slots; returns them, int32 [leases, n]."""
        taken = self._take(n * len(leases)).reshape(len(leases), n)
        for lease, slots in zip(leases, taken, strict=True):
            lease._append(slots)
        return taken

    def peek(self, tokens: np.ndarray, *, namespace: Namespace = "", limit: int | None = None) -> int:
        """How many tokens ``acquire`` would match. Changes no state; the result holds while ``version`` stays."""
        root = self.tree.roots.get(namespace)
        if root is None or not self.reuse:
            return 0
        return self.tree.find(root, as_tokens(tokens, limit))[1]

    def slots_of(self, tokens: np.ndarray, *, namespace: Namespace = "") -> np.ndarray:
        """The slots of the longest prefix of ``tokens`` in the tree, int32 [matched]. Changes no state; they are valid
        until the tree changes.
        """
        root = self.tree.roots.get(namespace)
        if root is None:
            return np.zeros(0, np.int32)
        node, equal = self.tree.find(root, as_tokens(tokens))
        slots = np.empty(max(equal, node.end), np.int32)
        at: RadixNode | None = node
        while at is not None:
            slots[at.start : at.end] = at.slots
            at = at.parent
        return slots[:equal]

    def continuation(self, tokens: np.ndarray, *, namespace: Namespace = "", limit: int) -> np.ndarray:
        """A copy of at most ``limit`` tokens that follow ``tokens`` in the tree, along the most recently used children.

        Empty if the tree does not hold all of ``tokens``. Changes no state.
        """
        node = self.tree.roots.get(namespace)
        pieces: list[np.ndarray] = []
        if node is not None and self.reuse:
            node, equal = self.tree.find(node, as_tokens(tokens))
            if equal == len(tokens):
                pieces.append(node.tokens[equal - (node.end - node.num_tokens) :][:limit])
                missing = limit - len(pieces[0])
                while missing > 0 and node.children:
                    node = max(node.children.values(), key=lambda child: child.last_use)
                    pieces.append(node.tokens[:missing])
                    missing -= len(pieces[-1])
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)

    def restore(self, lease: Lease, tokens: np.ndarray, *, limit: int | None = None) -> int:
        """Fill slots from the tiers' blocks that follow what ``lease`` shares; returns the tokens gained.

        The lease must hold no private slots; afterwards it shares at most ``limit`` tokens. Slots are taken as by
        ``Lease.extend``, but no more than are free or evictable.
        """
        assert lease.num_private == 0, "restore comes before extend"
        limit = len(tokens) if limit is None else limit
        before = lease.num_shared
        if self.tiers is None or before >= limit or not self.reuse:
            return 0
        tokens, block_len = as_tokens(tokens), self.tiers.block_len
        first, room = before // block_len, (self.num_free + self.num_evictable) // block_len
        blocks = self.tiers.blocks_of(tokens, first=first, limit=room, namespace=lease.node.namespace)
        start, end = first * block_len, (first + len(blocks)) * block_len
        if min(end, limit) <= before:
            return 0
        # [0, start) stays; [start, before) is loaded again beside the tree's own slots, which commit then prefers.
        lease.truncate(start)
        lease.extend(end - start)
        try:
            self.tiers.load(lease.slot_ids[start:end], blocks)
        except BaseException:
            lease.truncate(start)
            raise
        lease.commit(tokens[:end])
        if end > limit:
            lease.truncate(limit)
        lease.num_cached = lease.num_shared
        return lease.num_shared - before

    def pin(
        self,
        target: Lease | Sequence[int] | np.ndarray,
        *,
        ttl_s: float,
        owner: Hashable | None = None,
        namespace: Namespace = "",
    ) -> int:
        """Lock the part of ``target`` that the tree holds for ``ttl_s`` seconds.

        Returns the number of tokens locked: the shared part of a lease, or the matched part of tokens in ``namespace``;
        only their front when pins have used up their share of the slots. An owner has one pin: a new one replaces it,
        and ``ttl_s=0`` ends it. A pin without an owner belongs to its tokens: pinning them again renews it, and
        ``ttl_s=0`` ends every such pin on ``target`` or a prefix of it.
        """
        self.pins.expire()
        if isinstance(target, Lease):
            return self.pins.pin(target.node, owner=owner, ttl_s=ttl_s)
        root = self.tree.root(namespace)
        found, equal = self.tree.find(root, as_tokens(target))
        num_pinned = self.pins.pin(self.tree.node_at(found, equal), owner=owner, ttl_s=ttl_s)
        self.tree.drop_root_if_unused(root)
        return num_pinned

    def end_pins(self, need: int) -> bool:
        """End pins, least time left first, until ``need`` slots are free or evictable; False if that is not possible.

        The scheduler calls it when only pins keep a sequence from running: a pin must not block a sequence for ever.
        """
        if need > self.num_free + self.num_evictable + self.num_pinned:
            return False
        while need > self.num_free + self.num_evictable:
            if not self.pins.end_next():
                return False
            log.info("a pin was ended early: a sequence needs %d slots", need)
        return True

    def end_program(self, program: str) -> None:
        """``program`` has ended: prefixes that only it used are evicted before those of running programs."""
        self.tree.end_program(program)

    def free_up(self, n: int) -> None:
        """Evict until ``n`` slots are free or no token is evictable: one eviction for many small ``extend`` calls."""
        shortfall = n - self.num_free
        if shortfall > 0:
            self._evict(min(shortfall, self.num_evictable), "space")

    def flush(self) -> int:
        """Evict all tokens that are neither leased nor pinned; returns their number."""
        n = self.num_evictable
        self._evict(n, "flush")
        return n

    def forget(self, tokens: np.ndarray, *, start: int, namespace: Namespace = "") -> None:
        """Evict what the tree holds of ``tokens`` from position ``start`` on, and all that follows these tokens.

        They were committed ahead of a step that was not run. No lease and no pin may hold them.
        """
        root = self.tree.roots.get(namespace)
        if root is None:
            return
        found, equal = self.tree.find(root, as_tokens(tokens))
        if equal > start:
            above = self.tree.node_at(found, start)
            freed = self.tree.evict_branch(above.children[int(tokens[start])], "flush")
            self._pool.give(freed)
            self._evicted["flush"] += len(freed)

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Slots held by the tree."""
        return self.tree.num_tokens

    @property
    def num_locked(self) -> int:
        """Slots of the tree that are locked by a lease or pin."""
        return self.tree.num_locked

    @property
    def num_evictable(self) -> int:
        self.pins.expire()
        return self.tree.num_tokens - self.tree.num_locked

    @property
    def num_pinned(self) -> int:
        """Slots of the tree that are locked by pins."""
        return self.pins.num_tokens

    @property
    def num_leased(self) -> int:
        """Private slots of all leases."""
        return self._num_leased

    @property
    def version(self) -> int:
        """Changes whenever tokens enter or leave the tree."""
        return self.tree.version

    @property
    def counters(self) -> CacheCounters:
        return CacheCounters(
            lookups=self._num_lookups,
            hits=self._num_hits,
            looked_up_tokens=self._num_looked_up,
            matched_tokens=self._num_matched,
            evicted_tokens=dict(self._evicted),
        )

    def snapshot(self, *, max_nodes: int = 1000, num_first_tokens: int = 8) -> list[NodeSnapshot]:
        """The tree as values, one per root, for drawing; shows the ``max_nodes`` most recently used nodes."""
        nodes = sorted(self.tree.nodes(), key=lambda node: (-node.last_use, node.end))
        shown = set(nodes[:max_nodes])
        # A parent is used no earlier than its child and ends before it, so a shown node's parent is shown too.
        made: dict[RadixNode, list[NodeSnapshot]] = {}
        hidden: Counter[RadixNode] = Counter()
        result = []
        for node in sorted([*nodes, *self.tree.roots.values()], key=lambda node: -node.end):
            parent = node.parent
            if node not in shown and parent is not None:
                hidden[parent] += 1 + hidden.pop(node, 0)
                continue
            value = NodeSnapshot(
                namespace=node.namespace,
                num_tokens=node.num_tokens,
                first_tokens=tuple(node.tokens[:num_first_tokens].tolist()),
                lock_count=node.lock_count,
                is_pinned=node.pin_count > 0,
                last_use=node.last_use,
                hits=node.hits,
                programs=tuple(sorted(node.programs or ())),
                children=tuple(made.pop(node, ())),
                num_hidden=hidden.pop(node, 0),
            )
            if parent is None:
                result.append(value)
            else:
                made.setdefault(parent, []).append(value)
        return result

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    def outline(self, *, max_nodes: int, num_first_tokens: int = 8) -> tuple[list[Namespace], list[NodeOutline]]:
        """The roots' namespaces, and the ``max_nodes`` nodes that were used last, each after its parent.

        Takes 5 to 7 us a node on one busy core of an AMD EPYC, 34 ms for 5,000 of 14,000 nodes; ``snapshot`` 85 ms.
        """
        nodes = list(self.tree.nodes())
        if len(nodes) > max_nodes:
            nodes = _last_used(nodes, max_nodes)
        ids: dict[RadixNode, int] = {root: -1 - i for i, root in enumerate(self.tree.roots.values())}
        outlines = []
        for node in nodes:
            assert node.parent is not None
            tokens, programs = node.tokens, node.programs
            ids[node] = number = node.slots.item(0)
            outlines.append(
                NodeOutline(
                    number,
                    ids[node.parent],
                    len(tokens),
                    node.lock_count,
                    node.pin_count > 0,
                    node.hits,
                    node.last_use,
                    tokens[:num_first_tokens].tolist(),
                    sorted(programs)[:MAX_PROGRAMS] if programs else [],
                )
            )
        return [root.namespace for root in self.tree.roots.values()], outlines

    def blocks(self) -> BlockSnapshot:
        """The names of all blocks, for a router that has missed events. Only for a cache with ``on_event``."""
        assert self._events is not None, "block names are kept only with on_event"
        seq = self._events.seq  # first: a change that is made from here on has an event with a higher number
        device = tuple(name for node in self.tree.nodes() for name in node.names or ())
        if self.tiers is None:
            return BlockSnapshot(seq, device)
        disk = self.tiers.store.names() if self.tiers.store is not None else ()
        return BlockSnapshot(seq, device, self.tiers.host.names(), disk)

    def check(self) -> None:
        """Recompute every count and invariant; an AssertionError names the one that does not hold."""
        tree = self.tree
        owned = [self._pool.free_slots(), *(node.slots for node in tree.nodes())]
        owned += [lease._buffer[lease.num_shared : lease.num_slots] for lease in self._leases]
        uses = np.bincount(np.concatenate(owned), minlength=self.num_slots)
        assert len(uses) == self.num_slots, f"slot {len(uses) - 1} does not exist"
        assert (uses == 1).all(), f"slots lost: {np.flatnonzero(uses == 0)[:8]}, shared: {np.flatnonzero(uses > 1)[:8]}"
        assert self._num_leased == sum(lease.num_private for lease in self._leases)

        locks: Counter[RadixNode] = Counter()
        for lease in self._leases:
            assert lease.node.end == lease.num_shared <= lease.num_slots
            at: RadixNode | None = lease.node
            while at is not None:
                assert (lease._buffer[at.start : at.end] == at.slots).all(), f"{at} differs from its lease's slots"
                locks[at] += 1
                at = at.parent
        pins: Counter[RadixNode] = Counter()
        for pinned in self.pins.nodes.values():
            at = pinned
            while at is not None:
                locks[at] += 1
                pins[at] += 1
                at = at.parent
        num_tokens = num_locked = num_pinned = num_nodes = num_leaves = 0
        for node in tree.nodes():
            parent = node.parent
            assert parent is not None and parent.children[int(node.tokens[0])] is node
            assert 0 < len(node.tokens) == len(node.slots) == node.end - parent.end
            assert node.lock_count == locks.pop(node, 0), f"{node} has a wrong lock count"
            assert node.pin_count == pins[node], f"{node} has a wrong pin count"
            num_pinned += node.num_tokens if node.pin_count else 0
            is_evictable = node.lock_count == 0 and not node.children
            assert bool(node.ticket) == is_evictable, f"{node} in the eviction queue: {bool(node.ticket)}"
            num_tokens += node.num_tokens
            num_locked += node.num_tokens if node.lock_count else 0
            num_nodes += 1
            num_leaves += is_evictable
            for program in node.programs or ():
                assert node in tree.touched[program]
        for root in tree.roots.values():
            assert root.lock_count == locks.pop(root, 0) and (root.children or root.lock_count)
        assert num_pinned == self.pins.num_tokens <= self.pins.max_tokens
        assert not locks, f"leases on nodes outside the tree: {list(locks)[:4]}"
        counted = (tree.num_tokens, tree.num_locked, tree.num_nodes, tree.queue.num_leaves)
        assert counted == (num_tokens, num_locked, num_nodes, num_leaves), (counted, "counted incrementally")
        assert self.num_free + self.num_cached + self.num_leased == self.num_slots

    # -- leases, from both sides --------------------------------------------------------------------------------------

    def _lease(self, node: RadixNode, *, hits: int, program: str, priority: int) -> Lease:
        tree = self.tree
        tree.now += 1
        tree.lock(node)
        tree.touch(node, hits=hits, priority=priority, program=program)
        lease = Lease(self, node, program, priority)
        self._leases.add(lease)
        return lease

    def _release(self, lease: Lease, private: np.ndarray) -> None:
        tree = self.tree
        self._give_back(private)
        tree.now += 1
        tree.touch(lease.node, hits=0, priority=lease.priority, program=lease.program, turn=lease.turn)
        tree.unlock(lease.node)
        self._leases.discard(lease)
        if self.kept == "last":
            self._evict(self.num_evictable - self._num_evictable_on(lease.node), "flush")

    @staticmethod
    def _num_evictable_on(node: RadixNode) -> int:
        """Tokens on the path to ``node`` that no lease and no pin locks."""
        num = 0
        at: RadixNode | None = node
        while at is not None:
            num += at.num_tokens if at.lock_count == 0 else 0
            at = at.parent
        return num

    def _take(self, n: int) -> np.ndarray:
        shortfall = n - self.num_free
        if shortfall > 0:
            if shortfall > self.num_evictable:
                raise OutOfSlots(n, self.num_free, self.num_evictable)
            self._evict(shortfall, "space")
        self._num_leased += n
        return self._pool.take(n)

    def _give_back(self, private: np.ndarray) -> None:
        self._pool.give(private)
        self._num_leased -= len(private)

    def _evict(self, n: int, cause: str) -> None:
        if n > 0:
            freed = self.tree.evict(n, cause)
            if self.tiers is not None:
                self.tiers.save_leaving()
            self._pool.give(freed)
            self._evicted[cause] += n


class Lease:
    """A sequence's KV slots: a locked path of the tree, then private slots.

        [0, num_shared) in the tree, locked, not written again once computed
        [num_shared, num_slots) private, written by its owner

    Made by ``RadixCache.acquire`` and ended by exactly one ``release``. ``num_cached`` counts the tokens that were
    found and not computed: by ``acquire``, ``rematch`` and ``RadixCache.restore``. ``stale_from`` is the first position
    whose slot has changed since ``mark_fresh``.
    """

    __slots__ = (
        "_buffer",
        "_cache",
        "_is_released",
        "node",
        "num_cached",
        "num_shared",
        "num_slots",
        "priority",
        "program",
        "stale_from",
        "turn",
    )

    def __init__(self, cache: RadixCache, node: RadixNode, program: str, priority: int) -> None:
        self._cache = cache
        self._is_released = False
        self._buffer = np.empty(max(64, node.end + node.end // 4), np.int32)
        self.node = node  # where the shared part ends; locked
        self.program = program
        self.priority = priority
        self.num_slots = self.num_shared = self.num_cached = node.end
        self.stale_from = 0
        self.turn = 0  # of the conversation, as the history knows it
        self._read_path(0)

    @property
    def slot_ids(self) -> np.ndarray:
        """The slot of every position, int32 [num_slots]; a view, valid until the next call on this lease."""
        return self._buffer[: self.num_slots]

    @property
    def num_private(self) -> int:
        return self.num_slots - self.num_shared

    @property
    def num_sole(self) -> int:
        """Slots that no other lease or pin holds: they would be free or evictable after ``release``."""
        node: RadixNode | None = self.node
        while node is not None and node.lock_count == 1:
            node = node.parent
        return self.num_slots - (node.end if node is not None else 0)

    def mark_fresh(self) -> None:
        """The caller has copied ``slot_ids``: no position is stale until the next change."""
        self.stale_from = self.num_slots

    def extend(self, n: int) -> None:
        """Take ``n`` private slots for the next positions, evicting as many tokens as free slots are missing.

        Raises ``OutOfSlots``, without a change, if free and evictable slots together are fewer than ``n``.
        """
        assert not self._is_released and n >= 0
        self._append(self._cache._take(n))

    def commit(self, tokens: np.ndarray) -> None:
        """Give the KV of ``tokens`` (the sequence from position 0), which is computed, to the tree.

        Tokens that another lease has put into the tree meanwhile are adopted: the tree's slots replace the private
        ones, which are freed. ``tokens`` may be shorter than the slots held; the rest stays private. The shared tokens
        must not have changed. Without reuse this does nothing.
        """
        assert not self._is_released and len(tokens) <= self.num_slots
        cache, tree, n = self._cache, self._cache.tree, len(tokens)
        if n <= self.num_shared or not cache.reuse:
            return
        tokens = as_tokens(tokens)
        assert self.num_shared == 0 or self.node.tokens[-1] == tokens[self.num_shared - 1], "shared tokens changed"
        self._adopt(tokens)
        if n > self.num_shared:
            own = slice(self.num_shared, n)
            added = tree.append(self.node, tokens[own], self._buffer[own])
            cache._num_leased -= n - self.num_shared
            if added is not self.node:
                tree.lock(added, below=self.node)
            below = self.node if added is not self.node else added.parent
            tree.touch(added, hits=0, priority=self.priority, program=self.program, below=below)
            self.node, self.num_shared = added, n

    def commit_new(self, tokens: np.ndarray) -> None:
        """As ``commit``, but only where no slot of this lease changes: not if the tree would have to be adopted from.

        For a sequence that runs and whose slots others have copied. ``tokens`` may also be committed ahead of the step
        that computes them, if nothing reads their slots before; ``RadixCache.forget`` removes them if it is not run.
        """
        if len(tokens) > self.num_shared:
            own = as_tokens(tokens)[self.num_shared :]
            if not self._cache.tree.find(self.node, own)[1]:
                self.commit(tokens)

    def rematch(self, tokens: np.ndarray, *, limit: int | None = None) -> int:
        """Lock more of ``tokens`` that the tree holds by now; returns how many tokens are gained.

        For a sequence that was blocked while another computed their common prefix. Private slots at the gained
        positions are freed, so no step that writes them may be running.
        """
        assert not self._is_released
        if not self._cache.reuse:
            return 0
        before = self.num_shared
        self._adopt(as_tokens(tokens, limit))
        gained = self.num_shared - before
        self.num_cached += gained
        self._cache._num_matched += gained
        return gained

    def truncate(self, n: int) -> None:
        """Keep only the first ``n`` positions.

        Private slots beyond are freed. Shared slots stay in the tree and may be evicted once no lease holds them. The
        next slots that this lease takes are private, so a slot of the tree is not written again.
        """
        assert not self._is_released and 0 <= n <= self.num_slots
        cache, tree = self._cache, self._cache.tree
        keep = max(n, self.num_shared)
        cache._give_back(self._buffer[keep : self.num_slots])
        if n < self.num_shared:
            node = tree.node_at(self.node, n)
            tree.unlock(self.node, below=node)
            self.node, self.num_shared = node, n
        self.num_slots = n
        self.num_cached = min(self.num_cached, n)
        self.stale_from = min(self.stale_from, n)

    def release(self) -> None:
        """Free the private slots, unlock the path and end the lease. A second release is a bug."""
        assert not self._is_released, "a lease is released once"
        self._is_released = True
        self._cache._release(self, self._buffer[self.num_shared : self.num_slots])

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _append(self, taken: np.ndarray) -> None:
        """Hold ``taken`` as private slots of the next positions."""
        start, end = self.num_slots, self.num_slots + len(taken)
        if end > len(self._buffer):
            self._grow_buffer(end)
        self._buffer[start:end] = taken
        self.num_slots = end  # stale_from is at most the old num_slots, so the new slots are stale

    def _adopt(self, tokens: np.ndarray) -> None:
        """Move the lock down the path that the tree holds of ``tokens``, and free the private slots it replaces."""
        tree, old_shared, old_node = self._cache.tree, self.num_shared, self.node
        found, equal = tree.find(old_node, tokens[old_shared:])
        if equal == 0:
            return
        end = old_shared + equal
        node = tree.node_at(found, end)
        tree.lock(node, below=old_node)
        tree.touch(node, hits=1, priority=self.priority, program=self.program, below=old_node)
        self._cache._give_back(self._buffer[old_shared : min(end, self.num_slots)])
        self._grow_buffer(end)
        self.node, self.num_shared, self.num_slots = node, end, max(end, self.num_slots)
        self._read_path(old_shared)
        self.stale_from = min(self.stale_from, old_shared)

    def _read_path(self, start: int) -> None:
        """Copy the tree's slots of positions [start, num_shared) into the buffer; a node must end at ``start``."""
        at = self.node
        while at.end > start:
            self._buffer[at.start : at.end] = at.slots
            assert at.parent is not None
            at = at.parent

    def _grow_buffer(self, size: int) -> None:
        if size > len(self._buffer):
            grown = np.empty(max(size, 2 * len(self._buffer)), np.int32)
            grown[: self.num_slots] = self._buffer[: self.num_slots]
            self._buffer = grown


def _last_used(nodes: list[RadixNode], count: int) -> list[RadixNode]:
    """The ``count`` nodes that were used last, in their order; a node's parent is among them if the node is.

    A parent is used no earlier than its child and ends before it.
    """
    since = sorted([node.last_use for node in nodes], reverse=True)[count - 1]
    found = [node for node in nodes if node.last_use >= since]
    if len(found) > count:
        oldest = sorted((node for node in found if node.last_use == since), key=lambda node: node.end)
        left_out = set(oldest[len(oldest) - (len(found) - count) :])
        found = [node for node in found if node not in left_out]
    return found
