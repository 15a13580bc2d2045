"""Simulated requests on a real PrefixCache. A digest of the whole prefix stands for the KV in each slot."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from radix_jax.cache import MatchResult, OutOfPages, PagePool, PrefixCache, PrefixHandle, RadixTree
from radix_jax.viz import TreeSnapshot

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
    donor: MatchResult | None  # with a locked donor, until the first tokens are computed


class CacheDriver:
    """Does with the cache what a scheduler does, and audits every page."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.cache = PrefixCache(RadixTree(page_size=page_size), PagePool(num_pages))
        self.page_size = page_size
        self.kv = np.zeros((num_pages, page_size), np.int64)
        self.running: list[DrivenRequest] = []

    def start(self, prompt: Sequence[int], output: Sequence[int], namespace: Hashable = None) -> DrivenRequest | None:
        """Admit a request: match, lock, allocate pages for the rest of the prompt; without the donor if it must be.

        None if the pages are too few.
        """
        ids = np.asarray([*prompt, *output], np.int32)
        match = self.cache.match_prefix(ids[: len(prompt) - 1], namespace)
        match = self.cache.match_prefix(ids[: len(prompt) - 1], namespace, match.handle)
        self.cache.lock(match.handle)
        donor = None if match.donor_handle is None else match
        if match.donor_handle is not None:
            self.cache.lock(match.donor_handle)
        num_pages = -(-len(prompt) // self.page_size) - len(match.pages)
        pages = self._allocate(num_pages)
        if pages is None and match.donor_handle is not None:
            self.cache.unlock(match.donor_handle)
            donor, pages = None, self._allocate(num_pages)
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
            donor=donor,
        )
        self.running.append(request)
        return request

    def compute(self, request: DrivenRequest, num_tokens: int) -> bool:
        """Write the KV of the next tokens, behind what the donor gives; False if that takes a page that nobody has."""
        self._copy(request)
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
        """Let go of everything; what was committed stays cached, and what is behind it as a tail."""
        if request.donor is not None and request.donor.donor_handle is not None:
            self.cache.unlock(request.donor.donor_handle)
        ids = request.ids[: request.computed_len]
        self.cache.release(request.handle, request.pages, ids, request.namespace)
        self.running.remove(request)

    def audit(self) -> None:
        """Each page has one owner, counters agree with a recount, requests read their own KV, and tails hold theirs."""
        private = [request.pages[request.handle.cached_len // self.page_size :] for request in self.running]
        self.cache.check_integrity(np.concatenate(private) if private else ())
        tree, pool = self.cache.tree, self.cache.pool
        num_private = sum(map(len, private))
        snapshot = self.cache.snapshot() if self.page_size > 1 else None
        tails = () if snapshot is None else snapshot.tails
        num_evictable = tree.evictable_size // self.page_size + sum(tail.num_locks == 0 for tail in tails)
        assert pool.num_free + tree.total_size // self.page_size + len(tails) + num_private == pool.num_pages - 1
        assert self.cache.num_available == pool.num_free + num_evictable
        assert len(tails) <= pool.num_pages // 8 or self.cache.num_protected
        for request in self.running:
            readable = self.kv[request.pages].reshape(-1)[: request.computed_len]
            assert np.array_equal(readable, request.digests[: request.computed_len])
        if tails and snapshot is not None:
            self._check_tails(snapshot)

    def _copy(self, request: DrivenRequest) -> None:
        """Copy what the donor gives, and let go of it."""
        match, request.donor = request.donor, None
        if match is None or match.donor_handle is None:
            return
        target = request.pages[request.computed_len // self.page_size]
        self.kv[target, : match.donor_len] = self.kv[match.donor_page, : match.donor_len]
        request.computed_len += match.donor_len
        self.cache.unlock(match.donor_handle)

    def _check_tails(self, snapshot: TreeSnapshot) -> None:
        """What can be found behind a prefix is the KV of its tokens there."""
        paths: dict[int, list[int]] = {}
        namespaces: dict[int, Hashable] = {}
        for node in snapshot.nodes:
            above = [] if node.parent_id is None else paths[node.parent_id]
            paths[node.node_id] = [*above, *node.token_ids.tolist()]
            namespaces[node.node_id] = node.namespace
        for tail in snapshot.tails:
            if tail.parent_id is not None:
                ids = [*paths[tail.parent_id], *tail.token_ids.tolist()]
                digests = prefix_digests(ids, namespaces[tail.parent_id])[-len(tail.token_ids) :]
                assert np.array_equal(self.kv[tail.page_id, : len(tail.token_ids)], digests)

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
