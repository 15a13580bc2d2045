"""RadixTreeNode: one edge of the tree, its token ids and the pages that hold their KV."""

from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.keys import TOKEN_BYTES, TokenIds, common_len, to_int32, token_bytes

NO_PAGES = np.empty(0, np.int32)
NO_PAGES.setflags(write=False)


class RadixTreeNode:
    """A node and the edge that leads to it.

    parent: None for a root, and for a node that was evicted.
    children: by `key_fn` of their edges.
    key_fn: edge bytes -> the bytes of their first page, which no two children of a node share.
    ref_count: locks on this node or below it; a root counts as locked always.
    uuid: rises with each node of a tree; the tie-break of equal eviction keys.
    timestamp: value of the tree's use counter at the last use; no clock.
    edge: the key as bytes, 4 a token. value: int32 page ids, read-only, one a page of the key.
    hits: matches that used the whole node. priority: the highest of those inserted through it.
    namespace: the namespace it lives in. in_tree: False once evicted.
    """

    __slots__ = (
        "_uuids",
        "children",
        "edge",
        "hits",
        "in_tree",
        "key_fn",
        "namespace",
        "parent",
        "priority",
        "ref_count",
        "timestamp",
        "uuid",
        "value",
    )

    def __init__(self, key_fn: Callable[[bytes], bytes], uuids: Iterator[int], namespace: Hashable = None) -> None:
        self._uuids = uuids
        self.key_fn = key_fn
        self.uuid = next(uuids)
        self.parent: RadixTreeNode | None = None
        self.children: dict[bytes, RadixTreeNode] = {}
        self.edge = b""
        self.value = NO_PAGES
        self.ref_count = 0
        self.timestamp = 0
        self.hits = 0
        self.priority = 0
        self.namespace = namespace
        self.in_tree = True

    @property
    def key(self) -> Int32[np.ndarray, " T"]:
        """Token ids of the edge, a read-only view."""
        return np.frombuffer(self.edge, np.int32)

    @property
    def length(self) -> int:
        """Tokens of the edge."""
        return len(self.edge) // TOKEN_BYTES

    def is_root(self) -> bool:
        """True for the node at which a namespace starts."""
        return self.parent is None and self.in_tree

    def is_leaf(self) -> bool:
        """True without children."""
        return not self.children

    def set_key_value(self, key: TokenIds | bytes, value: TokenIds) -> None:
        """Set the edge's token ids (or their bytes) and their pages, which are copied.

        Raises:
            ValueError: no tokens, or their number is no multiple of the number of pages.
        """
        edge = key if isinstance(key, bytes) else token_bytes(key)
        pages = to_int32(value, "pages").copy()
        if not len(pages) or not edge or len(edge) // TOKEN_BYTES % len(pages):
            raise ValueError(f"a node of {len(edge) // TOKEN_BYTES} tokens can't have {len(pages)} full pages")
        pages.setflags(write=False)
        self.edge = edge
        self.value = pages

    def set_parent(self, parent: "RadixTreeNode") -> None:
        """Become the child of `parent` under the first page of the own edge."""
        self.parent = parent
        parent.children[self.key_fn(self.edge)] = self

    def get_match_len(self, key: TokenIds) -> int:
        """Tokens that `key` and this node's edge have in common from their start."""
        return common_len(self.edge, token_bytes(key), 0)

    def split_at(self, pos: int) -> "RadixTreeNode":
        """Give the first `pos` tokens to a new parent and keep the rest; returns the new parent.

        No KV moves. The new parent takes over locks, hits, priority and time of use. A tree must also be told of it
        (its eviction order holds all unlocked nodes), so callers outside of a tree use nodes of no tree.

        Raises:
            ValueError: `pos` is not inside the edge, or not where a page ends; or the node has no parent.
        """
        page_size = self.length // max(len(self.value), 1)
        if self.parent is None or not 0 < pos < self.length or pos % page_size:
            raise ValueError(
                f"can't split a node of {self.length} tokens at {pos}: splits fall inside the edge of a node with a "
                f"parent, at a multiple of page_size={page_size}"
            )
        front = RadixTreeNode(self.key_fn, self._uuids, self.namespace)
        front.set_key_value(self.edge[: pos * TOKEN_BYTES], self.value[: pos // page_size])
        front.ref_count = self.ref_count
        front.timestamp = self.timestamp
        front.hits = self.hits
        front.priority = self.priority
        front.set_parent(self.parent)
        self.set_key_value(self.edge[pos * TOKEN_BYTES :], self.value[pos // page_size :])
        self.set_parent(front)
        return front


def join_pages(nodes: Sequence[RadixTreeNode]) -> Int32[np.ndarray, " P"]:
    """Page ids of the nodes, one after the other; of a single node its own read-only array."""
    if len(nodes) == 1:
        return nodes[0].value
    return np.concatenate([node.value for node in nodes]) if nodes else NO_PAGES
