"""What a tree tells of its changes."""

import pytest

from radix_jax.cache import (
    CacheCleared,
    CacheEvent,
    EventQueue,
    PagePool,
    PagesRemoved,
    PagesStored,
    PrefixCache,
    RadixTree,
)


def test_stored_removed_and_cleared_are_told_in_order():
    events: list[CacheEvent] = []
    tree = RadixTree(page_size=2, on_event=events.append)
    tree.insert_prefix([1, 2, 3, 4, 5], [10, 11, 12], namespace="a")
    assert events == [PagesStored([10, 11], None, [1, 2, 3, 4], 2, "a")]
    events.clear()
    tree.insert_prefix([1, 2, 7, 8], [20, 21], namespace="a")
    assert events == [PagesStored([21], 10, [7, 8], 2, "a")], "a split stores nothing; the parent is its front part"
    events.clear()
    handle = tree.match_prefix([1, 2, 3, 4], namespace="a").handle
    tree.lock(handle)
    tree.insert_prefix([1, 2, 3, 4], [1, 2], namespace="a")
    tree.insert_prefix([1], [], namespace="a")
    tree.unlock(handle)
    assert events == [], "nothing entered, nothing left"
    tree.evict(4)
    assert events == [PagesRemoved([21], "a"), PagesRemoved([11], "a")]
    events.clear()
    tree.reset()
    assert events == [CacheCleared()]


def test_a_trimmed_leaf_tells_of_the_pages_that_went():
    events: list[CacheEvent] = []
    tree = RadixTree(page_size=1, on_event=events.append)
    tree.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4])
    tree.evict(2, trim=True)
    assert events[1:] == [PagesRemoved([3, 4], None)]
    tree.insert_prefix([1, 2, 3], [1, 2, 9])
    assert events[2:] == [PagesStored([9], 2, [3], 1, None)]


def test_a_queue_keeps_the_newest_events_and_shows_the_gap():
    queue = EventQueue(max_events=2)
    tree = RadixTree(page_size=1, on_event=queue)
    assert queue.take() == (0, [])
    for token in (1, 2, 3):
        tree.insert_prefix([token], [token])
    first, events = queue.take()
    assert (first, [event.page_ids for event in events]) == (1, [[2], [3]])
    tree.reset()
    assert queue.take() == (3, [CacheCleared()])
    assert queue.num_events == 4
    with pytest.raises(ValueError, match="max_events=0"):
        EventQueue(max_events=0)


def test_tails_pins_and_locks_are_no_events():
    events: list[CacheEvent] = []
    cache = PrefixCache(RadixTree(page_size=4, max_pinned_tokens=8, on_event=events.append), PagePool(17))
    match = cache.match_prefix([])
    cache.lock(match.handle)
    done = cache.commit([1, 2, 3, 4, 5, 6], cache.allocate(2), match.handle)
    cache.release(done.handle, done.pages, [1, 2, 3, 4, 5, 6])
    stored = PagesStored([1], None, [1, 2, 3, 4], 4, None)
    assert events == [stored]
    assert len(cache.snapshot().tails) == 1
    cache.tree.unpin(cache.tree.pin([1, 2, 3, 4], ttl=1))
    cache.allocate(16)
    assert cache.snapshot().tails == ()
    assert events == [stored, PagesRemoved([1], None)]
