"""RadixTree against the textbook's walk-throughs, its contract, and its errors."""

import numpy as np
import pytest

from radix_jax.cache import HandleError, RadixTree, RadixTreeNode
from radix_jax.cache.keys import common_len

A = [101, 11, 12, 21, 22]
B = [101, 11, 12, 31, 32]
C = [101, 11, 99]


def edges(tree: RadixTree) -> list[tuple[int, list[int], list[int]]]:
    """(depth, token ids, page ids) of each node, depth first, children by their first token."""
    nodes = tree.snapshot().nodes
    children: dict[int | None, list] = {}
    for node in nodes:
        children.setdefault(node.parent_id, []).append(node)
    found, stack = [], list(children.get(None, ()))
    while stack:
        node = stack.pop()
        if node.parent_id is not None:
            found.append((node.depth, node.token_ids.tolist(), node.page_ids.tolist()))
        stack.extend(sorted(children.get(node.node_id, ()), key=lambda child: -child.token_ids[0]))
    return found


def test_textbook_two_splits():
    tree = RadixTree(page_size=1)
    assert tree.insert_prefix(A, [1, 2, 3, 4, 5]).cached_len == 0
    assert edges(tree) == [(1, A, [1, 2, 3, 4, 5])]
    assert tree.insert_prefix(B, [11, 12, 13, 14, 15]).cached_len == 3
    assert edges(tree) == [(1, [101, 11, 12], [1, 2, 3]), (2, [21, 22], [4, 5]), (2, [31, 32], [14, 15])]
    assert tree.insert_prefix(C, [21, 22, 23]).cached_len == 2
    assert edges(tree) == [
        (1, [101, 11], [1, 2]),
        (2, [12], [3]),
        (3, [21, 22], [4, 5]),
        (3, [31, 32], [14, 15]),
        (2, [99], [23]),
    ]
    assert tree.match_prefix(A).pages.tolist() == [1, 2, 3, 4, 5]
    assert tree.match_prefix(B).pages.tolist() == [1, 2, 3, 14, 15]
    assert tree.match_prefix(C).pages.tolist() == [1, 2, 23]
    assert tree.total_size == 8
    tree.check_integrity()


def test_textbook_locks_along_the_path():
    tree = RadixTree(page_size=1)
    for ids, first in ((A, 1), (B, 11), (C, 21)):
        tree.insert_prefix(ids, range(first, first + len(ids)))
    a, b = tree.match_prefix(A).handle, tree.match_prefix(B).handle
    tree.lock(a)
    assert (tree.evictable_size, tree.protected_size) == (3, 5)
    tree.lock(b)
    assert (tree.evictable_size, tree.protected_size) == (1, 7)
    shared = a.node.parent
    assert (a.node.ref_count, b.node.ref_count, shared.ref_count, shared.parent.ref_count) == (1, 1, 2, 2)
    assert tree.evict(100).tolist() == [23]
    tree.unlock(a)
    assert (tree.evictable_size, tree.protected_size) == (2, 5)
    assert tree.evict(1).tolist() == [4, 5]
    tree.unlock(b)
    assert (tree.evictable_size, tree.protected_size) == (5, 0)
    # Leaves first, then the nodes that became leaves.
    assert [tree.evict(1).tolist() for _ in range(3)] == [[14, 15], [3], [1, 2]]
    assert (tree.total_size, edges(tree)) == (0, [])
    tree.check_integrity()


def test_match_splits_so_that_a_lock_protects_exactly_the_match():
    tree = RadixTree(page_size=2)
    tree.insert_prefix(list(range(12)), range(1, 7))
    match = tree.match_prefix([0, 1, 2, 3, 4, 99])
    assert (match.cached_len, match.pages.tolist()) == (4, [1, 2])
    assert (match.donor_page, match.donor_len) == (3, 1)
    tree.lock(match.handle)
    assert (tree.protected_size, tree.evictable_size) == (4, 8)
    assert tree.evict(100).tolist() == [3, 4, 5, 6]
    assert tree.match_len(list(range(12))) == 4


