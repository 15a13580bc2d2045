"""What the tree hands out: handles and the results of match and insert."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.node import RadixTreeNode


class PrefixHandle:
    """A prefix of `cached_len` tokens in one tree, to lock and unlock; callers change nothing in it.

    owner: the tree that made it. node: the node at which the prefix ends; splits keep this true.
    num_locks: locks taken through this handle and not given back.
    """

    __slots__ = ("cached_len", "node", "num_locks", "owner")

    def __init__(self, owner: object, node: RadixTreeNode, cached_len: int) -> None:
        self.owner = owner
        self.node = node
        self.cached_len = cached_len
        self.num_locks = 0


class MatchResult(NamedTuple):
    """The longest cached prefix of a key.

    cached_len: its tokens, a multiple of page_size. pages: its page ids, read-only, safe to use while the handle is
    locked. handle: covers exactly cached_len tokens. donor_page, donor_len, donor_handle: the page whose first
    donor_len tokens continue the match; None, 0 and None as long as partial pages are not built.
    """

    cached_len: int
    pages: Int32[np.ndarray, " P"]
    handle: PrefixHandle
    donor_page: int | None
    donor_len: int
    donor_handle: PrefixHandle | None


class InsertResult(NamedTuple):
    """cached_len: tokens that were in the tree already. handle: covers all full pages of the key."""

    cached_len: int
    handle: PrefixHandle
