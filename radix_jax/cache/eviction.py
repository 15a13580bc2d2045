"""Which unlocked leaf leaves first."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from radix_jax.cache.errors import IntegrityError
from radix_jax.cache.node import RadixTreeNode


@runtime_checkable
class EvictionPolicy(Protocol):
    """The order in which unlocked nodes leave. The tree reports every change; a policy never changes the tree.

    A policy holds exactly the unlocked nodes. It may read a node's parts (timestamp, hits, priority, uuid, value) and
    must break ties by uuid, so that runs repeat.
    """

    def add(self, node: RadixTreeNode) -> None:
        """`node` is new, or its last lock was taken off. Unlocked nodes below it were added before."""
        ...

    def discard(self, node: RadixTreeNode) -> None:
        """`node` was locked, or evicted; if evicted, it has left `node.parent.children` and still names its parent."""
        ...

    def refresh(self, node: RadixTreeNode) -> None:
        """`node` was used. Reported for a whole path, from its lowest node to the first locked one above."""
        ...

    def next_leaf(self) -> RadixTreeNode | None:
        """The unlocked leaf to evict next, None if nothing is unlocked."""
        ...

    def __iter__(self) -> Iterator[RadixTreeNode]:
        """All unlocked nodes, in any order."""
        ...

    def check_integrity(self) -> None:
        """Raise IntegrityError if the policy's own order is broken."""
        ...


class LRU:
    """Least recently used first, every operation in O(1).

    One ordered dict of the unlocked nodes, oldest use first, a child always before its parent: paths are added and
    refreshed from their lowest node upwards. So the first entry is a leaf, with no heap, no scan and no clock.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[RadixTreeNode, None] = OrderedDict()

    def add(self, node: RadixTreeNode) -> None:
        """Append `node` as the most recently used."""
        self._order[node] = None

    def discard(self, node: RadixTreeNode) -> None:
        """Take `node` out of the order."""
        del self._order[node]

    def refresh(self, node: RadixTreeNode) -> None:
        """Move `node` to the end of the order."""
        self._order.move_to_end(node)

    def next_leaf(self) -> RadixTreeNode | None:
        """The least recently used leaf."""
        return next(iter(self._order), None)

    def __iter__(self) -> Iterator[RadixTreeNode]:
        """Unlocked nodes, least recently used first."""
        return iter(self._order)

    def check_integrity(self) -> None:
        """Raise IntegrityError if a parent comes before its child, or a later use before an earlier one."""
        seen: set[RadixTreeNode] = set()
        last_use = 0
        for node in self._order:
            if not seen.issuperset(node.children.values()):
                raise IntegrityError(f"eviction order has node {node.uuid} before a child of it")
            if node.timestamp < last_use:
                raise IntegrityError(f"eviction order has node {node.uuid} after one that was used later")
            seen.add(node)
            last_use = node.timestamp


_POLICIES: dict[str, type[LRU]] = {"lru": LRU}


def make_policy(name: str) -> EvictionPolicy:
    """The policy of that name.

    Raises:
        ValueError: no policy has this name.
    """
    if name not in _POLICIES:
        raise ValueError(f"eviction_policy={name!r} is not one of {', '.join(map(repr, _POLICIES))}")
    return _POLICIES[name]()
