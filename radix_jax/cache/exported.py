"""ExportedTree: cached prefixes as arrays, to leave a process and come back; and what of it a cache takes in."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32, Int64

from radix_jax.cache.keys import namespace_key
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.viz import TreeSnapshot


@dataclass(frozen=True)
class ExportedTree:
    """The nodes of a tree, parents before children. Their pages are numbered one after the other, node by node. What
    comes from outside is a tree only if `check` says so.

    namespaces: those that there are. For each node, int32: namespace_ids: which of them it lives in; parents: -1 under
    a root; page_counts: its pages. last_uses: int64, the higher, the later. token_ids: int32 [pages, page_size].
    """

    namespaces: tuple[Hashable, ...]
    namespace_ids: np.ndarray
    parents: np.ndarray
    page_counts: np.ndarray
    last_uses: np.ndarray
    token_ids: np.ndarray

    @cached_property
    def ends(self) -> Int64[np.ndarray, " N"]:
        """Behind the last page of each node."""
        return np.cumsum(self.page_counts, dtype=np.int64)

    def path_pages(self, node: int) -> Int64[np.ndarray, " Q"]:
        """The pages from the root to the end of a node."""
        parts = []
        while node >= 0:
            end = self.ends[node]
            parts.append(np.arange(end - self.page_counts[node], end))
            node = int(self.parents[node])
        return np.concatenate(parts[::-1])

    def ids_of(self, pages: Int64[np.ndarray, " Q"]) -> Int32[np.ndarray, " T"]:
        """The tokens of these pages."""
        return self.token_ids[pages].reshape(-1)

    def namespace_of(self, node: int) -> Hashable:
        """The namespace that it lives in."""
        return self.namespaces[self.namespace_ids[node]]

    def check(self) -> None:
        """Refuse what is no tree.

        Raises:
            ValueError: what is off.
        """
        num_nodes = len(self.parents)
        if {len(self.namespace_ids), len(self.page_counts), len(self.last_uses)} != {num_nodes}:
            raise ValueError("its arrays are not of one length")
        if len({namespace_key(namespace) for namespace in self.namespaces}) != len(self.namespaces):
            raise ValueError("a namespace is there twice")
        if num_nodes and not (
            (self.parents >= -1).all()
            and (self.parents < np.arange(num_nodes)).all()
            and (self.page_counts > 0).all()
            and self.namespace_ids.min() >= 0
            and self.namespace_ids.max() < len(self.namespaces)
        ):
            raise ValueError("a node has no page, or a parent or a namespace that is not there")
        if self.page_counts.sum(dtype=np.int64) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} pages are not those of the nodes")
        below = self.parents >= 0
        if (self.namespace_ids[self.parents[below]] != self.namespace_ids[below]).any():
            raise ValueError("a node lives in another namespace than its parent")
        firsts = self.ends - self.page_counts
        places = zip(self.parents.tolist(), self.namespace_ids.tolist(), self.token_ids[firsts], strict=True)
        if len({(parent, namespace, page.tobytes()) for parent, namespace, page in places}) != num_nodes:
            raise ValueError("two nodes begin alike")


def export_tree(
    snapshot: TreeSnapshot, keeps: Callable[[Hashable], bool]
) -> tuple[ExportedTree, Int32[np.ndarray, " P"]]:
    """The prefixes of the namespaces that `keeps` lets pass, and the page ids of their pages."""
    places: dict[int, int] = {}
    namespaces: list[Hashable] = []
    rows: list[tuple[int, int, int, int]] = []
    tokens, pages = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    keeping = False
    for node in snapshot.nodes:  # depth first: the nodes of a namespace follow its root
        if node.parent_id is None:
            keeping = keeps(node.namespace)
            namespaces += [node.namespace] if keeping else []
        elif keeping:
            places[node.node_id] = len(rows)
            parent = places.get(node.parent_id, -1)
            rows.append((len(namespaces) - 1, parent, len(node.page_ids), node.last_use))
            tokens.append(node.token_ids)
            pages.append(node.page_ids)
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    tree = ExportedTree(
        tuple(namespaces),
        columns[0].astype(np.int32),
        columns[1].astype(np.int32),
        columns[2].astype(np.int32),
        columns[3].copy(),
        np.concatenate(tokens).reshape(-1, snapshot.page_size),
    )
    return tree, np.concatenate(pages)


class TreeImport:
    """What a cache takes in of an exported tree: what it has not and has free pages for, the latest used first, and of
    a prefix its beginning first.

    pages: the pages of the exported tree that are taken in, to be put into as many pages of the pool.
    num_left: pages that there is no room for.
    """

    def __init__(self, cache: PrefixCache, tree: ExportedTree) -> None:
        self._cache = cache
        self._tree = tree
        self._taken: list[tuple[int, int]] = []  # node, pages from the root on that are then there
        self.num_left = 0
        parts = [np.empty(0, np.int64)]
        room, whole = cache.pool.num_free, np.zeros(len(tree.parents), bool)
        for node in self._latest_first():
            parent = int(tree.parents[node])
            num_own = int(tree.page_counts[node])
            if parent >= 0 and not whole[parent]:
                self.num_left += num_own
                continue
            path = tree.path_pages(node)
            num_there = cache.match_len(tree.ids_of(path), tree.namespace_of(node)) // cache.page_size
            start = max(num_there, len(path) - num_own)
            end = min(len(path), start + room)
            room -= end - start
            whole[node] = end == len(path)
            self.num_left += len(path) - end
            if end > start:
                self._taken.append((node, end))
                parts.append(path[start:end])
        self.pages = np.concatenate(parts)

    def insert(self, pages: Int32[np.ndarray, " Q"]) -> None:
        """Give the tree the pages of the pool that now hold `self.pages`. Uses are in their old order, and later than
        those of what was there."""
        tree = self._tree
        page_ids = np.zeros(len(tree.token_ids), np.int32)  # what the cache has needs none
        page_ids[self.pages] = pages
        for node, num_pages in reversed(self._taken):
            path = tree.path_pages(node)[:num_pages]
            self._cache.tree.insert_prefix(tree.ids_of(path), page_ids[path], tree.namespace_of(node))

    def _latest_first(self) -> list[int]:
        """The nodes by their last use, a parent before its children: a use of a node is one of all above it."""
        last_uses = self._tree.last_uses.copy()
        for node in reversed(range(len(last_uses))):
            parent = self._tree.parents[node]
            if parent >= 0:
                last_uses[parent] = max(last_uses[parent], last_uses[node])
        return np.argsort(-last_uses, kind="stable").tolist()
