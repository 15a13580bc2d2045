"""Donors: where the whole pages of a match end, a cached page may still begin with the next tokens, short of a page."""

import sys
from itertools import islice

from radix_jax.cache.handles import PrefixHandle
from radix_jax.cache.keys import TOKEN_BYTES
from radix_jax.cache.node import RadixTreeNode

MAX_CHILDREN = 256  # looked at in one search, which then takes about as long as a match

Donor = tuple[int | None, int, PrefixHandle | None]
NO_DONOR: Donor = (None, 0, None)


def find_donor(owner: object, node: RadixTreeNode, page: bytes) -> Donor:
    """The page right under `node` that begins with the most of `page`: (page id, tokens in common, handle over it).

    owner: the tree. page: bytes of the ids that follow `node`, up to one page of them. Of equal ones the page of the
    newest child is taken, and only the MAX_CHILDREN newest are looked at. The handle reaches to the end of the child's
    edge: nothing is split for a copy. NO_DONOR where no page begins with the next token.
    """
    best_key, num_bytes = b"", 0
    wanted = page[:TOKEN_BYTES]
    for key in islice(reversed(node.children), MAX_CHILDREN):
        # Only what beats the best so far is looked at twice: one comparison a child, and one a token in common.
        while len(wanted) > num_bytes and key.startswith(wanted):
            best_key, num_bytes = key, len(wanted)
            wanted = page[: num_bytes + TOKEN_BYTES]
    if num_bytes == 0:
        return NO_DONOR
    child = node.children[best_key]
    page_id = int.from_bytes(child.pages[:TOKEN_BYTES], sys.byteorder)
    return page_id, num_bytes // TOKEN_BYTES, PrefixHandle(owner, child, child.end_len)
