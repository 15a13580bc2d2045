"""A trie with one node a token, the simplest structure that shares prefixes: what a radix tree is measured against."""

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.prefix_trace import Trace, TraceRequest
from radix_jax.cache import RadixTree

Serve = Callable[[TraceRequest, int], tuple[int, int]]  # with its first slot -> nodes visited, tokens found


class TrieNode:
    """One token. children: by token id. slot: where its KV is."""

    __slots__ = ("children", "slot")

    def __init__(self, slot: int) -> None:
        self.children: dict[int, TrieNode] = {}
        self.slot = slot


class TrieMatch(NamedTuple):
    """cached_len: tokens found. slots: theirs. num_visits: nodes looked at, the root not counted."""

    cached_len: int
    slots: list[int]
    num_visits: int


class TokenTrie:
    """Token ids -> slots, by one node a token. It only grows: nothing is locked or evicted."""

    def __init__(self) -> None:
        self._root = TrieNode(-1)
        self._num_nodes = 0

    @property
    def num_nodes(self) -> int:
        """Nodes, one a cached token; the root not counted."""
        return self._num_nodes

    def match(self, ids: Sequence[int]) -> TrieMatch:
        """The longest cached prefix of `ids`."""
        children = self._root.children
        slots: list[int] = []
        for token in ids:
            node = children.get(token)
            if node is None:
                break
            slots.append(node.slot)
            children = node.children
        return TrieMatch(len(slots), slots, len(slots))

    def insert(self, ids: Sequence[int], slots: Sequence[int]) -> int:
        """Add what is not cached yet; returns the number of tokens that were."""
        node = self._root
        num_new = 0
        for token, slot in zip(ids, slots, strict=True):
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = TrieNode(slot)
                num_new += 1
            node = child
        self._num_nodes += num_new
        return len(ids) - num_new


@dataclass(frozen=True)
class TrieComparison:
    """The same requests in a trie and in a radix tree at page size 1, nothing evicted.

    num_tokens: cached ones. num_found: prompt tokens that were cached when their request came, the same in both.
    nodes: of each at the end. visits: nodes looked at, a match. bytes_per_token: Python memory for a cached token.
    """

    num_requests: int
    num_tokens: int
    num_found: int
    trie_nodes: int
    tree_nodes: int
    trie_visits: float
    tree_visits: float
    trie_bytes_per_token: float
    tree_bytes_per_token: float


def compare_with_trie(trace: Trace, num_requests: int) -> TrieComparison:
    """Match and insert the first requests of a trace in both, one after the other.

    Raises:
        RuntimeError: the two find different numbers of tokens.
    """
    requests = trace.requests[:num_requests]
    trie, tree = TokenTrie(), RadixTree(page_size=1)
    trie_visits, trie_found, trie_bytes = _fill(requests, partial(_serve_trie, trie))
    tree_visits, tree_found, tree_bytes = _fill(requests, partial(_serve_tree, tree))
    if trie_found != tree_found:
        raise RuntimeError(f"the trie finds {trie_found} tokens, the radix tree {tree_found}")
    return TrieComparison(
        num_requests=len(requests),
        num_tokens=tree.total_size,
        num_found=tree_found,
        trie_nodes=trie.num_nodes,
        tree_nodes=sum(node.parent_id is not None for node in tree.snapshot().nodes),
        trie_visits=trie_visits / len(requests),
        tree_visits=tree_visits / len(requests),
        trie_bytes_per_token=trie_bytes / trie.num_nodes,
        tree_bytes_per_token=tree_bytes / tree.total_size,
    )


def _fill(
    requests: Sequence[TraceRequest], serve: Callable[[TraceRequest, int], tuple[int, int]]
) -> tuple[int, int, int]:
    """Nodes visited and tokens found by all requests, and the bytes that stay allocated."""
    num_visits = num_found = 0
    next_slot = 0
    gc.collect()
    tracemalloc.start()
    for request in requests:
        visits, found = serve(request, next_slot)
        num_visits += visits
        num_found += found
        next_slot += len(request.ids)
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return num_visits, num_found, num_bytes


def _serve_trie(trie: TokenTrie, request: TraceRequest, first_slot: int) -> tuple[int, int]:
    ids = request.ids.tolist()
    matched = trie.match(ids[: request.prompt_len])
    slots = matched.slots + list(range(first_slot + matched.cached_len, first_slot + len(ids)))
    trie.insert(ids, slots)
    return matched.num_visits, matched.cached_len


def _serve_tree(tree: RadixTree, request: TraceRequest, first_slot: int) -> tuple[int, int]:
    matched = tree.match_prefix(request.ids[: request.prompt_len])
    new_slots = np.arange(first_slot + matched.cached_len, first_slot + len(request.ids), dtype=np.int32)
    tree.insert_prefix(request.ids, np.concatenate([matched.pages, new_slots]))
    num_visits = 0
    node = matched.handle.node
    while node.parent is not None:
        num_visits += 1
        node = node.parent
    return num_visits, matched.cached_len
