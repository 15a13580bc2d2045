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
    wait: "Wait | None" = None


@dataclass(frozen=True)
class Wait:
    """For the next use, of a page that was used at `since`, after so many reuses; hits: those of the page then.
    returned: the bin of the age at which it came back after an eviction, None if it did not, or was hit since."""

    reuses: int
    since: int
    hits: int
    returned: int | None


BIN_STARTS = sorted({0} | {2**k for k in range(30)} | {3 * 2**k for k in range(30)})[:49]


def best_rates(begun: Counter[int], ended: Counter[tuple[int, int]]) -> dict[tuple[int, int], Fraction]:
    """By reuses and bin: waits that end for the time spent, at the best time to stop. In the middle of a bin half of
    those that end in it are left."""
    rates = {}
    for reuses in range(4):
        for first in range(48):
            left = max(begun[reuses] - sum(ended[reuses, place] for place in range(first)), 0)
            num_ended = spent = 0
            best = (0, 1)
            for place in range(first, 48):
                now_left = max(left - ended[reuses, place], 0)
                num_ended += ended[reuses, place]
                spent += (left + now_left) * (BIN_STARTS[place + 1] - BIN_STARTS[place])
                left = now_left
                best = max(best, (num_ended, max(spent, 1)), key=lambda pair: Fraction(*pair))
            rates[reuses, first] = Fraction(*best)
    return rates


FIRST_RATES = best_rates(
    Counter(dict.fromkeys(range(4), 24)), Counter((k, place) for k in range(4) for place in range(24))
)


@dataclass
class Learned:
    """What is known of waits, by reuses before (3 stands for more too) and by the bin in which they ended."""

    begun: Counter[int] = field(default_factory=lambda: Counter(dict.fromkeys(range(4), 24)))
    ended: Counter[tuple[int, int]] = field(
        default_factory=lambda: Counter({(k, place): 1 for k in range(4) for place in range(24)})
    )
    gone: dict[Hashable, Wait] = field(default_factory=dict)
    now: int = 0
    num_begun: int = 0
    due: int = 16
    rates: dict[tuple[int, int], Fraction] = field(default_factory=lambda: dict(FIRST_RATES))

    def bin_of(self, since: int) -> int:
        return max(place for place, start in enumerate(BIN_STARTS[:48]) if start <= self.now - since)

    def begin(self, reuses: int) -> None:
        self.begun[min(reuses, 3)] += 1
        self.num_begun += 1

    def end(self, reuses: int, place: int) -> None:
        self.ended[min(reuses, 3), place] += 1

    def learn_if_due(self) -> None:
        if self.num_begun >= self.due:
            self.rates = best_rates(self.begun, self.ended)
            self.due = self.num_begun + max(16, min(256, self.num_begun // 4))

    def rank(self, wait: Wait) -> list[Any]:
        cell = min(wait.reuses, 3), self.bin_of(wait.since)
        return [self.rates[cell], -cell[1], cell[0], wait.since]


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
    learned: Learned

    @property
    def reuse_rank(self) -> list[Any]:
        assert self.page.wait is not None
        return self.learned.rank(self.page.wait)

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
    "reuse-rate": lambda leaf: leaf.reuse_rank,
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
    learned: list[Learned] = field(default_factory=lambda: [Learned(), Learned()])

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
        path = [prefix for prefix in reversed(prefixes) if prefix in self.ends]
        for tier in (False, True):
            nodes = [end for end in path if (end in pinned) is tier]
            # Each order hears of its own lowest node, if that is unlocked; the plain one only of the path's end.
            if nodes and not self.locks[nodes[0]] and (tier or nodes[0] == path[0]):
                self.note_uses(nodes, self.learned[tier])

    def note_uses(self, nodes: list[Prefix], learned: Learned) -> None:
        """nodes: from below; the unlocked ones among them were used now."""
        learned.now = self.now
        waits = {end: self.wait_after_use(end, learned) for end in nodes if not self.locks[end]}
        for end, wait in waits.items():
            space, ids = end
            above = self.above(end)
            for stop in range(len(above[1]) if above else 0, len(ids), self.page_size):
                self.pages[space, ids[: stop + self.page_size]].wait = wait
        learned.learn_if_due()

    def wait_after_use(self, end: Prefix, learned: Learned) -> Wait:
        page, above = self.pages[end], self.above(end)
        wait = page.wait
        if wait is not None and page.hits == wait.hits:
            return Wait(wait.reuses, self.now, page.hits, wait.returned)
        if wait is not None:
            learned.end(wait.reuses, learned.bin_of(wait.since))
            learned.begin(wait.reuses + 1)
            return Wait(wait.reuses + 1, self.now, page.hits, None)
        reuses, returned = 0, None
        gone = learned.gone.pop(self.place(end, above), None)
        if gone is not None:
            reuses, returned = gone.reuses + 1, learned.bin_of(gone.since)
        elif above is not None and self.locks[above] and self.pages[above].hits == 0:
            before = self.pages[above].wait
            if before is not None and before.returned is not None:
                reuses, returned = before.reuses, before.returned
        if returned is not None:
            learned.end(reuses - 1, returned)
        learned.begin(reuses)
        return Wait(reuses, self.now, page.hits, returned)

    def place(self, end: Prefix, above: Prefix | None) -> Hashable:
        start = len(above[1]) if above else 0
        return end[0], start, end[1][start : start + self.page_size]

    def make_end(self, prefixes: list[Prefix]) -> None:
        if prefixes and prefixes[-1] not in self.ends:
            self.ends[prefixes[-1]] = self.next_id()
            self.reach[prefixes[-1]] = len(prefixes[-1][1])

    def next_id(self) -> int:
        self.num_ids += 1
        return self.num_ids

    def match(self, ids: list[int], namespace: Hashable, counted: list[Prefix], resumed: bool) -> list[Prefix]:
        """counted: prefixes whose hit this request has counted before. resumed: it goes on from a handle, which takes
        two ticks of the clock."""
        self.now += resumed
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
        pinned = self.pinned()
        above = {end: self.above(end) for end in self.ends}
        inner = set(above.values())
        leaves = []
        for end in self.ends.keys() - inner:
            if not self.locks[end]:
                start = above[end]
                start_len = 0 if start is None else len(start[1])
                num_tokens = len(end[1]) - start_len
                page, learned = self.pages[end], self.learned[end in pinned]
                leaves.append(Leaf(end, num_tokens, start_len, self.reach[end], self.ends[end], page, learned))
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
            else:
                if above is not None:
                    self.reach[above] = max(self.reach[above], reach)
                wait = self.pages[victim.end].wait
                assert wait is not None
                self.learned[tier].gone[self.place(victim.end, above)] = wait
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
