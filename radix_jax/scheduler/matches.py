"""What the cache holds of each of many prefixes, kept exact without matching all of them whenever the tree changes.

- A match grows only when the page right behind it enters the tree. So each is filed under that page, and only what is
  filed under a page that was just inserted is matched on, from where it ended.
- It shrinks only when the node in which it ends is evicted or cut, which that node itself tells. Only then it is
  matched anew.

While the tree stays, no node is looked at and no token compared.
"""

from collections.abc import Hashable, Iterator

from radix_jax.cache.peek import Peek
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.scheduler.request_state import RequestState


class TrackedMatch:
    """The match of the first `num_ids` tokens of one request. epoch: when it was last known to be exact.

    next_page: bytes of the page behind the match, under which it is filed; None if the ids end before that.
    """

    __slots__ = ("epoch", "next_page", "num_ids", "peek", "state")

    def __init__(self, state: RequestState, num_ids: int, peek: Peek, epoch: int):
        self.state = state
        self.num_ids = num_ids
        self.peek = peek
        self.epoch = epoch
        self.next_page: bytes | None = None


# Of one namespace: tokens in front of a page -> the bytes of its ids -> request id -> the match that ends there.
_Filed = dict[int, dict[bytes, dict[str, TrackedMatch]]]


class PrefixMatches:
    """The matches of many requests. Looks at the cache only through its peek.

    The tree may be changed in any way. Insertions have to be told at once (`note_inserted`); others are found out
    later, by `refresh_losses` what was evicted, and by `is_exact` what somebody else inserted.
    """

    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._page_size = cache.page_size
        self._num_insertions = 0
        self._epoch_of_losses = self.epoch
        self._matches: dict[str, TrackedMatch] = {}
        self._filed: dict[Hashable, _Filed] = {}

    def __len__(self) -> int:
        return len(self._matches)

    @property
    def epoch(self) -> int:
        """Changes when the tree lost something, or was changed by others."""
        return self._cache.tree.version - self._num_insertions

    def track(self, state: RequestState, num_ids: int) -> TrackedMatch:
        """Match the first `num_ids` tokens of a request, and keep that exact; replaces what was tracked."""
        self.forget(state.request_id)
        peek = self._cache.peek(state.tokens[:num_ids], state.namespace)
        match = self._matches[state.request_id] = TrackedMatch(state, num_ids, peek, self.epoch)
        self._file(match)
        return match

    def forget(self, request_id: str) -> None:
        """Stop tracking a request, if it is tracked."""
        match = self._matches.pop(request_id, None)
        if match is not None:
            self._unfile(match)

    def note_inserted(self, state: RequestState, tokens: range, version_rise: int) -> list[TrackedMatch]:
        """Match on what waited for pages that just entered the tree; returns those that changed.

        tokens: range of `state`'s tokens, whole pages. version_rise: by how much the insertion raised tree.version.
        """
        self._num_insertions += version_rise
        filed = self._filed.get(state.namespace_key)
        if filed is None:
            return []
        changed = []
        for start in _starts_within(filed, tokens, self._page_size):
            page = state.tokens[start : start + self._page_size].tobytes()
            there = filed.get(start, {}).get(page, {})
            changed += [match for match in list(there.values()) if self._rematch(match)]
        return changed

    def refresh_losses(self) -> list[TrackedMatch]:
        """Match anew what an eviction has shortened; returns those that changed."""
        epoch = self.epoch
        if epoch == self._epoch_of_losses:
            return []
        self._epoch_of_losses = epoch
        lost = [match for match in self._matches.values() if match.peek.node.end_len < match.peek.cached_len]
        return [match for match in lost if self._rematch(match)]

    def is_exact(self, match: TrackedMatch) -> bool:
        """Look once more, where the tree changed in a way that was not told; False if the match was not exact."""
        return match.epoch == self.epoch or not self._rematch(match)

    def follow(self, match: TrackedMatch) -> Peek:
        """Where the match ends now; `refresh_losses` first."""
        peek = match.peek.followed()
        assert peek is not None, f"the match of {match.state.request_id!r} was evicted"
        match.peek = peek
        return peek

    def at_place_of(self, other: TrackedMatch) -> Iterator[TrackedMatch]:
        """Those with the same namespace and next page, and as many tokens in front of it."""
        if other.next_page is None:
            return iter(())
        filed = self._filed.get(other.state.namespace_key, {})
        return iter(filed.get(other.peek.cached_len, {}).get(other.next_page, {}).values())

    def check_integrity(self) -> None:
        """Prove that all are filed, no match is below the truth, and none that counts as exact differs from it.

        Raises:
            AssertionError: what is off. Linear in all that is tracked.
        """
        for request_id, match in self._matches.items():
            state, cached_len = match.state, match.peek.cached_len
            true_len = self._cache.match_len(state.tokens[: match.num_ids], state.namespace)
            if cached_len < true_len or (self.epoch in (match.epoch, self._epoch_of_losses) and cached_len != true_len):
                raise AssertionError(f"{request_id!r} is kept with {cached_len} tokens cached, it has {true_len}")
            if match.next_page is not None and match not in self.at_place_of(match):
                raise AssertionError(f"{request_id!r} is not filed under its next page")
        num_filed = sum(match.next_page is not None for match in self._matches.values())
        num_found = sum(len(group) for filed in self._filed.values() for at in filed.values() for group in at.values())
        if num_found != num_filed:
            raise AssertionError(f"{num_filed} requests are filed, and {num_found} are found")

    def _rematch(self, match: TrackedMatch) -> bool:
        """Look how far the match reaches now, from where it ended; returns whether its length changed."""
        state, before = match.state, match.peek
        peek = self._cache.peek(state.tokens[: match.num_ids], state.namespace, before.followed())
        match.epoch = self.epoch
        if peek.cached_len == before.cached_len:
            match.peek = peek
            return False
        self._unfile(match)
        match.peek = peek
        self._file(match)
        return True

    def _file(self, match: TrackedMatch) -> None:
        start, state = match.peek.cached_len, match.state
        end = start + self._page_size
        if end <= match.num_ids:
            match.next_page = state.tokens[start:end].tobytes()
            at = self._filed.setdefault(state.namespace_key, {}).setdefault(start, {})
            at.setdefault(match.next_page, {})[state.request_id] = match

    def _unfile(self, match: TrackedMatch) -> None:
        if match.next_page is None:
            return
        key, start = match.state.namespace_key, match.peek.cached_len
        filed = self._filed[key]
        del filed[start][match.next_page][match.state.request_id]
        if not filed[start][match.next_page]:
            del filed[start][match.next_page]
        if not filed[start]:
            del filed[start]
        if not filed:
            del self._filed[key]
        match.next_page = None


def _starts_within(filed: _Filed, tokens: range, page_size: int) -> list[int]:
    """Starts of pages in `tokens` under which something is filed; looks through the fewer of both."""
    starts = tokens[::page_size]
    if len(filed) < len(starts):
        return [start for start in filed if start in tokens]
    return [start for start in starts if start in filed]
