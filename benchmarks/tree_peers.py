"""Prefix caches behind one interface, so that one program can measure them: ours, and hashed pages as vLLM has them."""

import hashlib
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from radix_jax.cache import MatchResult, RadixTree

Ids = Int32[np.ndarray, " N"]


class PrefixIndex(Protocol):
    """A prefix cache of `page_size` tokens a page, least recently used first, empty at first.

    Keys, values and results are in the cache's own form, so that no conversion falls into a measured call: keys and
    values are made by `prepare_keys` and `prepare_pages` before.
    """

    name: str
    page_size: int

    def prepare_keys(self, ids: Int32[np.ndarray, " T"], prompt_len: int) -> tuple[Any, Any]:
        """Keys to `match` the first `prompt_len` tokens with, and to `insert` all of them with."""
        ...

    def prepare_pages(self, pages: Int32[np.ndarray, " P"]) -> Any:
        """The value to `insert` full pages with."""
        ...

    def match(self, key: Any) -> Any:
        """Find the longest cached prefix, with its pages, as used now."""
        ...

    def start(self, key: Any) -> Any:
        """Match, and lock what matched."""
        ...

    def insert(self, key: Any, value: Any) -> int:
        """Add the full pages of a key; returns the tokens of it that were cached."""
        ...

    def end(self, started: Any, key: Any, value: Any) -> int:
        """Insert, as `insert`, and unlock what was locked at the start."""
        ...

    def evict(self, num_tokens: int) -> int:
        """Take out unlocked pages until at least `num_tokens` are gone; returns how many are."""
        ...

    def cached_len(self, matched: Any) -> int:
        """Tokens that a match or start found."""
        ...

    def page_ids(self, matched: Any) -> Int32[np.ndarray, " P"]:
        """Pages that a match or start found."""
        ...

    def size(self) -> int:
        """All cached tokens."""
        ...


class OurTree:
    """`RadixTree`. Keys are int32 ids, values int32 page ids.

    resume: at its end a request inserts from the node that it has locked, and not from the root. partial_pages: a match
    also looks for a page that begins with the next tokens. No other cache does either, so both are off at first.
    """

    name = "radix_jax"

    def __init__(self, page_size: int, resume: bool = False, partial_pages: bool = False) -> None:
        self.page_size = page_size
        self._resume = resume
        self.tree = RadixTree(page_size=page_size, partial_pages=partial_pages)

    def prepare_keys(self, ids: Ids, prompt_len: int) -> tuple[Ids, Ids]:
        """The ids as they are."""
        return ids[:prompt_len], ids

    def prepare_pages(self, pages: Ids) -> Ids:
        """The page ids as they are."""
        return pages

    def match(self, key: Ids) -> MatchResult:
        """Match."""
        return self.tree.match_prefix(key)

    def start(self, key: Ids) -> MatchResult:
        """Match and lock."""
        matched = self.tree.match_prefix(key)
        self.tree.lock(matched.handle)
        return matched

    def insert(self, key: Ids, value: Ids) -> int:
        """Insert from the root."""
        return self.tree.insert_prefix(key, value).cached_len

    def end(self, started: MatchResult, key: Ids, value: Ids) -> int:
        """Insert and unlock."""
        start = started.handle if self._resume else None
        cached_len = self.tree.insert_prefix(key, value, start=start).cached_len
        self.tree.unlock(started.handle)
        return cached_len

    def evict(self, num_tokens: int) -> int:
        """Evict whole leaves."""
        return len(self.tree.evict(num_tokens)) * self.page_size

    def cached_len(self, matched: MatchResult) -> int:
        """Tokens that matched."""
        return matched.cached_len

    def page_ids(self, matched: MatchResult) -> Ids:
        """Pages that matched."""
        return matched.pages

    def size(self) -> int:
        """All cached tokens."""
        return self.tree.total_size


class HashedMatch(NamedTuple):
    """hashes: of all full pages of the key, which a request keeps. pages: ids of those that were found."""

    hashes: list[bytes]
    pages: list[int]


