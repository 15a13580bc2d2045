"""RadixTree: token ids -> pages of KV, shared by every request with the same prefix."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.donor import NO_DONOR, find_donor
from radix_jax.cache.errors import HandleError
from radix_jax.cache.events import CacheCleared, CacheEvent, removed_event, stored_event
from radix_jax.cache.evicted import Evicted, Leaving
from radix_jax.cache.eviction import EvictionPolicy
from radix_jax.cache.eviction_rules import Rule, make_policy
from radix_jax.cache.handles import InsertResult, MatchResult, PrefixHandle, resume, unusable
from radix_jax.cache.integrity import check_nodes, check_sizes
from radix_jax.cache.keys import INT32, TOKEN_BYTES, KeyBytes, TokenIds, check_num_pages, key_bytes, to_int32
from radix_jax.cache.node import RadixTreeNode, descend, join_pages, lock_path, path_to, raise_priority, unlock_path
from radix_jax.cache.peek import Peek, pages_below, peek_below
from radix_jax.cache.pins import Pin, PinnedLast
from radix_jax.cache.roots import Roots, unlocked_below
from radix_jax.cache.snapshot import take_snapshot
from radix_jax.config import check_int
from radix_jax.viz import TreeSnapshot, TreeView, render_text

_new = tuple.__new__  # a NamedTuple's own constructor is a Python function and takes twice as long


class RadixTree:
    """A radix tree over whole pages of tokens: every edge is one or more pages long.

    page_size: tokens a page. eviction_policy: which unlocked leaf goes first: a name, or a function NodeView -> sort
    key, smallest first; see `make_policy`. max_pinned_tokens: that `pin` may keep. on_event: is called with each
    CacheEvent, when the change is done; it must not raise, nor use the tree. partial_pages: a match names a donor too,
    a cached page that begins with the tokens after the last whole page.

    A namespace is any hashable value; prefixes are shared only inside one, and equal values of different types (1,
    True, 1.0) are different namespaces. The tree owns the page ids that it took until `evict` or `reset` returns them;
    it never touches the pages themselves. Sizes are in tokens. Not thread-safe.

    Raises:
        ValueError: page_size below 1, max_pinned_tokens below 0, or an unknown policy.
    """

    def __init__(
        self,
        page_size: int = 16,
        eviction_policy: str | Rule = "lru",
        max_pinned_tokens: int = 0,
        on_event: Callable[[CacheEvent], object] | None = None,
        partial_pages: bool = True,
    ) -> None:
        check_int("page_size", page_size, at_least=1)
        check_int("max_pinned_tokens", max_pinned_tokens, at_least=0)
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        make_order = partial(make_policy, eviction_policy)
        self._pins = PinnedLast(make_order, max_pinned_tokens) if max_pinned_tokens else None
        self._policy: EvictionPolicy = self._pins or make_order()
        self._note_use = self._policy.used  # bound once: it runs for every request
        self._on_event = on_event
        self._partial_pages = partial_pages and page_size > 1
        self._roots = Roots(self._page_bytes)
        self._leaving = Leaving(self._roots, self._policy, self._pins, page_size)
        self._use_counter = self._version = 0
        self._evictable_len = self._protected_len = 0

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._page_size

    @property
    def partial_pages(self) -> bool:
        """Whether matches name donors."""
        return self._partial_pages

    @property
    def version(self) -> int:
        """Rises whenever prefixes come or go; while it stays, a match finds what it found before."""
        return self._version

    @property
    def evictable_size(self) -> int:
        """Tokens that `evict` could take out now."""
        return self._evictable_len

    @property
    def protected_size(self) -> int:
        """Tokens under a lock."""
        return self._protected_len

    @property
    def total_size(self) -> int:
        """All cached tokens: evictable and protected."""
        return self._evictable_len + self._protected_len

    @property
    def roots(self) -> list[RadixTreeNode]:
        """Where the namespaces that hold something begin."""
        return list(self._roots)

    def root_of(self, namespace: Hashable) -> RadixTreeNode:
        """Where a namespace begins; one without children if it holds nothing."""
        return self._roots.find(namespace)

    @property
    def pinned_size(self) -> int:
        """Tokens under a pin, locked ones included."""
        return self._pins.num_tokens if self._pins else 0

    def match_prefix(
        self,
        ids: TokenIds,
        namespace: Hashable = None,
        start: PrefixHandle | None = None,
        skip_donors: Collection[int] = (),
    ) -> MatchResult:
        """The longest cached prefix of `ids`, in whole pages.

        Splits a node where the match ends inside it, so that locking the handle protects exactly `cached_len` tokens;
        marks the path as just used, and counts one hit on each of its nodes.

        start: a handle of an earlier match of the same ids, to go on from where it ended, or from what was not evicted
        of it. At most the last 64 of its tokens are compared again, and its nodes are not counted as hit again: a
        request that matches more than once passes its last handle.

        Raises:
            ValueError: `ids` are no flat sequence of int32 values.
            TypeError: `namespace` is not hashable.
            HandleError: `start` is of another tree or namespace, or does not lead to these ids.
        """
        top, path, key = self._find(ids, namespace, start)
        self._use_counter = now = self._use_counter + 1
        for node in path:
            node.hits += 1
            node.timestamp = now
        last = path[-1] if path else top
        if start is not None:
            path[:0] = path_to(top)
            self._touch(last)
        elif not last.ref_count:
            self._note_use(last)
        cached_len, donor = last.end_len, NO_DONOR
        if self._partial_pages and last.children:
            first_byte = len(key) - (len(ids) - cached_len) * TOKEN_BYTES
            donor = find_donor(self, last, bytes(key[first_byte : first_byte + self._page_bytes]), skip_donors)
        pages = np.frombuffer(b"".join([node.pages for node in path]), INT32)
        return _new(MatchResult, (cached_len, pages, PrefixHandle(self, last, cached_len), *donor))

    def match_len(self, ids: TokenIds, namespace: Hashable = None) -> int:
        """`cached_len` of a match, changing nothing: no split, no hit, no recency. Raises as `match_prefix`."""
        return self.peek(ids, namespace).cached_len

    def match_pages(self, ids: TokenIds, namespace: Hashable = None) -> Int32[np.ndarray, " P"]:
        """`pages` of a match, changing nothing; no handle protects them. Raises as `match_prefix`."""
        return pages_below(self._roots.find(namespace), key_bytes(ids), self._page_bytes)

    def peek(self, ids: TokenIds, namespace: Hashable = None, start: Peek | None = None) -> Peek:
        """Where a match would end, changing nothing. Raises as `match_prefix`.

        start: what `followed` gives of an earlier peek of the same ids, to go on from; None looks from the root on.
        """
        top = start.whole_node if start and start.cached_len else self._roots.find(namespace)
        return peek_below(top, key_bytes(ids), self._page_bytes)

    def insert_prefix(
        self,
        ids: TokenIds,
        pages: TokenIds,
        namespace: Hashable = None,
        priority: int = 0,
        start: PrefixHandle | None = None,
    ) -> InsertResult:
        """Take the full pages of `ids` that are not cached yet.

        pages: page ids that cover `ids` from 0, one a full page; one more for a tail is accepted. The tail's page and
            those of what is cached already stay the caller's. Less than one page of ids: nothing is inserted.
        priority: raises the priority of each node on the path to at least this.
        start: as in `match_prefix`; spares looking through the ids in front of it.

        Nodes are never merged: inserting a prompt, and then the prompt with its output, leaves a border between them.

        Raises:
            ValueError: ids or pages are no flat sequence of int32 values, or their numbers don't agree.
            TypeError: `namespace` is not hashable.
            HandleError: as `match_prefix`.
        """
        token_ids, page_ids = to_int32(ids, "token ids"), to_int32(pages, "pages")
        page_size = self._page_size
        num_pages = len(token_ids) // page_size
        if len(page_ids) != num_pages:
            check_num_pages(len(page_ids), len(token_ids), page_size)
        node, path, key = self._find(token_ids, namespace, start)
        if path:
            node = path[-1]
        if node.priority < priority:
            raise_priority(node, priority)
        cached_len, full_len = node.end_len, num_pages * page_size
        if cached_len < full_len:
            if node is self._roots.nothing:
                node = self._roots.add(namespace)
            first_byte = len(key) - (len(token_ids) - cached_len) * TOKEN_BYTES
            edge = bytes(key[first_byte : first_byte + (full_len - cached_len) * TOKEN_BYTES])
            node = node.add_child(edge, page_ids[cached_len // page_size : num_pages].tobytes())
            node.priority = priority
            self._evictable_len += full_len - cached_len
            self._version += 1
        self._touch(node)
        if self._on_event is not None and cached_len < full_len:
            self._on_event(stored_event(node, page_size))
        return _new(InsertResult, (cached_len, PrefixHandle(self, node, full_len)))

    def lock(self, handle: PrefixHandle) -> None:
        """Keep the handle's `cached_len` tokens from eviction until `unlock`. A handle may be locked more than once.

        Raises:
            HandleError: the handle is of another tree, or its prefix was evicted.
        """
        node = handle.node
        if handle.owner is not self or handle.cached_len != node.end_len:
            raise unusable(handle, self)
        handle.num_locks += 1
        locked_len = lock_path(node)
        self._evictable_len -= locked_len
        self._protected_len += locked_len

    def unlock(self, handle: PrefixHandle) -> None:
        """Give one lock of the handle back; the path counts as used now.

        Raises:
            HandleError: the handle is of another tree, or not locked.
        """
        node = handle.node
        if handle.owner is not self or handle.cached_len != node.end_len:
            raise unusable(handle, self)
        if handle.num_locks == 0:
            raise HandleError("the handle is not locked; each lock is given back once")
        handle.num_locks -= 1
        self._use_counter = now = self._use_counter + 1
        unlocked_len = unlock_path(node, now)
        if unlocked_len:
            self._evictable_len += unlocked_len
            self._protected_len -= unlocked_len
            self._note_use(node)

    def evict(
        self,
        num_tokens: int,
        trim: bool = False,
        keep_pinned: bool = False,
        evicted: list[Evicted] | None = None,
    ) -> Int32[np.ndarray, " P"]:
        """Take unlocked leaves out, by the policy, until at least `num_tokens` are gone or nothing is left.

        trim: of the last leaf take only the pages that are needed, from its end; its handles end as if it were gone.
        keep_pinned: stop where nothing but pinned leaves is left. evicted: is told what went, in order.
        Returns the page ids of what was taken out; they are the caller's now.

        Raises:
            ValueError: `num_tokens` is negative. Exception: what a rule of one's own raised while nothing was taken.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens} to evict is negative")
        next_leaf = self._pins.next_unpinned if keep_pinned and self._pins else self._policy.next_leaf
        return self._take_out(next_leaf, num_tokens, trim, evicted)

    def drop(self, roots: Iterable[RadixTreeNode]) -> Int32[np.ndarray, " P"]:
        """Take out all below `roots` that is not locked, pinned or not; returns the page ids, the caller's now."""
        leaves = iter(unlocked_below(roots))
        return self._take_out(lambda: next(leaves, None), self._evictable_len)

    def reset(self) -> Int32[np.ndarray, " P"]:
        """Drop everything; returns the page ids that were cached. Handles of before fail from here on, save empty ones.

        Raises:
            HandleError: something is locked, so that running requests still read it. Nothing is dropped then.
        """
        if self._protected_len:
            raise HandleError(f"{self._protected_len} tokens are locked; unlock every handle before a reset")
        nodes = self._roots.clear()
        self._policy.clear()
        self._evictable_len = 0
        self._version += bool(nodes)
        if self._on_event is not None:
            self._on_event(CacheCleared())
        return join_pages(nodes)

    def pin(self, ids: TokenIds, ttl: float, now: float = 0.0, namespace: Hashable = None) -> Pin:
        """Keep the cached prefix of `ids` (whole pages; see `cached_len` of the result) until nothing else is left.

        The pin ends at `now + ttl` by the caller's clock, in seconds or steps, or with `unpin`. What is over ends in
        `pin` and `expire_pins`. Pinning and its end count as uses of the prefix.

        Raises:
            ValueError: `ttl` is not above 0; more than max_pinned_tokens would be pinned; or as `match_prefix`.
        """
        if self._pins is None:
            raise ValueError("max_pinned_tokens=0: this tree pins nothing; give it the tokens that pins may keep")
        self.expire_pins(now)
        node, path, _ = self._find(ids, namespace, None)
        if path:
            node = path[-1]
        try:
            return self._pins.pin(self, node, ttl, now)
        finally:
            self._touch(node)  # also where the budget was too small: the match may have split the node

    def unpin(self, pin: Pin) -> None:
        """Take a pin off.

        Raises:
            HandleError: the pin is of another tree, was taken off before, or is over.
        """
        if self._pins is None or pin.owner is not self:
            raise HandleError("the pin is of another tree; use it with the tree that made it")
        self._touch(self._pins.unpin(pin))

    def expire_pins(self, now: float) -> None:
        """Take off the pins whose time is over at `now`; at math.inf all."""
        while self._pins and (pin := self._pins.next_over(now)) is not None:
            self._touch(self._pins.unpin(pin))

    def snapshot(self) -> TreeSnapshot:
        """The tree as plain data, parents before children."""
        return take_snapshot(self._roots, self._page_size)

    def render(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """The tree as text; large trees are summarised. decode: token ids -> text, else the ids are shown."""
        return render_text(self.snapshot(), decode)

    def _repr_html_(self) -> str:
        """The tree as a notebook draws it; `viz.TreeView(tree.snapshot(), decode)` shows text instead of ids."""
        return TreeView(self.snapshot())._repr_html_()

    def check_integrity(self) -> None:
        """Recount everything: structure, page counts, locks, pins, sizes, eviction order, each page in one place.

        Raises:
            IntegrityError: names what is off.
        """
        nodes = list(self._roots.nodes())
        check_nodes(nodes, self._page_bytes)
        self._policy.check_integrity([node for node in nodes if node.ref_count == 0])
        check_sizes(nodes, self._evictable_len, self._protected_len, self.pinned_size)

    def owned_pages(self) -> Int32[np.ndarray, " P"]:
        """All page ids in the tree, for audits; takes time linear in its size."""
        return join_pages(list(self._roots.nodes()))

    def _find(
        self, ids: TokenIds, namespace: Hashable, start: PrefixHandle | None
    ) -> tuple[RadixTreeNode, list[RadixTreeNode], KeyBytes]:
        """Where the search began, the nodes below it that `ids` match, the last one split to do so in whole, and the
        bytes of the ids from that place on or from a little in front of it. The caller must touch the last node, since
        the front part of a split has no place in the eviction order yet."""
        if start is None:
            top, key, offset = self._roots.find(namespace), key_bytes(ids), 0
        else:
            living, key, offset = resume(start, self, ids, namespace)
            top = living or self._roots.find(namespace)
            if not top.children:
                return top, [], key
        path, rest, partial_len = descend(top, key, offset, self._page_bytes)
        if rest is not None:
            path.append(rest.split_at(partial_len))
            if not rest.ref_count:
                self._policy.changed(rest)
        return top, path, key

    def _take_out(
        self,
        next_leaf: Callable[[], RadixTreeNode | None],
        num_tokens: int,
        trim: bool = False,
        evicted: list[Evicted] | None = None,
    ) -> Int32[np.ndarray, " P"]:
        """As `Leaving.take`, counted and told of; returns the page ids."""
        taken, num_taken = self._leaving.take(next_leaf, num_tokens, trim)
        self._evictable_len -= num_taken
        self._version += bool(taken)
        if evicted is not None:
            evicted.extend(taken)
        if self._on_event is not None:
            for leaf, pages, _ in taken:
                self._on_event(removed_event(pages, leaf.namespace))
        return np.frombuffer(b"".join([pages for _, pages, _ in taken]), INT32)

    def _touch(self, lowest: RadixTreeNode) -> None:
        """Mark the path as just used, up to the first locked node: all above it are locked too."""
        self._use_counter = now = self._use_counter + 1
        node = lowest
        while not node.ref_count and (parent := node.parent) is not None:
            node.timestamp = now
            node = parent
        if node is not lowest:
            self._note_use(lowest)
