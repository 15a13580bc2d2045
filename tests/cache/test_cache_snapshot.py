"""The snapshot says what the tree holds, and stays as it was."""

import numpy as np

from radix_jax.cache import RadixTree


def test_snapshot_lists_parents_before_children_with_their_facts():
    tree = RadixTree(page_size=2)
    tree.insert_prefix([1, 2, 3, 4], [1, 2])
    held = tree.match_prefix([1, 2, 9, 9]).handle
    tree.lock(held)
    tree.insert_prefix([5, 6], [9], namespace="b")
    snapshot = tree.snapshot()
    rows = [
        (n.depth, n.token_ids.tolist(), n.page_ids.tolist(), n.num_locks, n.num_hits, n.namespace, n.state)
        for n in snapshot.nodes
    ]
    assert rows == [
        (0, [], [], 0, 0, None, "root"),
        (1, [1, 2], [1], 1, 1, None, "locked"),
        (2, [3, 4], [2], 0, 0, None, "evictable"),
        (0, [], [], 0, 0, "b", "root"),
        (1, [5, 6], [9], 0, 0, "b", "evictable"),
    ]
    ids = [n.node_id for n in snapshot.nodes]
    assert len(set(ids)) == len(ids)
    assert [n.parent_id for n in snapshot.nodes] == [None, ids[0], ids[1], None, ids[3]]
    assert all(n.token_ids.dtype == n.page_ids.dtype == np.int32 for n in snapshot.nodes)
    assert (snapshot.page_size, snapshot.num_tokens, snapshot.num_locked_tokens) == (2, 6, 2)


def test_snapshot_does_not_follow_the_tree():
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    snapshot = tree.snapshot()
    tree.match_prefix([1])
    tree.evict(2)
    assert [n.token_ids.tolist() for n in snapshot.nodes] == [[], [1, 2, 3]]
