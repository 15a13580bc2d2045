"""PrefixCache.hold locks what is cached of a prefix, its last page's part included, and little beyond it."""

import numpy as np

from radix_jax.cache import PagePool, PrefixCache, RadixTree, TailHandle

PAGE_SIZE = 4


def cache_of(num_tokens: int, num_pages: int = 65) -> PrefixCache:
    """A cache that holds the ids 0, 1, ... of one request that ended, the last page as a tail where it isn't full."""
    cache = PrefixCache(RadixTree(PAGE_SIZE), PagePool(num_pages))
    leave(cache, np.arange(num_tokens, dtype=np.int32))
    return cache


def leave(cache: PrefixCache, ids: np.ndarray) -> None:
    """What a request of these ids leaves."""
    match = cache.match_prefix(ids)
    cache.lock(match.handle)
    pages = np.concatenate([match.pages, cache.allocate(-(-len(ids) // PAGE_SIZE) - len(match.pages))])
    handle, pages = cache.commit(ids, pages, match.handle)
    cache.release(handle, pages, ids)


def num_locked(cache: PrefixCache, num_asked: int) -> tuple[int, int]:
    """(tokens that a hold of the first ids covers, pages that it locks); given back then."""
    covered, handles = cache.hold(np.arange(num_asked, dtype=np.int32))
    cache.check_integrity()
    num_pages = cache.num_protected
    for handle in handles:
        cache.unlock(handle)
    assert cache.num_protected == 0
    return covered, num_pages


def test_whole_pages_a_part_of_one_and_a_tail() -> None:
    cache = cache_of(22)
    assert num_locked(cache, 8) == (8, 2)
    assert num_locked(cache, 10) == (10, 3)
    assert num_locked(cache, 3) == (3, 1)
    assert num_locked(cache, 20) == (20, 5)
    assert num_locked(cache, 21) == (21, 6)
    assert num_locked(cache, 40) == (22, 6)


def test_nothing_is_locked_of_what_is_not_there() -> None:
    cache = PrefixCache(RadixTree(PAGE_SIZE), PagePool(9))
    assert cache.hold([1, 2, 3]) == (0, [])
    leave(cache, np.array([7, 8, 9, 10, 11], np.int32))
    assert cache.hold([1, 2, 3]) == (0, [])
    assert cache.hold([]) == (0, [])


def test_locked_tails_leave_room_for_others() -> None:
    cache = cache_of(2, num_pages=17)  # of which 2 may be tails
    held = [cache.hold([0, 1])]
    for first in (10, 20, 30):
        leave(cache, np.array([first, first + 1], np.int32))
        held.append(cache.hold([first, first + 1]))
    assert [covered for covered, _ in held] == [2] * 4
    assert all(isinstance(handle, TailHandle) for _, [handle] in held)
    for first in (40, 50, 60):
        leave(cache, np.array([first, first + 1], np.int32))
    assert [cache.match_prefix([first, first + 1]).donor_len for first in (40, 50, 60)] == [0, 2, 2]
    cache.check_integrity()


def test_a_donor_that_is_to_be_skipped_gives_way_to_the_next() -> None:
    cache = cache_of(4)
    leave(cache, np.array([0, 1, 2, 9], np.int32))
    newest = cache.match_prefix([0, 1, 2, 5])
    other = cache.match_prefix([0, 1, 2, 5], skip_donors={newest.donor_page})
    assert (newest.donor_len, other.donor_len) == (3, 3)
    assert other.donor_page != newest.donor_page
    assert cache.match_prefix([0, 1], skip_donors={newest.donor_page, other.donor_page}).donor_handle is None