def test_match_len_and_match_pages_change_nothing():
    tree = RadixTree(page_size=2)
    tree.insert_prefix(list(range(8)), [1, 2, 3, 4])
    tree.insert_prefix([90, 91], [5])
    before, version = edges(tree), tree.version
    assert tree.match_len([0, 1, 2, 3, 4]) == 4
    assert tree.match_pages([0, 1, 2, 3, 4]).tolist() == [1, 2]
    assert tree.match_len([7, 7]) == tree.match_len([]) == tree.match_len([0]) == 0
    assert (edges(tree), tree.version) == (before, version)
    assert all(node.num_hits == 0 for node in tree.snapshot().nodes)
    assert tree.evict(1).tolist() == [1, 2, 3, 4], "a peek must not make its path recent"


def test_hits_count_matches_and_splits_carry_hits_locks_and_priority():
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4], priority=7)
    full = tree.match_prefix([1, 2, 3, 4]).handle
    tree.lock(full)
    part = tree.match_prefix([1, 2, 9]).handle
    front, back = part.node, full.node
    assert back.parent is front
    assert (front.hits, front.ref_count, front.priority) == (2, 1, 7)
    assert (back.hits, back.ref_count, back.priority) == (1, 1, 7)
    assert (tree.protected_size, tree.evictable_size) == (4, 0)
    tree.unlock(full)
    assert (front.ref_count, back.ref_count) == (0, 0)
    assert (tree.protected_size, tree.evictable_size) == (0, 4)
    tree.check_integrity()


def test_priority_rises_along_the_path_and_never_falls():
    tree = RadixTree(page_size=1)
    low = tree.insert_prefix([1, 2], [1, 2], priority=-3).handle.node
    assert low.priority == -3
    high = tree.insert_prefix([1, 2, 3], [1, 2, 3], priority=5).handle.node
    assert (low.priority, high.priority) == (5, 5)
    tree.insert_prefix([1, 2, 3], [1, 2, 3], priority=1)
    assert (low.priority, high.priority) == (5, 5)
    assert tree.insert_prefix([1, 2, 4], [1, 2, 4], priority=2).handle.node.priority == 2
    tree.check_integrity()


def test_a_prompt_and_its_output_keep_a_border():
    tree = RadixTree(page_size=2)
    prompt, output = [1, 2, 3, 4, 5], [6, 7, 8]
    tree.insert_prefix(prompt, [1, 2, 9])
    whole = tree.insert_prefix(prompt + output, [1, 2, 3, 4])
    assert whole.cached_len == 4
    assert edges(tree) == [(1, [1, 2, 3, 4], [1, 2]), (2, [5, 6, 7, 8], [3, 4])]
    assert tree.evict(1).tolist() == [3, 4], "the generated tail goes before the prompt"


def test_insert_makes_a_border_inside_a_node_too():
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4])
    result = tree.insert_prefix([1, 2], [5, 6])
    assert (result.cached_len, result.handle.cached_len) == (2, 2)
    assert edges(tree) == [(1, [1, 2], [1, 2]), (2, [3, 4], [3, 4])]


def test_the_version_rises_exactly_when_prefixes_come_or_go():
    tree = RadixTree(page_size=1)
    seen = [tree.version]

    def changed() -> bool:
        seen.append(tree.version)
        return seen[-1] > seen[-2]

    handle = tree.insert_prefix([1, 2, 3], [1, 2, 3]).handle
    assert changed()
    tree.insert_prefix([1, 2, 3], [4, 5, 6])
    assert not changed()
    tree.match_prefix([1, 2, 9])
    tree.lock(handle)
    tree.unlock(handle)
    assert not changed()
    assert len(tree.evict(1)) == 1
    assert changed()
    tree.evict(0)
    assert not changed()
    tree.reset()
    assert changed()


def test_eviction_is_by_last_use():
    tree = RadixTree(page_size=1)
    for token in (1, 2, 3, 4, 5):
        tree.insert_prefix([token], [token])
    tree.match_prefix([1])
    held = tree.match_prefix([3]).handle
    tree.lock(held)
    tree.insert_prefix([2], [99])
    tree.unlock(held)
    assert tree.evict(5).tolist() == [4, 5, 1, 2, 3]


