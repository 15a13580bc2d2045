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
        policy.used(node)
    nodes[0].timestamp = 10
    policy.used(nodes[0])
    assert policy.next_leaf() is nodes[1]
    nodes[1].ref_count = 1
    assert policy.next_leaf() is nodes[2]
    policy.check_integrity([nodes[2], nodes[0]])
    policy.clear()
    assert policy.next_leaf() is None


def test_one_use_of_a_long_path_is_one_entry_and_its_nodes_go_from_the_lowest_up():
    tree = RadixTree(page_size=1)
    for length in range(1, 101):
        tree.insert_prefix(range(length), range(length))
    tree.match_prefix(range(100))
    assert isinstance(tree._policy, LRU)
    tree.check_integrity()
    assert tree.evict(100).tolist() == list(range(99, -1, -1))
    assert tree.evict(1).tolist() == []
    assert not tree._policy._log


def test_the_log_of_uses_stays_in_proportion_to_the_nodes():
    tree = RadixTree(page_size=1)
    assert isinstance(tree._policy, LRU)
    for token in range(100):
        tree.insert_prefix([token], [token])
    for use in range(20_000):
        tree.match_prefix([use % 100])
        assert len(tree._policy._log) <= 265
    handles = [tree.match_prefix([token]).handle for token in range(100)]
    for handle in handles[1:]:
        tree.lock(handle)
    for _ in range(300):
        tree.match_prefix([0])
    assert len(tree._policy._log) <= 70, "locked nodes need no entry"
    for handle in handles[1:]:
        tree.unlock(handle)
    tree.check_integrity()
    assert tree.evict(100).tolist() == list(range(100))


def test_lru_check_sees_what_is_lost_and_a_later_use_before_an_earlier_one():
    tree = RadixTree(page_size=1)
    parent = tree.insert_prefix([1], [1]).handle.node
    child = tree.insert_prefix([1, 2], [1, 2]).handle.node
    policy = LRU()
    policy.used(child)
    policy.check_integrity([parent, child])
    with pytest.raises(IntegrityError, match="has 2 nodes, 3 are unlocked"):
        policy.check_integrity([parent, child, tree.insert_prefix([3], [3]).handle.node])
    child.timestamp += 2
    policy.used(child)
    with pytest.raises(IntegrityError, match="has 1 nodes, 2 are unlocked"):
        policy.check_integrity([parent, child])
    parent.timestamp -= 1
    policy.used(parent)
    with pytest.raises(IntegrityError, match="a use at 1 after one at 4"):
        policy.check_integrity([parent, child])


def test_lru_check_sees_a_parent_before_its_child():
    tree = RadixTree(page_size=1)
    parent = tree.insert_prefix([1], [1]).handle.node
    child = tree.insert_prefix([1, 2], [1, 2]).handle.node
    policy = LRU()
    child.timestamp = parent.timestamp + 1
    policy.used(parent)
    policy.used(child)
    with pytest.raises(IntegrityError, match="before a child"):
        policy.check_integrity([parent, child])


def ranked(num_nodes: int) -> tuple[RankedLeaves, list]:
    tree = RadixTree(page_size=1)
    nodes = [tree.insert_prefix([token], [token]).handle.node for token in range(num_nodes)]
    policy = RankedLeaves(lambda node: node.timestamp)
    for node in nodes:
        policy.used(node)
    return policy, nodes


def test_the_heap_stays_in_proportion_to_the_nodes_however_often_they_are_used():
    policy, nodes = ranked(100)
    for time in range(20_000):
        nodes[time % 100].timestamp = time
        policy.used(nodes[time % 100])
    assert len(policy._heap) <= 264
    for node in nodes[:90]:
        policy.removed(node)
    assert len(policy._heap) <= 84
    policy.check_integrity(nodes[90:])
    assert policy.next_leaf() is nodes[90]


def test_the_heap_passes_over_locked_nodes_until_they_are_used_again():
    policy, nodes = ranked(3)
    nodes[0].ref_count = nodes[1].ref_count = 1
    assert policy.next_leaf() is nodes[2]
    nodes[0].ref_count = 0
    policy.used(nodes[0])
    assert policy.next_leaf() is nodes[0]
    policy.check_integrity([nodes[0], nodes[2]])
    policy.clear()
    assert policy.next_leaf() is None


class CountedKey:
    """A sort key that counts its comparisons."""

    num_comparisons = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: "CountedKey") -> bool:
        CountedKey.num_comparisons += 1
        return self.value < other.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountedKey) and self.value == other.value

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def test_a_heap_compares_a_logarithm_of_its_leaves_for_each_one_evicted():
    tree = RadixTree(page_size=1)
    policy = RankedLeaves(lambda node: CountedKey(node.uuid * 7919 % 4099))
    for token in range(4096):
        policy.used(tree.insert_prefix([token], [token]).handle.node)
    CountedKey.num_comparisons = 0
    for _ in range(1000):
        leaf = policy.next_leaf()
        assert leaf is not None
        policy.removed(leaf)
    assert CountedKey.num_comparisons <= 1000 * 2 * 12


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
        policy.used(first)
    second.timestamp = 4
    policy.used(second)
    assert policy.next_leaf() is second
    policy.removed(second)
    assert policy.next_leaf() is first
    policy.check_integrity([first])


def test_the_heap_check_sees_old_keys_a_broken_order_and_too_many_entries():
    policy, nodes = ranked(4)
    policy.check_integrity(nodes)
    nodes[2].timestamp += 1
    with pytest.raises(IntegrityError, match="or an old one"):
        policy.check_integrity(nodes)
    nodes[2].timestamp -= 1
    policy._heap.reverse()
    with pytest.raises(IntegrityError, match="not in heap order"):
        policy.check_integrity(nodes)
    policy._heap.sort()
    policy._heap += [policy._heap[-1]] * 100
    with pytest.raises(IntegrityError, match="104 entries of 4 nodes"):
        policy.check_integrity(nodes)


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
