"""What was evicted, for people to read."""

from collections.abc import Hashable
from typing import NamedTuple

from radix_jax.cache.node import RadixTreeNode, path_to


class EvictedSpan(NamedTuple):
    """Tokens [start, end) of a cached prefix of `namespace`, which were given up together."""

    namespace: Hashable
    start: int
    end: int


def span_of(node: RadixTreeNode) -> EvictedSpan:
    """Where an evicted node was; right after its eviction, while what it hung from is still there."""
    start = sum(each.length for each in path_to(node)[:-1])
    return EvictedSpan(node.namespace, start, start + node.length)