def test_eviction_takes_enough_or_all_there_is():
    tree = RadixTree(page_size=4)
    tree.insert_prefix(list(range(12)), [1, 2, 3])
    tree.insert_prefix(list(range(50, 58)), [4, 5])
    assert len(tree.evict(0)) == 0
    assert tree.evict(5).tolist() == [1, 2, 3]
    assert tree.evict(1_000).tolist() == [4, 5]
    assert len(tree.evict(1)) == 0
    with pytest.raises(ValueError, match="negative"):
        tree.evict(-1)


def test_eviction_order_repeats():
    def run() -> list[int]:
        tree = RadixTree(page_size=1)
        rng = np.random.default_rng(3)
        order: list[int] = []
        for page in range(0, 2_000, 10):
            ids = rng.integers(0, 3, 10, dtype=np.int32)
            tree.insert_prefix(ids, range(page, page + 10))
            order += tree.evict(int(rng.integers(0, 8))).tolist()
        return order + tree.evict(tree.evictable_size).tolist()

    assert run() == run()


def test_trim_takes_only_the_pages_needed_from_the_end_of_the_last_leaf():
    tree = RadixTree(page_size=4)
    tree.insert_prefix(list(range(12)), [1, 2, 3])
    whole = tree.insert_prefix(list(range(50, 66)), [4, 5, 6, 7]).handle
    node = whole.node
    assert tree.evict(17, trim=True).tolist() == [1, 2, 3, 6, 7]
    assert (node.key.tolist(), node.value.tolist(), tree.evictable_size) == (list(range(50, 58)), [4, 5], 8)
    with pytest.raises(HandleError, match="16 tokens were evicted"):
        tree.lock(whole)
    assert tree.match_prefix(list(range(50, 66))).pages.tolist() == [4, 5]
    assert tree.evict(8, trim=True).tolist() == [4, 5]
    tree.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "lfu", "filo", "cost-aware"])
def test_a_trimmed_leaf_stays_the_next_to_go(policy: str):
    tree = RadixTree(page_size=1, eviction_policy=policy)
    tree.insert_prefix([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    tree.insert_prefix([7, 8, 9], [7, 8, 9])
    order = [tree.evict(2, trim=True).tolist() for _ in range(5)]
    assert order[0] == ([8, 9] if policy in ("filo", "cost-aware") else [5, 6])
    assert sorted(page for pages in order for page in pages) == list(range(1, 10))
    tree.check_integrity()


def test_a_match_goes_on_from_a_handle():
    tree = RadixTree(page_size=2)
    ids = np.arange(40, dtype=np.int32)
    tree.insert_prefix(ids[:16], range(8), namespace="a")
    first = tree.match_prefix(ids[:11], namespace="a")
    tree.insert_prefix(ids, range(20), namespace="a")
    again = tree.match_prefix(ids, namespace="a", start=first.handle)
    assert (again.cached_len, again.pages.tolist()) == (40, list(range(20)))
    plain = tree.match_prefix(ids, namespace="a")
    assert plain.pages.tolist() == again.pages.tolist()
    assert plain.handle.node is again.handle.node
    assert tree.match_prefix(ids[:11], namespace="a", start=first.handle).cached_len == 10
    assert tree.match_prefix(ids, namespace="a", start=tree.match_prefix([99]).handle).cached_len == 40


def test_a_request_counts_a_hit_once_however_often_it_matches():
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2], [1, 2])
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    front = tree.match_prefix([1, 2]).handle
    handle = front
    for _ in range(3):
        handle = tree.match_prefix([1, 2, 3], start=handle).handle
    assert (front.node.hits, handle.node.hits) == (1, 1)
    tree.evict(1)
    assert tree.match_prefix([1, 2, 3], start=handle).cached_len == 2, "its end was evicted: on from what is left"
    assert front.node.hits == 1
    tree.insert_prefix([1, 2, 3], [1, 2, 9])
    assert tree.match_prefix([1, 2, 3], start=handle).handle.node.hits == 1
    tree.reset()
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    assert tree.match_prefix([1, 2, 3], start=handle).handle.node.hits == 1
    assert tree.match_prefix([1, 2, 3]).handle.node.hits == 2


