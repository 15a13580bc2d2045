"""Soft pins: evicted last, bounded in tokens and in time."""

import math

import pytest

from radix_jax.cache import HandleError, IntegrityError, RadixTree
from radix_jax.config import EVICTION_POLICIES


def make_tree(max_pinned_tokens: int = 10, **settings) -> RadixTree:
    tree = RadixTree(page_size=1, max_pinned_tokens=max_pinned_tokens, **settings)
    for first in (1, 2, 3):
        tree.insert_prefix([first] * 4, range(4 * first, 4 * first + 4))
    return tree


@pytest.mark.parametrize("policy", ["lru", "lfu", "cost-aware"])
def test_a_pinned_prefix_goes_only_when_nothing_else_is_left(policy: str):
    tree = make_tree(eviction_policy=policy)
    assert tree.pin([1, 1, 9], ttl=5).cached_len == 2
    assert (tree.pinned_size, tree.evictable_size, tree.protected_size) == (2, 12, 0)
    assert tree.evict(100, trim=True).tolist()[-2:] == [4, 5]
    assert tree.pinned_size == 0
    tree.check_integrity()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_pinned_leaves_can_be_kept_from_an_eviction(policy: str):
    tree = make_tree(eviction_policy=policy)
    tree.pin([1, 1, 9], ttl=5)
    num_unpinned = tree.evictable_size - tree.pinned_size
    assert len(tree.evict(1_000, keep_pinned=True)) == num_unpinned
    assert tree.pinned_size == tree.evictable_size == 2
    assert len(tree.evict(1, keep_pinned=True)) == 0
    tree.check_integrity()
    assert len(tree.evict(1_000)) == 2
    assert len(make_tree(max_pinned_tokens=0).evict(1_000, keep_pinned=True)) == 12, "nothing is pinned"


def test_a_pin_ends_by_the_callers_clock_and_its_end_is_a_use():
    tree = make_tree()
    pin = tree.pin([1, 1, 1, 1], ttl=3, now=10)
    assert pin.until == 13
    tree.expire_pins(now=12.9)
    assert tree.pinned_size == 4
    tree.expire_pins(now=13)
    assert tree.pinned_size == 0
    with pytest.raises(HandleError, match="is over"):
        tree.unpin(pin)
    assert [tree.evict(1).tolist()[0] for _ in range(3)] == [8, 12, 4]


def test_a_pin_without_end_is_taken_off_once():
    tree = make_tree()
    pin = tree.pin([2, 2, 2, 2], ttl=math.inf)
    tree.expire_pins(now=1e300)
    assert tree.pinned_size == 4
    tree.unpin(pin)
    with pytest.raises(HandleError, match="taken off before"):
        tree.unpin(pin)
    with pytest.raises(HandleError, match="another tree"):
        make_tree().unpin(pin)
    assert tree.pinned_size == 0


def test_shared_tokens_count_once_and_stay_until_the_last_pin_is_off():
    tree = make_tree()
    tree.insert_prefix([1, 1, 5, 6], [4, 5, 90, 91])
    pins = [tree.pin([1, 1, 1, 1], ttl=1), tree.pin([1, 1, 5, 6], ttl=2), tree.pin([1, 1], ttl=3)]
    assert tree.pinned_size == 6
    tree.unpin(pins[0])
    assert tree.pinned_size == 4
    tree.expire_pins(2)
    assert tree.pinned_size == 2
    tree.expire_pins(3)
    assert tree.pinned_size == 0
    tree.check_integrity()


def test_more_than_the_budget_is_refused_and_changes_no_pin():
    tree = make_tree(max_pinned_tokens=6)
    tree.pin([1, 1, 1, 1], ttl=2)
    with pytest.raises(ValueError, match=r"pinning 3 more tokens on top of 4 exceeds max_pinned_tokens=6; unpin"):
        tree.pin([2, 2, 2], ttl=2)
    tree.check_integrity()
    assert tree.pinned_size == 4
    assert tree.pin([2, 2, 2], ttl=2, now=2).cached_len == 3, "what is over makes room"
    assert tree.pinned_size == 3


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="max_pinned_tokens=0: this tree pins nothing"):
        make_tree(max_pinned_tokens=0).pin([1], ttl=1)
    with pytest.raises(ValueError, match="max_pinned_tokens=-1"):
        make_tree(max_pinned_tokens=-1)
    for ttl in (0, -1, math.nan):
        with pytest.raises(ValueError, match=r"ttl=.* must be above 0"):
            make_tree().pin([1, 1], ttl=ttl)


def test_a_locked_pin_and_one_of_nothing():
    tree = make_tree()
    nothing = tree.pin([7, 7], ttl=1)
    assert (nothing.cached_len, tree.pinned_size) == (0, 0)
    tree.unpin(nothing)
    held = tree.match_prefix([1, 1, 1, 1]).handle
    tree.lock(held)
    pin = tree.pin([1, 1, 1, 1], ttl=1)
    assert (tree.pinned_size, tree.protected_size) == (4, 4)
    tree.unpin(pin)
    tree.pin([1, 1, 1, 1], ttl=1)
    tree.unlock(held)
    assert tree.evict(8).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    tree.check_integrity()


def test_a_pin_whose_end_was_evicted_still_ends_for_the_rest():
    tree = make_tree()
    tree.insert_prefix([1, 1, 1, 1, 5], [4, 5, 6, 7, 90])
    pin = tree.pin([1, 1, 1, 1, 5], ttl=1)
    assert tree.evict(9).tolist()[-1] == 90
    assert tree.pinned_size == 4
    tree.insert_prefix([1, 1, 1, 1, 5], [4, 5, 6, 7, 91])
    assert tree.evict(1).tolist() == [91], "cached anew, so not pinned"
    tree.unpin(pin)
    assert tree.pinned_size == 0
    tree.check_integrity()


def test_a_reset_drops_what_is_pinned():
    tree = make_tree()
    pin = tree.pin([1, 1, 1, 1], ttl=1)
    assert len(tree.reset()) == 12
    assert tree.pinned_size == 0
    tree.unpin(pin)
    tree.insert_prefix([1, 1], [1, 2])
    assert tree.pin([1, 1], ttl=1).cached_len == 2
    tree.check_integrity()


def test_the_check_sees_miscounted_pins():
    tree = make_tree()
    node = tree.match_prefix([1, 1, 1, 1]).handle.node
    tree.pin([1, 1, 1, 1], ttl=1)
    assert tree._pins is not None
    tree._pins.note_trimmed(1)
    with pytest.raises(IntegrityError, match="pinned_size=3, recounted 4"):
        tree.check_integrity()
    node.num_pins = -1
    with pytest.raises(IntegrityError, match="has -1 pins"):
        tree.check_integrity()
