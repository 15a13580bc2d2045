"""Belady's evictions against a search through all evictions."""

import numpy as np
import pytest

from radix_jax.replay import Trace, TraceRequest, optimal_hit_tokens
from radix_jax.replay.trace import GivenIds

Pages = frozenset[tuple[int, ...]]


def random_trace(rng: np.random.Generator, num_requests: int) -> Trace:
    """Short requests over two tokens, which share a lot."""
    requests = []
    for place in range(num_requests):
        prompt = rng.integers(2, size=rng.integers(1, 8)).astype(np.int32)
        output = rng.integers(2, size=rng.integers(1, 4)).astype(np.int32)
        requests.append(TraceRequest(float(place), len(prompt), len(output), GivenIds(prompt), GivenIds(output)))
    return Trace("random", requests)


def most_hits(trace: Trace, page_size: int, num_pages: int) -> int:
    """The most prompt tokens found, over all sets of whole prefixes to keep at each request."""
    best: dict[Pages, int] = {frozenset(): 0}
    for place, one in enumerate(trace):
        ids = (*one.prompt_ids().tolist(), *trace.output_ids(place).tolist()[:-1])
        own = frozenset(ids[:end] for end in range(page_size, len(ids) + 1, page_size))
        num_needed = -(-len(ids) // page_size)
        after: dict[Pages, int] = {}
        for cached, hits in best.items():
            found = min(len(own & cached), (one.prompt_len - 1) // page_size)
            for kept in kept_sets(cached, own, page_size):
                if len(kept - own) + num_needed <= num_pages:
                    state = kept | own
                    after[state] = max(after.get(state, 0), hits + found * page_size)
        best = after
    return max(best.values())


def kept_sets(cached: Pages, own: Pages, page_size: int) -> set[Pages]:
    """Every part of `cached` that an eviction from the leaves can leave, what the request uses included."""
    sets, new = {cached}, {cached}
    while new:
        smaller = {
            state - {leaf}
            for state in new
            for leaf in state - own
            if not any(len(other) > len(leaf) and other[: len(leaf)] == leaf for other in state)
        }
        new = smaller - sets
        sets |= new
    return sets


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_nobody_finds_more_and_somebody_as_much(seed: int, page_size: int):
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, 7)
    num_pages = -(-10 // page_size) + int(rng.integers(3))
    assert optimal_hit_tokens(trace, range(7), page_size, num_pages) == most_hits(trace, page_size, num_pages)


def test_the_order_is_that_of_the_requests_as_given():
    trace = random_trace(np.random.default_rng(1), 6)
    order = [3, 1, 5, 0, 2, 4]
    turned = Trace(
        "turned",
        [TraceRequest(0.0, trace[p].prompt_len, trace[p].output_len, trace[p].prompt, trace[p].output) for p in order],
    )
    assert optimal_hit_tokens(trace, order, 1, 12) == optimal_hit_tokens(turned, range(6), 1, 12)


def test_namespaces_share_nothing():
    ids = GivenIds(np.arange(9, dtype=np.int32))
    requests = [TraceRequest(0.0, 9, 1, ids, namespace=namespace) for namespace in (1, True, 1)]
    assert optimal_hit_tokens(Trace("spaces", requests), range(3), 4, None) == 8


def test_a_request_larger_than_the_cache_is_refused():
    trace = Trace("large", [TraceRequest(0.0, 9, 1, GivenIds(np.arange(9, dtype=np.int32)))])
    with pytest.raises(ValueError, match="a request of 3 pages exceeds num_pages=2"):
        optimal_hit_tokens(trace, [0], 4, 2)
    assert optimal_hit_tokens(Trace("none", []), [], 4, 2) == 0
