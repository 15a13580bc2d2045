"""What a radix tree must do, told without one: a dict of page-aligned prefixes, and the places where nodes end.

Written from the rules alone; nothing of radix_jax is used.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Prefix = tuple[Hashable, tuple[int, ...]]  # typed namespace, and a whole number of pages of tokens


@dataclass
class Page:
    """The last page of a prefix."""

    page_id: int
    created: int
    priority: int
    hits: int = 0
    last_use: int = 0
    floor: Fraction = Fraction(0)


@dataclass(eq=False)
class OraclePin:
    until: float
    covered: list[Prefix]


@dataclass(frozen=True)
class Leaf:
    """A node that could be evicted, as the rules see it."""

    end: Prefix
    num_tokens: int
    start_len: int
    reach_len: int
    node_id: int
    page: Page

    @property
    def hits(self) -> int:
        return self.page.hits

    @property
    def last_use(self) -> int:
        return self.page.last_use


def _cost(leaf: Leaf) -> Fraction:
    positions = range(leaf.start_len, leaf.start_len + leaf.num_tokens)
    return sum((1 + Fraction(position, 16_384) for position in positions), Fraction(0)) / leaf.num_tokens


# Smallest first. These are the sentences of the documentation, once more.
RULES: dict[str, Callable[[Leaf], Any]] = {
    "lru": lambda leaf: leaf.last_use,
    "lfu": lambda leaf: [leaf.hits, leaf.last_use],
    "fifo": lambda leaf: leaf.page.created,
    "filo": lambda leaf: -leaf.page.created,
    "mru": lambda leaf: -leaf.last_use,
    "priority": lambda leaf: [leaf.page.priority, leaf.last_use],
    "slru": lambda leaf: [0 if leaf.hits < 2 else 1, leaf.last_use],
    "tlru": lambda leaf: [0 if leaf.reach_len - leaf.start_len + 256 <= 2048 else 1, leaf.last_use],
    "reuse-credit": lambda leaf: leaf.last_use + 1000 * (leaf.hits if leaf.hits < 4 else 4),
    "cost-aware": lambda leaf: [leaf.page.floor + _cost(leaf), leaf.last_use],
}


@dataclass
class TreeOracle:
    page_size: int
    rule: Callable[[Leaf], Any]
    pages: dict[Prefix, Page] = field(default_factory=dict)
    ends: dict[Prefix, int] = field(default_factory=dict)  # where a node ends -> its id
    reach: dict[Prefix, int] = field(default_factory=dict)
    locks: Counter[Prefix] = field(default_factory=Counter)
    pins: list[OraclePin] = field(default_factory=list)
    now: int = 0
    num_ids: int = 0
    floors: list[Fraction] = field(default_factory=lambda: [Fraction(0), Fraction(0)])  # without and with pins

    def prefixes(self, ids: list[int], namespace: Hashable) -> list[Prefix]:
        """The page-aligned prefixes of `ids`, shortest first."""
        typed = (type(namespace), repr(namespace))
        ends = range(self.page_size, len(ids) + 1, self.page_size)
        return [(typed, tuple(ids[:end])) for end in ends]

    def cached(self, ids: list[int], namespace: Hashable) -> list[Prefix]:
        return [prefix for prefix in self.prefixes(ids, namespace) if prefix in self.pages]

    def use(self, prefixes: list[Prefix]) -> None:
        """A path is used; a border is made where it ends."""
        self.now += 1
        pinned = self.pinned()
        for prefix in prefixes:
            self.pages[prefix].last_use = self.now
            self.pages[prefix].floor = self.floors[prefix in pinned]

    def make_end(self, prefixes: list[Prefix]) -> None:
        if prefixes and prefixes[-1] not in self.ends:
            self.ends[prefixes[-1]] = self.next_id()
            self.reach[prefixes[-1]] = len(prefixes[-1][1])

    def next_id(self) -> int:
        self.num_ids += 1
        return self.num_ids

    def match(self, ids: list[int], namespace: Hashable, counted: list[Prefix]) -> list[Prefix]:
        """counted: prefixes whose hit this request has counted before."""
        cached = self.cached(ids, namespace)
        self.make_end(cached)
        for prefix in cached:
            self.pages[prefix].hits += prefix not in counted
        self.use(cached)
        return cached

    def insert(self, ids: list[int], page_ids: list[int], namespace: Hashable, priority: int) -> list[Prefix]:
        prefixes, cached = self.prefixes(ids, namespace), self.cached(ids, namespace)
        self.make_end(cached)
        for prefix in cached:
            self.pages[prefix].priority = max(self.pages[prefix].priority, priority)
        created = self.next_id()
        for prefix, page_id in zip(prefixes, page_ids, strict=False):
            if prefix not in self.pages:
                self.pages[prefix] = Page(page_id, created, priority)
                self.ends.pop(prefix, None)
        if len(cached) < len(prefixes):
            self.ends[prefixes[-1]] = created
            self.reach[prefixes[-1]] = len(prefixes[-1][1])
        self.use(prefixes)
        return prefixes

    def pinned(self) -> set[Prefix]:
        return {prefix for pin in self.pins for prefix in pin.covered}

    def locked(self) -> set[Prefix]:
        return {prefix for prefix, count in self.locks.items() if count}

    def above(self, end: Prefix) -> Prefix | None:
        """Where the node above the one that ends at `end` ends; None where that is the root."""
        space, ids = end
        for cut in range(len(ids) - self.page_size, 0, -self.page_size):
            if (space, ids[:cut]) in self.ends:
                return space, ids[:cut]
        return None

    def leaves(self) -> list[Leaf]:
        """Unlocked nodes that nothing continues."""
        above = {end: self.above(end) for end in self.ends}
        inner = set(above.values())
        leaves = []
        for end in self.ends.keys() - inner:
            if not self.locks[end]:
                start = above[end]
                start_len = 0 if start is None else len(start[1])
                num_tokens = len(end[1]) - start_len
                leaves.append(Leaf(end, num_tokens, start_len, self.reach[end], self.ends[end], self.pages[end]))
        return leaves

    def evict(self, num_tokens: int, trim: bool) -> tuple[list[int], list[Prefix]]:
        """Page ids in the order in which they go, and their prefixes."""
        page_ids: list[int] = []
        gone: list[Prefix] = []
        while len(gone) * self.page_size < num_tokens and (leaves := self.leaves()):
            pinned = self.pinned()
            victim = min(leaves, key=lambda leaf: (leaf.end in pinned, self.rule(leaf), leaf.node_id))
            tier = victim.end in pinned
            self.floors[tier] = max(self.floors[tier], victim.page.floor + _cost(victim))
            num_pages = victim.num_tokens // self.page_size
            if trim:
                num_pages = min(num_pages, -(-(num_tokens - len(gone) * self.page_size) // self.page_size))
            space, ids = victim.end
            num_left = len(ids) - num_pages * self.page_size
            taken = [(space, ids[:end]) for end in range(num_left + self.page_size, len(ids) + 1, self.page_size)]
            page_ids += [self.pages[prefix].page_id for prefix in taken]
            above = self.above(victim.end)
            del self.ends[victim.end]
            reach = self.reach.pop(victim.end)
            if num_left > victim.start_len:
                self.ends[space, ids[:num_left]] = victim.node_id
                self.reach[space, ids[:num_left]] = reach
            elif above is not None:
                self.reach[above] = max(self.reach[above], reach)
            self.forget(taken)
            gone += taken
        return page_ids, gone

    def forget(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            del self.pages[prefix]
            self.locks.pop(prefix, None)
            self.ends.pop(prefix, None)
        for pin in self.pins:
            pin.covered = [prefix for prefix in pin.covered if prefix in self.pages]

    def pin(self, ids: list[int], namespace: Hashable, until: float, max_tokens: int) -> OraclePin | None:
        """None where the budget is too small; the prefix counts as used then too."""
        cached = self.cached(ids, namespace)
        self.make_end(cached)
        pin = OraclePin(until, cached)
        if len(self.pinned().union(cached)) * self.page_size <= max_tokens:
            self.pins.append(pin)
        self.use(cached)
        return pin if pin in self.pins else None

    def unpin(self, pin: OraclePin) -> None:
        self.pins.remove(pin)
        self.use(pin.covered)
