"""The best that any eviction could do for one order of requests: drop what is used farthest in the future."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64

from radix_jax.cache.keys import namespace_key
from radix_jax.replay.trace import Trace

_MIX = tuple(np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class _Run(NamedTuple):
    """Pages [start, start + num_pages) of one request's prompt, whose next use is by request `next_use`."""

    next_use: int
    start: int
    num_pages: int


def optimal_hit_tokens(trace: Trace, order: Sequence[int], page_size: int, num_pages: int | None) -> int:
    """Prompt tokens found in a cache that knows the future.

    One request at a time, in this order, with room for its whole prompt and output; a page goes at a time, always one
    that is used farthest in the future, of those used by the same request the one farthest from the root. Since a page
    is used whenever one behind it is, these are ends of leaves (Belady 1966). The last prompt token is always computed.

    order: places in the trace. num_pages: that the cache may use; None is without bound.

    Raises:
        ValueError: a request alone takes more than `num_pages`.
    """
    runs = _runs_by_next_use([_page_hashes(trace, place, page_size) for place in order])
    left: dict[tuple[int, int], int] = {}  # (next use, start) -> pages still cached
    heap: list[tuple[int, int]] = []  # the same, negated: farthest use first, then farthest from the root
    num_free, hit_tokens = num_pages, 0
    for number, place in enumerate(order):
        request, hit_pages = trace[place], 0
        while (found := left.pop((number, hit_pages), 0)) > 0:
            hit_pages += found
        hit_tokens += min(hit_pages, (request.prompt_len - 1) // page_size) * page_size
        num_needed = -(-(request.prompt_len + request.output_len - 1) // page_size) - hit_pages
        if num_free is not None:
            num_free = _make_room(num_free, num_needed, left, heap, number) - num_needed
            if num_free < 0:
                raise ValueError(f"a request of {num_needed + hit_pages} pages exceeds num_pages={num_pages}")
            # Pages that nobody uses again are free as soon as the request ends.
            num_free += num_needed + hit_pages - sum(run.num_pages for run in runs[number])
        for run in runs[number]:
            left[run.next_use, run.start] = run.num_pages
            heapq.heappush(heap, (-run.next_use, -run.start))
    return hit_tokens


def _make_room(
    num_free: int, num_needed: int, left: dict[tuple[int, int], int], heap: list[tuple[int, int]], number: int
) -> int:
    """Evict until `num_needed` pages are free, or nothing is left; returns how many are."""
    while num_free < num_needed and heap:
        next_use, start = -heap[0][0], -heap[0][1]
        cached = left.get((next_use, start), 0)
        if cached == 0 or next_use <= number:
            heapq.heappop(heap)
            continue
        num_taken = min(cached, num_needed - num_free)
        num_free += num_taken
        left[next_use, start] = cached - num_taken
    return num_free


def _runs_by_next_use(hashes: Sequence[UInt64[np.ndarray, " _"]]) -> list[list[_Run]]:
    """For each request the runs of its pages that some later request uses next.

    The pages that request j takes over from request i are one run of both, so (j, start) names it.
    """
    counts = np.array([len(one) for one in hashes], np.int64)
    if not counts.sum():
        return [[] for _ in hashes]
    owner = np.repeat(np.arange(len(hashes)), counts)
    next_use = _next_owner(np.concatenate(hashes), owner, len(hashes))
    runs: list[list[_Run]] = []
    for number, end in enumerate(np.cumsum(counts)):
        uses = next_use[end - counts[number] : end]
        uses = uses[: np.searchsorted(uses, len(hashes))]  # later uses never come first: they share a shorter prefix
        starts = np.flatnonzero(np.diff(uses, prepend=-1))
        ends = np.append(starts[1:], len(uses))[: len(starts)]
        runs.append([_Run(int(uses[a]), int(a), int(b - a)) for a, b in zip(starts, ends, strict=True)])
    return runs


def _next_owner(
    hashes: UInt64[np.ndarray, " P"], owner: Int64[np.ndarray, " P"], num_requests: int
) -> Int64[np.ndarray, " P"]:
    """For each page the next request that has the same one, `num_requests` where there is none; owners ascend."""
    order = np.argsort(hashes, kind="stable")
    again = hashes[order[1:]] == hashes[order[:-1]]
    following = np.full(len(hashes), num_requests, np.int64)
    following[order[:-1][again]] = owner[order[1:][again]]
    return following


def _page_hashes(trace: Trace, place: int, page_size: int) -> UInt64[np.ndarray, " P"]:
    """A number for each full page of a prompt and its output, the last token of which has no KV: the same for two pages
    only if all up to their end is the same (but for one pair of pages in 2^64)."""
    request = trace[place]
    ids = np.concatenate([request.prompt_ids(), trace.output_ids(place)[:-1]]).astype(np.uint64)
    ids = ids[: len(ids) // page_size * page_size]
    with np.errstate(over="ignore"):
        mixed = (ids + np.uint64(1)) * _MIX[0] + np.arange(len(ids), dtype=np.uint64) * _MIX[1]
        mixed = (mixed ^ (mixed >> np.uint64(31))) * _MIX[2]
        mixed ^= mixed >> np.uint64(29)
        sums = np.cumsum(mixed, dtype=np.uint64)[page_size - 1 :: page_size]
        return sums + np.uint64(hash(namespace_key(request.namespace)) % 2**64)
