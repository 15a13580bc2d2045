"""RadixTreeNode: one edge of the tree, its token ids and the pages that hold their KV."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.keys import INT32, TOKEN_BYTES, KeyBytes, TokenIds, common_len, to_int32, token_bytes

EVICTED = -1  # end_len of a node that has left its tree
NO_PAGES = np.empty(0, np.int32)
NO_PAGES.setflags(write=False)


class RadixTreeNode:
    """A node and the edge that leads to it.

    parent: None for a root; a node that was evicted still names the parent it had.
    children: by `key_fn` of their edges.
    key_fn: edge bytes -> the bytes of their first page, which no two children of a node share.
    ref_count: locks on this node or below it; a root counts as locked always.
    uuid: rises with each node of a tree; the tie-break of equal eviction keys.
    created: uuid of the node that brought these tokens; a split gives it to both parts.
    timestamp: value of the tree's use counter at the last use; no clock.
    edge: the key as bytes, 4 a token. pages: the value as bytes, 4 a page.
    end_len: tokens from the root to the end of this node; EVICTED once it has left the tree.
    reach_len: for a leaf, the longest prefix that ever ended at or below it, evicted ones included.
    hits: requests that used the whole node. priority: the highest of those inserted through it.
    num_pins: pins on this node or below it. namespace: the namespace it lives in.
    memo: what the eviction policy keeps of the node; a split gives it to both parts.
    """

    __slots__ = (
        "_uuids",
        "children",
        "created",
        "edge",
        "end_len",
        "hits",
        "key_fn",
        "memo",
        "namespace",
        "num_pins",
        "pages",
        "parent",
        "priority",
        "reach_len",
        "ref_count",
        "timestamp",
        "uuid",
    )

    def __init__(
        self,
        key_fn: Callable[[bytes], bytes],
        uuids: Iterator[int],
        namespace: Hashable = None,
        edge: bytes = b"",
        pages: bytes = b"",
    ) -> None:
        self._uuids = uuids
        self.key_fn = key_fn
        self.uuid = self.created = next(uuids)
        self.parent: RadixTreeNode | None = None
        self.children: dict[bytes, RadixTreeNode] = {}
        self.edge = edge
        self.pages = pages
        self.end_len = self.reach_len = 0
        self.ref_count = self.timestamp = self.hits = self.priority = self.num_pins = 0
        self.namespace = namespace
        self.memo: Any = None

    @property
    def key(self) -> Int32[np.ndarray, " T"]:
        """Token ids of the edge, a read-only view."""
        return np.frombuffer(self.edge, INT32)

    @property
    def value(self) -> Int32[np.ndarray, " P"]:
        """Page ids, one a page of the key, a read-only view."""
        return np.frombuffer(self.pages, INT32)

    @property
    def length(self) -> int:
        """Tokens of the edge."""
        return len(self.edge) // TOKEN_BYTES

    @property
    def start_len(self) -> int:
        """Tokens in front of the edge."""
        return self.end_len - len(self.edge) // TOKEN_BYTES

    @property
    def in_tree(self) -> bool:
        """False once evicted."""
        return self.end_len != EVICTED

    def is_root(self) -> bool:
        """True for the node at which a namespace starts."""
        return self.parent is None

    def is_leaf(self) -> bool:
        """True without children."""
        return not self.children

    def find_living(self) -> "RadixTreeNode":
        """This node, or the lowest above it that was not evicted."""
        node = self
        while node.end_len == EVICTED and node.parent is not None:
            node = node.parent
        return node

    def set_key_value(self, key: TokenIds | bytes, value: TokenIds) -> None:
        """Set the edge's token ids (or their bytes) and their pages, which are copied.

        Raises:
            ValueError: no tokens, or their number is no multiple of the number of pages.
        """
        edge = key if isinstance(key, bytes) else token_bytes(key)
        pages = to_int32(value, "pages")
        if not len(pages) or not edge or len(edge) // TOKEN_BYTES % len(pages):
            raise ValueError(f"a node of {len(edge) // TOKEN_BYTES} tokens can't have {len(pages)} full pages")
        self.edge = edge
        self.pages = pages.tobytes()

    def set_parent(self, parent: "RadixTreeNode") -> None:
        """Become the child of `parent` under the first page of the own edge."""
        self.parent = parent
        self.end_len = self.reach_len = parent.end_len + len(self.edge) // TOKEN_BYTES
        parent.children[self.key_fn(self.edge)] = self

    def add_child(self, edge: bytes, pages: bytes) -> "RadixTreeNode":
        """A new child in the same namespace; `edge` holds one or more full pages, and starts as no other child's."""
        child = RadixTreeNode(self.key_fn, self._uuids, self.namespace, edge, pages)
        child.parent = self
        child.end_len = child.reach_len = self.end_len + len(edge) // TOKEN_BYTES
        self.children[self.key_fn(edge)] = child
        return child

    def get_match_len(self, key: TokenIds) -> int:
        """Tokens that `key` and this node's edge have in common from their start."""
        return common_len(self.edge, token_bytes(key), 0)

    def split_at(self, pos: int) -> "RadixTreeNode":
        """Give the first `pos` tokens to a new parent and keep the rest; returns the new parent.

        No KV moves. The new parent takes over locks, pins, hits, priority, creation and time of use. A tree must also
        be told of it (its eviction order holds all unlocked nodes), so callers outside of a tree use nodes of no tree.

        Raises:
            ValueError: `pos` is not inside the edge, or not where a page ends; or the node has no parent.
        """
        cut, pages_cut = self._cut_at(pos)
        parent = self.parent
        if parent is None:
            raise ValueError(f"can't split a root at {pos}; splits fall inside the edge of a node with a parent")
        front = RadixTreeNode(self.key_fn, self._uuids, self.namespace, self.edge[:cut], self.pages[:pages_cut])
        front.ref_count = self.ref_count
        front.num_pins = self.num_pins
        front.timestamp = self.timestamp
        front.created = self.created
        front.hits = self.hits
        front.priority = self.priority
        front.memo = self.memo
        front.set_parent(parent)
        self.edge = self.edge[cut:]
        self.pages = self.pages[pages_cut:]
        self.parent = front
        front.children[self.key_fn(self.edge)] = self
        return front

    def trim_to(self, pos: int) -> bytes:
        """Keep the first `pos` tokens of a leaf; returns the pages of the rest, as bytes.

        Raises:
            ValueError: `pos` is not inside the edge, or not where a page ends; or the node has children.
        """
        cut, pages_cut = self._cut_at(pos)
        if self.children:
            raise ValueError(f"can't trim a node with {len(self.children)} children; only a leaf has an end to trim")
        rest = self.pages[pages_cut:]
        self.end_len -= (len(self.edge) - cut) // TOKEN_BYTES
        self.edge = self.edge[:cut]
        self.pages = self.pages[:pages_cut]
        return rest

    def _cut_at(self, pos: int) -> tuple[int, int]:
        """Where the first `pos` tokens end in edge and pages, in bytes."""
        page_size = len(self.edge) // max(len(self.pages), 1)
        if not 0 < pos < self.length or pos % page_size:
            raise ValueError(
                f"can't split a node of {self.length} tokens at {pos}: splits fall inside the edge of a node with a "
                f"parent, at a multiple of page_size={page_size}"
            )
        return pos * TOKEN_BYTES, pos // page_size * TOKEN_BYTES


