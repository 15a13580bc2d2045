"""What the tree hands out: handles and the results of match and insert."""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.errors import HandleError
from radix_jax.cache.keys import TOKEN_BYTES, KeyBytes, TokenIds, key_bytes, namespace_key
from radix_jax.cache.node import EVICTED, RadixTreeNode

TailPlace = tuple[RadixTreeNode | None, Hashable]

_NUM_CHECKED = 64  # tokens of a resumed match that are compared again, to find wrong use


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


class TailHandle:
    """A cached page of fewer tokens than page_size, which continues a prefix: to lock, copy from, and unlock.

    owner: the tails it belongs to. place: the prefix in front of it: the node that it continues and where that ends, or
    None and the key of the namespace that it begins. ids: its tokens, as bytes. page: holds their KV.
    """

    __slots__ = ("ids", "namespace", "num_locks", "owner", "page", "place")

    def __init__(self, owner: object, place: TailPlace, namespace: Hashable, ids: bytes, page: int) -> None:
        self.owner = owner
        self.place = place
        self.namespace = namespace
        self.ids = ids
        self.page = page
        self.num_locks = 0

    @property
    def is_lost(self) -> bool:
        """Whether the prefix in front of it left the tree, so that no match leads here."""
        node, end_len = self.place
        return node is not None and node.end_len != end_len


class BranchHandle:
    """A prefix in two parts: `base` in a namespace that many share, and behind it `own` in that of a Branch. Locked and
    unlocked as one. cached_len: tokens of both."""

    __slots__ = ("base", "cached_len", "own")

    def __init__(self, base: PrefixHandle, own: PrefixHandle) -> None:
        self.base = base
        self.own = own
        self.cached_len = base.cached_len + own.cached_len


Handle = PrefixHandle | BranchHandle


class MatchResult(NamedTuple):
    """The longest cached prefix of a key.

    cached_len: its tokens, a multiple of page_size. pages: its page ids, read-only, safe to use while the handle is
    locked. handle: covers exactly cached_len tokens. donor_page, donor_len: the page whose first donor_len < page_size
    tokens continue the match, to be copied while donor_handle, which covers it, is locked; None, 0, None: no such page.
    """

    cached_len: int
    pages: Int32[np.ndarray, " P"]
    handle: Handle
    donor_page: int | None
    donor_len: int
    donor_handle: PrefixHandle | TailHandle | None


class InsertResult(NamedTuple):
    """cached_len: tokens that were in the tree already. handle: covers all full pages of the key."""

    cached_len: int
    handle: PrefixHandle


def unusable(handle: PrefixHandle, tree: object) -> HandleError:
    """Why `tree` can't use `handle`."""
    if handle.owner is not tree:
        return HandleError("the handle is of another tree; use it with the tree that made it")
    return HandleError(f"the handle's {handle.cached_len} tokens were evicted or reset; match again")


def resume(
    start: PrefixHandle, tree: object, ids: TokenIds, namespace: Hashable
) -> tuple[RadixTreeNode | None, KeyBytes, int]:
    """The lowest node left of `start`, the bytes of the ids from a little in front of its end on, and that end in them.

    None in the place of the node, and all the bytes, if nothing is left.

    Raises:
        HandleError: the handle is of another tree, or it is not of these ids and this namespace, as far as its last 64
        tokens show.
    """
    if start.owner is not tree:
        raise unusable(start, tree)
    node = start.node
    if node.end_len == EVICTED:
        node = node.find_living()
    if node.parent is None:
        return None, key_bytes(ids), 0
    end_len = node.end_len
    end = min(len(node.edge), _NUM_CHECKED * TOKEN_BYTES)
    key = key_bytes(ids[end_len - end // TOKEN_BYTES :])
    if (
        len(ids) < end_len
        or not node.edge.endswith(key[:end] if type(key) is bytes else bytes(key[:end]))
        or (node.namespace is not namespace and namespace_key(node.namespace) != namespace_key(namespace))
    ):
        raise HandleError(
            f"start leads to {end_len} tokens in namespace {node.namespace!r}, but the {len(ids)} ids in namespace "
            f"{namespace!r} don't begin with them; pass a handle of an earlier match of these ids"
        )
    return node, key, end
