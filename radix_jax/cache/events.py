"""What a tree tells of its changes: the KV events of vLLM and SGLang, with pages in the place of hashed blocks.

- PagesStored(page_ids, parent_page, token_ids, page_size, namespace) is their
  BlockStored(block_hashes, parent_block_hash, token_ids, block_size, lora_id)
- PagesRemoved(page_ids, namespace) is their BlockRemoved(block_hashes)
- CacheCleared() is their AllBlocksCleared()

A page id names one prefix from the event that stores it to the one that removes it.

Only whole pages are told of. The tails of a PrefixCache come and go without an event: a consumer of these events (a
router that sends a prompt where most of its blocks are, a store that copies blocks) knows a block by all its tokens,
and in both engines only full blocks have a hash and events. So it expects less of a cache than a hit gives, by less
than a page. Locks, pins and uses are no events either.
"""

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from radix_jax.cache.node import RadixTreeNode
from radix_jax.config import check_int


class PagesStored(NamedTuple):
    """Pages entered the tree, one after the other behind `parent_page`, which is None at the start of a namespace.

    token_ids: `page_size` a page.
    """

    page_ids: list[int]
    parent_page: int | None
    token_ids: list[int]
    page_size: int
    namespace: Hashable


class PagesRemoved(NamedTuple):
    """Pages of one node left the tree, in the order of their tokens; never before the pages that continue them."""

    page_ids: list[int]
    namespace: Hashable


class CacheCleared(NamedTuple):
    """Everything left the tree, in all namespaces."""


CacheEvent = PagesStored | PagesRemoved | CacheCleared


class EventQueue:
    """Keeps the newest `max_events` events: `RadixTree(on_event=EventQueue(10_000))`.

    Raises:
        ValueError: max_events below 1.
    """

    def __init__(self, max_events: int) -> None:
        check_int("max_events", max_events, at_least=1)
        self._events: deque[CacheEvent] = deque(maxlen=max_events)
        self._num_events = 0

    @property
    def num_events(self) -> int:
        """All events so far: taken, waiting and lost."""
        return self._num_events

    def __call__(self, event: CacheEvent, /) -> None:
        """Append an event; when the queue is full the oldest one is lost, which `take` shows."""
        self._events.append(event)
        self._num_events += 1

    def take(self) -> tuple[int, list[CacheEvent]]:
        """The number of the first event, counted from 0, and all that wait; the queue is empty then.

        A first number above the last one seen + 1 says how many were lost; ask the tree for a snapshot then.
        """
        events = list(self._events)
        self._events.clear()
        return self._num_events - len(events), events


def stored_event(leaf: RadixTreeNode, page_size: int) -> PagesStored:
    """A leaf entered the tree."""
    parent = leaf.parent
    parent_page = None if parent is None or parent.is_root() else int(parent.value[-1])
    return PagesStored(leaf.value.tolist(), parent_page, leaf.key.tolist(), page_size, leaf.namespace)


def removed_event(pages: bytes, namespace: Hashable) -> PagesRemoved:
    """Pages, as bytes of int32, left the tree."""
    return PagesRemoved(np.frombuffer(pages, np.int32).tolist(), namespace)
