"""TreeSnapshot: a radix tree at one moment, as plain data that anything may draw."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int32

NodeState = Literal["root", "locked", "evictable"]


@dataclass(frozen=True, eq=False)
class NodeSnapshot:
    """One node. node_id: unique in its tree. parent_id: None for a root. depth: 0 for a root.

    token_ids: ids of the edge that leads to it. page_ids: pages that hold their KV. num_locks: locks on it or below it.
    num_hits: matches that used it. namespace: the namespace it lives in. state: "evictable" is any unlocked node,
    though an inner one can leave only after its children.
    """

    node_id: int
    parent_id: int | None
    depth: int
    token_ids: Int32[np.ndarray, " T"]
    page_ids: Int32[np.ndarray, " P"]
    num_locks: int
    num_hits: int
    namespace: Hashable
    state: NodeState


@dataclass(frozen=True, eq=False)
class TreeSnapshot:
    """All nodes of a tree, depth first, a parent before its children; one root a namespace that holds something."""

    page_size: int
    nodes: tuple[NodeSnapshot, ...]

    @property
    def num_tokens(self) -> int:
        """All cached tokens."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def num_locked_tokens(self) -> int:
        """Cached tokens that can't be evicted now."""
        return sum(len(node.token_ids) for node in self.nodes if node.state == "locked")


@dataclass(frozen=True, eq=False)
class PoolSnapshot:
    """The pool that a tree's pages come from. num_pages: all pages, the null page 0 included. private_pages: those that
    running requests hold and the tree does not own. What neither holds is free.
    """

    num_pages: int
    private_pages: Int32[np.ndarray, " P"]