def test_an_insertion_goes_on_from_a_handle():
    tree = RadixTree(page_size=2)
    ids = np.arange(40, dtype=np.int32)
    tree.insert_prefix(ids[:16], range(8))
    held = tree.match_prefix(ids[:16]).handle
    tree.lock(held)
    result = tree.insert_prefix(ids[:31], np.arange(100, 116), start=held)
    assert (result.cached_len, result.handle.cached_len) == (16, 30)
    assert tree.match_prefix(ids).pages.tolist() == [*range(8), *range(108, 115)]
    with pytest.raises(HandleError, match=r"start leads to 16 tokens .* but the 8 ids"):
        tree.insert_prefix(ids[:8], range(4), start=held)
    tree.check_integrity()


def test_a_wrong_start_is_refused():
    tree = RadixTree(page_size=2)
    ids = np.arange(200, dtype=np.int32)
    tree.insert_prefix(ids, range(100), namespace=("a", 1))
    handle = tree.match_prefix(ids, namespace=("a", 1)).handle
    before = tree.snapshot().nodes[-1].num_hits
    other = ids.copy()
    other[136] = 7  # the first of the 64 tokens that are compared
    for wrong in (other, ids[:199], ids[:0], []):
        with pytest.raises(HandleError, match="start leads to 200 tokens"):
            tree.match_prefix(wrong, namespace=("a", 1), start=handle)
    for namespace in (None, ("a", True), ("a", 1.0)):
        with pytest.raises(HandleError, match="in namespace"):
            tree.match_prefix(ids, namespace=namespace, start=handle)
    with pytest.raises(HandleError, match="another tree"):
        RadixTree(page_size=2).match_prefix(ids, namespace=("a", 1), start=handle)
    assert tree.snapshot().nodes[-1].num_hits == before
    tree.check_integrity()


def test_a_handle_whose_length_was_changed_is_refused():
    tree = RadixTree(page_size=1)
    handle = tree.insert_prefix([1, 2], [1, 2]).handle
    handle.cached_len = 1
    for use in (tree.lock, tree.unlock):
        with pytest.raises(HandleError, match="1 tokens were evicted"):
            use(handle)


