"""RadixTree in random walks against an oracle that knows nothing of nodes: a dict of page-aligned prefixes."""

from collections.abc import Hashable, Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from radix_jax.cache import HandleError, PrefixHandle, RadixTree

Prefix = tuple[Hashable, tuple[int, ...]]  # namespace and a whole number of pages of tokens

# Few symbols, so that keys share prefixes; lengths in pages and a tail that is cut to less than a page.
keys = st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 15))
namespaces = st.sampled_from([None, "a", ("a", 1), ("a", True)])


class TreeOracle:
    """Which prefixes are cached, in which page, when last used, and by how many handles held."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, int] = {}
        self.last_use: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}
        self.now = 0

    def prefixes(self, ids: list[int], namespace: Hashable) -> list[Prefix]:
        """The page-aligned prefixes of `ids`, shortest first."""
        typed = (type(namespace), repr(namespace))
        ends = range(self.page_size, len(ids) + 1, self.page_size)
        return [(typed, tuple(ids[:end])) for end in ends]

    def cached(self, ids: list[int], namespace: Hashable) -> list[Prefix]:
        return [prefix for prefix in self.prefixes(ids, namespace) if prefix in self.pages]

    def use(self, prefixes: list[Prefix]) -> None:
        self.now += 1
        for prefix in prefixes:
            self.last_use[prefix] = self.now

    def locked(self) -> set[Prefix]:
        return {prefix for prefix, count in self.locks.items() if count}

    def lru_order(self) -> Iterator[Prefix]:
        """Unlocked prefixes page by page: always the least recently used one that no cached prefix continues."""
        left = set(self.pages)
        locked = self.locked()
        while left - locked:
            parents = {(space, ids[: -self.page_size]) for space, ids in left}
            leaves = left - parents - locked
            victim = min(leaves, key=lambda prefix: self.last_use[prefix])
            left.remove(victim)
            yield victim


class RadixTreeMachine(RuleBasedStateMachine):
    """Every operation, right and wrong, on one tree."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.tree = RadixTree(page_size=page_size)
        self.oracle = TreeOracle(page_size)
        self.handles: list[tuple[PrefixHandle, list[Prefix]]] = []
        self.dead: set[PrefixHandle] = set()
        self.next_page = 1

    def ids(self, key: tuple[list[int], int]) -> list[int]:
        """Pages that differ in one token only, at a place of their own, so that keys part inside of pages too."""
        symbols, tail = key
        ids: list[int] = []
        for symbol in [*symbols, 1]:
            page = [7] * self.page_size
            page[(symbol * 5) % self.page_size] = 100 + symbol
            ids += page
        return ids[: len(symbols) * self.page_size + tail % self.page_size]

    @rule(key=keys, namespace=namespaces, priority=st.integers(-1, 2), tail_page=st.booleans())
    def insert(self, key, namespace, priority, tail_page):
        ids = self.ids(key)
        prefixes = self.oracle.prefixes(ids, namespace)
        cached = self.oracle.cached(ids, namespace)
        has_tail = len(ids) % self.page_size > 0
        pages = np.arange(self.next_page, self.next_page + len(prefixes) + (has_tail and tail_page))
        self.next_page += len(pages)
        version = self.tree.version
        result = self.tree.insert_prefix(ids, pages, namespace, priority)
        assert result.cached_len == len(cached) * self.page_size
        assert result.handle.cached_len == len(prefixes) * self.page_size
        assert (self.tree.version > version) == (len(cached) < len(prefixes))
        for prefix, page in zip(prefixes, pages.tolist(), strict=False):
            self.oracle.pages.setdefault(prefix, page)
        self.oracle.use(prefixes)
        self.handles.append((result.handle, prefixes))

    @rule(key=keys, namespace=namespaces)
    def match(self, key, namespace):
        ids = self.ids(key)
        cached = self.oracle.cached(ids, namespace)
        match = self.tree.match_prefix(np.array(ids, np.int32), namespace)
        assert match.cached_len == match.handle.cached_len == len(cached) * self.page_size
        assert match.pages.tolist() == [self.oracle.pages[prefix] for prefix in cached]
        self.oracle.use(cached)
        self.handles.append((match.handle, cached))

    @rule(key=keys, namespace=namespaces)
    def peek(self, key, namespace):
        ids = self.ids(key)
        cached = self.oracle.cached(ids, namespace)
        assert self.tree.match_len(ids, namespace) == len(cached) * self.page_size
        assert self.tree.match_pages(ids, namespace).tolist() == [self.oracle.pages[prefix] for prefix in cached]

    @precondition(lambda self: self.handles)
    @rule(place=st.integers(0, 10**6))
    def lock(self, place):
        handle, prefixes = self.handles[place % len(self.handles)]
        if handle in self.dead:
            with pytest.raises(HandleError, match="evicted"):
                self.tree.lock(handle)
        else:
            self.tree.lock(handle)
            for prefix in prefixes:
                self.oracle.locks[prefix] = self.oracle.locks.get(prefix, 0) + 1

    @precondition(lambda self: self.handles)
    @rule(place=st.integers(0, 10**6))
    def unlock(self, place):
        handle, prefixes = self.handles[place % len(self.handles)]
        if handle.num_locks:
            self.tree.unlock(handle)
            for prefix in prefixes:
                self.oracle.locks[prefix] -= 1
            self.oracle.use(prefixes)
        else:
            with pytest.raises(HandleError):
                self.tree.unlock(handle)

    @rule(num_tokens=st.integers(0, 60))
    def evict(self, num_tokens):
        order = list(self.oracle.lru_order())
        pages = self.tree.evict(num_tokens).tolist()
        num_needed = min(-(-num_tokens // self.page_size), len(order))
        evicted = order[: len(pages)]
        assert len(pages) >= num_needed
        assert set(pages) == {self.oracle.pages[prefix] for prefix in evicted}
        # No more than the rest of the node that reached the number: its pages were always used together.
        surplus = evicted[num_needed:]
        assert num_needed or not surplus
        assert all(self.oracle.last_use[prefix] == self.oracle.last_use[evicted[num_needed - 1]] for prefix in surplus)
        self.forget(evicted)

    @rule()
    def reset(self):
        if self.oracle.locked():
            with pytest.raises(HandleError, match="tokens are locked"):
                self.tree.reset()
        else:
            assert sorted(self.tree.reset().tolist()) == sorted(self.oracle.pages.values())
            self.forget(list(self.oracle.pages))

    def forget(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            del self.oracle.pages[prefix]
        gone = set(prefixes)
        self.dead |= {handle for handle, covered in self.handles if gone.intersection(covered)}

    @invariant()
    def sizes_agree(self):
        self.tree.check_integrity()
        num_locked = len(self.oracle.locked())
        assert self.tree.protected_size == num_locked * self.page_size
        assert self.tree.evictable_size == (len(self.oracle.pages) - num_locked) * self.page_size
        assert sorted(self.tree.owned_pages().tolist()) == sorted(self.oracle.pages.values())


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_radix_tree_agrees_with_the_oracle(page_size: int):
    run_state_machine_as_test(
        lambda: RadixTreeMachine(page_size),
        settings=settings(max_examples=40, stateful_step_count=40),
    )
