"""Retired prefixes: dropped at once where nobody holds them, else with the request that held them last."""

from collections.abc import Hashable

import numpy as np
import pytest

from radix_jax.cache import (
    CommitResult,
    EventQueue,
    HandleError,
    PagePool,
    PagesRemoved,
    PrefixCache,
    RadixTree,
    of_weights,
)
from radix_jax.cache.keys import namespace_key

POLICIES = ["lru", "lfu", "slru", "priority", "cost-aware"]


def fill(cache: PrefixCache, ids: list[int], *, hold: bool, namespace: Hashable = None) -> CommitResult:
    """Cache a prompt as a request does, and hold it, or release it with a tail."""
    match = cache.match_prefix(ids[:-1], namespace)
    cache.lock(match.handle)
    pages = np.concatenate([match.pages, cache.allocate(-(-len(ids) // cache.page_size) - len(match.pages))])
    result = cache.commit(ids, pages, match.handle, namespace)
    if not hold:
        cache.release(result.handle, result.pages, ids, namespace)
    return result


@pytest.mark.parametrize("policy", POLICIES)
def test_what_nobody_holds_goes_at_once_and_the_rest_with_its_last_user(policy: str) -> None:
    events = EventQueue(100)
    cache = PrefixCache(RadixTree(2, policy, max_pinned_tokens=8, on_event=events), PagePool(40))
    for ids in ([1, 2, 3, 4, 5], [1, 2, 9, 9, 9, 9, 9], [7, 7, 7]):
        fill(cache, ids, hold=False, namespace="a")
    fill(cache, [1, 2, 3, 4], hold=False)
    pin = cache.tree.pin([1, 2, 3, 4], ttl=np.inf)
    one, other = (fill(cache, ids, hold=True, namespace="a") for ids in ([1, 2, 3, 4, 6, 6, 6], [1, 2, 3, 4, 5, 5, 5]))
    events.take()
    cache.retire()
    private = np.concatenate([one[1][3:], other[1][3:]])
    cache.check_integrity(private)
    assert cache.num_evictable == 0
    assert cache.num_protected == 4
    assert not cache.snapshot().tails
    assert cache.tree.pinned_size == 0
    with pytest.raises(HandleError, match="over"):
        cache.tree.unpin(pin)
    told = [event for event in events.take()[1] if isinstance(event, PagesRemoved)]
    assert sum(len(event.page_ids) for event in told) == 5
    assert cache.num_evicted_pages == 0

    # What comes now is in other namespaces, and stays.
    fill(cache, [1, 2, 3, 4, 5], hold=False, namespace=of_weights("a", 1))
    cache.release(*one, namespace="a")
    cache.check_integrity(other[1][3:])
    assert (cache.num_protected, cache.num_evictable) == (3, 3)
    cache.release(*other, namespace="a")
    cache.check_integrity()
    assert (cache.num_protected, cache.num_evictable) == (0, 3)
    assert {node.namespace for node in cache.tree.snapshot().nodes if node.state != "root"} == {of_weights("a", 1)}
    assert cache.match_len([1, 2, 3, 4], of_weights("a", 1)) == 4


def test_a_second_retirement_counts_what_is_left_of_the_first() -> None:
    cache = PrefixCache(RadixTree(1), PagePool(20))
    old = fill(cache, [1, 2, 3], hold=True)
    cache.retire()
    newer = fill(cache, [1, 2, 3], hold=True, namespace=of_weights(None, 1))
    cache.retire()
    assert cache.num_evictable == 0
    cache.release(*newer)
    assert cache.num_protected == 3
    cache.release(*old)
    assert cache.pool.num_free == 19
    cache.check_integrity()


def test_a_reset_forgets_them() -> None:
    cache = PrefixCache(RadixTree(1), PagePool(20))
    handle, pages = fill(cache, [1, 2, 3], hold=True)
    cache.retire()
    cache.release(handle, pages)
    fill(cache, [4, 5], hold=False)
    cache.retire()
    cache.reset()
    fill(cache, [1, 2, 3], hold=False)
    cache.check_integrity()
    assert cache.match_len([1, 2, 3]) == 3


def test_no_version_shares_a_namespace_with_another() -> None:
    names = [None, 0, "a", ("a", 1), of_weights("a", 1), (None, 1)]
    keys = {namespace_key(of_weights(name, version)) for name in names for version in (0, 1, 2)}
    assert len(keys) == 3 * len(names) - 1, "but for the one given twice"
    assert of_weights("a", 0) == "a"
    assert repr(of_weights("a", 3)) == "'a' of weights 3"
