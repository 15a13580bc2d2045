"""Which unlocked leaf leaves first."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from radix_jax.cache.errors import IntegrityError
from radix_jax.cache.node import EVICTED, RadixTreeNode

_SLACK = 64  # stale entries that are always borne


@runtime_checkable
class EvictionPolicy(Protocol):
    """The order in which unlocked nodes leave. The tree reports uses and changes; a policy never changes the tree.

    A policy is of the nodes without pins, or of those with pins, and passes over the others. Locks are not reported: a
    policy passes over locked nodes, and giving the last lock back is a use. It may read a node's parts and must break
    ties by uuid, so that runs repeat. Every report comes after the node's parts were set.
    """

    def used(self, node: RadixTreeNode, /) -> None:
        """A path was used that ends at `node`, which is unlocked: it and the unlocked nodes above it bear a new
        timestamp, the same. Of these only `node` can be a leaf."""
        ...

    def changed(self, node: RadixTreeNode, /) -> None:
        """An unlocked node changed without a use: it lost its last child, was split in front, or was trimmed."""
        ...

    def removed(self, node: RadixTreeNode, /) -> None:
        """A leaf was evicted."""
        ...

    def next_leaf(self) -> RadixTreeNode | None:
        """The unlocked leaf to evict next, None if there is none. It is evicted then, or trimmed."""
        ...

    def clear(self) -> None:
        """All nodes have left the tree."""
        ...

    def check_integrity(self, unlocked: Sequence[RadixTreeNode], /) -> None:
        """Raise IntegrityError if the order is broken, given all unlocked nodes of the tree that it is of."""
        ...


class LRU:
    """Least recently used first, every operation in O(1) over a run.

    A log of uses, oldest first: (timestamp, lowest node of the path). Until they are used again, the nodes of that path
    bear the timestamp, so one entry stands for all of them, from the lowest up. A node's use is a use of what is above
    it, so nothing comes before what is below it: the first of the first entry is a leaf, with no heap, no scan, no
    clock. Entries whose nodes were used again, or are locked, are dropped when they come up, or swept out when the log
    has doubled.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._log: deque[tuple[int, RadixTreeNode]] = deque()
        self._max_len = _SLACK

    def used(self, node: RadixTreeNode, /) -> None:
        """Note the use."""
        log = self._log
        log.append((node.timestamp, node))
        if len(log) > self._max_len:
            self._sweep()

    def changed(self, node: RadixTreeNode, /) -> None:
        """Nothing: neither a node's length nor its children decide on its place."""

    def removed(self, node: RadixTreeNode, /) -> None:
        """Nothing: `next_leaf` sees it."""

    def next_leaf(self) -> RadixTreeNode | None:
        """The least recently used leaf."""
        log, is_pinned = self._log, self._pinned
        while log:
            timestamp, node = log[0]
            if node.end_len == EVICTED:
                node = node.find_living()
                log[0] = timestamp, node
            if node.timestamp == timestamp and not node.ref_count and (node.num_pins > 0) is is_pinned:
                return node  # the condition is `_counts`, here and below without a call an entry
            log.popleft()
        return None

    def clear(self) -> None:
        """Forget all uses."""
        self._log.clear()

    def check_integrity(self, unlocked: Sequence[RadixTreeNode], /) -> None:
        """Raise IntegrityError unless the log has each node once, in the order of use, and after all below it."""
        order: list[RadixTreeNode] = []
        last_use = 0
        for timestamp, node in map(_living, self._log):
            if timestamp < last_use:
                raise IntegrityError(f"eviction log has a use at {timestamp} after one at {last_use}")
            last_use = timestamp
            while self._counts(timestamp, node) and node.parent is not None:
                order.append(node)
                node = node.parent
        places = {node: place for place, node in enumerate(order)}
        if len(order) != len(unlocked) or places.keys() != set(unlocked):
            raise IntegrityError(f"eviction log has {len(order)} nodes, {len(unlocked)} are unlocked")
        for node in unlocked:
            if any(places.get(child, 0) > places[node] for child in node.children.values()):
                raise IntegrityError(f"eviction log has node {node.uuid} before a child of it")

    def _sweep(self) -> None:
        """Keep the entries that count."""
        kept: deque[tuple[int, RadixTreeNode]] = deque()
        is_pinned = self._pinned
        for timestamp, node in self._log:
            if node.end_len == EVICTED:
                node = node.find_living()
            if node.timestamp == timestamp and not node.ref_count and (node.num_pins > 0) is is_pinned:
                kept.append((timestamp, node))
        self._log = kept
        self._max_len = 2 * len(kept) + _SLACK

    def _counts(self, timestamp: int, node: RadixTreeNode) -> bool:
        """Whether this use is the node's last, and the node may go. A root counts as locked."""
        return node.timestamp == timestamp and not node.ref_count and (node.num_pins > 0) is self._pinned


