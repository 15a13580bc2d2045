"""What the cache tells of what was evicted to make room."""

from radix_jax.cache import PagePool, PrefixCache, RadixTree
from radix_jax.cache.evicted import EvictedSpan

PAGE_SIZE = 4


def make_cache(num_pages: int, **fields) -> PrefixCache:
    return PrefixCache(RadixTree(PAGE_SIZE, **fields), PagePool(num_pages))


def serve(cache: PrefixCache, ids, namespace=None) -> None:
    """A request that computes `ids` and ends."""
    match = cache.match_prefix(ids, namespace)
    cache.lock(match.handle)
    pages = [*match.pages, *cache.allocate(-(-len(ids) // PAGE_SIZE) - len(match.pages))]
    result = cache.commit(ids, pages, match.handle, namespace)
    cache.release(result.handle, result.pages, ids, namespace)


def test_nothing_is_evicted_while_pages_are_free():
    cache = make_cache(9)
    spans: list[EvictedSpan] = []
    serve(cache, range(8))
    cache.allocate(6, spans)
    assert (spans, cache.num_evicted_pages) == ([], 0)


def test_spans_are_counted_from_the_start_of_the_prefix():
    cache = make_cache(7)
    serve(cache, range(16), "a")
    serve(cache, [*range(8), *range(50, 58)], "a")
    spans: list[EvictedSpan] = []
    cache.allocate(1, spans)
    assert spans == [EvictedSpan("a", 12, 16)]
    # A parent goes, in part, in the same call as its last child.
    cache.allocate(4, spans)
    assert spans[1:] == [EvictedSpan("a", 8, 12), EvictedSpan("a", 8, 16), EvictedSpan("a", 4, 8)]
    assert cache.num_evicted_pages == 5
    assert cache.num_evicted_tokens == 20


def test_tails_count_as_pages_and_have_no_span():
    cache = make_cache(9)
    serve(cache, range(6))
    spans: list[EvictedSpan] = []
    cache.allocate(8, spans)
    assert spans == [EvictedSpan(None, 0, 4)]
    assert (cache.num_evicted_pages, cache.num_evicted_tokens) == (2, 4)


def test_of_many_a_few_are_told():
    cache = make_cache(65)
    for first in range(64):
        serve(cache, [first, 0, 0, 0])
    spans: list[EvictedSpan] = []
    cache.allocate(64, spans)
    assert spans == [EvictedSpan(None, 0, 4)] * 8
    assert cache.num_evicted_pages == 64
