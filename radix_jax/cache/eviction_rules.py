"""The eviction rules by name. Smallest key first, of equal keys the older node id."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from radix_jax.cache.eviction import LRU, EvictionPolicy, RankedLeaves
from radix_jax.cache.node import RadixTreeNode
from radix_jax.cache.reuse_rate import ReuseRate

_SLRU_HITS = 2  # from here on a node is protected
_REUSE_CREDIT = 1000  # uses by which each reuse makes a node younger
_MAX_REUSES = 4  # that are credited, so that nothing stays for ever
_TAIL_BUDGET = 2048  # tokens that a next turn may have to compute
_NEXT_PROMPT = 256  # tokens that a next turn is expected to add
_ATTENTION_LEN = 16_384  # context at which attention costs a token about as much as the weights do, in mid-sized models

SortKey = float | tuple[float, ...]


class NodeView(NamedTuple):
    """What a rule of one's own may look at, of a leaf.

    num_tokens, num_pages: that its eviction frees. start_len: tokens in front of it. hits: requests that reused it.
    priority: as given to `insert_prefix`. created: rises with the insertions. last_use: rises with each match,
    insertion and unlock. reach_len: the longest prefix ever cached that went through it. node_id: unique in its tree.
    """

    num_tokens: int
    num_pages: int
    start_len: int
    hits: int
    priority: int
    created: int
    last_use: int
    reach_len: int
    node_id: int
    namespace: Hashable


Rule = Callable[[NodeView], SortKey]


def make_policy(policy: str | Rule, pinned: bool = False) -> EvictionPolicy:
    """The policy of that name, or one that sorts by a rule of one's own, of the nodes without or with pins.

    - "lru": last use
    - "lfu": (hits, last use)
    - "fifo", "filo": creation, oldest or newest first; a split keeps the creation
    - "mru": -last use
    - "priority": (priority, last use)
    - "slru": (hits >= 2, last use), so what was reused twice goes last
    - "tlru": (not tail-safe, last use), after arXiv 2510.15152: a leaf is tail-safe if, without it, the longest prefix
      that was ever cached through it and a next prompt of 256 tokens leave no more than 2,048 tokens to compute
    - "reuse-credit": last use + 1000 * min(hits, 4)
    - "cost-aware": (floor + cost, last use), where cost is what a token of the leaf costs to compute again, in tokens
      without context: 1 + mean position / 16384. The pages of all leaves are of one size, so it is also the cost a
      freed page. floor is the sum of floor and cost of the leaf evicted last before the leaf's last use, and never
      falls (GreedyDual-Size, Cao and Irani 1997): among leaves used at the same floor the cheap ones go first, and
      nothing dear stays for ever. Pinned leaves have a floor of their own.
    - "reuse-rate": the lowest expected reuses a use of the tree for which it is kept, learned from what came back and
      when, by age and by how often it was reused; evicted prefixes that come back count (ReuseRate)

    A rule of one's own gets a NodeView and returns a number or a tuple of numbers; it is asked again whenever the leaf
    was used or changed, so it must depend on nothing else.

    Raises:
        ValueError: no policy has this name.
    """
    if callable(policy):
        return RankedLeaves(_OwnRule(policy), pinned)
    if policy == "lru":
        return LRU(pinned)
    if policy == "cost-aware":
        return CostAware(pinned)
    if policy == "reuse-rate":
        return ReuseRate(pinned)
    if policy not in _SORT_KEYS:
        names = ", ".join(map(repr, ("lru", *_SORT_KEYS, "cost-aware", "reuse-rate")))
        raise ValueError(f"eviction_policy={policy!r} is not one of {names}, nor a function")
    return RankedLeaves(_SORT_KEYS[policy], pinned)


_SORT_KEYS: dict[str, Callable[[RadixTreeNode], SortKey]] = {
    "lfu": lambda node: (node.hits, node.timestamp),
    "fifo": lambda node: node.created,
    "filo": lambda node: -node.created,
    "mru": lambda node: -node.timestamp,
    "priority": lambda node: (node.priority, node.timestamp),
    "slru": lambda node: (node.hits >= _SLRU_HITS, node.timestamp),
    "tlru": lambda node: (node.reach_len + _NEXT_PROMPT - node.start_len > _TAIL_BUDGET, node.timestamp),
    "reuse-credit": lambda node: node.timestamp + _REUSE_CREDIT * min(node.hits, _MAX_REUSES),
}


class CostAware:
    """GreedyDual-Size over the leaves: see `make_policy`. Reports cost O(log n), as those of RankedLeaves."""

    def __init__(self, pinned: bool = False) -> None:
        self._floor = 0.0
        self._floors: dict[RadixTreeNode, float] = {}  # at the last use of each node
        self._leaves = RankedLeaves(self._sort_key, pinned)

    def used(self, node: RadixTreeNode, /) -> None:
        """Rank `node` as used now, and what is above it once it is a leaf."""
        above = node
        while not above.ref_count and above.parent is not None:
            self._floors[above] = self._floor
            above = above.parent
        self._leaves.used(node)

    def changed(self, node: RadixTreeNode, /) -> None:
        """Rank `node` by its new length, as used when it was."""
        self._leaves.changed(node)

    def removed(self, node: RadixTreeNode, /) -> None:
        """Forget `node`."""
        self._floors.pop(node, None)
        self._leaves.removed(node)

    def next_leaf(self) -> RadixTreeNode | None:
        """The leaf with the smallest key; raises the floor to it."""
        leaf = self._leaves.next_leaf()
        if leaf is not None:
            self._floor = max(self._floor, self._sort_key(leaf)[0])
        return leaf

    def clear(self) -> None:
        """Forget all nodes; the floor stays."""
        self._floors.clear()
        self._leaves.clear()

    def check_integrity(self, unlocked: Sequence[RadixTreeNode], /) -> None:
        """As `RankedLeaves.check_integrity`."""
        self._leaves.check_integrity(unlocked)

    def _sort_key(self, node: RadixTreeNode) -> tuple[float, int]:
        mean_position = (node.start_len + node.end_len - 1) / 2
        return self._floors[node] + 1 + mean_position / _ATTENTION_LEN, node.timestamp


class _OwnRule:
    """A rule of a user's: shows it a view instead of the node, and lets only keys through that compare."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def __call__(self, node: RadixTreeNode) -> tuple[Any, ...]:
        num_tokens, start_len = node.length, node.start_len
        key = self._rule(
            NodeView(
                num_tokens,
                len(node.value),
                start_len,
                node.hits,
                node.priority,
                node.created,
                node.timestamp,
                node.reach_len,
                node.uuid,
                node.namespace,
            )
        )
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, int | float) and not math.isnan(part) for part in parts):
            raise TypeError(f"the eviction rule gave {key!r}; it must give a number or a tuple of numbers, none NaN")
        return parts
