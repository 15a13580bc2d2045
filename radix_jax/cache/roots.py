"""Roots: where each namespace of a tree starts."""

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator

from radix_jax.cache.keys import namespace_key
from radix_jax.cache.node import EVICTED, RadixTreeNode


class Roots:
    """The roots of the namespaces that hold something. A root counts as locked, so that it is never evicted.

    page_bytes: bytes of a page of token ids.
    """

    def __init__(self, page_bytes: int) -> None:
        self._key_fn: Callable[[bytes], bytes] = operator.itemgetter(slice(page_bytes))
        self._uuids = itertools.count()
        self._roots: dict[Hashable, RadixTreeNode] = {}
        self.nothing = self._make(None)  # stands for the root of a namespace that has none; never has children

    def __iter__(self) -> Iterator[RadixTreeNode]:
        """The roots, oldest first."""
        return iter(self._roots.values())

    def find(self, namespace: Hashable) -> RadixTreeNode:
        """The root of the namespace, or `nothing`.

        Raises:
            TypeError: `namespace` is not hashable.
        """
        if namespace is None:
            return self._roots.get(None, self.nothing)
        return self._roots.get(namespace_key(namespace), self.nothing)

    def add(self, namespace: Hashable) -> RadixTreeNode:
        """Start a namespace."""
        root = self._roots[namespace_key(namespace)] = self._make(namespace)
        return root

    def remove(self, leaf: RadixTreeNode) -> RadixTreeNode:
        """Take a leaf out; returns its parent. The namespace ends with its last leaf."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key_fn(leaf.edge)]
        leaf.end_len = EVICTED
        if leaf.reach_len > parent.reach_len:
            parent.reach_len = leaf.reach_len
        if not parent.children and parent.parent is None:
            del self._roots[namespace_key(parent.namespace)]
        return parent

    def clear(self) -> list[RadixTreeNode]:
        """End all namespaces; returns the nodes they held, evicted and without links to their children."""
        nodes = list(self.nodes())
        for node in nodes:
            node.end_len = EVICTED
            node.children.clear()
        for root in self:
            root.children.clear()
        self._roots.clear()
        return nodes

    def nodes(self) -> Iterator[RadixTreeNode]:
        """All nodes below the roots."""
        stack = list(self._roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def unlocked_below(self, namespace: Hashable) -> list[RadixTreeNode]:
        """The unlocked nodes of a namespace, children before their parents.

        Raises:
            TypeError: `namespace` is not hashable.
        """
        nodes = list(self.find(namespace).children.values())
        for node in nodes:  # grows as it goes
            nodes.extend(node.children.values())
        return [node for node in reversed(nodes) if not node.ref_count]

    def _make(self, namespace: Hashable) -> RadixTreeNode:
        root = RadixTreeNode(self._key_fn, self._uuids, namespace)
        root.ref_count = 1
        return root
