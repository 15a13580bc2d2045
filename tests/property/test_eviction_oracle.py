"""Every eviction policy against a list sorted by its written rule, on leaves side by side under one root."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_jax.cache import RadixTree
from radix_jax.config import EVICTION_POLICIES


class Record:
    """What happened to one prompt; times are the numbers of the operations."""

    def __init__(self, number: int, length: int, priority: int, time: int) -> None:
        self.number, self.length, self.priority = number, length, priority
        self.created = self.used = time
        self.hits = 0


SORTED_BY: dict[str, Callable[[Record], Any]] = {
    "lru": lambda r: (r.used,),
    "lfu": lambda r: (r.hits, r.used),
    "fifo": lambda r: (r.created,),
    "filo": lambda r: (-r.created,),
    "mru": lambda r: (-r.used,),
    "priority": lambda r: (r.priority, r.used),
    "slru": lambda r: (r.hits > 1, r.used),
    # Without such a leaf all its tokens and 256 more are to be computed.
    "tlru": lambda r: (r.length > 2048 - 256, r.used),
    "reuse-credit": lambda r: (r.used + 1000 * min(4, r.hits),),
    # Nothing was evicted before the last use: the floor is 0, and the mean position decides.
    "cost-aware": lambda r: (r.length, r.used),
}

steps = st.lists(st.tuples(st.sampled_from(["insert", "match", "hold"]), st.integers(0, 10**6)), max_size=60)


def test_every_policy_but_the_one_that_learns_is_tried():
    assert {*SORTED_BY, "reuse-rate"} == set(EVICTION_POLICIES)


@pytest.mark.parametrize("policy", SORTED_BY)
@settings(max_examples=25)
@given(steps=steps, page_size=st.sampled_from([1, 2, 4, 16]))
def test_leaves_go_in_the_order_of_the_rule(policy: str, steps: list[tuple[str, int]], page_size: int):
    tree = RadixTree(page_size, policy)
    records: list[Record] = []
    for time, (step, number) in enumerate(steps):
        if step == "insert" or not records:
            length = (1 + number % 200) * 16
            records.append(Record(len(records), length, number % 3, time))
            pages = np.full(length // page_size, len(records))
            tree.insert_prefix(ids_of(records[-1]), pages, priority=records[-1].priority)
            continue
        record = records[number % len(records)]
        record.used = time
        record.hits += 1
        handle = tree.match_prefix(ids_of(record)).handle
        if step == "hold":
            tree.lock(handle)
            tree.unlock(handle)
    # Matching, locking and inserting move the tree's counter at different speeds; the credit is in its units.
    if policy == "reuse-credit":
        for record in records:
            record.used = tree.match_prefix(ids_of(record)).handle.node.timestamp
            record.hits += 1
    order = sorted(records, key=SORTED_BY[policy])
    assert [tree.evict(1)[0] - 1 for _ in order] == [record.number for record in order]
    assert tree.total_size == 0


def ids_of(record: Record) -> np.ndarray:
    return np.full(record.length, record.number, np.int32)


def leaf(tree: RadixTree, first: int, length: int, page: int) -> None:
    tree.insert_prefix(np.full(length, first, np.int32), np.full(length // tree.page_size, page))


def test_lfu_forgets_nothing_and_breaks_ties_by_last_use():
    tree = RadixTree(1, "lfu")
    for token in (1, 2, 3):
        leaf(tree, token, 1, token)
    for token in (3, 1, 1, 2, 2, 3, 3):
        tree.match_prefix([token])
    assert tree.evict(3).tolist() == [1, 2, 3]


def test_fifo_keeps_the_creation_over_splits_and_filo_is_its_reverse():
    for policy, order in (("fifo", [[3, 4], [1, 2], [5]]), ("filo", [[5], [3, 4], [1, 2]])):
        tree = RadixTree(1, policy)
        tree.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4])
        tree.insert_prefix([9], [5])
        tree.match_prefix([1, 2])  # the new node in front is younger than the leaf [9], its tokens are older
        assert [tree.evict(1).tolist() for _ in range(3)] == order


def test_slru_protects_from_the_second_reuse_on():
    tree = RadixTree(1, "slru")
    for token in (1, 2, 3):
        leaf(tree, token, 1, token)
    for token in (1, 1, 2, 3, 2):
        tree.match_prefix([token])
    assert tree.evict(3).tolist() == [3, 1, 2]


def test_tlru_judges_by_the_longest_prefix_that_was_ever_cached_behind_a_leaf():
    tree = RadixTree(1, "tlru")
    ids = np.arange(4_000, dtype=np.int32)
    for end in (1_000, 2_500, 4_000):
        tree.insert_prefix(ids[:end], ids[:end] + 1)
    leaf(tree, -5, 1_000, 9_000)
    leaf(tree, -6, 1_792, 9_001)
    leaf(tree, -7, 1_793, 9_002)
    assert tree.evict(1).tolist() == list(range(2_501, 4_001)), "1,500 + 256 tokens are soon computed"
    # The node before would cost the conversation 3,000 + 256 tokens now: it goes by age, after what is tail-safe.
    assert [int(tree.evict(1)[0]) for _ in range(5)] == [9_000, 9_001, 1_001, 1, 9_002]


def test_tlru_takes_a_long_leaf_only_by_age():
    tree = RadixTree(1, "tlru")
    leaf(tree, 1, 1_793, 1)
    leaf(tree, 2, 1_792, 2)
    assert [int(tree.evict(1)[0]) for _ in range(2)] == [2, 1]


def test_reuse_credit_counts_four_reuses_at_most():
    tree = RadixTree(1, "reuse-credit")
    for token in (1, 2, 3):
        leaf(tree, token, 1, token)
    for _ in range(50):
        tree.match_prefix([1])
    for _ in range(4):
        tree.match_prefix([2])
    tree.match_prefix([3])
    assert tree.evict(3).tolist() == [3, 1, 2]


def test_cost_aware_lets_dear_leaves_age():
    tree = RadixTree(1, "cost-aware")
    leaf(tree, -1, 8_192, 10_000)  # mean position 4,095.5: 1.25 a token
    number = 0
    while tree.match_len([-1]) == 1:
        number += 1
        leaf(tree, number, 1, number)
        assert len(tree.evict(1)) in (1, 8_192)
    # Each cheap leaf costs 1 on top of the floor that the one before left. The second already stands at 2.
    assert number == 2


def test_a_rule_of_ones_own_sees_the_leaf_and_only_it():
    seen = []

    def dear_first(view):
        seen.append(view)
        return -view.num_tokens

    tree = RadixTree(2, dear_first)
    tree.insert_prefix([1, 2, 3, 4], [1, 2], namespace="a", priority=3)
    tree.insert_prefix([1, 2, 9, 9, 9, 9], [3, 4, 5], namespace="a")
    view = seen[-1]
    assert view._replace(node_id=0, created=0, last_use=0) == (4, 2, 2, 0, 0, 0, 0, 6, 0, "a")
    assert tree.evict(1).tolist() == [4, 5]
    assert tree.evict(1).tolist() == [2]
    assert tree.evict(1).tolist() == [1]


def test_equal_keys_go_by_node_id():
    tree = RadixTree(1, lambda view: 0)
    for token in (5, 3, 4, 1):
        leaf(tree, token, 1, token)
    tree.match_prefix([5])
    assert tree.evict(4).tolist() == [5, 3, 4, 1]


@pytest.mark.parametrize("key", ["a", None, float("nan"), (1, "a"), [1]])
def test_keys_that_do_not_compare_are_refused_without_harm(key: object):
    answers = [key]
    tree = RadixTree(1, lambda view: answers[0])
    tree.insert_prefix([1, 1], [1, 2])
    handle = tree.match_prefix([1, 1, 1]).handle
    tree.lock(handle)
    tree.unlock(handle)
    tree.check_integrity()
    for _ in range(2):
        with pytest.raises(TypeError, match="must give a number or a tuple of numbers"):
            tree.evict(1)
    assert (tree.total_size, tree.match_len([1, 1])) == (2, 2)
    answers[0] = 1.5
    assert tree.evict(1).tolist() == [1, 2]
    tree.check_integrity()


def test_a_rule_that_fails_half_way_loses_no_page():
    def rule(view):
        if view.num_tokens == 1:
            raise ZeroDivisionError("of the user's")
        return 0

    tree = RadixTree(1, rule)
    tree.insert_prefix([1], [1])
    tree.insert_prefix([1, 2, 3], [1, 2, 3])
    assert tree.evict(3).tolist() == [2, 3], "the parent's turn would come now"
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        tree.evict(1)
    assert tree.total_size == 1
    tree.check_integrity()
    assert tree.reset().tolist() == [1]
