"""Which prefixes are cached, and in which pages: plain bookkeeping on the host."""

from radix_jax.cache.errors import HandleError, IntegrityError, OutOfPages
from radix_jax.cache.events import CacheCleared, CacheEvent, EventQueue, PagesRemoved, PagesStored
from radix_jax.cache.eviction_rules import NodeView
from radix_jax.cache.handles import InsertResult, MatchResult, PrefixHandle, TailHandle
from radix_jax.cache.keys import of_weights
from radix_jax.cache.node import RadixTreeNode
from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.pins import Pin
from radix_jax.cache.prefix_cache import CommitResult, PrefixCache
from radix_jax.cache.radix_tree import RadixTree

__all__ = [
    "CacheCleared",
    "CacheEvent",
    "CommitResult",
    "EventQueue",
    "HandleError",
    "InsertResult",
    "IntegrityError",
    "MatchResult",
    "NodeView",
    "OutOfPages",
    "PagePool",
    "PagesRemoved",
    "PagesStored",
    "Pin",
    "PrefixCache",
    "PrefixHandle",
    "RadixTree",
    "RadixTreeNode",
    "TailHandle",
    "of_weights",
]
