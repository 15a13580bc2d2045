"""A tree's nodes, and the tails under them, as the plain data that viz draws."""

from collections.abc import Hashable, Iterable
from dataclasses import replace

import numpy as np

from radix_jax.cache.handles import TailHandle
from radix_jax.cache.keys import INT32, namespace_key
from radix_jax.cache.node import NO_PAGES, RadixTreeNode
from radix_jax.viz import NodeSnapshot, NodeState, TailSnapshot, TreeSnapshot


def take_snapshot(roots: Iterable[RadixTreeNode], page_size: int) -> TreeSnapshot:
    """All nodes under `roots` in depth-first order, a parent before its children."""
    nodes: list[NodeSnapshot] = []
    stack = [(root, 0) for root in roots][::-1]
    while stack:
        node, depth = stack.pop()
        nodes.append(_node_snapshot(node, depth))
        stack.extend([(child, depth + 1) for child in node.children.values()][::-1])
    return TreeSnapshot(page_size=page_size, nodes=tuple(nodes))


def add_tails(snapshot: TreeSnapshot, tails: Iterable[TailHandle]) -> TreeSnapshot:
    """The snapshot of a tree, just taken, with the tails of the cache around it. A namespace that holds nothing but
    tails gets a root here, whose node_id is negative."""
    roots = {namespace_key(node.namespace): node.node_id for node in snapshot.nodes if node.state == "root"}
    extra: list[NodeSnapshot] = []
    rows: list[TailSnapshot] = []
    for tail in tails:
        node, key = tail.place
        if node is None and key not in roots:
            roots[key] = -1 - len(extra)
            extra.append(_empty_root(roots[key], tail.namespace))
        parent_id = None if tail.is_lost else roots[key] if node is None else node.uuid
        rows.append(TailSnapshot(parent_id, np.frombuffer(tail.ids, INT32), tail.page, tail.num_locks))
    return replace(snapshot, nodes=(*snapshot.nodes, *extra), tails=tuple(rows))


def _empty_root(node_id: int, namespace: Hashable) -> NodeSnapshot:
    return NodeSnapshot(node_id, None, 0, NO_PAGES, NO_PAGES, 0, 0, 0, namespace, "root")


def _node_snapshot(node: RadixTreeNode, depth: int) -> NodeSnapshot:
    parent = node.parent
    return NodeSnapshot(
        node_id=node.uuid,
        parent_id=None if parent is None else parent.uuid,
        depth=depth,
        token_ids=node.key,
        page_ids=node.value,
        num_locks=0 if parent is None else node.ref_count,
        num_pins=node.num_pins,
        num_hits=node.hits,
        namespace=node.namespace,
        state=_state(node),
        last_use=node.timestamp,
    )


def _state(node: RadixTreeNode) -> NodeState:
    if node.parent is None:
        return "root"
    if node.ref_count:
        return "locked"
    return "pinned" if node.num_pins else "evictable"
