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
        if node.start_len != parent.end_len or parent.namespace is not node.namespace:
            raise IntegrityError(f"node {node.uuid} doesn't start where its parent ends, or is in another namespace")
        if not node.edge or len(node.edge) != len(node.value) * page_bytes:
            raise IntegrityError(f"node {node.uuid} has {node.length} tokens and {len(node.value)} pages")
        if not node.children and node.reach_len < node.end_len:
            raise IntegrityError(f"node {node.uuid} ends at {node.end_len}, but reaches only to {node.reach_len}")
        children = node.children.values()
        if node.ref_count < sum(child.ref_count for child in children) or node.ref_count < 0:
            raise IntegrityError(f"node {node.uuid} has {node.ref_count} locks, fewer than its children")
        if node.num_pins < sum(child.num_pins for child in children) or node.num_pins < 0:
            raise IntegrityError(f"node {node.uuid} has {node.num_pins} pins, fewer than its children")
        if any(child.priority > node.priority for child in children):
            raise IntegrityError(f"node {node.uuid} has priority {node.priority}, a child of it a higher one")
    values, counts = np.unique(join_pages(nodes), return_counts=True)
    if (counts > 1).any():
        raise IntegrityError(f"pages {values[counts > 1].tolist()} are in the tree more than once")


def check_sizes(
    nodes: Sequence[RadixTreeNode],
    evictable_len: int,
    protected_len: int,
    pinned_len: int,
) -> None:
    """Check a tree's counts.

    Raises:
        IntegrityError: names what is off.
    """
    unlocked_len = sum(node.length for node in nodes if node.ref_count == 0)
    locked_len = sum(node.length for node in nodes) - unlocked_len
    if (unlocked_len, locked_len) != (evictable_len, protected_len):
        raise IntegrityError(
            f"evictable_size={evictable_len} and protected_size={protected_len}, recounted {unlocked_len} and "
            f"{locked_len}"
        )
    recounted_len = sum(node.length for node in nodes if node.num_pins)
    if recounted_len != pinned_len:
        raise IntegrityError(f"pinned_size={pinned_len}, recounted {recounted_len}")
