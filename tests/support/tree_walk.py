"""One RadixTree and its oracle, driven side by side: every operation, right and wrong, is checked as it is done."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tree_oracle import RULES, Leaf, OraclePin, Prefix, TreeOracle

from radix_jax.cache import (
    CacheCleared,
    EventQueue,
    HandleError,
    NodeView,
    PagesRemoved,
    PagesStored,
    Pin,
    PrefixHandle,
    RadixTree,
)

MAX_PINNED_PAGES = 8
OWN_RULE = "a function"


def small_and_unused_first(view: NodeView) -> tuple[int, int]:
    return view.num_pages, -view.last_use


def small_and_unused_first_oracle(leaf: Leaf) -> tuple[int, int]:
    return leaf.num_tokens, -leaf.last_use


@dataclass(eq=False)
class Held:
    """A handle, and what it stands for. left: its prefixes that were never evicted."""

    handle: PrefixHandle
    ids: list[int]
    namespace: Hashable
    covered: list[Prefix]
    left: list[Prefix]


class TreeWalk:
    """policy: a name, or OWN_RULE. max_held: handles kept; beyond, unlocked ones are dropped."""

    def __init__(self, page_size: int, policy: str, max_held: int = 30) -> None:
        rule: str | Callable[[NodeView], Any] = small_and_unused_first if policy == OWN_RULE else policy
        oracle_rule = small_and_unused_first_oracle if policy == OWN_RULE else RULES[policy]
        self.page_size = page_size
        self.max_pinned_len = MAX_PINNED_PAGES * page_size
        self.events = EventQueue(1_000)
        self.num_events = 0
        self.told: dict[int, tuple[int | None, tuple[int, ...], Hashable]] = {}  # page -> parent, tokens, space
        self.tree = RadixTree(page_size, rule, max_pinned_tokens=self.max_pinned_len, on_event=self.events)
        self.oracle = TreeOracle(page_size, oracle_rule)
        self.held: list[Held] = []
        self.max_held = max_held
        self.pins: list[tuple[Pin, OraclePin]] = []
        self.next_page = 1
        self.clock = 0.0

    def hold(self, handle: PrefixHandle, ids: list[int], namespace: Hashable, covered: list[Prefix]) -> None:
        self.held.append(Held(handle, ids, namespace, covered, covered))
        if len(self.held) > self.max_held:
            free = next((held for held in self.held if not held.handle.num_locks), None)
            if free is not None:
                self.held.remove(free)

    def insert(self, ids: list[int], namespace: Hashable, priority: int, tail_page: bool, start: Held | None) -> None:
        num_pages = len(ids) // self.page_size
        pages = np.arange(self.next_page, self.next_page + num_pages + (tail_page and len(ids) % self.page_size > 0))
        self.next_page += len(pages)
        cached = self.oracle.cached(ids, namespace)
        version = self.tree.version
        handle = None if start is None else start.handle
        result = self.tree.insert_prefix(ids, pages, namespace, priority, handle)
        assert result.cached_len == len(cached) * self.page_size
        assert result.handle.cached_len == num_pages * self.page_size
        assert self.tree.version == version + (len(cached) < num_pages)
        self.hold(result.handle, ids, namespace, self.oracle.insert(ids, pages.tolist(), namespace, priority))

    def match(self, ids: list[int], namespace: Hashable, start: Held | None) -> None:
        handle, counted = (None, []) if start is None else (start.handle, start.left)
        match = self.tree.match_prefix(np.array(ids, np.int32), namespace, handle)
        cached = self.oracle.match(ids, namespace, counted, resumed=start is not None)
        assert match.cached_len == match.handle.cached_len == len(cached) * self.page_size
        assert match.pages.tolist() == [self.oracle.pages[prefix].page_id for prefix in cached]
        self.hold(match.handle, ids, namespace, cached)

    def peek(self, ids: list[int], namespace: Hashable) -> None:
        cached = self.oracle.cached(ids, namespace)
        assert self.tree.match_len(ids, namespace) == len(cached) * self.page_size
        page_ids = [self.oracle.pages[prefix].page_id for prefix in cached]
        assert self.tree.match_pages(ids, namespace).tolist() == page_ids

    def resume_wrongly(self, start: Held) -> None:
        """With ids that part from the handle's within its last page, with too few ids, and in another namespace."""
        if not start.left:
            return
        ids = list(start.left[-1][1])
        wrong = [ids[:-1], [*ids[:-1], ids[-1] + 1, 5]]
        for wrong_ids, namespace in [*((w, start.namespace) for w in wrong), (ids, ("elsewhere", start.namespace))]:
            with pytest.raises(HandleError, match="start leads to"):
                self.tree.match_prefix(wrong_ids, namespace, start.handle)

    def lock(self, held: Held) -> None:
        if len(held.left) < len(held.covered):
            with pytest.raises(HandleError, match="evicted"):
                self.tree.lock(held.handle)
            return
        self.tree.lock(held.handle)
        self.oracle.locks.update(held.covered)

    def unlock(self, held: Held) -> None:
        if held.handle.num_locks:
            self.tree.unlock(held.handle)
            self.oracle.locks.subtract(held.covered)
            self.oracle.use(held.covered)
        else:
            with pytest.raises(HandleError):
                self.tree.unlock(held.handle)

    def evict(self, num_tokens: int, trim: bool) -> None:
        pages = self.tree.evict(num_tokens, trim).tolist()
        expected, gone = self.oracle.evict(num_tokens, trim)
        assert pages == expected
        self.forget(gone)

    def reset(self) -> None:
        if self.oracle.locked():
            with pytest.raises(HandleError, match="tokens are locked"):
                self.tree.reset()
            return
        assert sorted(self.tree.reset().tolist()) == sorted(page.page_id for page in self.oracle.pages.values())
        gone = list(self.oracle.pages)
        self.oracle.forget(gone)
        self.forget(gone)

    def pin(self, ids: list[int], namespace: Hashable, ttl: float) -> None:
        self.expire()
        oracle_pin = self.oracle.pin(ids, namespace, self.clock + ttl, self.max_pinned_len)
        if oracle_pin is None:
            with pytest.raises(ValueError, match=f"exceeds max_pinned_tokens={self.max_pinned_len}"):
                self.tree.pin(ids, ttl, self.clock, namespace)
            return
        pin = self.tree.pin(ids, ttl, self.clock, namespace)
        assert (pin.cached_len, pin.until) == (len(oracle_pin.covered) * self.page_size, self.clock + ttl)
        self.pins.append((pin, oracle_pin))

    def unpin(self, place: int) -> None:
        pin, oracle_pin = self.pins.pop(place % len(self.pins))
        self.tree.unpin(pin)
        self.oracle.unpin(oracle_pin)
        with pytest.raises(HandleError, match="is over"):
            self.tree.unpin(pin)

    def expire(self, time: float = 0.0) -> None:
        self.clock += time
        self.tree.expire_pins(self.clock)
        for pin, oracle_pin in sorted(self.pins, key=lambda both: both[0].until):
            if pin.until <= self.clock:
                self.pins.remove((pin, oracle_pin))
                self.oracle.unpin(oracle_pin)

    def forget(self, gone: list[Prefix]) -> None:
        lost = set(gone)
        for held in self.held:
            held.left = [prefix for prefix in held.left if prefix not in lost]

    def check(self) -> None:
        """Compare all that can be seen."""
        self.tree.check_integrity()
        pages = {page.page_id: prefix for prefix, page in self.oracle.pages.items()}
        num_locked = len(self.oracle.locked())
        assert self.tree.protected_size == num_locked * self.page_size
        assert self.tree.evictable_size == (len(pages) - num_locked) * self.page_size
        assert self.tree.pinned_size == len(self.oracle.pinned()) * self.page_size
        assert sorted(self.tree.owned_pages().tolist()) == sorted(pages)
        nodes = [node for node in self.tree.snapshot().nodes if node.state != "root"]
        assert sorted(int(node.page_ids[-1]) for node in nodes) == sorted(
            self.oracle.pages[end].page_id for end in self.oracle.ends
        )
        for node in nodes:
            page = self.oracle.pages[pages[int(node.page_ids[-1])]]
            assert node.num_hits == page.hits
        self.check_events(pages)

    def check_events(self, pages: dict[int, Prefix]) -> None:
        """Whoever only listens knows what is cached."""
        first, events = self.events.take()
        assert first == self.num_events
        self.num_events += len(events)
        stored: set[int] = set()
        for event in events:
            match event:
                case PagesStored(page_ids, parent, token_ids, page_size, namespace):
                    assert page_size == self.page_size
                    for place, page in enumerate(page_ids):
                        tokens = tuple(token_ids[place * page_size : (place + 1) * page_size])
                        self.told[page] = (parent, tokens, namespace)
                        parent = page
                    stored.update(page_ids)
                case PagesRemoved(page_ids, namespace):
                    assert {self.told.pop(page)[2] for page in page_ids} == {namespace}
                    assert not any(above in page_ids for above, _, _ in self.told.values())
                case CacheCleared():
                    self.told.clear()
        assert self.told.keys() == pages.keys()
        for page in stored & pages.keys():
            tokens: tuple[int, ...] = ()
            above: int | None = page
            while above is not None:
                above, page_tokens, namespace = self.told[above]
                tokens = page_tokens + tokens
                assert (type(namespace), repr(namespace)) == pages[page][0]
            assert tokens == pages[page][1]
