"""The snapshot says what the tree and the cache around it hold, and stays as it was."""

import numpy as np

from radix_jax.cache import PagePool, PrefixCache, RadixTree


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


def test_pins_show_beside_locks():
    tree = RadixTree(page_size=1, max_pinned_tokens=10)
    tree.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4])
    tree.pin([1, 2, 3], ttl=5)
    tree.pin([1], ttl=5)
    handle = tree.match_prefix([1]).handle
    tree.lock(handle)
    rows = [(n.token_ids.tolist(), n.num_locks, n.num_pins, n.state) for n in tree.snapshot().nodes]
    assert rows == [
        ([], 0, 0, "root"),
        ([1], 1, 2, "locked"),
        ([2, 3], 0, 1, "pinned"),
        ([4], 0, 0, "evictable"),
    ]
    assert tree.snapshot().num_pinned_tokens == tree.pinned_size == 3
    tree.unlock(handle)
    assert [n.state for n in tree.snapshot().nodes] == ["root", "pinned", "pinned", "evictable"]
    assert tree.snapshot().num_locked_tokens == 0


def serve(cache: PrefixCache, ids: list[int], namespace=None) -> list[int]:
    """A request that computes `ids` and ends; its pages."""
    match = cache.match_prefix([], namespace)
    cache.lock(match.handle)
    result = cache.commit(ids, cache.allocate(-(-len(ids) // 4)), match.handle, namespace)
    cache.release(result.handle, result.pages, ids, namespace)
    return result.pages.tolist()


def test_tails_hang_under_their_nodes_last_used_first():
    cache = PrefixCache(RadixTree(page_size=4), PagePool(80))
    pages = [serve(cache, ids) for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [8])]
    [lone] = serve(cache, [9, 9], namespace=True)
    serve(cache, [1, 1, 1, 1], namespace=1)
    donor = cache.match_prefix([1, 2, 3, 4, 5]).donor_handle
    assert donor is not None
    cache.lock(donor)
    snapshot = cache.snapshot()
    roots = {type(n.namespace): n for n in snapshot.nodes if n.state == "root"}
    assert set(roots) == {type(None), bool, int}, "a namespace with nothing but a tail has a root too"
    assert len({n.node_id for n in snapshot.nodes}) == len(snapshot.nodes)
    [node] = [n for n in snapshot.nodes if n.token_ids.tolist() == [1, 2, 3, 4]]
    rows = [(t.parent_id, t.token_ids.tolist(), t.page_id, t.num_locks) for t in snapshot.tails]
    assert rows == [
        (roots[bool].node_id, [9, 9], lone, 0),
        (roots[type(None)].node_id, [8], pages[2][0], 0),
        (node.node_id, [7], pages[1][1], 0),
        (node.node_id, [5, 6], pages[0][1], 1),
    ]
    assert cache.tree.snapshot().tails == ()
    cache.unlock(donor)
    assert cache.snapshot().tails[0].token_ids.tolist() == [5, 6]
    assert snapshot.tails[3].num_locks == 1


def test_a_tail_whose_prefix_was_evicted_hangs_nowhere():
    cache = PrefixCache(RadixTree(page_size=4), PagePool(80))
    serve(cache, [1, 2, 3, 4, 5])
    cache.free(cache.tree.evict(4))
    serve(cache, [1, 2, 3, 4])
    [tail] = cache.snapshot().tails
    assert (tail.parent_id, tail.token_ids.tolist()) == (None, [5])


def test_snapshot_without_tails_is_the_trees():
    cache = PrefixCache(RadixTree(page_size=4), PagePool(80))
    serve(cache, [1, 2, 3, 4])
    assert repr(cache.snapshot()) == repr(cache.tree.snapshot())