def test_a_resumed_match_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch):
    tree = RadixTree(page_size=16)
    ids = np.arange(8_192, dtype=np.int32)
    for end in range(512, 8_193, 512):
        tree.insert_prefix(ids[:end], range(end // 16))
    handle = tree.match_prefix(ids[:7_680]).handle
    read: list[int] = []
    monkeypatch.setattr("radix_jax.cache.handles.key_bytes", lambda ids: (read.append(len(ids)), ids.tobytes())[1])
    assert tree.match_prefix(ids, start=handle).cached_len == 8_192
    assert read == [512 + 64]


def test_namespaces_are_apart_and_leave_nothing_behind():
    tree = RadixTree(page_size=1)
    for number in range(100):
        tree.insert_prefix([1, 2], [2 * number, 2 * number + 1], namespace=("tenant", number))
        tree.match_prefix([1, 2], namespace=("unseen", number))
    assert tree.match_prefix([1, 2], namespace=("tenant", 40)).pages.tolist() == [80, 81]
    assert sum(node.state == "root" for node in tree.snapshot().nodes) == 100
    tree.evict(150)
    assert sum(node.state == "root" for node in tree.snapshot().nodes) == 25
    tree.reset()
    assert tree.snapshot().nodes == ()
    tree.check_integrity()


def test_a_handle_of_an_empty_match_can_be_locked_and_survives_a_reset():
    tree = RadixTree(page_size=4)
    empty = tree.match_prefix([1, 2, 3, 4], namespace="new").handle
    assert empty.cached_len == 0
    assert empty.node.is_root()
    short = tree.insert_prefix([1], [], namespace="new").handle
    tree.lock(empty)
    tree.lock(short)
    tree.insert_prefix([1, 2, 3, 4], [1], namespace="new")
    assert (tree.evictable_size, tree.protected_size) == (4, 0)
    assert tree.reset().tolist() == [1]
    tree.unlock(empty)
    tree.unlock(short)
    with pytest.raises(HandleError):
        tree.unlock(empty)


def test_pages_of_a_match_are_read_only():
    tree = RadixTree(page_size=1)
    pages = np.array([1, 2], np.int32)
    tree.insert_prefix([1, 2], pages)
    pages[0] = 99
    match = tree.match_prefix([1, 2])
    assert match.pages.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        match.pages[0] = 5


def test_misused_handles_are_refused():
    tree, other = RadixTree(page_size=1), RadixTree(page_size=1)
    handle = tree.insert_prefix([1, 2], [1, 2]).handle
    other.insert_prefix([1, 2], [1, 2])
    with pytest.raises(HandleError, match="not locked"):
        tree.unlock(handle)
    with pytest.raises(HandleError, match="another tree"):
        other.lock(handle)
    tree.lock(handle)
    tree.lock(handle)
    assert handle.node.ref_count == 2
    with pytest.raises(HandleError, match="another tree"):
        other.unlock(handle)
    tree.unlock(handle)
    tree.unlock(handle)
    with pytest.raises(HandleError, match="not locked"):
        tree.unlock(handle)
    tree.evict(2)
    with pytest.raises(HandleError, match="evicted"):
        tree.lock(handle)
    tree.insert_prefix([1, 2], [3, 4])
    with pytest.raises(HandleError, match="evicted"):
        tree.lock(handle)
    tree.check_integrity()
    other.check_integrity()


def test_reset_refuses_while_locked_and_ends_handles_after():
    tree = RadixTree(page_size=1)
    handle = tree.insert_prefix([1, 2], [1, 2]).handle
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    tree.lock(handle)
    with pytest.raises(HandleError, match="2 tokens are locked"):
        tree.reset()
    assert tree.total_size == 3
    tree.unlock(handle)
    assert sorted(tree.reset().tolist()) == [1, 2, 3]
    assert (tree.total_size, tree.evictable_size, tree.protected_size) == (0, 0, 0)
    with pytest.raises(HandleError, match="reset"):
        tree.lock(handle)


def test_handles_stay_true_over_splits():
    tree = RadixTree(page_size=1)
    whole = tree.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4]).handle
    tree.match_prefix([1, 2, 9])
    tree.match_prefix([1, 2, 3, 9])
    tree.lock(whole)
    assert (tree.protected_size, whole.cached_len) == (4, 4)
    tree.unlock(whole)
    tree.check_integrity()


@pytest.mark.parametrize("num_pages", [0, 1, 4])
def test_pages_must_agree_with_ids(num_pages: int):
    tree = RadixTree(page_size=4)
    with pytest.raises(ValueError, match=f"{num_pages} pages for 10 tokens at page_size=4; pass 2 page ids"):
        tree.insert_prefix(list(range(10)), range(num_pages))
    with pytest.raises(ValueError, match="3 pages for 8 tokens"):
        tree.insert_prefix(list(range(8)), range(3))
    assert tree.total_size == 0


def test_ids_must_be_flat_integers():
    tree = RadixTree(page_size=1)
    for bad in (
        np.array([1.5]),
        np.array([True]),
        np.array(["1"]),
        np.zeros((2, 2), np.int32),
        np.int32(3)[None, None],
    ):
        with pytest.raises(ValueError, match="token ids must be"):
            tree.match_prefix(bad)
    with pytest.raises(ValueError, match="pages must be"):
        tree.insert_prefix([1], np.array([0.5]))


def test_unhashable_namespaces_and_settings_out_of_range_are_refused():
    tree = RadixTree(page_size=1)
    with pytest.raises(TypeError, match="not hashable"):
        tree.match_prefix([1], namespace=("a", ["b"]))
    with pytest.raises(ValueError, match="page_size=0"):
        RadixTree(page_size=0)
    with pytest.raises(ValueError, match="eviction_policy='random' is not one of 'lru', 'lfu'"):
        RadixTree(eviction_policy="random")


