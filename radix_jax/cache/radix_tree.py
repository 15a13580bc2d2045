"""RadixTree: token ids -> pages of KV, shared by every request with the same prefix."""

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.errors import HandleError, IntegrityError
from radix_jax.cache.eviction import make_policy
from radix_jax.cache.handles import InsertResult, MatchResult, PrefixHandle
from radix_jax.cache.integrity import check_nodes
from radix_jax.cache.keys import TOKEN_BYTES, TokenIds, common_len, namespace_key, to_int32, token_bytes
from radix_jax.cache.node import NO_PAGES, RadixTreeNode, join_pages
from radix_jax.cache.snapshot import take_snapshot
from radix_jax.config import check_int
from radix_jax.viz import TreeSnapshot, TreeView, render_text


class RadixTree:
    """A radix tree over whole pages of tokens: every edge is one or more pages long.

    page_size: tokens a page. eviction_policy: which unlocked leaf goes first; "lru".

    A namespace is any hashable value; prefixes are shared only inside one, and equal values of different types (1,
    True, 1.0) are different namespaces. The tree owns the page ids that it took until `evict` or `reset` returns them;
    it never touches the pages themselves. Sizes are in tokens. Not thread-safe.

    Raises:
        ValueError: page_size below 1, or an unknown policy.
    """

    def __init__(self, page_size: int = 16, eviction_policy: str = "lru") -> None:
        check_int("page_size", page_size, at_least=1)
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._policy = make_policy(eviction_policy)
        self._key_fn: Callable[[bytes], bytes] = operator.itemgetter(slice(self._page_bytes))
        self._uuids = itertools.count()
        self._nothing = self._new_root(None)  # where a match in a namespace without a root ends; never has children
        self._roots: dict[Hashable, RadixTreeNode] = {}
        self._use_counter = 0
        self._version = 0
        self._evictable_len = 0
        self._protected_len = 0

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._page_size

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

    def match_prefix(self, ids: TokenIds, namespace: Hashable = None) -> MatchResult:
        """The longest cached prefix of `ids`, in whole pages.

        Splits a node where the match ends inside it, so that locking the handle protects exactly `cached_len` tokens;
        marks the path as just used, and counts one hit on each of its nodes.

        Raises:
            ValueError: `ids` are no flat sequence of int32 values.
            TypeError: `namespace` is not hashable.
        """
        path, cached_len, partial, partial_len = self._descend(token_bytes(ids), self._find_root(namespace))
        if partial is not None:
            path.append(self._split(partial, partial_len))
            cached_len += partial_len
        if not path:
            return MatchResult(0, NO_PAGES, PrefixHandle(self, self._nothing, 0), None, 0, None)
        for node in path:
            node.hits += 1
        self._touch(path[-1])
        return MatchResult(cached_len, join_pages(path), PrefixHandle(self, path[-1], cached_len), None, 0, None)

    def match_len(self, ids: TokenIds, namespace: Hashable = None) -> int:
        """`cached_len` of a match, changing nothing: no split, no hit, no recency.

        Raises:
            ValueError, TypeError: as `match_prefix`.
        """
        _, cached_len, _, partial_len = self._descend(token_bytes(ids), self._find_root(namespace))
        return cached_len + partial_len

    def match_pages(self, ids: TokenIds, namespace: Hashable = None) -> Int32[np.ndarray, " P"]:
        """`pages` of a match, changing nothing; only for looking, since no handle protects them.

        Raises:
            ValueError, TypeError: as `match_prefix`.
        """
        path, _, partial, partial_len = self._descend(token_bytes(ids), self._find_root(namespace))
        pages = join_pages(path)
        if partial is None:
            return pages
        return np.concatenate([pages, partial.value[: partial_len // self._page_size]])

    def insert_prefix(
        self, ids: TokenIds, pages: TokenIds, namespace: Hashable = None, priority: int = 0
    ) -> InsertResult:
        """Take the full pages of `ids` that are not cached yet.

        pages: page ids that cover `ids` from 0, one a full page; one more for a tail is accepted. The tail's page and
            those of what is cached already stay the caller's. Less than one page of ids: nothing is inserted.
        priority: raises the priority of each node on the path to at least this.

        Nodes are never merged: inserting a prompt, and then the prompt with its output, leaves a border between them.

        Raises:
            ValueError: ids or pages are no flat sequence of int32 values, or their numbers don't agree.
            TypeError: `namespace` is not hashable.
        """
        key = token_bytes(ids)
        page_ids = to_int32(pages, "pages")
        num_tokens = len(key) // TOKEN_BYTES
        num_pages = num_tokens // self._page_size
        if len(page_ids) not in (num_pages, -(-num_tokens // self._page_size)):
            raise ValueError(
                f"{len(page_ids)} pages for {num_tokens} tokens at page_size={self._page_size}; pass "
                f"{num_pages} page ids, one a full page, or one more if a tail is left"
            )
        root = self._find_root(namespace)
        path, cached_len, partial, partial_len = self._descend(key, root)
        node = path[-1] if path else root
        if partial is not None:
            node = self._split(partial, partial_len)
            cached_len += partial_len
        self._raise_priority(node, priority)
        full_len = num_pages * self._page_size
        if cached_len < full_len:
            if node is self._nothing:
                node = self._add_root(namespace)
            edge = key[cached_len * TOKEN_BYTES : full_len * TOKEN_BYTES]
            node = self._add_leaf(node, edge, page_ids[cached_len // self._page_size : num_pages], priority)
        self._touch(node)
        return InsertResult(cached_len, PrefixHandle(self, node, full_len))

    def lock(self, handle: PrefixHandle) -> None:
        """Keep the handle's `cached_len` tokens from eviction until `unlock`. A handle may be locked more than once.

        Raises:
            HandleError: the handle is of another tree, or its prefix was evicted.
        """
        self._check_handle(handle)
        handle.num_locks += 1
        locked_len = 0
        node = handle.node
        while node.parent is not None:
            if node.ref_count == 0:
                self._policy.discard(node)
                locked_len += node.length
            node.ref_count += 1
            node = node.parent
        self._evictable_len -= locked_len
        self._protected_len += locked_len

    def unlock(self, handle: PrefixHandle) -> None:
        """Give one lock of the handle back; the path counts as used now.

        Raises:
            HandleError: the handle is of another tree, or not locked.
        """
        self._check_handle(handle)
        if handle.num_locks == 0:
            raise HandleError("the handle is not locked; each lock is given back once")
        handle.num_locks -= 1
        self._use_counter += 1
        unlocked_len = 0
        node = handle.node
        while node.parent is not None:
            node.ref_count -= 1
            if node.ref_count == 0:
                node.timestamp = self._use_counter
                self._policy.add(node)
                unlocked_len += node.length
            node = node.parent
        self._evictable_len += unlocked_len
        self._protected_len -= unlocked_len

    def evict(self, num_tokens: int) -> Int32[np.ndarray, " P"]:
        """Take unlocked leaves out, by the policy, until at least `num_tokens` are gone or nothing is left.

        Returns the page ids of what was taken out; they are the caller's now.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens} to evict is negative")
        taken: list[RadixTreeNode] = []
        num_taken = 0
        while num_taken < num_tokens and (leaf := self._policy.next_leaf()) is not None:
            num_taken += leaf.length
            taken.append(leaf)
            self._remove(leaf)
        if taken:
            self._evictable_len -= num_taken
            self._version += 1
        return join_pages(taken)

    def reset(self) -> Int32[np.ndarray, " P"]:
        """Drop everything; returns the page ids that were cached. Handles of before fail from here on, save empty ones.

        Raises:
            HandleError: something is locked, so that running requests still read it. Nothing is dropped then.
        """
        if self._protected_len:
            raise HandleError(f"{self._protected_len} tokens are locked; unlock every handle before a reset")
        return self.evict(self._evictable_len)

    def snapshot(self) -> TreeSnapshot:
        """The tree as plain data, parents before children."""
        return take_snapshot(self._roots.values(), self._page_size)

    def render(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """The tree as text; large trees are summarised. decode: token ids -> text, else the ids are shown."""
        return render_text(self.snapshot(), decode)

    def _repr_html_(self) -> str:
        """The tree as a notebook draws it; `viz.TreeView(tree.snapshot(), decode)` shows text instead of ids."""
        return TreeView(self.snapshot())._repr_html_()

    def check_integrity(self) -> None:
        """Recount everything: structure, page counts, locks, sizes, eviction order, each page in one place.

        Raises:
            IntegrityError: names what is off.
        """
        nodes = list(self._nodes())
        check_nodes(nodes, self._page_bytes)
        self._policy.check_integrity()
        in_order = list(self._policy)
        unlocked = [node for node in nodes if node.ref_count == 0]
        if len(in_order) != len(unlocked) or set(in_order) != set(unlocked):
            raise IntegrityError(
                f"eviction policy holds {len(in_order)} nodes, the tree has {len(unlocked)} unlocked ones"
            )
        evictable_len = sum(len(node.value) for node in unlocked) * self._page_size
        protected_len = sum(len(node.value) for node in nodes) * self._page_size - evictable_len
        if (evictable_len, protected_len) != (self._evictable_len, self._protected_len):
            raise IntegrityError(
                f"evictable_size={self._evictable_len} and protected_size={self._protected_len}, recounted "
                f"{evictable_len} and {protected_len}"
            )

    def owned_pages(self) -> Int32[np.ndarray, " P"]:
        """All page ids in the tree, for audits; takes time linear in its size."""
        return join_pages(list(self._nodes()))

    def _descend(self, key: bytes, root: RadixTreeNode) -> tuple[list[RadixTreeNode], int, RadixTreeNode | None, int]:
        """Follow `key` down: nodes wholly matched, their tokens, the node matched in part, tokens matched of it."""
        page_bytes = self._page_bytes
        path: list[RadixTreeNode] = []
        children = root.children
        offset = 0
        while offset < len(key):
            node = children.get(key[offset : offset + page_bytes])  # a tail is shorter than any child's key
            if node is None:
                break
            edge = node.edge
            if not key.startswith(edge, offset):
                num_common = common_len(edge, key, offset)
                return path, offset // TOKEN_BYTES, node, num_common - num_common % self._page_size
            path.append(node)
            offset += len(edge)
            children = node.children
        return path, offset // TOKEN_BYTES, None, 0

    def _find_root(self, namespace: Hashable) -> RadixTreeNode:
        try:
            return self._roots.get(namespace_key(namespace), self._nothing)
        except TypeError as error:
            raise TypeError(
                f"namespace {namespace!r} is not hashable; use a str, a number or a tuple of them"
            ) from error

    def _new_root(self, namespace: Hashable) -> RadixTreeNode:
        root = RadixTreeNode(self._key_fn, self._uuids, namespace)
        root.ref_count = 1
        return root

    def _add_root(self, namespace: Hashable) -> RadixTreeNode:
        root = self._roots[namespace_key(namespace)] = self._new_root(namespace)
        return root

    def _add_leaf(
        self, parent: RadixTreeNode, edge: bytes, pages: Int32[np.ndarray, " P"], priority: int
    ) -> RadixTreeNode:
        leaf = RadixTreeNode(self._key_fn, self._uuids, parent.namespace)
        leaf.priority = priority
        leaf.set_key_value(edge, pages)
        leaf.set_parent(parent)
        self._policy.add(leaf)
        self._evictable_len += leaf.length
        self._version += 1
        return leaf

    def _split(self, node: RadixTreeNode, num_tokens: int) -> RadixTreeNode:
        """Cut `node` after `num_tokens`; the caller must touch the part in front, which is last in the order so far."""
        front = node.split_at(num_tokens)
        if front.ref_count == 0:
            self._policy.add(front)
        return front

    def _remove(self, leaf: RadixTreeNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._key_fn(leaf.edge)]
        self._policy.discard(leaf)
        leaf.parent = None
        leaf.in_tree = False
        if parent.parent is None and not parent.children:
            del self._roots[namespace_key(parent.namespace)]

    def _touch(self, node: RadixTreeNode) -> None:
        """Mark the path as just used, up to the first locked node: all above it are locked too."""
        self._use_counter += 1
        now = self._use_counter
        refresh = self._policy.refresh
        while node.ref_count == 0 and node.parent is not None:
            node.timestamp = now
            refresh(node)
            node = node.parent

    def _raise_priority(self, node: RadixTreeNode, priority: int) -> None:
        """A parent's priority is never below a child's."""
        while node.parent is not None and node.priority < priority:
            node.priority = priority
            node = node.parent

    def _check_handle(self, handle: PrefixHandle) -> None:
        if handle.owner is not self:
            raise HandleError("the handle is of another tree; use it with the tree that made it")
        if not handle.node.in_tree:
            raise HandleError(f"the handle's {handle.cached_len} tokens were evicted or reset; match again")

    def _nodes(self) -> Iterator[RadixTreeNode]:
        """All nodes that are not roots."""
        stack = list(self._roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)
