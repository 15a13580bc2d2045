"""Peeks find what a match finds, change nothing, and are followed through splits and evictions."""

import random

import numpy as np

from radix_jax.cache.radix_tree import RadixTree


def grown_tree() -> RadixTree:
    tree = RadixTree(2)
    tree.insert_prefix([1, 1, 2, 2, 3, 3, 4, 4], [1, 2, 3, 4])
    return tree


def test_a_peek_names_the_node_that_the_match_ends_in() -> None:
    tree = grown_tree()
    before = repr(tree.snapshot())
    inside, end, nothing = tree.peek([1, 1, 2, 2, 9]), tree.peek([1, 1, 2, 2, 3, 3, 4, 4, 5]), tree.peek([9, 9])
    assert (inside.cached_len, end.cached_len, nothing.cached_len) == (4, 8, 0)
    assert inside.node is end.node
    assert nothing.node.is_root()
    assert repr(tree.snapshot()) == before


def test_a_peek_is_followed_through_splits() -> None:
    tree = grown_tree()
    peeks = [tree.peek([1, 1, 2, 2, 3, 3, 4, 4][:length]) for length in (2, 4, 6, 8)]
    tree.match_prefix([1, 1, 2, 2, 3, 3])
    tree.match_prefix([1, 1])
    followed = [peek.followed() for peek in peeks]
    assert [peek and (peek.node.start_len, peek.node.end_len) for peek in followed] == [(0, 2), (2, 6), (2, 6), (6, 8)]
    assert followed == [tree.peek([1, 1, 2, 2, 3, 3, 4, 4][:length]) for length in (2, 4, 6, 8)]


def test_what_was_evicted_or_cut_is_not_followed() -> None:
    tree = grown_tree()
    short, long = tree.peek([1, 1, 2, 2]), tree.peek([1, 1, 2, 2, 3, 3, 4, 4])
    tree.evict(2, trim=True)
    assert long.followed() is None
    assert short.followed() == short
    tree.evict(2)
    assert short.followed() is None
    empty = tree.peek([5, 5])
    assert empty.followed() == empty


def test_a_match_outlives_the_rear_part_of_its_node() -> None:
    tree = grown_tree()
    short = tree.peek([1, 1, 2, 2])
    handle = tree.match_prefix([1, 1, 2, 2]).handle
    tree.evict(2)
    assert not short.node.in_tree
    assert short.followed() == (4, handle.node)


def test_going_on_from_a_peek_finds_what_a_new_one_finds() -> None:
    rng = random.Random(0)
    tree, num_followed = RadixTree(2), 0
    for _ in range(2_000):
        ids = np.array([rng.randrange(2) for _ in range(rng.randrange(1, 16))], np.int32)
        namespace = rng.choice([None, "a"])
        peek = tree.peek(ids, namespace)
        assert peek.cached_len == tree.match_len(ids, namespace)
        for _ in range(3):
            other = np.array([rng.randrange(2) for _ in range(rng.randrange(16))], np.int32)
            if rng.random() < 0.6:
                tree.insert_prefix(other, range(len(other) // 2), namespace)
            elif rng.random() < 0.5:
                tree.match_prefix(other, namespace)
            else:
                tree.evict(rng.randrange(6), trim=rng.random() < 0.5)
        followed = peek.followed()
        if followed is not None:
            num_followed += 1
            again = tree.peek(ids, namespace, followed)
            assert again == tree.peek(ids, namespace)
            assert again.cached_len >= peek.cached_len
    assert 1_000 < num_followed < 2_000
