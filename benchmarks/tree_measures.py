"""What is measured of each prefix cache: short samples of processor time, all caches in turn, many turns.

Other work on the machine slows a few turns down, and all caches of a turn alike. So a figure is a median of samples,
and how many times ours it is, is the median of the quotients of each turn.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from benchmarks.prefix_trace import Trace
from benchmarks.trace_replay import TimedReplay, rehearse
from benchmarks.tree_peers import Ids, OurTree, PrefixIndex

POOL_TOKENS = 500_000
EVICT_TOKENS = 64
LEAF_LEN = 16  # tokens of a leaf in the measurement of eviction
LEAVES_A_GROUP = 1000
EVICTIONS_A_SAMPLE = 10
MATCHES_A_SAMPLE = 10
INSERTS_A_SAMPLE = 64
TURNS_A_REPEAT = 5  # of what takes milliseconds
TRACE_PIECES = 4
US = 1e6  # microseconds a second

Makers = Mapping[str, Callable[[int], PrefixIndex]]


@dataclass(frozen=True)
class Row:
    """One measurement of every cache that takes part in it, by its name. times_ours: how many times our tree's value,
    measured turn by turn where caches take turns."""

    name: str
    unit: str
    values: dict[str, float]
    times_ours: dict[str, float]


def measure_match(makers: Makers, num_tokens: int, num_edges: int, repeats: int) -> Row:
    """Match a key that is cached as so many edges, with its pages, at page size 16."""
    ids = _draw(np.random.default_rng(0), num_tokens)
    samples: dict[str, Callable[[], float]] = {}
    for name, make in makers.items():
        index = make(16)
        for end in range(num_tokens // num_edges, num_tokens + 1, num_tokens // num_edges):
            index.insert(index.prepare_keys(ids[:end], 0)[1], index.prepare_pages(_count(1, end // 16)))
        samples[name] = _match_sampler(index, ids)
    edges = "1 edge" if num_edges == 1 else f"{num_edges} edges"
    return median_row(f"match {num_tokens // 1024}k, {edges}, P=16", in_turn(samples, TURNS_A_REPEAT * repeats))


def _match_sampler(index: PrefixIndex, ids: Ids) -> Callable[[], float]:
    key, _ = index.prepare_keys(ids, len(ids))
    match = index.match

    def sample() -> float:
        match(key)  # brings back what the other caches' turns pushed out of the processor's caches
        began = time.process_time()
        for _ in range(MATCHES_A_SAMPLE):
            match(key)
        return (time.process_time() - began) / MATCHES_A_SAMPLE

    return sample


def measure_insert(makers: Makers, repeats: int) -> Row:
    """Insert keys of 2k tokens after the same 8k tokens, at page size 16."""
    rng = np.random.default_rng(1)
    shared = _draw(rng, 8192)
    keys = [np.concatenate([shared, _draw(rng, 2048)]) for _ in range(INSERTS_A_SAMPLE)]

    def sample(make: Callable[[int], PrefixIndex]) -> float:
        index = make(16)
        index.insert(index.prepare_keys(shared, 0)[1], index.prepare_pages(_count(1, 512)))
        calls = [
            (index.prepare_keys(key, 0)[1], index.prepare_pages(np.concatenate([_count(1, 512), _count(start, 128)])))
            for key, start in zip(keys, range(513, 10**9, 128), strict=False)
        ]
        insert = index.insert
        began = time.process_time()
        for key, value in calls:
            insert(key, value)
        return (time.process_time() - began) / INSERTS_A_SAMPLE

    samples = {name: lambda make=make: sample(make) for name, make in makers.items()}
    return median_row("insert 2k under a shared 8k, P=16", in_turn(samples, TURNS_A_REPEAT * repeats))


def measure_trace(makers: Makers, trace: Trace, page_size: int, repeats: int) -> tuple[Row, int]:
    """The trace, a request; and the prompt tokens found in it. The caches take turns piece by piece of the trace.

    Raises:
        RuntimeError: the caches don't find the same for every request.
    """
    plans = {name: rehearse(make(page_size), trace, POOL_TOKENS // page_size) for name, make in makers.items()}
    first, *others = plans
    for other in others:
        if plans[other].cached_lens != plans[first].cached_lens:
            raise RuntimeError(
                f"{other} finds {plans[other].num_cached()} tokens in the trace at page_size={page_size}, "
                f"{first} {plans[first].num_cached()}"
            )
    taken: dict[str, list[list[float]]] = {name: [] for name in makers}
    for _ in range(repeats):
        replays = {
            name: TimedReplay(make(page_size), trace, plans[name], TRACE_PIECES) for name, make in makers.items()
        }
        pieces = in_turn({name: replay.play_piece for name, replay in replays.items()}, TRACE_PIECES)
        for name, seconds_s in pieces.items():
            taken[name].append(seconds_s)
    values = {
        name: sum(map(statistics.median, zip(*runs, strict=True))) / len(trace.requests) * US
        for name, runs in taken.items()
    }
    turns = {name: list(chain.from_iterable(runs)) for name, runs in taken.items()}
    row = Row(f"trace per request, P={page_size}", "µs", values, _times_ours(turns))
    return row, plans[first].num_cached()


def measure_evictions(makers: Makers, num_leaves: Sequence[int], repeats: int) -> list[Row]:
    """Evict 64 tokens from trees of so many leaves, at page size 1; what went is put back between the samples.

    The sizes take turns, so that their ratios hold on a busy machine; the caches don't, as they wouldn't fit in memory.
    """
    values: dict[int, dict[str, float]] = {leaves: {} for leaves in num_leaves}
    for name, make in makers.items():
        forests = {f"{leaves}": _Forest(make(1), leaves) for leaves in num_leaves}
        samples = {leaves: forest.time_evictions for leaves, forest in forests.items()}
        for leaves, seconds_s in in_turn(samples, repeats).items():
            values[int(leaves)][name] = statistics.median(seconds_s) * US
    return [plain_row(f"evict 64 tokens of {leaves:,} leaves, P=1", "µs", values[leaves]) for leaves in num_leaves]


def plain_row(name: str, unit: str, values: Mapping[str, float]) -> Row:
    """A row of what was measured one cache after the other."""
    return Row(name, unit, dict(values), {cache: value / values[OurTree.name] for cache, value in values.items()})


class _Forest:
    """A cache of many leaves of 16 tokens, a thousand each under a token of their own, at page size 1."""

    def __init__(self, index: PrefixIndex, num_leaves: int) -> None:
        self._index = index
        self._rng = np.random.default_rng(2)
        self._next_leaf = 0
        self._grow(num_leaves)

    def time_evictions(self) -> float:
        """Seconds of one eviction, then as many leaves are added as have gone."""
        evict = self._index.evict
        began = time.process_time()
        for _ in range(EVICTIONS_A_SAMPLE):
            evict(EVICT_TOKENS)
        seconds_s = (time.process_time() - began) / EVICTIONS_A_SAMPLE
        self._grow(EVICTIONS_A_SAMPLE * EVICT_TOKENS // LEAF_LEN)
        return seconds_s

    def _grow(self, num_leaves: int) -> None:
        for leaf in range(self._next_leaf, self._next_leaf + num_leaves):
            ids = self._rng.integers(50000, size=LEAF_LEN + 1, dtype=np.int32)
            ids[:2] = divmod(leaf, LEAVES_A_GROUP)
            pages = _count(1 + leaf * LEAF_LEN, LEAF_LEN + 1)
            self._index.insert(self._index.prepare_keys(ids, 0)[1], self._index.prepare_pages(pages))
        self._next_leaf += num_leaves


def in_turn(samples: Mapping[str, Callable[[], float]], num_turns: int) -> dict[str, list[float]]:
    """Take a sample of each in turn, in seconds, each turn beginning with another. Garbage waits meanwhile."""
    taken: dict[str, list[float]] = {name: [] for name in samples}
    names = deque(samples)
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_turns):
            for name in names:
                taken[name].append(samples[name]())
            names.rotate(-1)
    finally:
        gc.enable()
    return taken


def median_row(name: str, taken: Mapping[str, Sequence[float]]) -> Row:
    """A row, in microseconds, of what was measured in turn, in seconds."""
    values = {cache: statistics.median(seconds_s) * US for cache, seconds_s in taken.items()}
    return Row(name, "µs", values, _times_ours(taken))


def _times_ours(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of the quotients of each turn."""
    ours = taken[OurTree.name]
    return {
        cache: statistics.median(theirs / our for theirs, our in zip(seconds_s, ours, strict=True))
        for cache, seconds_s in taken.items()
    }


def _draw(rng: np.random.Generator, num_tokens: int) -> Ids:
    return rng.integers(50000, size=num_tokens, dtype=np.int32)


def _count(first: int, num_pages: int) -> Ids:
    return np.arange(first, first + num_pages, dtype=np.int32)
