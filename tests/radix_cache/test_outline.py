"""The outline of the tree, for drawings: the nodes that are there, each after its parent, the last used ones first."""

import numpy as np
import pytest
from phloem.radix_cache import RadixCache


def filled(num_prompts: int, *, num_slots: int = 4096) -> RadixCache:
    rng = np.random.default_rng(3)
    cache = RadixCache(num_slots)
    for i in range(num_prompts):
        tokens = np.concatenate([np.arange(20), rng.integers(0, 3, 12), [100 + i]]).astype(np.int32)
        lease = cache.acquire(tokens, namespace=f"space {i % 2}")
        lease.extend(len(tokens) - lease.num_cached)
        lease.commit(tokens)
        lease.release()
    return cache


def test_an_outline_has_the_nodes_and_parents_of_the_snapshot():
    cache = filled(40)
    namespaces, nodes = cache.outline(max_nodes=1000)
    assert sorted(namespaces) == ["space 0", "space 1"] and len(nodes) == cache.num_nodes > 40
    assert sum(node.num_tokens for node in nodes) == cache.num_cached
    seen = {-1, -2}
    for node in nodes:
        assert node.parent in seen and node.id not in seen
        seen.add(node.id)
    wanted = []

    def visit(snapshot, path):
        path = (*path, snapshot.first_tokens)
        wanted.append(path)
        for child in snapshot.children:
            visit(child, path)

    for root in cache.snapshot():
        visit(root, (root.namespace,))
    by_id = {node.id: node for node in nodes}

    def path_of(node):
        if node.parent < 0:
            name = namespaces[-1 - node.parent]
            return (name, (), tuple(node.first_tokens))
        return (*path_of(by_id[node.parent]), tuple(node.first_tokens))

    assert sorted(path for path in wanted if len(path) > 2) == sorted(map(path_of, nodes))


@pytest.mark.parametrize("most", [1, 7, 30])
def test_what_was_used_last_is_shown_with_its_parents(most):
    cache = filled(40)
    _, nodes = cache.outline(max_nodes=most)
    _, every = cache.outline(max_nodes=1000)
    assert len(nodes) == most
    ids = {node.id for node in nodes} | {-1, -2}
    assert all(node.parent in ids for node in nodes)
    left_out = [node.last_use for node in every if node.id not in ids]
    assert min(node.last_use for node in nodes) >= max(left_out)


def test_an_id_stays_until_the_node_is_evicted():
    cache = filled(10)
    _, before = cache.outline(max_nodes=1000)
    _, again = cache.outline(max_nodes=1000)
    assert before == again
    assert cache.flush() > 0
    assert cache.outline(max_nodes=1000)[1] == []
