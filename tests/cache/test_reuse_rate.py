"""Eviction by learned reuse: what it does without evidence and with it, its sums, and what it may grow to."""

from collections import Counter

import numpy as np
import pytest
from tree_oracle import BIN_STARTS, FIRST_RATES, best_rates

from radix_jax.cache import IntegrityError, RadixTree, reuse_rate
from radix_jax.cache.reuse_rate import NUM_BINS, NUM_CLASSES, ReuseRate, ReuseTimes, age_bin


def policy_of(tree: RadixTree) -> ReuseRate:
    policy = tree._policy
    assert isinstance(policy, ReuseRate)
    return policy


def serve(tree: RadixTree, ids: list[int], capacity: int) -> int:
    """One request at a time: match, make room, insert; returns the tokens found."""
    match = tree.match_prefix(ids)
    tree.lock(match.handle)
    tree.evict(max(tree.total_size + len(ids) - match.cached_len - capacity, 0))
    tree.unlock(match.handle)
    tree.insert_prefix(ids, 100 * ids[0] + np.arange(len(ids)))
    return match.cached_len


def test_bins_of_age():
    for place, start in enumerate(BIN_STARTS[:NUM_BINS]):
        assert age_bin(start) == place
        if start:
            assert age_bin(start - 1) == place - 1
    assert age_bin(2**40) == NUM_BINS - 1


def test_without_evidence_the_older_octave_goes_first():
    tree = RadixTree(1, "reuse-rate")
    for token, uses_between in ((1, 40), (2, 20), (3, 8), (4, 3), (5, 0)):
        tree.insert_prefix([token], [token])
        for _ in range(uses_between):
            tree.match_prefix([99])
    tree.lock(tree.match_prefix([3]).handle)
    assert tree.evict(9).tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize("num_prefixes", [12, 20, 40])
def test_of_a_cycle_that_is_too_long_a_part_stays(num_prefixes: int):
    """LRU evicts each prefix shortly before its turn, and finds nothing at all."""
    prefixes = [[number, *range(1000, 1009)] for number in range(num_prefixes)]
    found = {}
    for policy in ("lru", "reuse-rate"):
        tree = RadixTree(1, policy)
        found[policy] = sum(serve(tree, ids, 100) for _ in range(60) for ids in prefixes)
    asked = 60 * num_prefixes * 10
    assert found["lru"] == 0
    assert found["reuse-rate"] > asked * 10 / num_prefixes / 2, "half of what ten prefixes that always stay would give"


def test_what_came_back_before_stays_and_what_never_does_goes():
    """Ten prefixes come back every 30 requests; between them, others come once each, too many for the cache."""
    tree, found, fresh = RadixTree(1, "reuse-rate"), 0, 100
    for _ in range(60):
        for number in range(10):
            found += serve(tree, [number] * 4, 60)
            for _ in range(2):
                fresh += 1
                assert serve(tree, [fresh] * 4, 60) == 0
    assert found > 0.7 * 60 * 10 * 4


@pytest.mark.parametrize("seed", range(5))
def test_cells_are_in_the_order_of_exact_rates(seed: int):
    rng = np.random.default_rng(seed)
    times, begun = ReuseTimes(), Counter(dict.fromkeys(range(NUM_CLASSES), 24))
    ended = Counter((k, place) for k in range(NUM_CLASSES) for place in range(24))
    assert times.order == in_order(FIRST_RATES)
    for _ in range(400):
        num_reuses, place = int(rng.integers(6)), int(rng.integers(NUM_BINS))
        times.note_birth(num_reuses)
        begun[min(num_reuses, 3)] += 1
        if rng.random() < 0.6:
            times.note_reuse(num_reuses, place)
            ended[min(num_reuses, 3), place] += 1
        if times.learn():
            assert times.order == in_order(best_rates(begun, ended))


def in_order(rates: dict) -> list[tuple[int, int]]:
    return sorted(rates, key=lambda cell: (rates[cell], -cell[1], cell[0]))


def test_what_was_learned_long_ago_fades():
    times = ReuseTimes()
    for _ in range(70_000):
        times.note_birth(0)
        times.note_reuse(0, 10)
        times.learn()
    assert times._births[0] < 40_000
    assert times._reuses[0][10] < 40_000


def test_it_remembers_and_lists_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reuse_rate, "MAX_REMEMBERED", 100)
    tree = RadixTree(1, "reuse-rate")
    policy = policy_of(tree)
    for number in range(400):
        serve(tree, [number], 50)
    assert len(policy._gone) == 100
    tree = RadixTree(1, "reuse-rate")
    policy = policy_of(tree)
    for number in range(2_000):
        serve(tree, [number % 20], 50)
    assert sum(map(len, policy._heaps.values())) < 700, "20 leaves, used 100 times each, none evicted"
    tree.check_integrity()


def test_a_reset_forgets_the_nodes_and_keeps_what_was_learned():
    tree = RadixTree(1, "reuse-rate")
    for number in range(200):
        serve(tree, [number % 12], 10)
    order = policy_of(tree)._times.order
    assert order != ReuseTimes().order
    tree.reset()
    assert tree.evict(1).tolist() == []
    assert policy_of(tree)._times.order == order


def test_a_broken_order_is_seen():
    tree = RadixTree(1, "reuse-rate")
    tree.insert_prefix([1], [1])
    tree.check_integrity()
    policy_of(tree)._heaps.clear()
    with pytest.raises(IntegrityError, match="list 0 leaves, 1 may go"):
        tree.check_integrity()
