"""A tree's nodes as the plain data that viz draws."""

from collections.abc import Iterable

from radix_jax.cache.node import RadixTreeNode
from radix_jax.viz import NodeSnapshot, TreeSnapshot


def take_snapshot(roots: Iterable[RadixTreeNode], page_size: int) -> TreeSnapshot:
    """All nodes under `roots` in depth-first order, a parent before its children."""
    nodes: list[NodeSnapshot] = []
    stack = [(root, 0) for root in roots][::-1]
    while stack:
        node, depth = stack.pop()
        nodes.append(_node_snapshot(node, depth))
        stack.extend([(child, depth + 1) for child in node.children.values()][::-1])
    return TreeSnapshot(page_size=page_size, nodes=tuple(nodes))


def _node_snapshot(node: RadixTreeNode, depth: int) -> NodeSnapshot:
    parent = node.parent
    return NodeSnapshot(
        node_id=node.uuid,
        parent_id=None if parent is None else parent.uuid,
        depth=depth,
        token_ids=node.key,
        page_ids=node.value,
        num_locks=0 if parent is None else node.ref_count,
        num_hits=node.hits,
        namespace=node.namespace,
        state="root" if parent is None else "locked" if node.ref_count else "evictable",
    )
