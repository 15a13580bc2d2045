"""Tails: pages that ended requests filled in part, as donors behind the tree's whole pages."""

import numpy as np
import pytest

from radix_jax.cache import HandleError, OutOfPages, PagePool, PrefixCache, RadixTree

PAGE_SIZE = 4


def make_cache(num_pages: int = 33, **fields) -> PrefixCache:
    return PrefixCache(RadixTree(PAGE_SIZE, **fields), PagePool(num_pages))


def serve(cache: PrefixCache, ids, namespace=None) -> list[int]:
    """A request that computes `ids` and ends; its pages."""
    match = cache.match_prefix([], namespace)
    cache.lock(match.handle)
    pages = cache.allocate(-(-len(ids) // PAGE_SIZE))
    result = cache.commit(ids, pages, match.handle, namespace)
    cache.release(result.handle, result.pages, ids, namespace)
    cache.check_integrity()
    return result.pages.tolist()


def found(cache: PrefixCache, ids, namespace=None) -> tuple[int, int, int | None]:
    match = cache.match_prefix(ids, namespace)
    return match.cached_len, match.donor_len, match.donor_page


def test_what_is_behind_the_last_whole_page_is_found_again():
    cache = make_cache()
    pages = serve(cache, [1, 2, 3, 4, 5, 6, 7])
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == (4, 3, pages[1])
    assert found(cache, [1, 2, 3, 4, 5, 6, 9]) == (4, 2, pages[1])
    assert found(cache, [1, 2, 3, 4, 9]) == (4, 0, None)
    assert found(cache, [1, 2, 3]) == (0, 3, pages[0]), "of the tree's own page"
    assert (cache.num_available, cache.num_evictable, cache.num_protected) == (32, 2, 0)
    assert cache.pool.num_free == 30


def test_a_request_shorter_than_a_page_leaves_a_tail_in_its_namespace():
    cache = make_cache()
    pages = serve(cache, [1, 2], namespace=1)
    assert found(cache, [1, 2, 3], namespace=1) == (0, 2, pages[0])
    for namespace in (None, True, 1.0, "1"):
        assert found(cache, [1, 2, 3], namespace=namespace) == (0, 0, None)


def test_the_longer_of_a_page_and_a_tail_is_the_donor():
    cache = make_cache()
    [page] = serve(cache, [1, 2, 3, 4])
    [tail] = serve(cache, [1, 2, 9])
    assert found(cache, [1, 2, 3]) == (0, 3, page)
    assert found(cache, [1, 2, 9]) == (0, 3, tail)
    assert found(cache, [1, 2, 8]) == (0, 2, page)


def test_a_tail_that_is_cached_already_is_not_kept():
    cache = make_cache()
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    serve(cache, [1, 2, 3, 4, 5, 6, 7])
    assert cache.num_evictable == 2
    serve(cache, [1, 2, 3, 4, 6, 7])
    serve(cache, [1, 2, 3, 4, 6])
    serve(cache, [1, 2, 3, 4, 6, 7])
    assert cache.num_evictable == 3


def test_a_longer_tail_replaces_what_it_continues_unless_that_is_locked():
    cache = make_cache()
    serve(cache, [5])
    serve(cache, [5, 6])
    assert cache.num_evictable == 1
    locked = cache.match_prefix([5, 6]).donor_handle
    assert locked is not None
    cache.lock(locked)
    assert (cache.num_protected, cache.num_evictable) == (1, 0)
    [long] = serve(cache, [5, 6, 7])
    assert (cache.num_protected, cache.num_evictable) == (1, 1)
    cache.unlock(locked)
    assert found(cache, [5, 6, 7, 8]) == (0, 3, long)


def test_an_eighth_of_the_pool_at_most_and_the_last_used_ones():
    cache = make_cache(num_pages=17)
    [first], [second] = serve(cache, [1]), serve(cache, [2])
    handle = cache.match_prefix([1]).donor_handle
    assert handle is not None
    cache.lock(handle)
    cache.unlock(handle)
    [third] = serve(cache, [3])
    assert [found(cache, [token])[2] for token in (1, 2, 3)] == [first, None, third]
    assert cache.pool.num_free == 14
    assert second in cache.allocate(1)


def test_a_pool_too_small_for_an_eighth_keeps_none():
    cache = make_cache(num_pages=7)
    serve(cache, [1])
    assert cache.pool.num_free == 6


def test_pages_go_before_tails_and_locked_tails_never():
    cache = make_cache(num_pages=17)
    serve(cache, list(range(8)))
    serve(cache, [50])
    serve(cache, [60])
    locked = cache.match_prefix([50]).donor_handle
    assert locked is not None
    cache.lock(locked)
    with pytest.raises(OutOfPages):
        cache.allocate(16)
    pages = cache.allocate(14)
    assert cache.num_evicted_tokens == 8
    assert found(cache, [60])[1] == 1
    last = cache.allocate(1)
    assert cache.num_available == 0
    assert found(cache, [60])[1] == 0
    cache.check_integrity(np.concatenate([pages, last]))
    cache.unlock(locked)
    assert cache.num_available == 1


def test_a_tail_whose_prefix_was_evicted_goes_first():
    cache = make_cache(num_pages=17)
    pages = serve(cache, [1, 2, 3, 4, 5])
    cache.allocate(14)
    cache.free(cache.allocate(1))  # evicts the page in front of the tail
    assert cache.num_evicted_tokens == 4
    cache.commit([9, 9, 9, 9], cache.allocate(1), _locked_empty(cache))
    assert cache.allocate(1).tolist() == [pages[1]]
    assert cache.num_evicted_tokens == 4


def test_tails_go_before_what_is_pinned():
    cache = make_cache(num_pages=17, max_pinned_tokens=8)
    serve(cache, [1, 2, 3, 4, 5])
    serve(cache, [9, 9, 9, 9])
    cache.tree.pin([1, 2, 3, 4], ttl=1)
    private = cache.allocate(14)
    assert (cache.match_len([9, 9, 9, 9]), cache.match_len([1, 2, 3, 4]), found(cache, [1, 2, 3, 4, 5])[1]) == (0, 4, 1)
    private = np.concatenate([private, cache.allocate(1)])
    assert (cache.tree.pinned_size, found(cache, [1, 2, 3, 4, 5])[1]) == (4, 0)
    private = np.concatenate([private, cache.allocate(1)])
    assert (cache.tree.pinned_size, cache.num_available, cache.num_evicted_tokens) == (0, 0, 8)
    cache.check_integrity(private)


def test_a_request_that_matches_again_finds_new_tails_and_counts_its_hits_once():
    cache = make_cache()
    serve(cache, [1, 2, 3, 4])
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    handle = cache.match_prefix(ids).handle
    cache.lock(handle)
    cache.unlock(handle)  # as where it did not fit
    serve(cache, [1, 2, 3, 4, 5, 6, 7])
    match = cache.match_prefix(ids, start=handle)
    assert (match.cached_len, match.donor_len) == (4, 3)
    assert match.donor_page == cache.snapshot().tails[0].page_id
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    for _ in range(3):
        match = cache.match_prefix(ids, start=match.handle)
        assert (match.cached_len, match.donor_len) == (8, 1)
    assert len(match.pages) == 2
    assert [node.num_hits for node in cache.snapshot().nodes] == [0, 1, 1]


def test_a_request_that_matches_again_after_an_eviction_goes_on_from_what_is_left():
    cache = make_cache()
    serve(cache, [1, 2, 3, 4])
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    handle = cache.match_prefix(ids).handle
    cache.free(cache.tree.evict(4))
    serve(cache, [1, 2, 3, 4, 5, 6])
    match = cache.match_prefix(ids, start=handle)
    assert (match.cached_len, match.donor_len) == (4, 2)
    assert [node.num_hits for node in cache.snapshot().nodes] == [0, 1]
    cache.reset()
    serve(cache, [1, 2])
    match = cache.match_prefix(ids, start=match.handle)
    assert (match.cached_len, match.donor_len) == (0, 2)


def _locked_empty(cache: PrefixCache):
    handle = cache.match_prefix([]).handle
    cache.lock(handle)
    return handle


def test_a_tail_behind_a_trimmed_page_is_not_found():
    cache = make_cache()
    serve(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.free(cache.tree.evict(4, trim=True))
    assert found(cache, [1, 2, 3, 4, 9]) == (4, 0, None)
    assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == (4, 0, None)
    cache.check_integrity()


def test_reset_drops_tails_and_refuses_locked_ones():
    cache = make_cache()
    serve(cache, [1, 2, 3, 4, 5])
    handle = cache.match_prefix([1, 2, 3, 4, 5]).donor_handle
    assert handle is not None
    cache.lock(handle)
    with pytest.raises(HandleError, match="1 tails are locked"):
        cache.reset()
    assert cache.match_prefix([1, 2, 3, 4, 5]).cached_len == 4
    cache.unlock(handle)
    with pytest.raises(HandleError, match="not locked"):
        cache.unlock(handle)
    cache.reset()
    assert cache.pool.num_free == 32
    with pytest.raises(HandleError, match="not cached here"):
        cache.lock(handle)


def test_another_caches_tail_is_refused():
    cache, other = make_cache(), make_cache()
    serve(cache, [1])
    handle = cache.match_prefix([1]).donor_handle
    assert handle is not None
    with pytest.raises(HandleError, match="not cached here"):
        other.lock(handle)
    cache.lock(handle)
    with pytest.raises(HandleError, match="not locked here"):
        other.unlock(handle)
    cache.unlock(handle)


def test_off_keeps_none():
    cache = make_cache(partial_pages=False)
    serve(cache, [1, 2, 3, 4, 5])
    assert cache.pool.num_free == 31
    assert found(cache, [1, 2, 3, 4, 5]) == (4, 0, None)
