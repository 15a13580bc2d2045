"""Peeks: where a match ends, found and followed without changing anything: no split, no hit, no recency."""

from typing import NamedTuple

from jaxtyping import Int32
from numpy import concatenate, ndarray

from radix_jax.cache.keys import TOKEN_BYTES, KeyBytes
from radix_jax.cache.node import NO_PAGES, RadixTreeNode, descend, join_pages


class Peek(NamedTuple):
    """cached_len: tokens of the match. node: the node inside which or at whose end it ends; a root if it is empty.

    Two current peeks with the same node and the same cached_len have the same tokens up to there.
    """

    cached_len: int
    node: RadixTreeNode

    def followed(self) -> "Peek | None":
        """The same match, its node found again after splits, in constant time but for those; None where it was evicted.

        What was inserted behind it is not looked at.
        """
        cached_len, node = self
        if not node.in_tree:
            node = node.find_living()  # a split may have left the front part, in which the match ends
        if node.end_len < cached_len:
            return None
        parent = node.parent
        while parent is not None and parent.end_len >= cached_len:
            node, parent = parent, parent.parent
        return self if node is self.node else Peek(cached_len, node)

    @property
    def whole_node(self) -> RadixTreeNode:
        """The lowest node that the match covers to its end."""
        parent = self.node.parent
        return self.node if parent is None or self.node.end_len == self.cached_len else parent


def peek_below(top: RadixTreeNode, key: KeyBytes, page_bytes: int) -> Peek:
    """Where the match of `key` ends, given that it reaches the end of `top`.

    page_bytes: bytes of a page of token ids.
    """
    path, partial, partial_len = descend(top, key, top.end_len * TOKEN_BYTES, page_bytes)
    last = path[-1] if path else top
    return Peek(last.end_len, last) if partial is None else Peek(last.end_len + partial_len, partial)


def pages_below(root: RadixTreeNode, key: KeyBytes, page_bytes: int) -> Int32[ndarray, " P"]:
    """The pages that a match of `key` would give; only for looking, since no handle protects them."""
    path, partial, partial_len = descend(root, key, 0, page_bytes)
    rest = NO_PAGES if partial is None else partial.value[: partial_len * TOKEN_BYTES // page_bytes]
    return concatenate([join_pages(path), rest])
