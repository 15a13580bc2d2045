"""Policies by themselves, and that the integrity check sees a broken order."""

import pytest

from radix_jax.cache import IntegrityError, RadixTree
from radix_jax.cache.eviction import LRU, EvictionPolicy
from radix_jax.cache.eviction_rules import make_policy


def test_only_known_names_make_a_policy():
    assert isinstance(make_policy("lru"), LRU)
    assert isinstance(make_policy("lru"), EvictionPolicy)
    with pytest.raises(ValueError, match="eviction_policy='LRU' is not one of 'lru'"):
        make_policy("LRU")


def test_lru_gives_the_least_recently_used_leaf():
    tree = RadixTree(page_size=1)
    nodes = [tree.insert_prefix([token], [token]).handle.node for token in range(3)]
    policy = LRU()
    assert policy.next_leaf() is None
    for node in nodes:
        policy.add(node)
    policy.refresh(nodes[0])
    assert policy.next_leaf() is nodes[1]
    policy.discard(nodes[1])
    assert policy.next_leaf() is nodes[2]
    assert list(policy) == [nodes[2], nodes[0]]


def test_lru_check_sees_a_parent_before_its_child_and_a_later_use_before_an_earlier_one():
    tree = RadixTree(page_size=1)
    parent = tree.insert_prefix([1], [1]).handle.node
    child = tree.insert_prefix([1, 2], [1, 2]).handle.node
    policy = LRU()
    policy.add(child)
    policy.add(parent)
    policy.check_integrity()
    policy.refresh(child)
    with pytest.raises(IntegrityError, match="before a child"):
        policy.check_integrity()
    policy.refresh(parent)
    child.timestamp += 1
    with pytest.raises(IntegrityError, match="used later"):
        policy.check_integrity()
