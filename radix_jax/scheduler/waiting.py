"""The waiting requests in the order of a policy, without matching all of them again whenever the tree changes.

What the cache holds of each waiting request is kept exact where it counts:

- It rises only when the page right after the match enters the tree. So a request is filed under that page, and only
  what is filed under a page that was just inserted is matched again.
- It falls only when something is evicted. A length that is too large sorts too early, so only what comes to the head
  of the queue is matched again.

A step in which the tree does not change matches nothing.
"""

import heapq
import itertools
from collections.abc import Hashable, Iterator

import numpy as np

from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.scheduler.policy import Policy, QueueView
from radix_jax.scheduler.request_state import RequestState

# Namespace, tokens in front of a page, and the bytes of the page's ids.
_Place = tuple[Hashable, int, bytes]


class WaitingEntry:
    """A waiting request and what the queue knows of it.

    matched_len: prompt tokens in the cache, at most prompt_len - 1; current when `WaitingQueue.in_order` yields it.
    """

    __slots__ = ("epoch", "joined_pass", "matched_len", "place", "sequence", "state")

    def __init__(self, state: RequestState, *, joined_pass: int, sequence: int):
        self.state = state
        self.joined_pass = joined_pass
        self.sequence = sequence
        self.matched_len: int = 0
        self.epoch: int = 0
        self.place: _Place | None = None


class WaitingQueue:
    """Waiting requests, ordered by a policy. Looks at the cache only through its read-only peek.

    cache: None where nothing is shared; then every matched length is 0.
    """

    def __init__(self, policy: Policy, cache: PrefixCache | None):
        self._policy = policy
        self._cache = cache
        self._page_size = cache.page_size if cache is not None else 0
        self._num_passes = 0
        self._num_insertions = 0
        self._sequence = itertools.count()
        self._entries: dict[str, WaitingEntry] = {}
        self._filed: dict[_Place, dict[str, WaitingEntry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, state: RequestState) -> None:
        """Append a request."""
        entry = WaitingEntry(state, joined_pass=self._num_passes, sequence=next(self._sequence))
        self._match(entry)
        self._entries[state.request_id] = entry

    def remove(self, request_id: str) -> None:
        """Take a request out; allowed while `in_order` runs, for one that it has yielded."""
        self._unfile(self._entries.pop(request_id))

    def clear(self) -> None:
        """Take every request out."""
        self._entries.clear()
        self._filed.clear()

    def in_order(self, context: object = None) -> Iterator[WaitingEntry]:
        """The waiting requests, best first, each with its matched length as it is when it is yielded."""
        heap = [(*self._key(entry), entry) for entry in self._entries.values()]
        heapq.heapify(heap)
        while heap:
            entry = heap[0][-1]
            if entry.epoch != self._epoch and self._match(entry):
                heapq.heapreplace(heap, (*self._key(entry), entry))
            else:
                heapq.heappop(heap)
                yield entry

    def end_pass(self) -> None:
        """Somebody was admitted: it counts as a pass for all who still wait."""
        self._num_passes += 1

    def would_repeat(self, entry: WaitingEntry, computing: RequestState) -> bool:
        """Whether `computing`, which is being prefilled, computes the very page that `entry` needs next.

        True exactly if floor_P(min(lcp of both prompts, prompt_len - 1)) > matched_len. False where nothing is shared.
        """
        if entry.place is None:
            return False
        namespace, start, page = entry.place
        end = start + self._page_size
        if computing.known[start:end].tobytes() != page or computing.namespace_key != namespace:
            return False
        return np.array_equal(computing.known[:start], entry.state.known[:start])

    def note_inserted(self, state: RequestState, tokens: range, version_rise: int) -> None:
        """Match again what waited for pages that just entered the tree.

        tokens: range of `state`'s tokens, whole pages. version_rise: by how much the insertion raised tree.version.
        """
        self._num_insertions += version_rise
        if not self._filed:
            return
        page_bytes = state.tokens[tokens.start : tokens.stop].tobytes()
        num_bytes = self._page_size * state.tokens.itemsize
        for i, start in enumerate(tokens[:: self._page_size]):
            place = (state.namespace_key, start, page_bytes[i * num_bytes : (i + 1) * num_bytes])
            for entry in list(self._filed.get(place, {}).values()):
                self._match(entry)

    def check_integrity(self) -> None:
        """Prove that no matched length is below the truth, none that counts as current is above it, and all are filed.

        Raises:
            AssertionError: what is off. Linear in all that waits.
        """
        num_filed = 0
        for request_id, entry in self._entries.items():
            true_len = 0
            if self._cache is not None:
                true_len = self._cache.match_len(entry.state.known[:-1], entry.state.request.namespace)
            if entry.matched_len < true_len or (entry.epoch == self._epoch and entry.matched_len != true_len):
                raise AssertionError(
                    f"{request_id!r} is kept with {entry.matched_len} tokens cached, it has {true_len}"
                )
            if entry.place is not None:
                num_filed += 1
                if self._filed[entry.place].get(request_id) is not entry:
                    raise AssertionError(f"{request_id!r} is not filed under its next page")
        if sum(map(len, self._filed.values())) != num_filed:
            raise AssertionError(f"{num_filed} requests are filed, and more are found")

    @property
    def _epoch(self) -> int:
        """Changes when the tree lost something, or was changed by others."""
        return self._cache.tree.version - self._num_insertions if self._cache is not None else 0

    def _key(self, entry: WaitingEntry) -> tuple[int, int, int]:
        request = entry.state.request
        view = QueueView(
            prompt_len=request.prompt_len,
            max_tokens=request.max_tokens,
            matched_len=entry.matched_len,
            passes_waited=self._num_passes - entry.joined_pass,
            arrival=request.arrival,
        )
        return self._policy(view), request.arrival, entry.sequence

    def _match(self, entry: WaitingEntry) -> bool:
        """Set what depends on the tree; returns whether the matched length changed."""
        if self._cache is None:
            return False
        state = entry.state
        prefix = state.known[:-1]
        matched_len = self._cache.match_len(prefix, state.request.namespace)
        entry.epoch = self._epoch
        if matched_len == entry.matched_len and entry.place is not None:
            return False
        changed, entry.matched_len = matched_len != entry.matched_len, matched_len
        self._unfile(entry)
        page = prefix[matched_len : matched_len + self._page_size]
        if len(page) == self._page_size:
            entry.place = (state.namespace_key, matched_len, page.tobytes())
            self._filed.setdefault(entry.place, {})[state.request_id] = entry
        return changed

    def _unfile(self, entry: WaitingEntry) -> None:
        if entry.place is None:
            return
        there = self._filed[entry.place]
        del there[entry.state.request_id]
        if not there:
            del self._filed[entry.place]
        entry.place = None
