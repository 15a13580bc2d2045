"""A trace run on a prefix cache: once to see what it needs, then again with nothing but its calls under the clock."""

import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.prefix_trace import Trace
from benchmarks.tree_peers import Ids, PrefixIndex


@dataclass(frozen=True)
class Rehearsal:
    """What a cache of limited size does for a trace.

    cached_lens: tokens found for each request. evict_lens: tokens asked to be evicted when it starts. pages: its page
    ids, one a full page. found: where kept, the page ids found for each request. size: tokens cached at the end.
    """

    cached_lens: list[int]
    evict_lens: list[int]
    pages: list[Ids]
    found: list[Ids]
    size: int

    def num_cached(self) -> int:
        """Prompt tokens found, of all requests."""
        return sum(self.cached_lens)


def rehearse(index: PrefixIndex, trace: Trace, num_pages: int, *, keep_found: bool = False) -> Rehearsal:
    """Run a trace with a pool of `num_pages`; page ids count up and are used once, so that they tell caches apart.

    A prompt's last token is never looked up, since an engine has to compute it to have logits.
    """
    num_requests = len(trace.requests)
    cached_lens, evict_lens = [0] * num_requests, [0] * num_requests
    pages: list[Ids] = [np.empty(0, np.int32)] * num_requests
    found = pages[:]
    running: dict[int, tuple[Any, Any]] = {}
    num_free, next_page, page_size = num_pages, 1, index.page_size
    for step in trace.steps:
        number = step if step >= 0 else ~step
        request = trace.requests[number]
        if step >= 0:
            match_key, insert_key = index.prepare_keys(request.ids, request.prompt_len - 1)
            started = index.start(match_key)
            cached_lens[number] = index.cached_len(started)
            num_new = -(-len(request.ids) // page_size) - cached_lens[number] // page_size
            evict_lens[number] = max(num_new - num_free, 0) * page_size
            if evict_lens[number]:
                num_free += index.evict(evict_lens[number]) // page_size
            num_free -= num_new
            if num_free < 0:
                raise ValueError(f"a pool of {num_pages} pages is too small for the requests in flight")
            new_pages = np.arange(next_page, next_page + num_new, dtype=np.int32)
            next_page += num_new
            table = np.concatenate([index.page_ids(started), new_pages])
            pages[number] = table[: len(request.ids) // page_size]
            if keep_found:
                found[number] = index.page_ids(started).copy()
            running[number] = started, insert_key
        else:
            started, insert_key = running.pop(number)
            cached_len = index.end(started, insert_key, index.prepare_pages(pages[number]))
            has_tail = len(request.ids) % page_size > 0
            num_free += (cached_len - cached_lens[number]) // page_size + has_tail
    return Rehearsal(cached_lens, evict_lens, pages, found, index.size())


class TimedReplay:
    """A trace on an empty cache, in `num_pieces` pieces of equally many calls, so that caches can take turns."""

    def __init__(self, index: PrefixIndex, trace: Trace, plan: Rehearsal, num_pieces: int) -> None:
        calls = _prepare_calls(index, trace, plan)
        bounds = [len(calls) * piece // num_pieces for piece in range(num_pieces + 1)]
        self._pieces = deque(calls[first:last] for first, last in pairwise(bounds))
        self._index = index
        self._size = plan.size
        self._running: dict[int, Any] = {}

    def play_piece(self) -> float:
        """Seconds of processor time for the next piece.

        Raises:
            RuntimeError: after the last piece the size is not that of the rehearsal, so the cache did other work.
        """
        calls, running = self._pieces.popleft(), self._running
        start, evict, end = self._index.start, self._index.evict, self._index.end
        began = time.process_time()
        for step, key, value in calls:
            if step >= 0:
                running[step] = start(key)
                if value:
                    evict(value)
            else:
                end(running.pop(~step), key, value)
        seconds_s = time.process_time() - began
        if not self._pieces and self._index.size() != self._size:
            raise RuntimeError(
                f"{self._index.name} caches {self._index.size()} tokens at the end, {self._size} in the rehearsal"
            )
        return seconds_s


def _prepare_calls(index: PrefixIndex, trace: Trace, plan: Rehearsal) -> list[tuple[int, Any, Any]]:
    """Each step with its key, and the tokens to evict at a start or the value to insert at an end."""
    insert_keys: dict[int, Any] = {}
    calls: list[tuple[int, Any, Any]] = []
    for step in trace.steps:
        if step >= 0:
            request = trace.requests[step]
            match_key, insert_keys[step] = index.prepare_keys(request.ids, request.prompt_len - 1)
            calls.append((step, match_key, plan.evict_lens[step]))
        else:
            calls.append((step, insert_keys.pop(~step), index.prepare_pages(plan.pages[~step])))
    return calls
