"""Which unlocked leaf leaves first."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from radix_jax.cache.errors import IntegrityError
from radix_jax.cache.node import RadixTreeNode

_SLACK = 64  # stale heap entries that are always borne


@runtime_checkable
class EvictionPolicy(Protocol):
    """The order in which unlocked nodes leave. The tree reports every change; a policy never changes the tree.

    A policy holds exactly the unlocked nodes. It may read a node's parts and must break ties by uuid, so that runs
    repeat. Every report comes after the node's parts were set.
    """

    def add(self, node: RadixTreeNode, /) -> object:
        """`node` is new, or its last lock was taken off. Unlocked nodes below it were added before."""
        ...

    def discard(self, node: RadixTreeNode, /) -> object:
        """`node` was locked, or evicted."""
        ...

    def refresh(self, node: RadixTreeNode, /) -> object:
        """`node` was used. Reported for a whole path, from its lowest node to the first locked one above."""
        ...

    def change(self, node: RadixTreeNode, /) -> object:
        """`node` changed by something else than its use: it lost its last child, was split in front, or was trimmed."""
        ...

    def next_leaf(self) -> RadixTreeNode | None:
        """The unlocked leaf to evict next, None if nothing is unlocked. It is evicted then, or trimmed."""
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
    refreshed from their lowest node upwards. So the first entry is a leaf, with no heap, no scan and no clock. The
    reports are the dict's own methods, which spares a Python call a node.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[RadixTreeNode, None] = OrderedDict()
        self.add = self._order.setdefault
        self.discard = self._order.pop
        self.refresh = self._order.move_to_end

    def change(self, node: RadixTreeNode, /) -> None:
        """Nothing: neither a node's length nor its children decide on its place."""

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
            if not seen.issuperset(child for child in node.children.values() if child in self._order):
                raise IntegrityError(f"eviction order has node {node.uuid} before a child of it")
            if node.timestamp < last_use:
                raise IntegrityError(f"eviction order has node {node.uuid} after one that was used later")
            seen.add(node)
            last_use = node.timestamp


class RankedLeaves:
    """The leaf with the smallest key first, every report in O(log n) over a run.

    sort_key: node -> what to sort by; read anew at each report, so it may depend on anything that is reported.

    A heap of the unlocked leaves, cleaned lazily: a new key is a new entry, and an entry that is no longer its node's
    newest is dropped when it comes up. Entries are at most about twice the nodes; beyond, the stale ones are swept out,
    which costs O(1) an entry. Where `sort_key` fails, the node waits without an entry, and `next_leaf` tries again and
    raises, so that an error of a user's rule never leaves a tree half changed.
    """

    def __init__(self, sort_key: Callable[[RadixTreeNode], Any]) -> None:
        self._sort_key = sort_key
        self._serial = itertools.count()  # two entries of one node may have the same key
        self._newest: dict[RadixTreeNode, tuple[Any, ...] | None] = {}  # of every unlocked node
        self._heap: list[tuple[Any, int, int, RadixTreeNode]] = []
        self._failed: dict[RadixTreeNode, None] = {}

    def add(self, node: RadixTreeNode, /) -> None:
        """Rank `node`, if it is a leaf."""
        self._newest[node] = None
        self.change(node)

    def discard(self, node: RadixTreeNode, /) -> None:
        """Forget `node`; its entries are stale now."""
        del self._newest[node]
        self._failed.pop(node, None)
        self._sweep()

    def refresh(self, node: RadixTreeNode, /) -> None:
        """As `change`."""
        self.change(node)

    def change(self, node: RadixTreeNode, /) -> None:
        """Rank `node` anew, if it is a leaf."""
        if not node.children:
            try:
                self._rank(node)
            except Exception:  # whatever a user's rule may raise; next_leaf raises it
                self._failed[node] = None

    def next_leaf(self) -> RadixTreeNode | None:
        """The leaf with the smallest key, of equal ones the one with the smallest uuid.

        Raises:
            Exception: what a user's rule raised.
        """
        while self._failed:
            node = next(iter(self._failed))
            if not node.children:
                self._rank(node)
            del self._failed[node]
        heap = self._heap
        while heap:
            entry = heap[0]
            node = entry[-1]
            if self._newest.get(node) is entry:
                if not node.children:
                    return node
                self._newest[node] = None
            heapq.heappop(heap)
        return None

    def __iter__(self) -> Iterator[RadixTreeNode]:
        """Unlocked nodes, in no order of use."""
        return iter(self._newest)

    def check_integrity(self) -> None:
        """Raise IntegrityError if a leaf has no entry or an old key, the heap is none, or it has grown too large."""
        listed = {id(entry) for entry in self._heap}
        for node, entry in self._newest.items():
            if node.children or node in self._failed:
                continue
            if entry is None or id(entry) not in listed or entry[0] != self._sort_key(node):
                raise IntegrityError(f"eviction heap has no entry of leaf {node.uuid}, or an old one")
        if any(self._heap[(place - 1) // 2] > self._heap[place] for place in range(1, len(self._heap))):
            raise IntegrityError("eviction heap is not in heap order")
        if len(self._heap) > self._max_len():
            raise IntegrityError(f"eviction heap has {len(self._heap)} entries of {len(self._newest)} nodes")

    def _rank(self, node: RadixTreeNode) -> None:
        key = self._sort_key(node)
        newest = self._newest[node]
        if newest is not None and newest[0] == key:
            return
        entry = (key, node.uuid, next(self._serial), node)
        self._newest[node] = entry
        heapq.heappush(self._heap, entry)
        self._sweep()

    def _sweep(self) -> None:
        if len(self._heap) > self._max_len():
            self._heap = [entry for entry in self._heap if self._newest.get(entry[-1]) is entry]
            heapq.heapify(self._heap)

    def _max_len(self) -> int:
        return 2 * len(self._newest) + _SLACK
