"""Policies by themselves: what they hold, how large they grow, and that the integrity checks see a broken order."""

import numpy as np
import pytest

from radix_jax.cache import IntegrityError, RadixTree
from radix_jax.cache.eviction import LRU, EvictionPolicy, RankedLeaves
from radix_jax.cache.eviction_rules import make_policy
from radix_jax.config import EVICTION_POLICIES, EngineConfig


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_every_name_of_the_config_makes_a_policy(name: str):
    assert isinstance(make_policy(name), EvictionPolicy)
    assert EngineConfig(eviction_policy=name).eviction_policy == name


def test_other_names_are_refused_with_the_right_ones():
    names = ", ".join(map(repr, EVICTION_POLICIES))
    with pytest.raises(ValueError, match=f"^eviction_policy='LRU' is not one of {names}, nor a function$"):
        make_policy("LRU")
    with pytest.raises(ValueError, match=f"eviction_policy='LRU' is not one of {names}"):
        EngineConfig(eviction_policy="LRU")


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


def ranked(num_nodes: int) -> tuple[RankedLeaves, list]:
    tree = RadixTree(page_size=1)
    nodes = [tree.insert_prefix([token], [token]).handle.node for token in range(num_nodes)]
    policy = RankedLeaves(lambda node: node.timestamp)
    for node in nodes:
        policy.add(node)
    return policy, nodes


def test_the_heap_stays_in_proportion_to_the_nodes_however_often_they_are_used():
    policy, nodes = ranked(100)
    for time in range(20_000):
        nodes[time % 100].timestamp = time
        policy.refresh(nodes[time % 100])
    assert len(policy._heap) <= 264
    for node in nodes[:90]:
        policy.discard(node)
    assert len(policy._heap) <= 84
    policy.check_integrity()
    assert policy.next_leaf() is nodes[90]


def test_an_eviction_looks_at_few_nodes_however_many_there_are():
    """The rule is asked for the leaves that changed, never for all: no rebuild, no scan."""
    asked: list[int] = []

    def rule(view):
        asked.append(view.node_id)
        return view.last_use

    tree = RadixTree(1, rule)
    for token in range(5_000):
        tree.insert_prefix([token], [token])
    assert len(asked) <= 2 * 5_000
    asked.clear()
    for token in range(5_000, 5_100):
        assert tree.evict(1).tolist() == [token - 5_000]
        tree.insert_prefix([token], [token])
    assert len(asked) <= 2 * 100


def test_a_key_that_comes_back_is_told_from_its_old_entry():
    policy, (first, second) = ranked(2)
    for key in (5, 1, 5, 1, 5):
        first.timestamp = key
        policy.refresh(first)
    second.timestamp = 4
    policy.refresh(second)
    assert policy.next_leaf() is second
    policy.discard(second)
    assert policy.next_leaf() is first
    policy.check_integrity()


def test_the_heap_check_sees_old_keys_a_broken_order_and_too_many_entries():
    policy, nodes = ranked(4)
    policy.check_integrity()
    nodes[2].timestamp += 1
    with pytest.raises(IntegrityError, match="or an old one"):
        policy.check_integrity()
    nodes[2].timestamp -= 1
    policy._heap.reverse()
    with pytest.raises(IntegrityError, match="not in heap order"):
        policy.check_integrity()
    policy._heap.sort()
    policy._heap += [policy._heap[-1]] * 100
    with pytest.raises(IntegrityError, match="104 entries of 4 nodes"):
        policy.check_integrity()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_eviction_order_repeats_under_every_policy(policy: str):
    def run() -> list[int]:
        tree = RadixTree(page_size=1, eviction_policy=policy)
        rng = np.random.default_rng(3)
        order: list[int] = []
        for page in range(0, 600, 10):
            ids = rng.integers(0, 3, 10, dtype=np.int32)
            tree.match_prefix(ids)
            tree.insert_prefix(ids, range(page, page + 10), priority=int(rng.integers(3)))
            order += tree.evict(int(rng.integers(0, 8))).tolist()
        return order + tree.evict(tree.evictable_size).tolist()

    assert run() == run()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_neither_a_locked_node_nor_one_with_a_child_is_evicted(policy: str):
    tree = RadixTree(page_size=1, eviction_policy=policy)
    tree.insert_prefix([1, 2], [1, 2])
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    tree.insert_prefix([1, 2, 4], [1, 2, 4])
    held = tree.match_prefix([1, 2, 3]).handle
    tree.lock(held)
    assert tree.evict(100).tolist() == [4]
    assert tree.evict(100).tolist() == []
    tree.unlock(held)
    assert tree.evict(100).tolist() == [3, 1, 2]
    tree.check_integrity()