class PageHashes:
    """Full pages found by a hash of their tokens and of all tokens before them, in the manner of vLLM.

    A page's hash is that of the page before it, followed by its own tokens, so one dict holds all prefixes and no node
    is ever split. Unlocked pages wait in a queue, the one to be reused first in front; a request puts its last page
    there first. Pages are evicted one by one.
    """

    name = "page hashes"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * np.dtype(np.int32).itemsize
        self._pages: dict[bytes, int] = {}
        self._num_locks: dict[bytes, int] = {}
        self._unlocked: OrderedDict[bytes, None] = OrderedDict()

    def prepare_keys(self, ids: Ids, prompt_len: int) -> tuple[bytes, bytes]:
        """The bytes of the ids."""
        data = ids.tobytes()
        return data[: prompt_len * ids.itemsize], data

    def prepare_pages(self, pages: Ids) -> list[int]:
        """A list of page ids."""
        return pages.tolist()

    def match(self, key: bytes) -> HashedMatch:
        """Hash the key and look its pages up, until one is not there; those found are used now."""
        hashes = self._hash(key, [])
        pages = self._find(hashes)
        for page_hash in reversed(hashes[: len(pages)]):
            if page_hash in self._unlocked:
                self._unlocked.move_to_end(page_hash)
        return HashedMatch(hashes, pages)

    def start(self, key: bytes) -> HashedMatch:
        """Match and lock every page."""
        hashes = self._hash(key, [])
        pages = self._find(hashes)
        for page_hash in hashes[: len(pages)]:
            self._unlocked.pop(page_hash, None)
            self._num_locks[page_hash] = self._num_locks.get(page_hash, 0) + 1
        return HashedMatch(hashes, pages)

    def insert(self, key: bytes, value: list[int]) -> int:
        """Add the pages that are not there, unlocked."""
        return self._add(self._hash(key, []), value)

    def end(self, started: HashedMatch, key: bytes, value: list[int]) -> int:
        """Hash what is new since the start, insert, and unlock every page from the last one on."""
        cached_len = self._add(self._hash(key, started.hashes), value)
        for page_hash in reversed(started.hashes[: len(started.pages)]):
            num_locks = self._num_locks.pop(page_hash) - 1
            if num_locks:
                self._num_locks[page_hash] = num_locks
            else:
                self._unlocked[page_hash] = None
        return cached_len

    def evict(self, num_tokens: int) -> int:
        """Evict pages one by one."""
        num_pages = min(-(-num_tokens // self.page_size), len(self._unlocked))
        for _ in range(num_pages):
            page_hash, _ = self._unlocked.popitem(last=False)
            del self._pages[page_hash]
        return num_pages * self.page_size

    def cached_len(self, matched: HashedMatch) -> int:
        """Tokens that matched."""
        return len(matched.pages) * self.page_size

    def page_ids(self, matched: HashedMatch) -> Ids:
        """Pages that matched."""
        return np.array(matched.pages, np.int32)

    def size(self) -> int:
        """All cached tokens."""
        return len(self._pages) * self.page_size

    def _find(self, hashes: list[bytes]) -> list[int]:
        pages: list[int] = []
        for page_hash in hashes:
            page = self._pages.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def _add(self, hashes: list[bytes], value: list[int]) -> int:
        """Returns the tokens that were there; all unlocked pages of the key count as used now."""
        num_cached = 0
        for page_hash, page in zip(hashes, value, strict=True):
            if page_hash in self._pages:
                num_cached += 1
            else:
                self._pages[page_hash] = page
        for page_hash in reversed(hashes):
            if page_hash not in self._num_locks:
                self._unlocked[page_hash] = None
                self._unlocked.move_to_end(page_hash)
        return num_cached * self.page_size

    def _hash(self, key: bytes, known: list[bytes]) -> list[bytes]:
        """Hashes of all full pages of `key`; the first are `known`."""
        page_bytes = self._page_bytes
        hashes = known[:]
        last = hashes[-1] if hashes else b""
        full_bytes = len(key) // page_bytes * page_bytes
        for start in range(len(hashes) * page_bytes, full_bytes, page_bytes):
            last = hashlib.sha256(last + key[start : start + page_bytes]).digest()
            hashes.append(last)
        return hashes