def descend(
    top: RadixTreeNode, key: KeyBytes, offset: int, page_bytes: int
) -> tuple[list[RadixTreeNode], RadixTreeNode | None, int]:
    """Follow `key` from byte `offset` down from `top`: nodes wholly matched, the one matched in part, tokens of it.

    page_bytes: bytes of a page of token ids; matches end where a page ends. A whole edge is compared at once, in place.
    """
    if isinstance(key, memoryview):
        return _descend_view(top, key, offset, page_bytes)
    key_len = len(key)
    path: list[RadixTreeNode] = []
    children = top.children
    while offset < key_len:
        node = children.get(key[offset : offset + page_bytes])  # a tail is shorter than any child's key
        if node is None:
            break
        edge = node.edge
        if not key.startswith(edge, offset):
            num_common = common_len(edge, key, offset)
            return path, node, num_common - num_common % (page_bytes // TOKEN_BYTES)
        path.append(node)
        offset += len(edge)
        children = node.children
    return path, None, 0


def _descend_view(
    top: RadixTreeNode, key: memoryview, offset: int, page_bytes: int
) -> tuple[list[RadixTreeNode], RadixTreeNode | None, int]:
    """As `descend`: slices of a view are no copies. `bytes.startswith` takes them; a view has no such method."""
    path: list[RadixTreeNode] = []
    children = top.children
    while offset < len(key):
        node = children.get(bytes(key[offset : offset + page_bytes]))
        if node is None:
            break
        edge = node.edge
        rest = key[offset : offset + len(edge)]
        if len(rest) < len(edge) or not edge.startswith(rest):
            num_common = common_len(edge, key, offset)
            return path, node, num_common - num_common % (page_bytes // TOKEN_BYTES)
        path.append(node)
        offset += len(edge)
        children = node.children
    return path, None, 0


def path_to(node: RadixTreeNode) -> list[RadixTreeNode]:
    """`node` and all above it, the root left out, from above."""
    path: list[RadixTreeNode] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def raise_priority(node: RadixTreeNode, priority: int) -> None:
    """Raise the priority of `node` and all above it to at least this: a parent's is never below a child's."""
    while node.parent is not None and node.priority < priority:
        node.priority = priority
        node = node.parent


def lock_path(node: RadixTreeNode) -> int:
    """Count a lock on the node and all above it; returns the tokens on the path that had none."""
    end_len = node.end_len
    while not node.ref_count and (parent := node.parent) is not None:
        node.ref_count = 1
        node = parent
    locked_len = end_len - node.end_len
    while (parent := node.parent) is not None:
        node.ref_count += 1
        node = parent
    return locked_len


def unlock_path(node: RadixTreeNode, now: int) -> int:
    """Take a lock off the node and all above it; what has none left counts as used `now`. Returns its tokens."""
    end_len = node.end_len
    while node.ref_count == 1 and (parent := node.parent) is not None:
        node.ref_count = 0
        node.timestamp = now
        node = parent
    unlocked_len = end_len - node.end_len
    while (parent := node.parent) is not None:
        node.ref_count -= 1
        node = parent
    return unlocked_len


def join_pages(nodes: Sequence[RadixTreeNode]) -> Int32[np.ndarray, " P"]:
    """Page ids of the nodes, one after the other, read-only."""
    return np.frombuffer(b"".join([node.pages for node in nodes]), INT32)
