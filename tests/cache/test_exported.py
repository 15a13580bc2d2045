"""A tree as arrays and back: the same prefixes in the same pages' places, as much as there is room for."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from radix_jax.cache import PagePool, PrefixCache, RadixTree
from radix_jax.cache.exported import ExportedTree, TreeImport, export_tree
from radix_jax.config import EVICTION_POLICIES

# Used in this order, each a prompt of its namespace; pages of 2 tokens.
PROMPTS = [
    (None, [1, 2, 3, 4, 5, 6]),
    (None, [1, 2, 3, 4, 7, 8]),
    ("a", [1, 2, 3, 4]),
    (None, [9, 9]),
    (None, [1, 2]),
]


def new_cache(num_pages: int = 20, policy: str = "lru") -> PrefixCache:
    return PrefixCache(RadixTree(page_size=2, eviction_policy=policy), PagePool(num_pages))


def filled_cache() -> PrefixCache:
    cache = new_cache()
    for namespace, ids in PROMPTS:
        insert(cache, ids, namespace)
    return cache


def insert(cache: PrefixCache, ids: list[int], namespace: object = None) -> None:
    pages = cache.allocate(len(ids) // 2)
    result = cache.tree.insert_prefix(ids, pages, namespace)
    cache.free(pages[: result.cached_len // 2])


def contents(cache: PrefixCache) -> set[tuple[object, tuple[int, ...]]]:
    """The end of each node, as its namespace and all tokens up to there."""
    before: dict[int | None, tuple[int, ...]] = {}
    found = set()
    for node in cache.tree.snapshot().nodes:
        before[node.node_id] = before.get(node.parent_id, ()) + tuple(node.token_ids.tolist())
        if node.parent_id is not None:
            found.add((node.namespace, before[node.node_id]))
    return found


def exported(cache: PrefixCache) -> ExportedTree:
    tree, _ = export_tree(cache.tree.snapshot(), lambda namespace: True)
    tree.check()
    return tree


def take_in(cache: PrefixCache, tree: ExportedTree) -> TreeImport:
    taking = TreeImport(cache, tree)
    taking.insert(cache.allocate(len(taking.pages)))
    cache.check_integrity()
    return taking


def test_pages_are_numbered_as_their_tokens_are() -> None:
    cache = filled_cache()
    tree, page_ids = export_tree(cache.tree.snapshot(), lambda namespace: True)
    for node in range(len(tree.parents)):
        path = tree.path_pages(node)
        found = cache.tree.match_pages(tree.ids_of(path), tree.namespace_of(node))
        assert found.tolist() == page_ids[path].tolist()
    assert sorted(page_ids.tolist()) == sorted(cache.tree.owned_pages().tolist())
    assert tree.namespaces == (None, "a")


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_all_of_it_comes_back(policy: str) -> None:
    there = filled_cache()
    cache = new_cache(policy=policy)
    taking = take_in(cache, exported(there))
    assert (len(taking.pages), taking.num_left) == (7, 0)
    assert contents(cache) == contents(there)
    again = take_in(cache, exported(there))
    assert (len(again.pages), again.num_left) == (0, 0)
    assert contents(cache) == contents(there)


def test_uses_are_in_their_old_order() -> None:
    there, cache = filled_cache(), new_cache()
    take_in(cache, exported(there))
    for _ in range(7):
        evicted: list[Any] = [[], []]
        for spans, each in zip(evicted, (there, cache), strict=True):
            each.free(each.tree.evict(2, trim=True, evicted=spans))
        assert [(node.namespace, end) for node, _, end in evicted[0]] == [
            (node.namespace, end) for node, _, end in evicted[1]
        ]
        assert contents(there) == contents(cache)


# Latest first: [1, 2] and [9, 9], then "a" from its beginning, then [3, 4], [7, 8] and [5, 6] behind [1, 2].
@pytest.mark.parametrize(
    ("num_free", "expected"),
    [
        (0, set()),
        (1, {(None, (1, 2))}),
        (2, {(None, (1, 2)), (None, (9, 9))}),
        (3, {(None, (1, 2)), (None, (9, 9)), ("a", (1, 2))}),
        (5, {(None, (1, 2)), (None, (9, 9)), ("a", (1, 2, 3, 4)), (None, (1, 2, 3, 4))}),
        (6, {(None, (1, 2)), (None, (9, 9)), ("a", (1, 2, 3, 4)), (None, (1, 2, 3, 4)), (None, (1, 2, 3, 4, 7, 8))}),
    ],
)
def test_what_was_used_last_comes_first_and_from_its_beginning(num_free: int, expected: set[Any]) -> None:
    cache = new_cache()
    cache.allocate(19 - num_free)
    tree = exported(filled_cache())
    taking = TreeImport(cache, tree)
    taking.insert(cache.allocate(len(taking.pages)))
    assert (len(taking.pages), taking.num_left) == (num_free, 7 - num_free)
    assert contents(cache) == expected


def test_what_is_there_stays_and_is_not_taken_in_twice() -> None:
    cache = new_cache()
    insert(cache, [1, 2, 3, 4, 7, 8, 10, 10])
    insert(cache, [50, 51], "b")
    before = cache.tree.match_pages([1, 2, 3, 4, 7, 8, 10, 10]).tolist()
    taking = take_in(cache, exported(filled_cache()))
    assert (len(taking.pages), taking.num_left) == (4, 0)
    assert cache.tree.match_pages([1, 2, 3, 4, 7, 8, 10, 10]).tolist() == before
    assert [cache.match_len(ids, namespace) for namespace, ids in PROMPTS] == [len(ids) for _, ids in PROMPTS]
    assert cache.match_len([50, 51], "b") == 2
    assert cache.tree.total_size == 2 * (4 + 1 + 4)


def test_namespaces_that_are_not_kept_are_left_out() -> None:
    tree, page_ids = export_tree(filled_cache().tree.snapshot(), lambda namespace: namespace == "a")
    assert (tree.namespaces, tree.token_ids.tolist(), len(page_ids)) == (("a",), [[1, 2], [3, 4]], 2)
    empty, page_ids = export_tree(new_cache().tree.snapshot(), lambda namespace: True)
    empty.check()
    assert (empty.token_ids.shape, len(page_ids)) == ((0, 2), 0)
    assert len(TreeImport(new_cache(), empty).pages) == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("parents", lambda parents: np.roll(parents, -1)),
        ("parents", lambda parents: parents - 1),
        ("parents", lambda parents: parents[:-1]),
        ("page_counts", lambda counts: counts * 0),
        ("page_counts", lambda counts: counts + 1),
        ("namespace_ids", lambda ids: ids + 1),
        ("namespace_ids", lambda ids: 1 - ids),
        ("namespaces", lambda namespaces: namespaces[:1] * 2),
        ("token_ids", lambda ids: ids * 0),
        ("token_ids", lambda ids: ids[1:]),
    ],
)
def test_what_is_no_tree_is_refused(name: str, change: Any) -> None:
    tree = exported(filled_cache())
    if name == "namespace_ids":
        tree = dataclasses.replace(tree, parents=np.arange(len(tree.parents), dtype=np.int32) - 1)
    with pytest.raises(ValueError, match=r"node|namespace|length|pages"):
        dataclasses.replace(tree, **{name: change(getattr(tree, name))}).check()