def _living(entry: tuple[int, RadixTreeNode]) -> tuple[int, RadixTreeNode]:
    return entry[0], entry[1].find_living()


class RankedLeaves:
    """The leaf with the smallest key first, every report in O(log n) over a run.

    sort_key: node -> what to sort by; read anew at each report, so it may depend on anything that is reported.

    A heap of leaves, cleaned lazily: a new key is a new entry, and an entry is dropped when it comes up but is not its
    node's newest, or the node is no leaf, locked, or of the other kind. Entries are at most about twice the leaves;
    beyond, the stale ones are swept out, which costs O(1) an entry. Where `sort_key` fails, the node waits without an
    entry, and `next_leaf` tries again and raises, so that an error of a user's rule never leaves a tree half changed.
    """

    def __init__(self, sort_key: Callable[[RadixTreeNode], Any], pinned: bool = False) -> None:
        self._sort_key = sort_key
        self._pinned = pinned
        self._serial = itertools.count()  # two entries of one node may have the same key
        self._newest: dict[RadixTreeNode, tuple[Any, ...]] = {}
        self._heap: list[tuple[Any, int, int, RadixTreeNode]] = []
        self._failed: dict[RadixTreeNode, None] = {}

    def used(self, node: RadixTreeNode, /) -> None:
        """Rank `node` anew, if it is a leaf."""
        self.changed(node)

    def changed(self, node: RadixTreeNode, /) -> None:
        """Rank `node` anew, if it is a leaf."""
        if not node.children:
            try:
                self._rank(node)
            except Exception:  # whatever a user's rule may raise; next_leaf raises it
                self._failed[node] = None

    def removed(self, node: RadixTreeNode, /) -> None:
        """Forget `node`."""
        self._newest.pop(node, None)
        self._failed.pop(node, None)
        self._sweep()

    def next_leaf(self) -> RadixTreeNode | None:
        """The leaf with the smallest key, of equal ones the one with the smallest uuid.

        Raises:
            Exception: what a user's rule raised.
        """
        while self._failed:
            node = next(iter(self._failed))
            if self._may_go(node):
                self._rank(node)
            del self._failed[node]
        heap, newest = self._heap, self._newest
        while heap:
            entry = heap[0]
            node = entry[-1]
            if newest.get(node) is entry:
                if self._may_go(node):
                    return node
                del newest[node]
            heapq.heappop(heap)
        return None

    def clear(self) -> None:
        """Forget all nodes."""
        self._heap.clear()
        self._newest.clear()
        self._failed.clear()

    def check_integrity(self, unlocked: Sequence[RadixTreeNode], /) -> None:
        """Raise IntegrityError if a leaf has no entry or an old key, the heap is none, or it has grown too large."""
        listed = {id(entry) for entry in self._heap}
        for node in unlocked:
            if node.children or node in self._failed:
                continue
            entry = self._newest.get(node)
            if entry is None or id(entry) not in listed or entry[0] != self._sort_key(node):
                raise IntegrityError(f"eviction heap has no entry of leaf {node.uuid}, or an old one")
        if any(self._heap[(place - 1) // 2] > self._heap[place] for place in range(1, len(self._heap))):
            raise IntegrityError("eviction heap is not in heap order")
        if len(self._heap) > self._max_len():
            raise IntegrityError(f"eviction heap has {len(self._heap)} entries of {len(self._newest)} nodes")

    def _may_go(self, node: RadixTreeNode) -> bool:
        return not node.children and not node.ref_count and (node.num_pins > 0) is self._pinned

    def _rank(self, node: RadixTreeNode) -> None:
        key = self._sort_key(node)
        newest = self._newest.get(node)
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
