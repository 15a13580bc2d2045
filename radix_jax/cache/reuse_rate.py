"""Eviction by learned reuse: the leaf goes whose next use is worth the least for the time that it has to be kept."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from radix_jax.cache.errors import IntegrityError
from radix_jax.cache.keys import namespace_key
from radix_jax.cache.node import EVICTED, RadixTreeNode

NUM_CLASSES = 4
NUM_BINS = 48  # two an octave: up to 2^24 uses of the tree
MAX_REMEMBERED = 1 << 14
_FIRST_WAITS = 24  # that each class begins with
_MAX_BIRTHS = 1 << 15  # beyond, what was learned counts half
_MIN_NEW, _MAX_NEW = 16, 256  # births until it is learned again: a quarter of those so far, within these bounds

Cell = tuple[int, int]


def age_bin(age: int) -> int:
    """Bins start at 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, two an octave; the last one has no end."""
    if age < 4:
        return max(age, 0)
    octave = age.bit_length()
    return min(2 * octave - 2 + (age >> (octave - 2) & 1), NUM_BINS - 1)


def _bin_start(place: int) -> int:
    return place if place < 4 else (2 + place % 2) << (place // 2 - 1)


_WIDTHS = tuple(_bin_start(place + 1) - _bin_start(place) for place in range(NUM_BINS))
_ENDS = (*(_bin_start(place + 1) for place in range(NUM_BINS - 1)), 1 << 62)


class ReuseTimes:
    """How long a prefix waits for its next use, counted by how often it was reused before (its class: 0, 1, 2, 3+) and
    by bins of age.

    To begin with each class knows of 24 waits, one that ended in each of the first 24 bins, as if each doubling of the
    age brought as many back as the one before. So the older goes first, octave by octave, until there is evidence.
    """

    def __init__(self) -> None:
        self._births = [_FIRST_WAITS] * NUM_CLASSES
        first = [1] * _FIRST_WAITS + [0] * (NUM_BINS - _FIRST_WAITS)
        self._reuses = [first[:] for _ in range(NUM_CLASSES)]
        self._num_births = 0
        self._next_learning = _MIN_NEW
        self.order: list[Cell] = self._sorted_cells()

    def note_birth(self, num_reuses: int) -> None:
        """A wait began, of something that was reused so often."""
        self._births[min(num_reuses, NUM_CLASSES - 1)] += 1
        self._num_births += 1

    def note_reuse(self, num_reuses: int, place: int) -> None:
        """The wait of something that had been reused so often ended, in this bin of its age."""
        self._reuses[min(num_reuses, NUM_CLASSES - 1)][place] += 1

    def learn(self) -> bool:
        """Sort the cells anew, if there is enough that is new; `order` has those to evict first in front."""
        if self._num_births < self._next_learning:
            return False
        self.order = self._sorted_cells()
        if self._num_births > _MAX_BIRTHS:
            self._num_births //= 2
            self._births = [(count + 1) // 2 for count in self._births]
            self._reuses = [[(count + 1) // 2 for count in counts] for counts in self._reuses]
        self._next_learning = self._num_births + min(max(self._num_births // 4, _MIN_NEW), _MAX_NEW)
        return True

    def _sorted_cells(self) -> list[Cell]:
        rates = {(k, place): rate for k in range(NUM_CLASSES) for place, rate in enumerate(self._rates(k))}
        return sorted(rates, key=lambda cell: (rates[cell], -cell[1], cell[0]))

    def _rates(self, num_reuses: int) -> list[float]:
        """By bin, the most reuses a unit of time that keeping can give, whenever one stops keeping.

        That is the index of Gittins (1979): max over m >= k of sum_{k..m} reuses / sum_{k..m} kept * width.
        Both sums are whole numbers far below 2^53, so equal quotients are equal floats.
        """
        kept, reuses = [self._births[num_reuses]], self._reuses[num_reuses]
        for count in reuses:
            kept.append(max(kept[-1] - count, 0))
        times = [(kept[k] + kept[k + 1]) * width for k, width in enumerate(_WIDTHS)]
        rates: list[float] = []
        for k in range(NUM_BINS):
            best, num, time, most = 0.0, 0, 0, sum(reuses[k:])
            for place in range(k, NUM_BINS):
                num += reuses[place]
                time += times[place]
                if num > best * time:
                    best = num / max(time, 1)
                if most < best * time:
                    break  # not even all that are left would do better
            rates.append(best)
        return rates


class Record:
    """What is kept of a node; a split gives both parts the same one, so it never changes.

    num_reuses: how often it was reused, before it was evicted and came back included. hits: the node's when it was last
    noted. last_use: the node's timestamp then. returned: the bin of the age at which it came back, None if it never did
    or was hit since.
    """

    __slots__ = ("hits", "last_use", "num_reuses", "returned")

    def __init__(self, num_reuses: int, hits: int, last_use: int, returned: int | None) -> None:
        self.num_reuses = num_reuses
        self.hits = hits
        self.last_use = last_use
        self.returned = returned


class ReuseRate:
    """The leaf with the lowest expected rate of reuse first: see `make_policy`. A report costs O(log n) over a run, and
    O(1) for each node of the path.

    Evicted nodes are remembered by where they began and their first page, so that a prefix which comes back after its
    eviction counts as reused too; a cache that is too small to see a reuse learns from those.

    Leaves lie in heaps by class and bin of age, and move on as they age. An entry is stale once its node was used
    again, is no leaf, locked, or of the other kind; stale ones go when they come up, or are about to move on.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._now = 0
        self._times = ReuseTimes()
        self._gone: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # -> reuses, last use
        self._serial = itertools.count()
        self._heaps: dict[Cell, list[tuple[int, int, int, RadixTreeNode]]] = {}
        self._num_pushed = 0  # since the entries moved on

    def used(self, node: RadixTreeNode, /) -> None:
        """Note a use of the path, rank the leaf, and learn from time to time."""
        self._now = node.timestamp
        above = node
        while not above.ref_count and above.parent is not None and (above.num_pins > 0) is self._pinned:
            self._note(above, above.parent)
            above = above.parent
        self._times.learn()
        self.changed(node)

    def changed(self, node: RadixTreeNode, /) -> None:
        """Rank `node`, if it is a leaf."""
        if node.children or node.memo is None:
            return
        self._push(node.memo, node)
        self._num_pushed += 1
        if self._num_pushed > _MAX_NEW and self._num_pushed > sum(map(len, self._heaps.values())) // 2:
            self._move_on()

    def removed(self, node: RadixTreeNode, /) -> None:
        """Remember it."""
        if node.memo is None or (node.num_pins > 0) is not self._pinned:
            return
        key = _place(node)
        self._gone[key] = node.memo.num_reuses, node.memo.last_use
        self._gone.move_to_end(key)
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def next_leaf(self) -> RadixTreeNode | None:
        """The leaf of the first cell that has one, there the least recently used."""
        self._move_on()
        for cell in self._times.order:
            heap = self._heaps.get(cell)
            while heap:
                if self._may_go(heap[0]):
                    return heap[0][-1]
                heapq.heappop(heap)
        return None

    def clear(self) -> None:
        """Forget all nodes; what was learned stays."""
        self._heaps.clear()

    def check_integrity(self, unlocked: Sequence[RadixTreeNode], /) -> None:
        """Raise IntegrityError if a leaf has no entry, or one in another cell than its age and reuses say."""
        self._move_on()
        listed = {(cell, entry[-1]) for cell, heap in self._heaps.items() for entry in heap if self._may_go(entry)}
        expected = {(self._cell(node.memo), node) for node in unlocked if not node.children}
        if listed != expected:
            raise IntegrityError(f"the eviction heaps list {len(listed)} leaves, {len(expected)} may go")

    def _note(self, node: RadixTreeNode, parent: RadixTreeNode) -> None:
        """Set a node's record to what it is after a use now."""
        now, times, record = self._now, self._times, node.memo
        if record is None:
            node.memo = self._born(node, parent)
        elif node.hits > record.hits:
            times.note_reuse(record.num_reuses, age_bin(now - record.last_use))
            times.note_birth(record.num_reuses + 1)
            node.memo = Record(record.num_reuses + 1, node.hits, now, None)
        else:
            node.memo = Record(record.num_reuses, node.hits, now, record.returned)

    def _born(self, node: RadixTreeNode, parent: RadixTreeNode) -> Record:
        """The record of a new node: of one that comes back, or goes on with a prompt that comes back chunk by chunk."""
        gone, above = self._gone.pop(_place(node), None), parent.memo
        num_reuses, returned = 0, None
        if gone is not None:
            num_reuses, returned = gone[0] + 1, age_bin(self._now - gone[1])
        elif parent.ref_count and above is not None and above.returned is not None and parent.hits == 0:
            num_reuses, returned = above.num_reuses, above.returned
        if returned is not None:
            self._times.note_reuse(num_reuses - 1, returned)
        self._times.note_birth(num_reuses)
        return Record(num_reuses, node.hits, self._now, returned)

    def _cell(self, record: Record) -> Cell:
        return min(record.num_reuses, NUM_CLASSES - 1), age_bin(self._now - record.last_use)

    def _push(self, record: Record, node: RadixTreeNode) -> None:
        heap = self._heaps.setdefault(self._cell(record), [])
        heapq.heappush(heap, (record.last_use, node.uuid, next(self._serial), node))

    def _may_go(self, entry: tuple[int, int, int, RadixTreeNode]) -> bool:
        node = entry[-1]
        return (
            node.memo.last_use == entry[0]
            and not node.children
            and not node.ref_count
            and node.end_len != EVICTED
            and (node.num_pins > 0) is self._pinned
        )

    def _move_on(self) -> None:
        """Put every leaf where its age says."""
        self._num_pushed = 0
        now, emptied = self._now, []
        for cell, heap in list(self._heaps.items()):
            end = now - _ENDS[cell[1]]
            while heap and heap[0][0] <= end:
                entry = heapq.heappop(heap)
                if self._may_go(entry):
                    self._push(entry[-1].memo, entry[-1])
            if not heap:
                emptied.append(cell)
        for cell in emptied:
            if not self._heaps[cell]:  # nothing has moved on to it since
                del self._heaps[cell]


def _place(node: RadixTreeNode) -> Hashable:
    """Where a node begins, and with what."""
    parent = node.parent
    assert parent is not None
    return namespace_key(node.namespace), parent.end_len, node.key_fn(node.edge)
