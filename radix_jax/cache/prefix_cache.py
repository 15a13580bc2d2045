"""PrefixCache: the tree and the pool together, so that each page always has one owner."""

import math
from collections.abc import Collection, Hashable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.errors import HandleError, IntegrityError, OutOfPages
from radix_jax.cache.evicted import Evicted, EvictedSpan, span_of
from radix_jax.cache.handles import MatchResult, PrefixHandle, TailHandle
from radix_jax.cache.keys import INT32, TOKEN_BYTES, TokenIds, to_int32, token_bytes
from radix_jax.cache.node import RadixTreeNode
from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.peek import Peek
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.cache.snapshot import add_tails
from radix_jax.cache.tails import Tails
from radix_jax.viz import TreeSnapshot

_TAIL_SHARE = 8  # one page in so many may be a tail
# A trim copies what is left of its leaf, so it takes more than a page off: 16, in a pool of at least 64 times that.
_LEAST_EVICTED, _EVICTED_SHARE = 16, 64
_MAX_SPANS = 8  # that are told of one eviction


class CommitResult(NamedTuple):
    """handle: locked, covers what the tree now holds of the request. pages: the request's new page table."""

    handle: PrefixHandle
    pages: Int32[np.ndarray, " P"]


class PrefixCache:
    """What a scheduler calls. A page belongs to the pool (free), to the tree or the tails (cached), or to one request
    (private).

    Tails are the pages that ended requests filled in part, kept where the tree has partial pages: donors like the
    tree's pages, an eighth of the pool at most besides locked ones.

    A request's page table starts with the tree's pages of its locked handle, `handle.cached_len / page_size` of them;
    the rest is private to the request.
    """

    def __init__(self, tree: RadixTree, pool: PagePool) -> None:
        self._tree = tree
        self._pool = pool
        self._tails = Tails(pool.num_pages // _TAIL_SHARE if tree.partial_pages else 0)
        self._least_evicted = min(_LEAST_EVICTED, pool.num_pages // _EVICTED_SHARE)
        self._num_evicted_tokens = self._num_evicted_pages = 0
        self._retired: list[RadixTreeNode] = []  # roots of namespaces that nobody is to match any more

    @property
    def tree(self) -> RadixTree:
        """The tree of cached prefixes."""
        return self._tree

    @property
    def pool(self) -> PagePool:
        """The pool that all pages come from."""
        return self._pool

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._tree.page_size

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free and evictable ones."""
        return self._pool.num_free + self.num_evictable

    @property
    def num_evictable(self) -> int:
        """Cached pages that `allocate` may evict."""
        return self._tree.evictable_size // self.page_size + self._tails.num_evictable

    @property
    def num_protected(self) -> int:
        """Cached pages under a lock."""
        return self._tree.protected_size // self.page_size + self._tails.num_locked

    @property
    def num_evicted_tokens(self) -> int:
        """Tokens of whole pages evicted so far to make room; a reset doesn't count."""
        return self._num_evicted_tokens

    @property
    def num_evicted_pages(self) -> int:
        """Pages evicted so far to make room, tails included; a reset doesn't count."""
        return self._num_evicted_pages

    def match_prefix(
        self,
        ids: TokenIds,
        namespace: Hashable = None,
        start: PrefixHandle | None = None,
        skip_donors: Collection[int] = (),
    ) -> MatchResult:
        """As `RadixTree.match_prefix`, and the donor may be a tail. Lock the handle, and the donor's where it is used,
        before anything is allocated for the same request.

        A request that has to match again passes its last handle as `start`, so that its hits count once.
        """
        match = self._tree.match_prefix(ids, namespace, start, skip_donors)
        if not len(self._tails):
            return match
        next_ids = token_bytes(ids[match.cached_len : match.cached_len + self.page_size])
        found = self._tails.find(match.handle.node, namespace, next_ids)
        if found is None or found[1] <= match.donor_len:
            return match
        tail, donor_len = found
        return match._replace(donor_page=tail.page, donor_len=donor_len, donor_handle=tail)

    def match_len(self, ids: TokenIds, namespace: Hashable = None) -> int:
        """As `RadixTree.match_len`: changes nothing."""
        return self._tree.match_len(ids, namespace)

    def peek(self, ids: TokenIds, namespace: Hashable = None, start: Peek | None = None) -> Peek:
        """As `RadixTree.peek`: changes nothing."""
        return self._tree.peek(ids, namespace, start)

    def hold(self, ids: TokenIds, namespace: Hashable = None) -> tuple[int, list[PrefixHandle | TailHandle]]:
        """Lock the longest cached prefix of `ids`, a part of its last page included: (its tokens, the locked handles).

        What is locked beyond it is the rest of that page. Raises as `RadixTree.match_prefix`.
        """
        match = self.match_prefix(ids, namespace)
        handles: list[PrefixHandle | TailHandle] = [match.handle] if match.cached_len else []
        donor = match.donor_handle
        if isinstance(donor, TailHandle):
            handles.append(donor)
        elif donor is not None:
            # Its edge may be long: a node border after the page that is needed, and a lock up to there.
            page = np.frombuffer(donor.node.edge[: self.page_size * TOKEN_BYTES], INT32)
            to_page = np.concatenate([to_int32(ids, "token ids")[: match.cached_len], page])
            handles = [self._tree.match_prefix(to_page, namespace, match.handle).handle]
        for handle in handles:
            self.lock(handle)
        return match.cached_len + match.donor_len, handles

    def lock(self, handle: PrefixHandle | TailHandle) -> None:
        """As `RadixTree.lock`, for a tail too."""
        if isinstance(handle, TailHandle):
            self._tails.lock(handle)
        else:
            self._tree.lock(handle)

    def unlock(self, handle: PrefixHandle | TailHandle) -> None:
        """As `RadixTree.unlock`, for a tail too."""
        if isinstance(handle, TailHandle):
            self._tails.unlock(handle)
            self._pool.free(self._tails.evict_surplus())
        else:
            self._tree.unlock(handle)

    def allocate(self, num_pages: int, evicted: list[EvictedSpan] | None = None) -> Int32[np.ndarray, " P"]:
        """Take `num_pages` pages for one request, evicting unlocked prefixes if too few are free.

        evicted: a few of the spans that were given up for it are appended.

        Raises:
            OutOfPages: free and evictable pages together are too few; nothing is taken or evicted.
            ValueError: `num_pages` is negative. Exception: what an eviction rule of one's own raised; nothing is taken,
                and what was evicted before is free.
        """
        num_short = num_pages - self._pool.num_free
        if num_short > 0:
            num_evictable = self.num_evictable
            if num_short > num_evictable:
                raise OutOfPages(
                    f"{num_pages} pages asked for; {self._pool.num_free} of {self._pool.num_pages - 1} are free and "
                    f"{num_evictable} evictable; wait until running requests finish, or raise num_pages"
                )
            self._evict(num_short, [] if evicted is None else evicted)
        return self._pool.allocate(num_pages)

    def free(self, pages: TokenIds) -> None:
        """Give private pages of a request back to the pool.

        Raises:
            ValueError: as `PagePool.free`; nothing is freed.
        """
        self._pool.free(pages)

    def commit(
        self,
        ids: TokenIds,
        pages: TokenIds,
        handle: PrefixHandle,
        namespace: Hashable = None,
        priority: int = 0,
        duplicates: list[int] | None = None,
    ) -> CommitResult:
        """Give the full pages of a running request to the tree, and move its lock to them.

        ids: the tokens whose KV is computed. pages: the request's page table, which may reach beyond `ids`.
        handle: the request's locked handle. Where the tree already has pages of its own, the returned table names
        those and the request's duplicates are freed; a partial last page stays private. If `ids` reach no further than
        the handle, only a node border is made there, and the handle comes back as it is, still locked.
        duplicates: gets the duplicates, which stay the caller's then.

        Raises:
            HandleError: the handle is not locked, or of another tree; nothing is changed then.
            ValueError: `ids` or `pages` don't continue what the handle covers, or are too few; nothing is changed then.
        """
        token_ids = to_int32(ids, "token ids")
        page_ids = to_int32(pages, "pages")
        num_held = self._num_held_pages(handle)
        num_full = len(token_ids) // self.page_size
        cached = self._tree.match_pages(token_ids, namespace)
        self._check_table(page_ids, cached, num_held, len(token_ids))
        start = handle if num_held <= num_full else None
        result = self._tree.insert_prefix(token_ids, page_ids[:num_full], namespace, priority, start)
        table = page_ids.copy()
        if num_full <= num_held:
            return CommitResult(handle, table)
        self._tree.lock(result.handle)
        self._tree.unlock(handle)
        table[: len(cached)] = cached
        if duplicates is None:
            self._pool.free(page_ids[num_held : len(cached)])
        else:
            duplicates.extend(page_ids[num_held : len(cached)].tolist())
        return CommitResult(result.handle, table)

    def release(self, handle: PrefixHandle, pages: TokenIds, ids: TokenIds = (), namespace: Hashable = None) -> None:
        """End a request: its private pages go back to the pool, and its handle is unlocked.

        handle: the request's locked handle. pages: its page table. ids: the tokens whose KV is in the pages; where they
        end inside the first page behind the handle, that page is kept as a tail.

        Raises:
            HandleError: the handle is not locked, or of another tree; nothing changes.
            ValueError: as `PagePool.free`; nothing changes.
        """
        private = to_int32(pages, "pages")[self._num_held_pages(handle) :]
        num_kept = int(self._tree.partial_pages and 0 < len(ids) - handle.cached_len < self.page_size)
        self._pool.free(private[num_kept:])
        for page in private[:num_kept].tolist():
            self._pool.free(self._tails.add(handle, namespace, token_bytes(ids[handle.cached_len :]), page))
        self._tree.unlock(handle)
        self._drop_retired()

    def retire(self) -> None:
        """Nobody is to match what is cached now, as its KV is of other weights: what is unlocked is dropped, pinned or
        not, and the rest as requests release it; pins end. That is no eviction. The caller uses other namespaces from
        here on."""
        self._tree.expire_pins(math.inf)
        self._pool.free(self._tails.evict(len(self._tails)))
        self._retired = self._tree.roots
        self._drop_retired()

    def reset(self) -> None:
        """Drop all cached prefixes; their pages go back to the pool.

        Raises:
            HandleError: something is locked; nothing is dropped then.
        """
        if self._tree.protected_size:
            self._tree.reset()  # says what is locked
        self._pool.free(self._tails.reset())
        self._pool.free(self._tree.reset())

    def drop(self, namespace: Hashable) -> None:
        """Drop the prefixes of a namespace that nobody holds, which is no eviction; its tails stay."""
        self._pool.free(self._tree.drop([self._tree.root_of(namespace)]))

    def snapshot(self) -> TreeSnapshot:
        """As `RadixTree.snapshot`, with the tails."""
        return add_tails(self._tree.snapshot(), self._tails.last_used_first())

    def check_integrity(self, private_pages: TokenIds = ()) -> None:
        """Check tree and pool, and that each page but the null page has exactly one owner.

        private_pages: the private pages of all requests.

        Raises:
            IntegrityError: names what is off.
        """
        self._tree.check_integrity()
        self._tails.check_integrity(self.page_size)
        self._pool.check_integrity()
        tails = to_int32(self._tails.pages, "tails")
        owned = np.concatenate([self._tree.owned_pages(), tails, to_int32(private_pages, "private pages")])
        outside = owned[(owned < 1) | (owned >= self._pool.num_pages)]
        if len(outside):
            raise IntegrityError(f"pages {outside.tolist()} have an owner but are not of the pool")
        num_owners = self._pool.free_mask() + np.bincount(owned, minlength=self._pool.num_pages)
        num_owners[0] = 1
        if (num_owners != 1).any():
            lost, shared = np.flatnonzero(num_owners == 0).tolist(), np.flatnonzero(num_owners > 1).tolist()
            raise IntegrityError(
                f"pages {lost} have no owner, pages {shared} have more than one of pool, tree, request"
            )

    def _drop_retired(self) -> None:
        """Drop what is unlocked of retired namespaces."""
        if self._retired:
            self._pool.free(self._tree.drop(self._retired))
            self._retired = [root for root in self._retired if root.children]

    def _evict(self, num_pages: int, spans: list[EvictedSpan]) -> None:
        """Make `num_pages` cached pages free, or a few more. Tails go last, as they are few and hold the ends of the
        latest requests; but before what is pinned. The last leaf is only trimmed: its front may be asked for again."""
        num_short = num_pages - self._take_back(self._tails.evict_lost())
        if num_short <= 0:
            return
        num_short -= self._evict_leaves(max(num_short, self._least_evicted), True, spans)
        num_short -= self._take_back(self._tails.evict(num_short))
        if num_short > 0:
            self._evict_leaves(num_short, False, spans)

    def _evict_leaves(self, num_pages: int, keep_pinned: bool, spans: list[EvictedSpan]) -> int:
        """Make pages of the tree free; returns how many."""
        taken: list[Evicted] = []
        pages = self._tree.evict(num_pages * self.page_size, trim=True, keep_pinned=keep_pinned, evicted=taken)
        spans.extend([span_of(each, self.page_size) for each in taken[:_MAX_SPANS]])
        self._num_evicted_tokens += len(pages) * self.page_size
        return self._take_back(pages)

    def _take_back(self, pages: TokenIds) -> int:
        """Evicted pages are free at once, since a rule of one's own may raise before the next are; returns how many."""
        self._num_evicted_pages += len(pages)
        self._pool.free(pages)
        return len(pages)

    def _num_held_pages(self, handle: PrefixHandle) -> int:
        """Pages at the start of the page table that belong to the tree."""
        if handle.owner is not self._tree or handle.num_locks == 0:
            raise HandleError("the handle is not locked, or of another tree; pass the handle that the request holds")
        return handle.cached_len // self.page_size

    def _check_table(
        self, pages: Int32[np.ndarray, " P"], cached: Int32[np.ndarray, " C"], num_held: int, num_tokens: int
    ) -> None:
        """The page table covers the ids, starts with the tree's pages as far as the handle reaches, and no further."""
        if len(pages) * self.page_size < num_tokens:
            raise ValueError(f"{len(pages)} pages of {self.page_size} tokens don't cover {num_tokens} tokens")
        num_shared = min(num_held, num_tokens // self.page_size)
        if len(cached) < num_shared or (cached[:num_shared] != pages[:num_shared]).any():
            raise ValueError(
                f"ids and page table don't start with what the handle covers ({num_held} pages); pass the table that "
                "the last commit returned, with the ids and the namespace it belongs to"
            )
        private = pages[num_held : len(cached)]
        if (private == cached[num_held:]).any():
            raise ValueError(f"pages {private.tolist()} are the tree's, but the handle covers only {num_held} pages")
