"""The history of lookups, compared with counts in a dict, however the tree splits its edges."""

import random
from collections import Counter

import numpy as np
import pytest
from phloem.radix_cache import POLICIES, RadixCache
from phloem.radix_cache.history import BLOCK, MOST, History, weights_of


def text(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


def serve(cache: RadixCache, tokens: np.ndarray, **options: object) -> int:
    """Serve a whole request; returns how many tokens the cache had."""
    lease = cache.acquire(tokens, limit=len(tokens) - 1, **options)
    found = lease.num_cached
    lease.extend(len(tokens) - found)
    lease.commit(tokens)
    lease.release()
    return found


def nodes_of(cache: RadixCache) -> dict[tuple[int, ...], object]:
    """Every node by the tokens of its path."""
    found = {}

    def walk(node, before):
        tokens = before + tuple(node.tokens.tolist())
        found[tokens] = node
        for child in node.children.values():
            walk(child, tokens)

    for root in cache.tree.roots.values():
        for child in root.children.values():
            walk(child, ())
    return found


def test_counts_equal_those_of_a_dict_however_edges_are_split():
    rng = random.Random(3)
    cache, asked = RadixCache(100_000), Counter()
    stems = [[rng.randrange(50) for _ in range(rng.randrange(1, 200))] for _ in range(12)]
    for _ in range(300):
        # Distinct last blocks: no lookup continues an earlier one.
        tokens = [*rng.choice(stems), *(rng.randrange(50) for _ in range(40))]
        if rng.random() < 0.5:
            tokens = tokens[: rng.randrange(1, len(tokens))] + [rng.randrange(10**6) for _ in range(40)]
        serve(cache, np.array(tokens, np.int32))
        asked.update(tuple(tokens[:n]) for n in range(BLOCK, len(tokens) + 1, BLOCK))
    history, nodes = cache.history, nodes_of(cache)
    assert len(nodes) > 300
    wrong = 0
    for path, node in nodes.items():
        times, cut_from = history.times(node)
        whole = len(path) // BLOCK * BLOCK
        true = asked[path[:whole]] if whole else 0
        assert times >= true or times == 0 == whole, "a count is never too low"
        wrong += times > true
        assert node.start <= cut_from <= node.end
        blocks = [n for n in range(BLOCK, len(path) + 1, BLOCK) if n > node.start]
        if blocks and times == true:
            above = [n for n in blocks if asked[path[:n]] > times]
            assert cut_from >= max(above, default=node.start)
    assert wrong < 0.02 * len(nodes)


def test_counts_survive_eviction():
    """Two popular prefixes among prompts that come once; the pool holds a tenth of all tokens."""
    found = {}
    for policy in ("lru", "program_aware"):
        rng = random.Random(1)
        cache = RadixCache(1200, policy=POLICIES[policy])
        found[policy] = 0
        for i in range(400):
            stem = text(1000 * rng.randrange(1, 3), 300) if rng.random() < 0.2 else text(10**6 + 1000 * i, 300)
            found[policy] += serve(cache, np.concatenate((stem, text(10**7 + 1000 * i, 100))))
        cache.check()
    assert found["lru"] > 0 and found["program_aware"] > 1.3 * found["lru"]


def test_a_chats_next_turn_does_not_count_its_history_but_other_lookups_do():
    history, cache = History(10_000), RadixCache(10_000)
    chat = text(0, 100)
    for _ in range(5):
        history.count("", chat)
        chat = np.concatenate((chat, text(chat[-1] + 1, 90)))
    serve(cache, chat)
    (node,) = nodes_of(cache).values()
    assert history.times(node)[0] == 0  # no lookup included its last turn
    serve(cache, chat[:200])
    node = next(node for path, node in nodes_of(cache).items() if len(path) in (199, 200))
    assert history.times(node)[0] == 1
    for n in range(3):
        history.count("", np.concatenate((chat[:200], text(10**6 + 1000 * n, 50))))
    assert history.times(node)[0] == 4


def test_an_equal_request_counts_again_but_a_repeated_lookup_does_not():
    cache = RadixCache(1000)
    tokens = text(0, 64)
    for _ in range(3):
        serve(cache, tokens)
    serve(cache, tokens, is_repeated=True)
    (node,) = (node for path, node in nodes_of(cache).items() if len(path) == 64)
    assert cache.history.times(node)[0] == 3


def test_namespaces_are_counted_apart_and_chance_changes_no_small_count():
    """Tables are small: other counters are shared in each namespace, and in one a lookup seems to continue another."""
    asked = {"a": 3, "b": 1, **{f"namespace {n}": 3 for n in range(400)}}
    for namespaces in (("a", "b"), *((name,) for name in asked)):
        cache = RadixCache(1000)
        for namespace in namespaces:
            for n in range(asked[namespace]):
                serve(cache, np.concatenate((text(0, 64), text(1000 * (n + 1), 32))), namespace=namespace)
        for root in cache.tree.roots.values():
            (node,) = root.children.values()
            assert cache.history.times(node)[0] == asked[root.namespace]


def test_old_counts_fade_and_none_overflows():
    history, cache = History(100), RadixCache(1000)
    serve(cache, text(0, 32))
    (node,) = nodes_of(cache).values()
    history.num_until_halved = 1 << 60
    for _ in range(3 * MOST):
        history.count("", text(0, 32))
    assert history.times(node)[0] == MOST
    history.num_until_halved = 1
    history.count("", text(5000, 32))
    assert history.times(node)[0] == MOST // 2


def test_longer_prompts_keep_earlier_counts():
    history, cache = History(100_000), RadixCache(100_000)
    history.count("", text(0, 32))
    long = text(0, 20_000)
    history.count("", long)
    assert len(history.weights) >= 20_000 and (weights_of(7) == history.weights[:7]).all()
    serve(cache, long)
    (node,) = nodes_of(cache).values()
    assert history.times(node)[0] == 1
    serve(cache, np.concatenate((text(0, 32), text(10**6, 32))))
    assert history.times(nodes_of(cache)[tuple(range(32))])[0] == 1  # the long lookup continued this one


@pytest.mark.parametrize("policy", ["lru", "lfu", "size_aware", "priority"])
def test_policies_that_read_no_history_keep_none(policy):
    assert RadixCache(100, policy=POLICIES[policy]).history is None
    assert RadixCache(100, reuse=False).history is None
