"""Which nodes of a snapshot a drawing shows, and what it leaves out."""

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass

from radix_jax.viz.snapshot import NodeSnapshot, TailSnapshot, TreeSnapshot

_FIRST_CHILDREN = 6


@dataclass(frozen=True)
class Hidden:
    """What is left out under a node (or of the roots). num_children: its own children; the rest counts all below,
    roots aside.
    """

    num_children: int
    num_nodes: int
    num_tokens: int
    num_locked_tokens: int


@dataclass(frozen=True)
class Tails:
    """All tails that continue one node; or, where `is_lost`, those whose prefixes were evicted."""

    tails: tuple[TailSnapshot, ...]
    is_lost: bool


class Outline:
    """The nodes of a snapshot that are worth drawing: always the one with the most tokens at and below it comes next.

    The first six children of each node come before all further ones, so that a wide level leaves room for what is
    below it.

    max_nodes: nodes drawn at most, roots included. max_depth: nodes further below a root are left out.
    """

    def __init__(self, snapshot: TreeSnapshot, max_nodes: int, max_depth: int) -> None:
        self._children: dict[int | None, list[NodeSnapshot]] = defaultdict(list)
        for node in snapshot.nodes:
            self._children[node.parent_id].append(node)
        self._tails: dict[int | None, list[TailSnapshot]] = defaultdict(list)
        for tail in snapshot.tails:
            self._tails[tail.parent_id].append(tail)
        self._num_tokens: Counter[int | None] = Counter()
        self._num_locked: Counter[int | None] = Counter()
        self._num_nodes: Counter[int | None] = Counter()
        self._sum_up(snapshot)
        self._shown = self._choose(max_nodes, max_depth)
        self.num_hidden = sum(node.state != "root" and node.node_id not in self._shown for node in snapshot.nodes)

    def children(self, parent_id: int | None) -> list[NodeSnapshot]:
        """Children of a node that are drawn, in the snapshot's order; the roots for None."""
        return [node for node in self._children.get(parent_id, ()) if node.node_id in self._shown]

    def hidden(self, parent_id: int | None) -> Hidden | None:
        """What is left out of a drawn node's children; None if that is nothing."""
        hidden = [node.node_id for node in self._children.get(parent_id, ()) if node.node_id not in self._shown]
        if not hidden:
            return None
        sums = (
            sum(map(number.__getitem__, hidden)) for number in (self._num_nodes, self._num_tokens, self._num_locked)
        )
        return Hidden(len(hidden), *sums)

    def tails(self, parent_id: int | None) -> Tails | None:
        """The tails under a drawn node, those without a node for None; None if there are none."""
        tails = self._tails.get(parent_id)
        return Tails(tuple(tails), is_lost=parent_id is None) if tails else None

    def subtree_len(self, node_id: int | None) -> int:
        """Tokens at and below a node; of the whole tree for None."""
        return self._num_tokens[node_id]

    def _sum_up(self, snapshot: TreeSnapshot) -> None:
        for node in reversed(snapshot.nodes):
            node_id, parent_id, node_len = node.node_id, node.parent_id, len(node.token_ids)
            self._num_tokens[node_id] += node_len
            self._num_locked[node_id] += node_len if node.state == "locked" else 0
            self._num_nodes[node_id] += node.state != "root"
            for number in (self._num_tokens, self._num_locked, self._num_nodes):
                number[parent_id] += number[node_id]

    def _choose(self, max_nodes: int, max_depth: int) -> set[int]:
        shown: set[int] = set()
        frontier: list[tuple[int, int, int, NodeSnapshot]] = []
        candidates = self._children.get(None, [])
        while len(shown) < max_nodes:
            candidates = heapq.nsmallest(max_nodes, candidates, key=self._rank)
            for place, node in enumerate(candidates):
                heapq.heappush(frontier, (place // _FIRST_CHILDREN, *self._rank(node), node))
            if not frontier:
                break
            _, _, node_id, node = heapq.heappop(frontier)
            shown.add(node_id)
            candidates = self._children.get(node_id, []) if node.depth < max_depth else []
        return shown

    def _rank(self, node: NodeSnapshot) -> tuple[int, int]:
        return -self._num_tokens[node.node_id], node.node_id
