"""Soft pins: prefixes that are evicted only when nothing else is left."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from radix_jax.cache.errors import HandleError
from radix_jax.cache.eviction import EvictionPolicy
from radix_jax.cache.node import RadixTreeNode


class Pin:
    """A pinned prefix, to unpin. cached_len: tokens pinned when it was made. until: when it ends by itself."""

    __slots__ = ("cached_len", "is_over", "node", "owner", "until")

    def __init__(self, owner: object, node: RadixTreeNode, until: float) -> None:
        self.owner = owner
        self.node = node
        self.cached_len = node.end_len
        self.until = until
        self.is_over = False


class PinnedLast:
    """Two orders of one policy, of the nodes without and with pins; the second is used up last. And the book of pins.

    A node is pinned with everything above it, so the unpinned nodes are closed downwards, and either order can be kept
    by itself.

    make_order: whether it is of the pinned nodes -> an order. max_tokens: that may be pinned at a time, each shared
    token counted once.
    """

    def __init__(self, make_order: Callable[[bool], EvictionPolicy], max_tokens: int) -> None:
        self._plain = make_order(False)
        self._pinned = make_order(True)
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._serial = itertools.count()
        self._living: set[Pin] = set()
        self._ends: list[tuple[float, int, Pin]] = []  # a heap; pins that were taken off early leave it in their time

    @property
    def num_tokens(self) -> int:
        """Tokens pinned now, locked ones included."""
        return self._num_tokens

    def used(self, node: RadixTreeNode, /) -> None:
        """As EvictionPolicy. Where pins begin on the path, the order of the pinned nodes has its own lowest one."""
        self._order_of(node).used(node)
        if self._num_tokens and not node.num_pins:
            pinned = next((above for above in _path_up(node) if above.num_pins), None)
            if pinned is not None and not pinned.ref_count:
                self._pinned.used(pinned)

    def changed(self, node: RadixTreeNode, /) -> None:
        """As EvictionPolicy."""
        self._order_of(node).changed(node)

    def removed(self, node: RadixTreeNode, /) -> None:
        """As EvictionPolicy; either order may know the node."""
        self._plain.removed(node)
        self._pinned.removed(node)
        if node.num_pins:
            self._num_tokens -= node.length

    def next_leaf(self) -> RadixTreeNode | None:
        """The first leaf without a pin, else the first one with a pin."""
        leaf = self._plain.next_leaf()
        return self._pinned.next_leaf() if leaf is None else leaf

    def next_unpinned(self) -> RadixTreeNode | None:
        """The first leaf without a pin."""
        return self._plain.next_leaf()

    def clear(self) -> None:
        """As EvictionPolicy."""
        self._plain.clear()
        self._pinned.clear()
        self._living.clear()
        self._num_tokens = 0

    def check_integrity(self, unlocked: Sequence[RadixTreeNode], /) -> None:
        """Raise IntegrityError if one of the orders is broken."""
        self._plain.check_integrity([node for node in unlocked if not node.num_pins])
        self._pinned.check_integrity([node for node in unlocked if node.num_pins])

    def pin(self, owner: object, node: RadixTreeNode, ttl: float, now: float) -> Pin:
        """Pin `node` and everything above it. The caller must mark the path as used then.

        Raises:
            ValueError: `ttl` is not above 0, or the budget is too small; nothing is pinned.
        """
        if not ttl > 0:
            raise ValueError(f"ttl={ttl} must be above 0")
        num_new = sum(above.length for above in _path_up(node) if not above.num_pins)
        if self._num_tokens + num_new > self._max_tokens:
            raise ValueError(
                f"pinning {num_new} more tokens on top of {self._num_tokens} exceeds max_pinned_tokens="
                f"{self._max_tokens}; unpin something, wait for its end, or raise max_pinned_tokens"
            )
        self._num_tokens += num_new
        for above in _path_up(node):
            above.num_pins += 1
        pin = Pin(owner, node, now + ttl)
        self._living.add(pin)
        if pin.until < math.inf:
            heapq.heappush(self._ends, (pin.until, next(self._serial), pin))
        return pin

    def unpin(self, pin: Pin) -> RadixTreeNode:
        """Take a pin off; returns the lowest node that is left of its prefix, to be marked as used by the caller.

        Raises:
            HandleError: the pin was taken off before, or is over.
        """
        if pin.is_over:
            raise HandleError("the pin is over, or was taken off before; each pin is taken off once")
        pin.is_over = True
        self._living.discard(pin)
        lowest = pin.node.find_living()
        for node in _path_up(lowest):
            node.num_pins -= 1
            if node.num_pins == 0:
                self._num_tokens -= node.length
        return lowest

    def next_over(self, now: float) -> Pin | None:
        """A pin whose time is over at `now`, None if there is no more. It is still to be taken off. At math.inf
        that is so of all, those too that do not end by themselves."""
        if now == math.inf:
            return next(iter(self._living), None)
        while self._ends and self._ends[0][0] <= now:
            pin = heapq.heappop(self._ends)[-1]
            if not pin.is_over:
                return pin
        return None

    def note_trimmed(self, num_tokens: int) -> None:
        """Pinned tokens were trimmed off, since nothing else was left."""
        self._num_tokens -= num_tokens

    def _order_of(self, node: RadixTreeNode) -> EvictionPolicy:
        return self._pinned if node.num_pins else self._plain


def _path_up(node: RadixTreeNode) -> Iterator[RadixTreeNode]:
    """`node` and all above it, the root left out."""
    while node.parent is not None:
        yield node
        node = node.parent
