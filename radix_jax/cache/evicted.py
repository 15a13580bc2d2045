"""How leaves are taken out of a tree, and what was evicted, for people to read."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from radix_jax.cache.eviction import EvictionPolicy
from radix_jax.cache.keys import TOKEN_BYTES
from radix_jax.cache.node import RadixTreeNode
from radix_jax.cache.pins import PinnedLast
from radix_jax.cache.roots import Roots

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


class Leaving:
    """Takes leaves out of a tree: from its structure, the order of eviction, and the count of what is pinned."""

    def __init__(self, roots: Roots, policy: EvictionPolicy, pins: PinnedLast | None, page_size: int) -> None:
        self._roots = roots
        self._policy = policy
        self._pins = pins
        self._page_size = page_size

    def take(
        self, next_leaf: Callable[[], RadixTreeNode | None], num_tokens: int, trim: bool = False
    ) -> tuple[list[Evicted], int]:
        """Take unlocked leaves out until at least `num_tokens` are gone or there is no next one; what went, in order,
        and the tokens of it. trim: as in `RadixTree.evict`.

        Raises:
            Exception: what `next_leaf` raised while nothing was taken.
        """
        taken: list[Evicted] = []
        num_taken = 0
        while num_taken < num_tokens:
            try:
                leaf = next_leaf()
            except Exception:
                if not taken:
                    raise
                break  # what is out already must reach the caller
            if leaf is None:
                break
            pages, length, end_len = leaf.pages, len(leaf.edge) // TOKEN_BYTES, leaf.end_len
            if trim and (surplus := num_taken + length - num_tokens) >= self._page_size:
                pages = leaf.trim_to(surplus - surplus % self._page_size)
                length -= surplus - surplus % self._page_size
                self._policy.changed(leaf)
                if leaf.num_pins and self._pins:
                    self._pins.note_trimmed(length)
            else:
                parent = self._roots.remove(leaf)
                self._policy.removed(leaf)
                if not parent.children and not parent.ref_count:
                    self._policy.changed(parent)
            taken.append((leaf, pages, end_len))
            num_taken += length
        return taken, num_taken
