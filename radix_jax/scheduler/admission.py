"""Pages of the running requests: who gets in, what each may still ask for, and how everything comes back.

No deadlock: an admitted request has all the pages it can ever need reserved, by count. At every moment

    sum over running requests of pages still to come <= free pages + evictable pages

so no running request ever waits for a page, and each of them ends in a bounded number of steps.
"""

from collections.abc import Iterable

import numpy as np

from radix_jax.cache.handles import MatchResult
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.plan import PageCopy
from radix_jax.request import Request
from radix_jax.scheduler.request_state import RequestState, num_pages_for


class Admission:
    """Takes pages from the cache for running requests and gives them back; owns the count of reserved pages.

    num_pages: pages of the pool, the null page included.
    enable_prefix_cache: False gives every request pages of its own and shares none.
    """

    def __init__(self, cache: PrefixCache, *, num_pages: int, max_model_len: int, enable_prefix_cache: bool):
        self._cache = cache
        self._num_usable_pages = num_pages - 1
        self._max_model_len = max_model_len
        self._enable_prefix_cache = enable_prefix_cache
        self._num_pages_to_come = 0

    def check_admissible(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            ValueError: no prompt, no output, or more tokens than the context or the pool holds.
        """
        prompt_len, max_tokens, page_size = request.prompt_len, request.max_tokens, self._cache.page_size
        asked = f"request of {prompt_len} prompt + {max_tokens} output tokens"
        if prompt_len < 1 or max_tokens < 1:
            raise ValueError(f"{asked} has nothing to do; both must be at least 1")
        if prompt_len + max_tokens > self._max_model_len:
            raise ValueError(f"{asked} exceeds max_model_len={self._max_model_len}; raise max_model_len or shorten it")
        num_pages = num_pages_for(prompt_len, max_tokens, page_size)
        if num_pages > self._num_usable_pages:
            raise ValueError(
                f"{asked} needs {num_pages} pages of {page_size} tokens, the pool has {self._num_usable_pages}; "
                "raise num_pages or shorten it"
            )

    def admit(self, state: RequestState, matched_len: int) -> bool:
        """Lock the cached prefix of a waiting request and reserve the rest; False where that does not fit.

        matched_len: tokens in whole pages that the cache holds of it now; spares the tree a match for what cannot fit
        anyway.
        """
        if not self._fits(state, matched_len):
            return False
        # The last prompt token is computed even when it is cached: its logits give the first output token.
        prefix_len = state.request.prompt_len - 1 if self._enable_prefix_cache else 0
        match = self._cache.match_prefix(state.prompt[:prefix_len], state.request.namespace)
        self._cache.lock(match.handle)
        # A locked prefix can no longer be evicted to make room, so only now the count is final.
        if not self._fits(state, match.cached_len):
            self._cache.unlock(match.handle)
            return False
        state.handle = match.handle
        state.cached_len = state.num_computed = match.cached_len
        state.append_pages(match.pages)
        self._num_pages_to_come += state.num_pages_to_come
        self._plan_copy(state, match)
        return True

    def end_copy(self, state: RequestState) -> bool:
        """The copy that a request's first step began with is done: let go of the donor. False if there was none."""
        if state.donor_handle is None:
            return False
        self._cache.unlock(state.donor_handle)
        state.copy = state.donor_handle = None
        return True

    def extend(self, state: RequestState, end: int) -> None:
        """Give a running request the pages that its tokens [0, end) need."""
        num_new = -(-end // self._cache.page_size) - state.num_pages
        if num_new > 0:
            state.append_pages(self._cache.allocate(num_new))
            self._num_pages_to_come -= num_new

    def insert(self, state: RequestState) -> range:
        """Share the full pages computed so far; returns the tokens that the request did not share before."""
        assert state.handle is not None
        start, page_size = state.handle.cached_len, self._cache.page_size
        end = state.num_computed - state.num_computed % page_size
        if not self._enable_prefix_cache or end == start:
            return range(start, start)
        ids = state.tokens[: state.num_computed]
        result = self._cache.commit(ids, state.pages, state.handle, state.request.namespace)
        state.handle = result.handle
        state.replace_pages(result.pages)
        return range(start, end)

    def release(self, state: RequestState) -> None:
        """Give back all that a running request holds, its reservation included."""
        assert state.handle is not None
        had_copy = self.end_copy(state)
        self._num_pages_to_come -= state.num_pages_to_come
        # A page that a copy was meant for may never have been written.
        ids = state.tokens[: state.num_computed] if self._enable_prefix_cache and not had_copy else ()
        self._cache.release(state.handle, state.pages, ids, state.request.namespace)
        state.drop_pages()

    def check_integrity(self, running: Iterable[RequestState]) -> None:
        """Prove that reservations add up and can be met, and that each page has one owner.

        Raises:
            AssertionError: what is off, with the numbers.
        """
        private, num_to_come = [np.empty(0, np.int32)], 0
        for state in running:
            assert state.handle is not None, f"running request {state.request_id!r} holds no handle"
            private.append(state.pages[state.handle.cached_len // self._cache.page_size :])
            num_to_come += state.num_pages_to_come
            self._check_copy(state)
        if num_to_come != self._num_pages_to_come:
            raise AssertionError(f"{self._num_pages_to_come} pages are reserved, recounted {num_to_come}")
        if num_to_come > self._cache.num_available:
            raise AssertionError(f"{num_to_come} pages are reserved, {self._cache.num_available} are available")
        self._cache.check_integrity(np.concatenate(private))

    def _plan_copy(self, state: RequestState, match: MatchResult) -> None:
        """Continue an admitted request's prefix by a part of a page, copied into a page of its own, if one is cached.

        The donor is locked until the copy is done. It may be what others were to evict; then nothing is copied.
        """
        if match.donor_handle is None:
            return
        assert match.donor_page is not None
        self._cache.lock(match.donor_handle)
        if self._num_pages_to_come > self._cache.num_available:
            self._cache.unlock(match.donor_handle)
            return
        self.extend(state, match.cached_len + 1)
        state.copy = PageCopy(match.donor_page, int(state.pages[-1]), match.donor_len)
        state.donor_handle = match.donor_handle
        state.cached_len = state.num_computed = match.cached_len + match.donor_len

    def _check_copy(self, state: RequestState) -> None:
        if (state.copy is None) != (state.donor_handle is None):
            raise AssertionError(f"{state.request_id!r} has only one of copy {state.copy} and {state.donor_handle}")
        if state.copy is None or state.donor_handle is None or state.handle is None:
            return
        if not state.donor_handle.num_locks:
            raise AssertionError(f"{state.request_id!r} copies page {state.copy.source}, which is not locked")
        covered_len, page_size = state.handle.cached_len, self._cache.page_size
        if state.copy.target != state.pages[covered_len // page_size] or not (
            0 < state.copy.num_tokens == state.num_computed - covered_len < page_size
        ):
            raise AssertionError(f"{state.request_id!r} with {state.num_computed} tokens computed plans {state.copy}")

    def _fits(self, state: RequestState, cached_len: int) -> bool:
        num_new = state.num_pages_to_come - cached_len // self._cache.page_size
        return self._num_pages_to_come + num_new <= self._cache.num_available
