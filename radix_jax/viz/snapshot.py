"""TreeSnapshot: a radix tree at one moment, as plain data that anything may draw."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int32

NodeState = Literal["root", "locked", "pinned", "evictable"]


@dataclass(frozen=True, eq=False)
class NodeSnapshot:
    """One node. node_id: unique in its tree. parent_id: None for a root. depth: 0 for a root.

    token_ids: ids of the edge that leads to it. page_ids: pages that hold their KV. num_locks, num_pins: on it or below
    it. num_hits: requests that used it. namespace: the namespace it lives in. state: "locked" with or without pins;
    "pinned" can be evicted, but only when nothing else is left; "evictable" is any other, though an inner node can
    leave only after its children. last_use: rises with each use of the tree; no clock.
    """

    node_id: int
    parent_id: int | None
    depth: int
    token_ids: Int32[np.ndarray, " T"]
    page_ids: Int32[np.ndarray, " P"]
    num_locks: int
    num_pins: int
    num_hits: int
    namespace: Hashable
    state: NodeState
    last_use: int = 0


@dataclass(frozen=True, eq=False)
class TailSnapshot:
    """A page that a request left filled in part, to be copied from. parent_id: the node that it continues; None where
    that was evicted, so that nothing finds the tail any more. token_ids: fewer than a page. page_id: holds their KV.
    """

    parent_id: int | None
    token_ids: Int32[np.ndarray, " T"]
    page_id: int
    num_locks: int


@dataclass(frozen=True, eq=False)
class TreeSnapshot:
    """All nodes of a tree, depth first, a parent before its children; one root a namespace that holds something.

    tails: of the cache around the tree, last used first; none where only the tree was asked.
    """

    page_size: int
    nodes: tuple[NodeSnapshot, ...]
    tails: tuple[TailSnapshot, ...] = ()

    @property
    def num_tokens(self) -> int:
        """All tokens of the nodes."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def num_locked_tokens(self) -> int:
        """Those that can't be evicted now."""
        return sum(len(node.token_ids) for node in self.nodes if node.state == "locked")

    @property
    def num_pinned_tokens(self) -> int:
        """Those under a pin, locked or not."""
        return sum(len(node.token_ids) for node in self.nodes if node.num_pins)


@dataclass(frozen=True, eq=False)
class PoolSnapshot:
    """The pool that a tree's pages come from. num_pages: all pages, the null page 0 included. private_pages: those that
    running requests hold and the tree does not own. What neither holds, nor is a tail, is free.
    """

    num_pages: int
    private_pages: Int32[np.ndarray, " P"]
