"""What was evicted, for people to read."""

from collections.abc import Hashable
from typing import NamedTuple

from radix_jax.cache.keys import TOKEN_BYTES
from radix_jax.cache.node import RadixTreeNode

Evicted = tuple[RadixTreeNode, bytes, int]  # a leaf, the page ids that it lost, and where it ended before


class EvictedSpan(NamedTuple):
    """Tokens [start, end) of a cached prefix of `namespace`, which were given up together."""

    namespace: Hashable
    start: int
    end: int


def span_of(evicted: Evicted, page_size: int) -> EvictedSpan:
    """Where those pages were."""
    node, pages, end = evicted
    return EvictedSpan(node.namespace, end - len(pages) // TOKEN_BYTES * page_size, end)
