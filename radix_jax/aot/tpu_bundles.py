"""What Mosaic and libtpu made of a TPU kernel, read from the final bundles that libtpu writes out.

A bundle is one instruction word of the core: one cycle at least. Stalls are not in it, so counts are lower bounds.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

_BUNDLE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{(.*)$")
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_ENDS = re.compile(r"End region (\d+)")
_BRANCH = re.compile(r"\bsbr\.rel\b\s*(\([^)]*\))?\s*target = \$region(\d+)")
_MATMUL = re.compile(r"\bvmatmul\.")
_SPILL = re.compile(r"\bvst(?:\.\S+)? \[vmem:\[#allocation\d+_spill\]")
_FILL = re.compile(r"\bvld(?:\.\S+)? \[vmem:\[#allocation\d+_spill\]")
_SCALAR_SPILL = re.compile(r"\bsst \[smem:\[#allocation\d+_spill\]")
_COPY_IN = re.compile(r"\bdma\.(?:hbm_to_vmem|general)\b(?:.*?/\*size_in_granules=\*/(\d+))?")
_COPY_OUT = re.compile(r"\bdma\.vmem_to_hbm\b")
# The bundles behind a branch that are still run.
_DELAY_SLOTS = 4
SLOTS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")


@dataclass(frozen=True)
class Work:
    """What a stretch of bundles does. copies_in: page copies and others from HBM that it starts; copied_granules: by
    those whose size is known, in the unit of the target's copies. copies_out: to HBM."""

    bundles: int = 0
    matmuls: int = 0
    copies_in: int = 0
    copied_granules: int = 0
    copies_out: int = 0
    spills: int = 0
    fills: int = 0
    scalar_spills: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(self._numbers, other._numbers, strict=True)))

    def times(self, number: int) -> "Work":
        """So often."""
        return Work(*(one * number for one in self._numbers))

    @property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass(frozen=True)
class Loop:
    """A loop's body, [first, last] in bundles. parent: index of the loop around it, or None."""

    first: int
    last: int
    depth: int
    parent: int | None


Trips = Callable[[int], int]


@dataclass(frozen=True)
class Program:
    """A kernel's bundles.

    work: of each bundle. branches: bundle -> (bundle it may go to, whether it always goes there). slots: of each bundle
    how many of SLOTS are used; capacity: how many there are; both empty where libtpu did not tell.
    """

    work: tuple[Work, ...]
    branches: dict[int, tuple[int, bool]]
    loops: tuple[Loop, ...]
    capacity: tuple[int, ...] = ()
    slots: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @cached_property
    def total(self) -> Work:
        """All bundles, each once."""
        return sum(self.work, Work())

    @cached_property
    def main_loop(self) -> int | None:
        """Index of the loop with the most matmuls outside of loops in it, of several the shortest; None where no loop
        has any."""
        own = [self._own(index) for index in range(len(self.loops))]
        best = max(range(len(own)), key=lambda index: (own[index].matmuls, -own[index].bundles), default=None)
        return best if best is not None and own[best].matmuls else None

    def _own(self, index: int) -> Work:
        loop = self.loops[index]
        inner = [other for other in self.loops if other.parent == index]
        outside = (
            work
            for at, work in enumerate(self.work[loop.first : loop.last + 1], loop.first)
            if not any(one.first <= at <= one.last for one in inner)
        )
        return sum(outside, Work())

    def steady(self, index: int, trips: Trips) -> Work:
        """The cheapest way through a loop's body that has the most matmuls and copies from HBM: what one of many
        iterations runs, without what is done at the start or the end of a sequence only.

        trips: how often a loop in it runs, by its index.
        """
        return self._way(index, trips, lambda work: (work.matmuls, work.copies_in, -work.bundles))

    def longest(self, index: int, trips: Trips) -> Work:
        """The longest way through a loop's body: at least what its first, last or masked iterations run."""
        return self._way(index, trips, lambda work: (work.bundles,))

    def around(self, index: int) -> Work:
        """The longest way through a loop's body, without the loops in it."""
        return self._way(index, lambda inner: 0, lambda work: (work.bundles,))

    def _way(self, index: int, trips: Trips, worth: Callable[[Work], tuple[int, ...]]) -> Work:
        """The best way from a loop's first bundle to its last one; `worth` has to grow with each bundle alike."""
        loop = self.loops[index]
        inner = {self.loops[i].first: i for i in range(len(self.loops)) if self.loops[i].parent == index}
        best: dict[int, Work] = {loop.first: Work()}

        def reach(at: int, work: Work) -> None:
            if at not in best or worth(work) > worth(best[at]):
                best[at] = work

        end = loop.last + 1
        at = loop.first
        while at < end:
            if at not in best:
                at += 1
                continue
            here = best[at]
            if at in inner and at != loop.first:
                nested = self.loops[inner[at]]
                reach(nested.last + 1, here + self._way(inner[at], trips, worth).times(trips(inner[at])))
                at += 1
                continue
            here = here + self.work[at]
            target, always = self.branches.get(at, (None, False))
            if target is None or target <= at or target > loop.last:
                reach(at + 1, here)
            else:
                slots = sum(self.work[at + 1 : min(at + 1 + _DELAY_SLOTS, target)], Work())
                reach(target, here + slots)
                if not always:
                    reach(at + 1, here)
            at += 1
        return best[end]

    def shares(self, index: int) -> dict[str, float]:
        """How much of each kind of slot a loop uses, all its bundles counted, by name; 1 is all of it."""
        loop = self.loops[index]
        rows = self.slots[loop.first : loop.last + 1]
        used = [sum(column) for column in zip(*rows, strict=True)]
        return {
            name: number / (len(rows) * capacity)
            for name, number, capacity in zip(SLOTS, used, self.capacity, strict=False)
        }


