"""Pages of the running requests: who gets in, what each takes, and how everything comes back.

A request is let in while its known tokens and its whole output fit beside what the running ones are expected to take
yet (see `budget`). What they take beyond that, the scheduler makes room for by retraction.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.evicted import EvictedSpan
from radix_jax.cache.handles import MatchResult, PrefixHandle, TailHandle
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.plan import PageCopy
from radix_jax.request import Request
from radix_jax.scheduler.budget import num_pages_to_come
from radix_jax.scheduler.prompt_logprobs import PageEntries
from radix_jax.scheduler.request_state import RequestState, num_pages_for
from radix_jax.scheduler.timeline import Timelines


class Admission:
    """Takes pages from the cache for running requests, and gives them back.

    What is shared, and with whom, `SampleGroup` says. num_pages: pages of the pool, the null page included.
    """

    def __init__(
        self,
        cache: PrefixCache,
        timelines: Timelines,
        *,
        num_pages: int,
        max_model_len: int,
    ):
        self._cache = cache
        self._timelines = timelines
        self._page_size = cache.page_size
        self._num_usable_pages = num_pages - 1
        self._max_model_len = max_model_len
        self._page_entries = PageEntries(cache.pool, cache.page_size)
        self._donors: list[PrefixHandle | TailHandle] = []  # locked until the plan is made
        self._duplicates: list[int] = []  # freed when the plan is made: rows of it may write them
        self._fresh_pages: set[int] = set()  # taken in this plan: the copies come before they are written

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._page_size

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable."""
        return self._cache.num_available

    @property
    def num_protected_tokens(self) -> int:
        """Cached tokens under a lock."""
        return self._cache.tree.protected_size

    @property
    def tree_version(self) -> int:
        """Rises whenever prefixes come or go."""
        return self._cache.tree.version

    def check_admissible(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            ValueError: no prompt, no output, or more tokens than the context or the pool holds.
        """
        prompt_len, max_tokens, page_size = request.prompt_len, request.max_tokens, self._page_size
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

    def num_needed(self, state: RequestState, matched_len: int) -> int:
        """Pages that a waiting request asks for, besides those of the `matched_len` tokens that the cache holds."""
        return num_pages_to_come(state, 1.0, self._page_size) - matched_len // self._page_size

    def admit(self, state: RequestState, matched_len: int, num_reserved: int) -> bool:
        """Lock the cached prefix of a waiting request; False where the rest of it does not fit.

        matched_len: tokens in whole pages that the cache holds of it now; spares the tree a match for what cannot fit
        anyway, but says nothing where log-probabilities of the prompt are asked for. num_reserved: pages that the
        running requests are expected to take yet.
        """
        too_many = self.num_needed(state, matched_len) + num_reserved > self._cache.num_available
        if too_many and not state.lacks_prompt_logprobs:
            return False
        match = self._match_and_lock(state)
        # A locked prefix can no longer be evicted to make room, so only now the count is final.
        if self.num_needed(state, match.cached_len) + num_reserved > self._cache.num_available:
            self._cache.unlock(match.handle)
            return False
        state.handle = match.handle
        state.num_computed = match.cached_len
        state.append_pages(match.pages)
        self._plan_copy(state, match, num_reserved)
        return True

    def would_fit(
        self, state: RequestState, matched_len: int, num_reserved: int, without: Sequence[RequestState]
    ) -> bool:
        """Whether a waiting request would be admitted if the running ones in `without` gave their pages back.

        Tried out on the locks, since they may share with others that stay, or with the request itself.
        """
        handles = [other.handle for other in without if other.handle is not None]
        num_private = sum(other.num_pages for other in without) - sum(
            handle.cached_len // self._page_size for handle in handles
        )
        num_spare = num_private - num_reserved
        for handle in handles:
            self._cache.unlock(handle)
        fits = self.num_needed(state, matched_len) <= self._cache.num_available + num_spare
        if fits:
            match = self._match_and_lock(state)
            fits = self.num_needed(state, match.cached_len) <= self._cache.num_available + num_spare
            self._cache.unlock(match.handle)
        for handle in handles:
            self._cache.lock(handle)
        return fits

    def num_missing(self, state: RequestState, end: int) -> int:
        """Pages that a running request has to take for its tokens [0, end)."""
        return max(-(-end // self._page_size) - state.num_pages, 0)

    def extend(self, state: RequestState, end: int) -> None:
        """Give a running request the pages that its tokens [0, end) need."""
        num_new = self.num_missing(state, end)
        if num_new:
            pages = self._allocate([state], [num_new])
            state.append_pages(pages)
            self._fresh_pages.update(pages.tolist())

    def extend_all(self, states: Sequence[RequestState], num_steps: int) -> None:
        """Give requests that decode the pages of so many tokens more. Nobody copies from those in the same plan, since
        decode rows are its last."""
        if not states:
            return
        nums_new = [self.num_missing(state, state.num_computed + num_steps) for state in states]
        pages = self._allocate(states, nums_new)
        start = 0
        for state, num_new in zip(states, nums_new, strict=True):
            state.append_pages(pages[start : start + num_new])
            start += num_new

    def insert(self, state: RequestState, end: int, *, in_plan: bool = False) -> range:
        """Share the full pages of tokens [0, end), which are computed in device order; returns the tokens that the
        request did not share before.

        in_plan: for a row of the plan that is being made, which writes pages that the request may give back for those
        that are cached already.
        """
        assert state.handle is not None
        start = state.handle.cached_len
        full_len = end - end % self._page_size
        if not state.writes or full_len <= start:
            return range(start, start)
        duplicates = self._duplicates if in_plan else None
        result = self._cache.commit(
            state.tokens[:end], state.pages, state.handle, state.namespace, duplicates=duplicates
        )
        state.handle = result.handle
        state.replace_pages(result.pages)
        return range(start, full_len)

    def save_prompt_logprobs(self, state: RequestState) -> None:
        """Keep what is known of a running request's prompt beside its pages that the tree has."""
        assert state.handle is not None
        assert state.prompt_logprobs is not None
        if state.writes:
            num_shared = state.handle.cached_len // self._page_size
            self._page_entries.save(state.prompt_logprobs, state.pages[:num_shared].tolist())

    def release(self, state: RequestState) -> None:
        """Give back all that a running request holds."""
        assert state.handle is not None
        # Beyond the known tokens, a step in flight may compute one more, which nobody will ask for.
        end = min(state.num_computed, state.num_tokens - 1)
        ids = state.tokens[:end] if state.keeps_tails else ()
        self._cache.release(state.handle, state.pages, ids, state.namespace)
        state.last_handle = state.handle
        state.drop_pages()

    def end_plan(self) -> None:
        """The plan is made: what it copies and writes comes before anything that later plans write, so the donors of
        its copies are let go, and the duplicates of cached pages."""
        for donor in self._donors:
            self._cache.unlock(donor)
        self._cache.free(self._duplicates)
        self._donors.clear()
        self._duplicates.clear()
        self._fresh_pages.clear()

    def check_integrity(self, running: Iterable[RequestState]) -> None:
        """Prove that each page has one owner.

        Raises:
            AssertionError: what is off, with the numbers.
        """
        private = [np.empty(0, np.int32)]
        for state in running:
            assert state.handle is not None, f"running request {state.request_id!r} holds no handle"
            if state.num_pages * self._page_size < state.num_computed:
                raise AssertionError(
                    f"{state.request_id!r} computed {state.num_computed} tokens in {state.num_pages} pages"
                )
            private.append(state.pages[state.handle.cached_len // self._page_size :])
        if self._donors or self._duplicates:
            raise AssertionError(
                f"{len(self._donors)} donors and {len(self._duplicates)} duplicates are kept, and no plan is being made"
            )
        self._cache.check_integrity(np.concatenate(private))

    def _allocate(self, states: Sequence[RequestState], nums_new: Sequence[int]) -> Int32[np.ndarray, " P"]:
        """Pages for some requests. Free ones count for the first of them, evicted ones for the last, and for the very
        last also what was evicted beyond the need."""
        num_new = sum(nums_new)
        num_short = num_new - self._cache.pool.num_free
        if num_short <= 0:
            return self._cache.allocate(num_new)
        spans: list[EvictedSpan] = []
        num_before = self._cache.num_evicted_pages
        pages = self._cache.allocate(num_new, spans)
        num_surplus = self._cache.num_evicted_pages - num_before - num_short
        for state, num_own in zip(reversed(states), reversed(nums_new), strict=True):
            num_evicted = min(num_own, num_short)
            if num_evicted:
                self._timelines.note_evicted(state.request_id, num_evicted + num_surplus, spans)
            num_short -= num_evicted
            num_surplus = 0
        return pages

    def _match_and_lock(self, state: RequestState) -> MatchResult:
        ids = state.tokens[: self._matchable_len(state) if state.reads else 0]
        start = state.last_handle if state.reads else None
        match = self._cache.match_prefix(ids, state.namespace, start, skip_donors=self._fresh_pages)
        state.last_handle = match.handle
        self._cache.lock(match.handle)
        return match

    def _matchable_len(self, state: RequestState) -> int:
        """Tokens that need not be computed where the cache has them. The last known token is: its logits give the next
        one. So is the last one whose entry is known, for the next entry, where log-probabilities of the prompt are
        asked for."""
        entries = state.prompt_logprobs
        if entries is not None and not entries.is_complete:
            pages = self._cache.tree.match_pages(state.request.token_ids, state.namespace)
            self._page_entries.load(entries, pages.tolist())
        if entries is None or entries.is_complete:
            return state.num_tokens - 1
        return entries.num_known - 1

    def _plan_copy(self, state: RequestState, match: MatchResult, num_reserved: int) -> None:
        """Continue an admitted request's prefix by a part of a page, copied into a page of its own, if one is cached.

        The donor is locked until the plan is made. It may be what others were to evict; then nothing is copied.
        """
        if match.donor_handle is None or not state.group.copies:
            return
        assert match.donor_page is not None
        self._cache.lock(match.donor_handle)
        if num_pages_to_come(state, 1.0, self._page_size) + num_reserved > self._cache.num_available:
            self._cache.unlock(match.donor_handle)
            return
        self._donors.append(match.donor_handle)
        self.extend(state, match.cached_len + 1)
        state.copy = PageCopy(match.donor_page, int(state.pages[-1]), match.donor_len)
        state.num_computed = match.cached_len + match.donor_len
