"""Donors: where the whole pages of a match end, a cached page may still begin with the next tokens, short of a page."""

import sys
from collections.abc import Collection, Iterable
from itertools import islice

from radix_jax.cache.handles import PrefixHandle
from radix_jax.cache.keys import TOKEN_BYTES
from radix_jax.cache.node import RadixTreeNode

MAX_CANDIDATES = 256  # looked at in one search, which then takes about as long as a match

Donor = tuple[int | None, int, PrefixHandle | None]
NO_DONOR: Donor = (None, 0, None)


def find_donor(owner: object, node: RadixTreeNode, page: bytes, skip_pages: Collection[int] = ()) -> Donor:
    """The page right under `node` that begins with the most of `page`: (page id, tokens in common, handle over it).

    owner: the tree. page: bytes of the ids that follow `node`, up to one page of them. skip_pages: pages that can't be
    copied yet. Of equal ones the page of the newest child is taken, and only the MAX_CANDIDATES newest are looked at.
    The handle reaches to the end of the child's edge: nothing is split for a copy. NO_DONOR where no page begins with
    the next token.
    """
    keys: Iterable[bytes] = reversed(node.children)
    if skip_pages:
        keys = (key for key, child in reversed(node.children.items()) if _first_page(child) not in skip_pages)
    key, num_common = longest_beginning(keys, page)
    if num_common == 0:
        return NO_DONOR
    child = node.children[key]
    return _first_page(child), num_common, PrefixHandle(owner, child, child.end_len)


def _first_page(node: RadixTreeNode) -> int:
    return int.from_bytes(node.pages[:TOKEN_BYTES], sys.byteorder)


def longest_beginning(keys: Iterable[bytes], wanted: bytes) -> tuple[bytes, int]:
    """The one of the first MAX_CANDIDATES keys that begins with the most of `wanted`, and how many ids; b"" and 0
    where none begins with its first id. Of equal ones the first. Ids as bytes."""
    best, num_bytes = b"", 0
    part = wanted[:TOKEN_BYTES]
    for key in islice(keys, MAX_CANDIDATES):
        # Only what beats the best so far is looked at twice: one comparison a key, and one an id in common.
        while len(part) > num_bytes and key.startswith(part):
            best, num_bytes = key, len(part)
            part = wanted[: num_bytes + TOKEN_BYTES]
    return best, num_bytes // TOKEN_BYTES