def test_deep_trees_need_no_recursion():
    tree = RadixTree(page_size=1)
    depth = 10_000
    ids = np.arange(depth, dtype=np.int32)
    pages = np.arange(1, depth + 1, dtype=np.int32)
    # From the whole key backwards, each match cuts one token off the single node: one node a level.
    tree.insert_prefix(ids, pages)
    for end in range(depth - 1, 0, -1):
        assert tree.match_prefix(ids[:end]).cached_len == end
    match = tree.match_prefix(ids)
    tree.lock(match.handle)
    assert (match.handle.node.length, tree.protected_size) == (1, depth)
    tree.check_integrity()
    assert max(node.depth for node in tree.snapshot().nodes) == depth
    assert "more child" in tree.render()
    tree.unlock(match.handle)
    assert tree.evict(depth).tolist() == pages[::-1].tolist()


def test_a_long_match_compares_each_edge_once(monkeypatch: pytest.MonkeyPatch):
    """One look-up a node, and the place of a difference is searched for in the last node only."""
    tree = RadixTree(page_size=16)
    ids = np.arange(8_192, dtype=np.int32)
    for end in range(512, 8_193, 512):
        tree.insert_prefix(ids[:end], range(end // 16))
    searched: list[int] = []

    def counting(edge: bytes, key: bytes, start: int) -> int:
        searched.append(start // 4)
        return common_len(edge, key, start)

    monkeypatch.setattr("radix_jax.cache.node.common_len", counting)
    assert tree.match_prefix(ids).cached_len == 8_192
    assert searched == []
    assert sum(node.num_hits for node in tree.snapshot().nodes) == 16
    ids[5_000] += 1
    assert tree.match_len(ids) == 4_992
    assert searched == [4_608]


@pytest.mark.parametrize("length", [8_192, 8_193, 20_000])
def test_keys_too_long_to_copy_match_as_short_ones_do(length: int):
    tree = RadixTree(page_size=16)
    ids = np.arange(length, dtype=np.int32)
    num_pages = length // 16
    for end in (4_096, 4_112, length):
        tree.insert_prefix(ids[:end].copy(), np.arange(end // 16))
    assert [node.num_hits for node in tree.snapshot().nodes if node.state != "root"] == [0, 0, 0]
    assert tree.match_prefix(ids.tolist()).cached_len == num_pages * 16
    assert tree.match_pages(ids[::-1].copy()[::-1]).tolist() == list(range(num_pages))
    for place in (0, 15, 16, 4_095, 4_100, 5_000, num_pages * 16 - 1):
        other = ids.copy()
        other[place] = -1
        assert tree.match_len(other) == place // 16 * 16
    assert tree.match_len(np.concatenate([ids, ids])) == num_pages * 16
    half = tree.match_prefix(ids[:6_000])
    assert (half.cached_len, half.pages.tolist()) == (6_000, list(range(375)))
    more = np.concatenate([ids[: num_pages * 16], -ids])
    start = tree.match_prefix(ids).handle
    inserted = tree.insert_prefix(more, np.arange(len(more) // 16) + 10_000, start=start)
    assert inserted.cached_len == num_pages * 16
    assert tree.match_prefix(more, start=start).pages.tolist()[num_pages:] == [
        10_000 + page for page in range(num_pages, len(more) // 16)
    ]
    assert tree.match_len(more) == len(more) // 16 * 16
    tree.check_integrity()


def test_nodes_have_the_textbooks_parts():
    tree = RadixTree(page_size=2)
    node = tree.insert_prefix([1, 2, 3, 4], [7, 8]).handle.node
    assert isinstance(node, RadixTreeNode)
    assert node.key.tolist() == [1, 2, 3, 4]
    assert node.key.dtype == node.value.dtype == np.int32
    assert len(node.key) == len(node.value) * tree.page_size == node.length
    assert node.parent is not None
    assert node.parent.is_root()
    assert node.parent.children[node.key_fn(node.edge)] is node
    assert (node.is_leaf(), node.is_root(), node.parent.is_leaf()) == (True, False, False)
    assert node.get_match_len([1, 2, 3, 9]) == 3
    assert not hasattr(node, "__dict__")
    later = tree.insert_prefix([9, 9], [9]).handle.node
    assert later.uuid > node.uuid
    assert later.timestamp > node.timestamp
