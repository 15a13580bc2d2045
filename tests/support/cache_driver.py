"""Simulated requests on a real PrefixCache. A digest of the whole prefix stands for the KV in each slot."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from radix_jax.cache import OutOfPages, PagePool, PrefixCache, PrefixHandle, RadixTree

_MODULUS = 2**61 - 1


def prefix_digests(ids: Sequence[int], namespace: Hashable) -> np.ndarray:
    """int64 [len(ids)]: entry i stands for the KV of token i, which depends on the namespace and on ids[: i + 1]."""
    digest = hash((type(namespace), namespace)) % _MODULUS
    digests = np.empty(len(ids), np.int64)
    for place, token in enumerate(ids):
        digest = (digest * 1_000_003 + int(token) + 7) % _MODULUS
        digests[place] = digest
    return digests


@dataclass(eq=False)
class DrivenRequest:
    ids: np.ndarray  # prompt and the output it will produce
    prompt_len: int
    namespace: Hashable
    digests: np.ndarray
    handle: PrefixHandle
    pages: np.ndarray
    computed_len: int


class CacheDriver:
    """Does with the cache what a scheduler does, and audits every page."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.cache = PrefixCache(RadixTree(page_size=page_size), PagePool(num_pages))
        self.page_size = page_size
        self.kv = np.zeros((num_pages, page_size), np.int64)
        self.running: list[DrivenRequest] = []

    def start(self, prompt: Sequence[int], output: Sequence[int], namespace: Hashable = None) -> DrivenRequest | None:
        """Admit a request: match, lock, allocate pages for the rest of the prompt. None if the pages are too few."""
        ids = np.asarray([*prompt, *output], np.int32)
        match = self.cache.match_prefix(ids[: len(prompt) - 1], namespace)
        self.cache.lock(match.handle)
        pages = self._allocate(-(-len(prompt) // self.page_size) - len(match.pages))
        if pages is None:
            self.cache.unlock(match.handle)
            return None
        request = DrivenRequest(
            ids=ids,
            prompt_len=len(prompt),
            namespace=namespace,
            digests=prefix_digests(ids, namespace),
            handle=match.handle,
            pages=np.concatenate([match.pages, pages]),
            computed_len=match.cached_len,
        )
        self.running.append(request)
        return request

    def compute(self, request: DrivenRequest, num_tokens: int) -> bool:
        """Write the KV of the next tokens; False if that takes a page that nobody can give."""
        end = min(request.computed_len + num_tokens, len(request.ids))
        num_missing = -(-end // self.page_size) - len(request.pages)
        if num_missing > 0:
            pages = self._allocate(num_missing)
            if pages is None:
                return False
            request.pages = np.concatenate([request.pages, pages])
        places = np.arange(request.computed_len, end)
        self.kv[request.pages[places // self.page_size], places % self.page_size] = request.digests[places]
        request.computed_len = end
        return True

    def commit(self, request: DrivenRequest, up_to: int | None = None) -> None:
        """Give the full pages computed so far (or those of the first `up_to` tokens) to the tree."""
        end = request.computed_len if up_to is None else min(up_to, request.computed_len)
        result = self.cache.commit(request.ids[:end], request.pages, request.handle, request.namespace)
        request.handle, request.pages = result

    def finish(self, request: DrivenRequest) -> None:
        """Keep prompt and output in the tree with a border between them, and let go of everything."""
        self.commit(request, up_to=request.prompt_len)
        self.commit(request)
        self.abort(request)

    def abort(self, request: DrivenRequest) -> None:
        """Let go of everything; what was committed stays cached."""
        self.cache.release(request.handle, request.pages)
        self.running.remove(request)

    def audit(self) -> None:
        """Each page has one owner, counters agree with a recount, and every running request reads its own KV."""
        private = [request.pages[request.handle.cached_len // self.page_size :] for request in self.running]
        self.cache.check_integrity(np.concatenate(private) if private else ())
        tree, pool = self.cache.tree, self.cache.pool
        num_private = sum(map(len, private))
        assert pool.num_free + tree.total_size // self.page_size + num_private == pool.num_pages - 1
        assert self.cache.num_available == pool.num_free + tree.evictable_size // self.page_size
        for request in self.running:
            readable = self.kv[request.pages].reshape(-1)[: request.computed_len]
            assert np.array_equal(readable, request.digests[: request.computed_len])

    def _allocate(self, num_pages: int) -> np.ndarray | None:
        num_available = self.cache.num_available
        num_free = self.cache.pool.num_free
        try:
            pages = self.cache.allocate(num_pages)
        except OutOfPages:
            assert num_pages > num_available
            assert (self.cache.num_available, self.cache.pool.num_free) == (num_available, num_free)
            return None
        assert len(pages) == num_pages <= num_available
        return pages
