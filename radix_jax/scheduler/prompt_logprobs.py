"""Log-probabilities of prompts: of one request, and those kept beside the KV of cached pages.

Entry j of a prompt is of its token j, given those before it; entry 0 is none. The step that computes the KV of token j
gives entry j + 1. Entries [k * K, (k + 1) * K) are filed under page k: like its KV they depend on nothing behind it.

    tokens          [0, K)            [K, 2K)           [2K, ...)
    entries         none, 1 ... K-1   K ... 2K-1        2K ...
    filed under     the first page    the second one    ...
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.page_pool import PagePool
from radix_jax.plan import PromptLogprobs
from radix_jax.request import Logprob


class PromptEntries:
    """The entries of one prompt, known from its start on.

    num_top: most likely tokens asked for besides. num_known: entries so far, the empty first one included.
    """

    __slots__ = ("_by_token", "_ids", "_values", "num_known", "num_top")

    def __init__(self, prompt_ids: Int32[np.ndarray, " T"], num_top: int):
        self._ids = prompt_ids
        self._values: Any = None
        self._by_token: list[dict[int, Logprob] | None] = [None]
        self.num_top = num_top
        self.num_known = 1

    @property
    def num_asked(self) -> int:
        """What a step is to give of the next tokens: `num_top`, or -1 for nothing."""
        return -1 if self.is_complete else self.num_top

    @property
    def is_complete(self) -> bool:
        """Whether all entries are known."""
        return self.num_known == len(self._ids)

    def take(self, start: int, values: PromptLogprobs) -> None:
        """Take entries [start, ...) over, as many as the prompt has; those in front of `start` are known."""
        assert start <= self.num_known, f"entries from {start} on, {self.num_known} are known"
        end = min(start + len(values.logprob), len(self._ids))
        if self._values is None:
            self._values = PromptLogprobs(*(np.zeros((len(self._ids), *new.shape[1:]), new.dtype) for new in values))
        for own, new in zip(self._values, values, strict=True):
            own[start:end] = new[: end - start]
        self.num_known = max(self.num_known, end)

    def part(self, start: int, end: int) -> PromptLogprobs:
        """A copy of entries [start, end)."""
        return PromptLogprobs(*(own[start:end].copy() for own in self._values))

    def by_token(self) -> list[dict[int, Logprob] | None]:
        """None for the first token; for each other one token id -> Logprob: itself first, then the most likely ones.
        Of complete entries; made once."""
        entries = self._by_token
        if len(entries) == len(self._ids):
            return entries
        logprob, rank, top_ids, top = (own.tolist() for own in self._values)
        for j in range(1, len(self._ids)):
            entry = {int(self._ids[j]): Logprob(logprob[j], rank[j])}
            tops = zip(top_ids[j][: self.num_top], top[j][: self.num_top], strict=True)
            # Among equally likely tokens the order of the best ones is the rank, for the prompt's own token too.
            entry |= {top_id: Logprob(value, place) for place, (top_id, value) in enumerate(tops, 1)}
            entries.append(entry)
        return entries


class _Filed(NamedTuple):
    """generation: of the page when they were filed. has_top: with the most likely tokens."""

    generation: int
    has_top: bool
    values: PromptLogprobs


class PageEntries:
    """Entries kept beside the KV of cached pages; of a page that the pool gave out again nothing is known."""

    def __init__(self, pool: PagePool, page_size: int):
        self._pool = pool
        self._page_size = page_size
        self._filed: dict[int, _Filed] = {}

    def save(self, entries: PromptEntries, pages: Sequence[int]) -> None:
        """File the known entries of a prompt under its cached pages. pages: from its first one on."""
        for place, page in enumerate(pages[: entries.num_known // self._page_size]):
            has_top = entries.num_top > 0
            if not self._suffices(page, has_top):
                start = place * self._page_size
                values = entries.part(start, start + self._page_size)
                self._filed[page] = _Filed(self._pool.generation_of(page), has_top, values)

    def load(self, entries: PromptEntries, pages: Sequence[int]) -> None:
        """Complete the entries of a prompt by what is filed under its cached pages, as far as they follow each other.
        pages: from its first one on."""
        for place, page in enumerate(pages):
            if not self._suffices(page, entries.num_top > 0):
                return
            end = (place + 1) * self._page_size
            if end > entries.num_known:
                entries.take(place * self._page_size, self._filed[page].values)

    def _suffices(self, page: int, has_top: bool) -> bool:
        filed = self._filed.get(page)
        if filed is None:
            return False
        if filed.generation != self._pool.generation_of(page):
            del self._filed[page]
            return False
        return filed.has_top or not has_top
