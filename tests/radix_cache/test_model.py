"""Random operations on the cache against a slow, obvious model.

The model has prefixes instead of nodes: the tree is a set of (namespace, prefix) pairs, and a fake KV array holds for
each slot the (namespace, prefix) that was computed into it. After every step the real tree is read out and must equal
the model. Evicted tokens must be of the right number and unlocked.
"""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from phloem.radix_cache import POLICIES, Lease, OutOfSlots, RadixCache, Stored, block_names
from phloem.radix_cache.blocks import root_name

NAMESPACES = ("", ("adapter", 1))
PROGRAMS = ("", "p", "q")
Prefix = tuple[object, tuple[int, ...]]

MAX_SEQUENCES = 6
BLOCK_LEN = 3

# Few long texts with small changes, so that sequences share prefixes and differ inside edges.
STEMS = (tuple([0] * 24), tuple([0, 1] * 12), tuple([0, 0, 1, 2] * 6), tuple([1, 2, 0] * 8))
tokens_of_text = st.builds(
    lambda stem, n, tail: stem[:n] + tuple(tail),
    st.sampled_from(STEMS),
    st.integers(0, 24),
    st.lists(st.integers(0, 2), max_size=4),
)


class Sequence:
    """A lease, its tokens, and how many of them are computed."""

    def __init__(self, lease: Lease, namespace: object, tokens: tuple[int, ...]) -> None:
        self.lease = lease
        self.namespace = namespace
        self.tokens = tokens
        self.num_computed = lease.num_cached
        self.num_slots = lease.num_slots
        self.num_shared = lease.num_shared
        self.seen = lease.slot_ids.copy()  # slot_ids at the last mark_fresh

    def prefix(self, n: int) -> Prefix:
        return (self.namespace, self.tokens[:n])


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.sampled_from((16, 30, 45, 60)),
        policy=st.sampled_from(sorted(POLICIES)),
        reuse=st.sampled_from((True,) * 9 + (False,)),
        texts=st.lists(tokens_of_text, min_size=2, max_size=4),
        data=st.data(),
    )
    def make(self, num_slots, policy, reuse, texts, data):
        self.now = 0.0
        self.pins: dict[str, tuple[float, Prefix]] = {}
        self.max_pinned = num_slots // 2
        self.router: set[bytes] = set()  # the blocks that a router knows from events
        self.last_event = 0
        self.cache = RadixCache(
            num_slots,
            policy=POLICIES[policy],
            reuse=reuse,
            pin_share=0.5,
            clock=lambda: self.now,
            on_event=self.follow,
            block_len=BLOCK_LEN,
        )
        self.kv: list[Prefix | None] = [None] * num_slots
        self.tree: dict[Prefix, int] = {}  # the prefixes that must be in the tree, and their slots
        self.sequences: list[Sequence] = []
        for tokens in texts:
            self.acquire_for(tokens, NAMESPACES[0], None, "", 0)
            self.prefill_one(self.sequences[-1], 0, True)
        for s in self.sequences[: len(texts) // 2]:
            self.release_one(s)

    # -- the model ----------------------------------------------------------------------------------------------------

    def read_tree(self) -> dict[Prefix, int]:
        found: dict[Prefix, int] = {}

        def walk(namespace, node, before):
            tokens = before + tuple(node.tokens.tolist())
            for i, slot in enumerate(node.slots.tolist()):
                found[namespace, tokens[: len(before) + i + 1]] = slot
            for child in node.children.values():
                walk(namespace, child, tokens)

        for namespace, root in self.cache.tree.roots.items():
            walk(namespace, root, ())
        return found

    def follow(self, event) -> None:
        assert event.seq == self.last_event + 1
        self.last_event += 1
        names = set(event.names)
        assert len(names) == len(event.names)
        if isinstance(event, Stored):
            assert not names & self.router
            assert event.parent in self.router or event.parent == root_name(event.namespace)
            self.router |= names
        else:
            assert names <= self.router
            self.router -= names

    def pinned(self) -> set[Prefix]:
        live = [prefix for end, prefix in self.pins.values() if end > self.now]
        return {(namespace, tokens[:n]) for namespace, tokens in live for n in range(1, len(tokens) + 1)}

    def locked(self) -> set[Prefix]:
        return self.pinned() | {s.prefix(n) for s in self.sequences for n in range(1, s.num_shared + 1)}

    def match_len(self, namespace, tokens) -> int:
        n = 0
        while n < len(tokens) and (namespace, tokens[: n + 1]) in self.tree:
            n += 1
        return n

    def num_private(self) -> int:
        return sum(s.num_slots - s.num_shared for s in self.sequences)

    def num_free(self) -> int:
        return len(self.kv) - len(self.tree) - self.num_private()

    def expect_evicted(self, n: int) -> None:
        """Exactly ``n`` prefixes have left the tree, none of them locked. ``read_tree`` checks the paths."""
        now = self.read_tree()
        gone = self.tree.keys() - now.keys()
        assert len(gone) == n
        assert not gone & self.locked()
        assert now.keys() <= self.tree.keys()
        self.tree = {prefix: slot for prefix, slot in self.tree.items() if prefix not in gone}

    def pick(self, data) -> Sequence:
        return data.draw(st.sampled_from(self.sequences))

    # -- the operations -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(
        tokens=tokens_of_text,
        namespace=st.sampled_from((NAMESPACES[0], *NAMESPACES)),
        limit=st.none() | st.integers(0, 10),
        program=st.sampled_from(PROGRAMS),
        level=st.integers(-1, 1),
    )
    def acquire(self, tokens, namespace, limit, program, level):
        self.acquire_for(tokens, namespace, limit, program, level)

    def acquire_for(self, tokens, namespace, limit, program, level) -> None:
        array = np.array(tokens, np.int32)
        expected = self.match_len(namespace, tokens[:limit]) if self.cache.reuse else 0
        assert self.cache.peek(array, namespace=namespace, limit=limit) == expected
        lease = self.cache.acquire(array, namespace=namespace, limit=limit, program=program, priority=level)
        assert lease.num_cached == lease.num_shared == lease.num_slots == expected
        assert lease.stale_from == 0
        self.sequences.append(Sequence(lease, namespace, tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), n=st.integers(0, 20))
    def extend(self, data, n):
        self.extend_by(self.pick(data), n)

    def extend_by(self, s, n) -> bool:
        free, evictable = self.num_free(), len(self.tree) - len(self.locked())
        try:
            s.lease.extend(n)
        except OutOfSlots as error:
            assert (error.need, error.free, error.evictable) == (n, free, evictable)
            assert n > free + evictable
            assert s.lease.num_slots == s.num_slots
            return False
        assert n <= free + evictable
        self.expect_evicted(max(n - free, 0))
        taken = s.lease.slot_ids[s.num_slots :].tolist()
        s.num_slots += n
        assert len(taken) == n
        assert not set(taken) & set(self.tree.values())
        return True

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.integers(0, 8))
    def compute(self, data, more):
        """Write the KV of the next tokens into the private slots, as a step does."""
        s = self.pick(data)
        more = min(more, s.num_slots - len(s.tokens))
        s.tokens += tuple(data.draw(st.integers(0, 1)) for _ in range(more))
        self.write(s, min(s.num_slots, len(s.tokens)))

    def write(self, s, end) -> None:
        for n in range(s.num_computed, end):
            assert n >= s.num_shared, "a step must not write a slot of the tree"
            self.kv[s.lease.slot_ids[n]] = s.prefix(n + 1)
        s.num_computed = max(s.num_computed, end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def commit(self, data):
        s = self.pick(data)
        self.commit_to(s, data.draw(st.integers(0, s.num_computed)))

    def commit_to(self, s, n) -> None:
        before = s.lease.slot_ids.copy()
        s.lease.commit(np.array(s.tokens[:n], np.int32))
        if self.cache.reuse and n > s.num_shared:
            for k in range(s.num_shared + 1, n + 1):
                self.tree.setdefault(s.prefix(k), int(before[k - 1]))
            s.num_shared = n

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), spare=st.integers(0, 3), commits=st.booleans())
    def prefill(self, data, spare, commits):
        """Take slots for the whole text and ``spare`` more, compute it, and perhaps commit it."""
        self.prefill_one(self.pick(data), spare, commits)

    def prefill_one(self, s, spare, commits) -> None:
        if self.extend_by(s, max(len(s.tokens) + spare - s.num_slots, 0)):
            self.write(s, len(s.tokens))
            if commits:
                self.commit_to(s, len(s.tokens))

    @rule(tokens=tokens_of_text, namespace=st.sampled_from(NAMESPACES), program=st.sampled_from(PROGRAMS))
    def serve_whole_request(self, tokens, namespace, program):
        """Acquire, compute, commit and release."""
        self.acquire_for(tokens, namespace, None, program, 0)
        self.prefill_one(self.sequences[-1], 0, True)
        self.release_one(self.sequences[-1])

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(tokens=tokens_of_text, tails=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def race(self, tokens, tails):
        """Two sequences with a common prefix are both computed before either is committed."""
        for tail in tails:
            self.acquire_for((*tokens, *[2] * tail), NAMESPACES[0], None, "", 0)
            self.prefill_one(self.sequences[-1], tail, False)
        for s in self.sequences[-2:]:
            self.commit_to(s, s.num_computed)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.integers(1, 8), is_found=st.booleans())
    def drop_a_step(self, data, more, is_found):
        """Commit tokens ahead of a step, perhaps find them for another sequence, and forget them: it is not run."""
        s = self.pick(data)
        end = s.num_computed + more
        if not self.extend_by(s, max(end - s.num_slots, 0)):
            return
        ahead = np.array((*s.tokens, *[0] * more)[:end], np.int32)
        slots = s.lease.slot_ids.copy()
        s.lease.commit_new(ahead)
        assert (s.lease.slot_ids == slots).all()
        if s.lease.num_shared < end:
            return  # the tree holds some of them in other slots
        for k in range(s.num_shared + 1, s.num_computed + 1):
            self.tree[s.prefix(k)] = int(slots[k - 1])
        if is_found:
            other = self.cache.acquire(ahead, namespace=s.namespace, limit=end - more // 2)
            assert other.num_cached == end - more // 2
            other.release()
        s.lease.truncate(s.num_computed)
        s.num_slots = s.num_shared = s.num_computed
        self.cache.forget(ahead, start=s.num_computed, namespace=s.namespace)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), limit=st.none() | st.integers(0, 14))
    def rematch(self, data, limit):
        s = self.pick(data)
        if s.num_computed > s.num_shared:
            return  # private slots are in use
        tokens = s.tokens[:limit]
        found = self.match_len(s.namespace, tokens) if self.cache.reuse else 0
        gained = max(found - s.num_shared, 0)
        assert s.lease.rematch(np.array(tokens, np.int32), limit=limit) == gained
        s.num_shared += gained
        s.num_computed = max(s.num_computed, s.num_shared)
        s.num_slots = max(s.num_slots, s.num_shared)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def truncate(self, data):
        s = self.pick(data)
        n = data.draw(st.integers(0, s.num_slots))
        s.lease.truncate(n)
        s.num_slots = n
        s.num_shared, s.num_computed = min(s.num_shared, n), min(s.num_computed, n)
        s.tokens = s.tokens[:n]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data):
        self.release_one(self.pick(data))

    def release_one(self, s) -> None:
        self.sequences.remove(s)
        s.lease.release()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def copy_to_executor(self, data):
        s = self.pick(data)
        s.seen = s.lease.slot_ids.copy()
        s.lease.mark_fresh()

    @precondition(lambda self: self.tree)
    @rule(data=st.data(), owner=st.sampled_from("xyz"), ttl_s=st.integers(0, 9), of_lease=st.booleans())
    def pin(self, data, owner, ttl_s, of_lease):
        self.pins = {o: pin for o, pin in self.pins.items() if pin[0] > self.now and o != owner}
        if of_lease and self.sequences:
            s = self.pick(data)
            namespace, tokens = s.prefix(s.num_shared)
            kept = self.cache.pin(s.lease, owner=owner, ttl_s=ttl_s)
        else:
            namespace, tokens = data.draw(st.sampled_from(sorted(self.tree, key=repr)))
            kept = self.cache.pin((*tokens, 7), owner=owner, ttl_s=ttl_s, namespace=namespace)
        new = [n for n in range(1, len(tokens) + 1) if (namespace, tokens[:n]) not in self.pinned()]
        room = self.max_pinned - len(self.pinned())
        assert kept == (len(tokens) - max(len(new) - room, 0) if ttl_s else 0)
        if kept:
            self.pins[owner] = (self.now + ttl_s, (namespace, tokens[:kept]))

    @precondition(lambda self: self.pins)
    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.sequences)
    @rule(program=st.sampled_from(PROGRAMS))
    def end_program(self, program):
        self.cache.end_program(program)

    @precondition(lambda self: len(self.tree) > len(self.kv) // 2)
    @rule()
    def flush(self):
        n = len(self.tree) - len(self.locked())
        assert self.cache.flush() == n
        self.expect_evicted(n)

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def the_cache_checks_itself(self):
        self.cache.check()

    @invariant()
    def the_tree_equals_the_model(self):
        assert self.read_tree() == self.tree
        assert self.cache.num_cached == len(self.tree)
        assert self.cache.num_evictable == len(self.tree) - len(self.locked())
        assert self.cache.num_locked == len(self.locked())
        assert self.cache.num_pinned == len(self.pinned()) <= self.max_pinned
        assert self.cache.num_leased == self.num_private()
        assert self.cache.num_free == self.num_free()

    @invariant()
    def the_queue_holds_every_evictable_leaf_at_the_key_that_it_has_now(self):
        """A key is computed when its leaf becomes evictable, and must still be the leaf's key."""
        queue = self.cache.tree.queue
        live = {id(leaf): key for key, ticket, leaf in queue.heap if leaf.ticket == ticket}
        assert len(live) == queue.num_leaves
        if queue.policy is not POLICIES["size_aware"]:  # its keys include the age at which they were computed
            for _, ticket, leaf in queue.heap:
                assert leaf.ticket != ticket or live[id(leaf)] == queue.policy(leaf, queue.age)

    @invariant()
    def a_router_that_follows_the_events_knows_every_whole_block(self):
        whole = {
            block_names(tokens, namespace=ns, block_len=BLOCK_LEN)[-1]
            for ns, tokens in self.tree
            if len(tokens) % BLOCK_LEN == 0
        }
        assert self.router == whole

    @invariant()
    def every_computed_slot_holds_exactly_its_prefix(self):
        for prefix, slot in self.tree.items():
            assert self.kv[slot] == prefix
        for s in self.sequences:
            slots = s.lease.slot_ids.tolist()
            assert len(slots) == s.num_slots
            for n in range(s.num_computed):
                assert self.kv[slots[n]] == s.prefix(n + 1)

    @invariant()
    def what_is_not_stale_has_not_changed(self):
        for s in self.sequences:
            fresh = s.lease.stale_from
            assert fresh <= s.num_slots
            if fresh:
                assert (s.lease.slot_ids[:fresh] == s.seen[:fresh]).all()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=130,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