def read_program(bundles: str, utilization: str = "") -> Program:
    """A kernel from libtpu's text of its final bundles, and of what each of them uses.

    Raises:
        ValueError: there is no bundle in the text.
    """
    texts = [(match[2], match[4]) for line in bundles.splitlines() if (match := _BUNDLE.match(line))]
    if not texts:
        raise ValueError(f"there are no bundles in the text of {len(bundles)} characters")
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for at, (_, text) in enumerate(texts):
        for region in _STARTS.findall(text):
            starts.setdefault(int(region), at)
        for region in _ENDS.findall(text):
            ends[int(region)] = at
    branches: dict[int, tuple[int, bool]] = {}
    back: dict[int, int] = {}
    for at, (_, text) in enumerate(texts):
        for condition, region in _BRANCH.findall(text):
            target = starts.get(int(region))
            if target is None:
                continue
            branches[at] = (target, not condition)
            if target <= at:
                first = next((i for i in range(target, at) if texts[i][0] == "LB"), target)
                back[first] = max(back.get(first, 0), at + _DELAY_SLOTS)
    last = len(texts) - 1
    work = tuple(_work_of(text) for _, text in texts)
    capacity, slots = _read_utilization(utilization)
    extents = {first: min(end, last) for first, end in back.items()}
    loops = _nest(extents)
    return Program(work, branches, loops, capacity, slots if len(slots) == len(work) else ())


def _work_of(text: str) -> Work:
    copies = _COPY_IN.findall(text)
    return Work(
        bundles=1,
        matmuls=len(_MATMUL.findall(text)),
        copies_in=len(copies),
        copied_granules=sum(int(granules or 0) for granules in copies),
        copies_out=len(_COPY_OUT.findall(text)),
        spills=len(_SPILL.findall(text)),
        fills=len(_FILL.findall(text)),
        scalar_spills=len(_SCALAR_SPILL.findall(text)),
    )


def _nest(extents: dict[int, int]) -> tuple[Loop, ...]:
    loops: list[Loop] = []
    for first, last in sorted(extents.items()):
        around = [i for i, loop in enumerate(loops) if loop.first <= first and last <= loop.last]
        parent = around[-1] if around else None
        loops.append(Loop(first, last, len(around) + 1, parent))
    return tuple(loops)


def _read_utilization(text: str) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    rows = [tuple(map(int, words)) for line in text.splitlines() if (words := line.split()) and _all_digits(words)]
    return (rows[0], tuple(rows[1:])) if rows else ((), ())


def _all_digits(words: Iterable[str]) -> bool:
    return all(word.isdigit() for word in words)
