"""PrefixCache: the textbook's requests, remap before free, and what it refuses."""

import numpy as np
import pytest

from radix_jax.cache import HandleError, OutOfPages, PagePool, PrefixCache, RadixTree
from radix_jax.cache.eviction_rules import NodeView
from radix_jax.config import EVICTION_POLICIES

S = [900, 10, 11, 12]
R1 = [*S, 31, 32]
R2 = [*S, 41, 42, 43]


def make_cache(num_pages: int, page_size: int = 1) -> PrefixCache:
    return PrefixCache(RadixTree(page_size=page_size), PagePool(num_pages))


def sizes(cache: PrefixCache) -> tuple[int, int, int]:
    """(free pages, evictable tokens, protected tokens)"""
    return cache.pool.num_free, cache.tree.evictable_size, cache.tree.protected_size


def fill(cache: PrefixCache, ids: list[int], namespace: object = None) -> np.ndarray:
    """Run one request over `ids` from start to finish; its page table at the end."""
    match = cache.match_prefix(ids, namespace)
    cache.lock(match.handle)
    pages = np.concatenate([match.pages, cache.allocate(-(-len(ids) // cache.page_size) - len(match.pages))])
    done = cache.commit(ids, pages, match.handle, namespace)
    cache.release(done.handle, done.pages)
    return done.pages


def test_textbook_requests_step_by_step():
    cache = make_cache(num_pages=11)
    assert sizes(cache) == (10, 0, 0)
    assert fill(cache, S).tolist() == [1, 2, 3, 4]
    assert sizes(cache) == (6, 4, 0)

    # Both match S; the peek that a scheduler orders by says how much each still has to compute.
    assert [len(ids) - cache.match_len(ids[:-1]) for ids in (R1, R2)] == [2, 3]
    match = cache.match_prefix(R1[:-1])
    assert (match.cached_len, match.pages.tolist()) == (4, [1, 2, 3, 4])
    cache.lock(match.handle)
    assert sizes(cache) == (6, 0, 4)
    gap = cache.allocate(2)
    assert gap.tolist() == [5, 6]
    assert sizes(cache) == (4, 0, 4)
    first = cache.commit(R1, np.concatenate([match.pages, gap]), match.handle)
    assert first.pages.tolist() == [1, 2, 3, 4, 5, 6]
    assert sizes(cache) == (4, 0, 6)

    match = cache.match_prefix(R2[:-1])
    assert match.pages.tolist() == [1, 2, 3, 4]
    cache.lock(match.handle)
    gap = cache.allocate(3)
    assert not set(gap.tolist()) & {1, 2, 3, 4, 5, 6}
    second = cache.commit(R2, np.concatenate([match.pages, gap]), match.handle)
    assert sizes(cache) == (1, 0, 9)

    cache.release(first.handle, first.pages)
    assert sizes(cache) == (1, 2, 7)
    assert cache.num_available == 3
    with pytest.raises(OutOfPages, match="4 pages asked for; 1 of 10 are free and 2 evictable"):
        cache.allocate(4)
    assert sizes(cache) == (1, 2, 7)
    # Only R1's own tail can go: S is locked through R2. Of its two pages the last is enough.
    taken = cache.allocate(2)
    assert set(taken.tolist()) <= {6, 10}
    assert (sizes(cache), cache.num_evicted_tokens) == ((0, 1, 7), 1)
    cache.check_integrity(taken)

    cache.free(taken)
    cache.release(second.handle, second.pages)
    assert sizes(cache) == (2, 8, 0)
    rest = cache.tree.evict(1)
    assert rest.tolist() == [5]
    cache.free(rest)
    assert cache.tree.evict(1).tolist() == gap.tolist()
    cache.free(gap)
    assert sizes(cache) == (6, 4, 0)
    cache.reset()
    assert sizes(cache) == (10, 0, 0)
    cache.check_integrity()


def test_twins_in_one_batch_end_up_on_the_same_pages_and_free_the_others():
    """The page table is rewritten to the tree's pages before the duplicates are freed."""
    cache = make_cache(num_pages=20, page_size=2)
    ids = np.arange(9, dtype=np.int32)
    handles = [cache.match_prefix(ids[:-1]).handle for _ in range(3)]
    tables = []
    for handle in handles:
        cache.lock(handle)
        tables.append(cache.allocate(5))
    done = [cache.commit(ids, pages, handle) for pages, handle in zip(tables, handles, strict=True)]
    for result, own in zip(done, tables, strict=True):
        assert result.pages[:4].tolist() == tables[0][:4].tolist()
        assert result.pages[4] == own[4], "a partial last page stays the request's own"
        assert result.handle.cached_len == 8
    assert cache.pool.num_free == 19 - 4 - 3
    reused = cache.allocate(12)
    assert not set(reused.tolist()) & {page for result in done for page in result.pages.tolist()}
    cache.free(reused)
    cache.check_integrity([int(result.pages[4]) for result in done])
    for result in done:
        cache.release(result.handle, result.pages)
    assert sizes(cache) == (15, 8, 0)


def test_commit_by_chunks_then_decode_then_finish():
    cache = make_cache(num_pages=20, page_size=4)
    ids = np.arange(30, 52, dtype=np.int32)
    match = cache.match_prefix(ids[:17])
    cache.lock(match.handle)
    handle, pages = match.handle, cache.allocate(5)
    for end in (8, 10, 18):
        handle, pages = cache.commit(ids[:end], pages, handle)
        assert handle.cached_len == end // 4 * 4
        assert cache.tree.protected_size == end // 4 * 4
        cache.check_integrity(pages[end // 4 :])
    pages = np.concatenate([pages, cache.allocate(1)])
    for end in (18, 22):
        handle, pages = cache.commit(ids[:end], pages, handle)
    assert cache.match_len(ids) == 20
    cache.release(handle, pages)
    assert sizes(cache) == (14, 20, 0)
    assert cache.tree.evict(1).tolist() == [5], "the tail behind the prompt's last full page goes first"


def test_a_shorter_commit_makes_a_border_and_keeps_the_longer_handle():
    cache = make_cache(num_pages=20, page_size=2)
    ids = np.arange(9, dtype=np.int32)
    start = cache.match_prefix(ids).handle
    cache.lock(start)
    handle, pages = cache.commit(ids, cache.allocate(5), start)
    again = cache.commit(ids[:5], pages, handle)
    assert again.handle is handle
    assert again.pages.tolist() == pages.tolist()
    assert cache.tree.protected_size == handle.cached_len == 8
    assert [len(node.token_ids) for node in cache.tree.snapshot().nodes] == [0, 4, 4]
    cache.check_integrity(pages[4:])
    cache.release(handle, pages)
    assert sizes(cache) == (15, 8, 0)


def test_commit_into_a_namespace_stays_there():
    cache = make_cache(num_pages=20)
    fill(cache, S, namespace="a")
    assert (cache.match_len(S, namespace="a"), cache.match_len(S), cache.match_len(S, namespace="b")) == (4, 0, 0)


def test_the_page_table_may_reach_beyond_the_tokens():
    cache = make_cache(num_pages=20, page_size=2)
    start = cache.match_prefix([1, 2, 3]).handle
    cache.lock(start)
    done = cache.commit([1, 2, 3], cache.allocate(6), start)
    assert done.pages.tolist() == [1, 2, 3, 4, 5, 6]
    cache.check_integrity([2, 3, 4, 5, 6])
    cache.release(done.handle, done.pages)
    assert sizes(cache) == (18, 2, 0)


def test_commit_refuses_what_does_not_continue_the_handle():
    cache = make_cache(num_pages=30, page_size=2)
    fill(cache, [9, 9, 8, 8, 7, 7])
    other = cache.tree.match_pages([9, 9, 8, 8])
    start = cache.match_prefix([1, 2, 3, 4]).handle
    with pytest.raises(HandleError, match="not locked"):
        cache.commit([1, 2], cache.allocate(1), start)
    cache.free([4])
    cache.lock(start)
    handle, pages = cache.commit([1, 2, 3, 4], cache.allocate(2), start)
    before = sizes(cache)
    for ids, table, namespace in (
        ([1, 2, 5, 5], pages, None),
        ([9, 9, 8, 8], pages, None),
        ([9, 9, 8, 8], other, "elsewhere"),
        ([1, 2, 3, 4], pages, "elsewhere"),
        ([1, 2, 3, 4], pages[::-1], None),
        ([9, 9, 8, 8, 7, 7], np.concatenate([pages, other[:1]]), None),
    ):
        with pytest.raises(ValueError, match="don't start with what the handle covers"):
            cache.commit(ids, table, handle, namespace)
    with pytest.raises(ValueError, match="2 pages of 2 tokens don't cover 5 tokens"):
        cache.commit([1, 2, 3, 4, 5], pages, handle)
    with pytest.raises(HandleError, match="not locked"):
        cache.commit([1, 2, 3, 4], pages, start)
    assert sizes(cache) == before
    cache.release(handle, pages)
    with pytest.raises(HandleError, match="not locked"):
        cache.release(handle, pages)
    cache.check_integrity()


def test_commit_refuses_tree_pages_beyond_the_handle():
    """A table that already names the tree's page where the handle does not reach would free it under others."""
    cache = make_cache(num_pages=20)
    cached = fill(cache, [1, 2, 3])
    short = cache.match_prefix([1]).handle
    cache.lock(short)
    with pytest.raises(ValueError, match=r"pages \[2, 3\] are the tree's"):
        cache.commit([1, 2, 3], cached, short)
    cache.release(short, cached[:1])
    cache.check_integrity()


def test_a_failed_release_changes_nothing():
    cache = make_cache(num_pages=10, page_size=2)
    start = cache.match_prefix([1, 2, 3]).handle
    cache.lock(start)
    handle, pages = cache.commit([1, 2, 3], cache.allocate(2), start)
    with pytest.raises(ValueError, match="freed twice"):
        cache.release(handle, [*pages, pages[-1]])
    assert sizes(cache) == (7, 0, 2)
    cache.release(handle, pages)
    assert sizes(cache) == (8, 2, 0)


def test_handles_of_another_cache_are_refused():
    cache, other = make_cache(10), make_cache(10)
    handle = other.match_prefix([1]).handle
    other.lock(handle)
    with pytest.raises(HandleError, match="another tree"):
        cache.commit([1], cache.allocate(1), handle)
    with pytest.raises(HandleError, match="another tree"):
        cache.release(handle, [])


def test_reset_refuses_while_anything_is_locked():
    cache = make_cache(10)
    fill(cache, S)
    held = cache.match_prefix(S[:2]).handle
    cache.lock(held)
    with pytest.raises(HandleError, match="2 tokens are locked"):
        cache.reset()
    assert sizes(cache) == (5, 2, 2)
    cache.unlock(held)
    cache.reset()
    assert sizes(cache) == (9, 0, 0)
    assert cache.num_evicted_tokens == 0


def test_a_request_without_any_full_page_leaves_nothing():
    cache = make_cache(10, page_size=16)
    start = cache.match_prefix([1, 2]).handle
    cache.lock(start)
    done = cache.commit([1, 2, 3], cache.allocate(1), start)
    assert done.handle is start
    cache.release(done.handle, done.pages)
    assert sizes(cache) == (9, 0, 0)


def test_a_request_that_matches_again_counts_its_hits_once():
    cache = PrefixCache(RadixTree(page_size=1), PagePool(8))
    cache.tree.insert_prefix([1, 2], cache.allocate(2))
    first = cache.match_prefix([1, 2, 3])
    again = cache.match_prefix([1, 2, 3], start=first.handle)
    assert again.pages.tolist() == first.pages.tolist()
    assert again.handle.node.hits == 1


def test_a_rule_that_raises_loses_no_page():
    """A tail whose prefix is gone was taken before the rule is asked for a leaf."""
    broken = False

    def rule(view: NodeView) -> float:
        if broken and view.start_len == 0:
            raise ZeroDivisionError("of the rule")
        return view.last_use

    cache = PrefixCache(RadixTree(page_size=4, eviction_policy=rule), PagePool(41))
    for first in range(0, 500, 100):
        ids = np.arange(first, first + 10)
        match = cache.match_prefix(ids)
        cache.lock(match.handle)
        done = cache.commit(ids, cache.allocate(3), match.handle)
        cache.release(done.handle, done.pages, ids)
    private = cache.allocate(cache.pool.num_free + 2)  # the first prefix goes, its tail stays
    broken = True
    cache.match_prefix(np.arange(100, 108))
    for num_pages in (2, 3):
        with pytest.raises(ZeroDivisionError):
            cache.allocate(cache.pool.num_free + num_pages)
        broken = False
        cache.check_integrity(private)
        broken = True
    assert cache.pool.num_free == 1, "the tail"
    assert cache.num_evicted_pages == 3


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_nobody_holds_of_a_namespace_is_dropped_and_no_eviction(policy: str) -> None:
    cache = PrefixCache(RadixTree(page_size=2, eviction_policy=policy), PagePool(20))
    cache.tree.insert_prefix([1, 2, 3, 4, 5, 6], cache.allocate(3))
    cache.tree.insert_prefix([1, 2, 7, 8], cache.allocate(2), namespace="other")
    held = cache.match_prefix([1, 2, 3, 4]).handle
    cache.lock(held)
    cache.drop(None)
    cache.drop("nothing there")
    cache.check_integrity()
    assert cache.match_len([1, 2, 3, 4, 5, 6]) == 4
    assert cache.match_len([1, 2, 7, 8], "other") == 4
    assert (cache.pool.num_free, cache.num_evicted_tokens) == (15, 0)
    cache.unlock(held)
    cache.drop(None)
    cache.check_integrity()
    assert cache.match_len([1, 2, 3, 4]) == 0
    assert cache.pool.num_free == 17
    cache.drop("other")
    assert cache.pool.num_free == 19
