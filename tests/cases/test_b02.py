"""A key shorter than a page, or with a tail, neither crashes nor bends the counters."""

import numpy as np
import pytest

from radix_jax.cache import PagePool, PrefixCache, RadixTree


def test_tail_page_goes_back_and_short_keys_match_nothing():
    cache = PrefixCache(RadixTree(page_size=4), PagePool(17))
    ids = np.arange(100, 110, dtype=np.int32)
    empty = cache.match_prefix(ids)
    cache.lock(empty.handle)
    pages = cache.allocate(3)
    committed = cache.commit(ids, pages, empty.handle)
    cache.release(committed.handle, committed.pages)
    assert (cache.pool.num_free, cache.tree.evictable_size, cache.tree.protected_size) == (14, 8, 0)
    assert [cache.match_prefix(ids[:n]).cached_len for n in (10, 7, 3)] == [8, 4, 0]
    cache.check_integrity()
    assert sorted(cache.tree.evict(8)) == sorted(pages[:2])
    assert (cache.tree.evictable_size, cache.tree.total_size) == (0, 0)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 15, 16, 17, 33])
def test_sizes_count_whole_pages_at_every_length(page_size: int, num_tokens: int):
    tree = RadixTree(page_size=page_size)
    ids = np.arange(num_tokens, dtype=np.int32)
    num_full, with_tail = num_tokens // page_size, -(-num_tokens // page_size)
    result = tree.insert_prefix(ids, np.arange(1, 1 + with_tail))
    assert result.cached_len == 0
    assert result.handle.cached_len == num_full * page_size == tree.total_size
    match = tree.match_prefix(ids)
    assert match.cached_len == num_full * page_size
    assert match.pages.tolist() == list(range(1, 1 + num_full))
    tree.lock(match.handle)
    assert (tree.evictable_size, tree.protected_size) == (0, num_full * page_size)
    tree.unlock(match.handle)
    tree.check_integrity()
    assert len(tree.evict(num_tokens + 1)) == num_full
    assert tree.total_size == 0
