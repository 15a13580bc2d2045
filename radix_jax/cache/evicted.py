"""What was evicted, for people to read."""

from collections.abc import Hashable
from typing import NamedTuple

from radix_jax.cache.keys import TOKEN_BYTES
from radix_jax.cache.node import EVICTED, RadixTreeNode, path_to

Evicted = tuple[RadixTreeNode, bytes]  # a leaf, and the page ids that it lost


class EvictedSpan(NamedTuple):
    """Tokens [start, end) of a cached prefix of `namespace`, which were given up together."""

    namespace: Hashable
    start: int
    end: int


def span_of(evicted: Evicted, page_size: int) -> EvictedSpan:
    """Where those pages were; right after they went, while what the leaf hung from is still there."""
    node, pages = evicted
    above = path_to(node)
    if node.end_len == EVICTED:
        above.pop()
    start = sum(each.length for each in above)
    return EvictedSpan(node.namespace, start, start + len(pages) // TOKEN_BYTES * page_size)
