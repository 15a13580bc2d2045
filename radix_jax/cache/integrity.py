"""What must hold for the nodes of a tree, whatever its policy and its counters."""

from collections.abc import Sequence

import numpy as np

from radix_jax.cache.errors import IntegrityError
from radix_jax.cache.node import RadixTreeNode, join_pages


def check_nodes(nodes: Sequence[RadixTreeNode], page_bytes: int) -> None:
    """Check links, lengths, locks and priorities of all nodes that are not roots, and that no page is there twice.

    Raises:
        IntegrityError: names the node or the pages.
    """
    for node in nodes:
        parent = node.parent
        if parent is None or parent.children.get(node.key_fn(node.edge)) is not node:
            raise IntegrityError(f"node {node.uuid} is not where its parent's children name it")
        if not node.in_tree or parent.namespace is not node.namespace:
            raise IntegrityError(f"node {node.uuid} is marked as evicted, or is in another namespace than its parent")
        if not node.edge or len(node.edge) != len(node.value) * page_bytes:
            raise IntegrityError(f"node {node.uuid} has {node.length} tokens and {len(node.value)} pages")
        children = node.children.values()
        if node.ref_count < sum(child.ref_count for child in children) or node.ref_count < 0:
            raise IntegrityError(f"node {node.uuid} has {node.ref_count} locks, fewer than its children")
        if any(child.priority > node.priority for child in children):
            raise IntegrityError(f"node {node.uuid} has priority {node.priority}, a child of it a higher one")
    values, counts = np.unique(join_pages(nodes), return_counts=True)
    if (counts > 1).any():
        raise IntegrityError(f"pages {values[counts > 1].tolist()} are in the tree more than once")
