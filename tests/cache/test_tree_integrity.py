"""check_integrity finds each kind of damage."""

from collections.abc import Callable

import numpy as np
import pytest

from radix_jax.cache import IntegrityError, PagePool, PrefixCache, RadixTree, RadixTreeNode


def _set(name: str, value: object) -> Callable[[RadixTree, RadixTreeNode], None]:
    return lambda tree, node: setattr(node, name, value)


def _lose_child(tree: RadixTree, node: RadixTreeNode) -> None:
    assert node.parent is not None
    node.parent.children[b"xxxx"] = node.parent.children.pop(node.key_fn(node.edge))


def _miscount(tree: RadixTree, node: RadixTreeNode) -> None:
    tree._evictable_len += 1


def _forget_in_policy(tree: RadixTree, node: RadixTreeNode) -> None:
    node.timestamp += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_set("pages", np.array([9, 10], np.int32).tobytes()), "has 1 tokens and 2 pages"),
        (_set("pages", np.array([1], np.int32).tobytes()), r"pages \[1\] are in the tree more than once"),
        (_set("ref_count", 1), "locks, fewer than its children"),
        (_set("ref_count", -1), "has -1 locks"),
        (_set("priority", 3), "a child of it a higher one"),
        (_set("end_len", -1), "start where its parent ends"),
        (_set("namespace", "other"), "in another namespace"),
        (_set("edge", b"\x09\x00\x00\x00"), "not where its parent's children name it"),
        (_lose_child, "not where its parent's children name it"),
        (_miscount, "evictable_size=4 and protected_size=0, recounted 3 and 0"),
        (_forget_in_policy, "eviction log has 0 nodes, 2 are unlocked"),
    ],
)
def test_damage_is_named(damage: Callable[[RadixTree, RadixTreeNode], None], message: str):
    tree = RadixTree(page_size=1)
    tree.insert_prefix([1, 2], [1, 2])
    leaf = tree.insert_prefix([1, 2, 3], [1, 2, 3]).handle.node
    tree.check_integrity()
    damage(tree, leaf)
    with pytest.raises(IntegrityError, match=message):
        tree.check_integrity()


def test_pages_without_an_owner_or_with_two_are_named():
    cache = PrefixCache(RadixTree(page_size=1), PagePool(8))
    private = cache.allocate(3)
    cache.check_integrity(private)
    with pytest.raises(IntegrityError, match=r"pages \[3\] have no owner"):
        cache.check_integrity(private[:2])
    with pytest.raises(IntegrityError, match=r"pages \[3\] have more than one"):
        cache.check_integrity([1, 2, 3, 3])
    with pytest.raises(IntegrityError, match=r"pages \[5\] have more than one"):
        cache.check_integrity([1, 2, 3, 5])
    with pytest.raises(IntegrityError, match=r"pages \[0, 8\] .* not of the pool"):
        cache.check_integrity([1, 2, 3, 0, 8])
    cache.tree.insert_prefix([7], private[:1])
    cache.check_integrity(private[1:])
    with pytest.raises(IntegrityError, match=r"pages \[1\] have more than one"):
        cache.check_integrity(private)
