"""The waiting queue: always in the right order, and the tree asked only about what may have changed."""

import random
from collections.abc import Hashable

import numpy as np
import pytest
from scheduling import FakeModel, RequestMaker, make_scheduler, run_all, step

from radix_jax.cache.keys import TokenIds
from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.scheduler.policy import lpm
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.waiting import WaitingQueue


class CountingCache(PrefixCache):
    """Counts the peeks."""

    num_peeks = 0

    def match_len(self, ids: TokenIds, namespace: Hashable = None) -> int:
        self.num_peeks += 1
        return super().match_len(ids, namespace)


def counting_cache(page_size: int, num_pages: int) -> CountingCache:
    return CountingCache(RadixTree(page_size), PagePool(num_pages))


def put(queue: WaitingQueue, cache: PrefixCache, state: RequestState, num_computed: int) -> None:
    """Insert the state's first tokens as a running request would, and tell the queue."""
    pages = cache.allocate(num_computed // cache.page_size)
    version = cache.tree.version
    result = cache.tree.insert_prefix(state.tokens[:num_computed], pages, state.request.namespace)
    cache.free(pages[: result.cached_len // cache.page_size])
    queue.note_inserted(state, range(result.cached_len, num_computed), cache.tree.version - version)


def ids_in_order(queue: WaitingQueue) -> list[str]:
    return [entry.state.request_id for entry in queue.in_order()]


def test_a_thousand_long_requests_are_not_matched_while_the_tree_stays() -> None:
    rng = np.random.default_rng(0)
    cache = counting_cache(16, 4097)
    scheduler = make_scheduler(page_size=16, num_pages=4097, max_model_len=20_000, max_running_requests=2, cache=cache)
    model, make = FakeModel(4097, 16), RequestMaker()
    stem = rng.integers(0, 1000, 8_000, np.int32)
    for _ in range(1_000):
        scheduler.add(make(np.concatenate([stem, rng.integers(0, 1000, 8_000, np.int32)]), 40))
    kinds = []
    while kinds[-2:] != ["decode", "decode"]:
        plan = scheduler.plan()
        assert plan is not None
        kinds.append(plan.kind)
        scheduler.commit(plan, model.run(plan))
    num_peeks, version = cache.num_peeks, cache.tree.version
    for _ in range(20):
        plan = scheduler.plan()
        assert plan is not None
        assert plan.kind == "decode"
        scheduler.commit(plan, model.run(plan))
    assert cache.tree.version == version
    assert scheduler.num_waiting == 998
    assert cache.num_peeks == num_peeks


def test_only_what_waits_for_the_inserted_page_is_matched_again() -> None:
    cache = counting_cache(4, 257)
    queue, make = WaitingQueue(lpm, cache), RequestMaker()
    families = [np.arange(start, start + 20, dtype=np.int32) for start in (0, 100, 200)]
    states = []
    for family in families:
        for tail in range(10):
            state = RequestState(make([*family, 900 + tail]), 4)
            states.append(state)
            queue.add(state)
    assert cache.num_peeks == 30
    put(queue, cache, states[10], 8)
    assert cache.num_peeks == 40
    queue.check_integrity()
    assert ids_in_order(queue)[:10] == [f"r{i}" for i in range(10, 20)]
    cache.num_peeks = 0
    # Beyond its first page this one is like no other.
    loner = RequestState(make([*families[1][:8], 7, 7, 7, 7, 7]), 4)
    put(queue, cache, loner, 12)
    assert cache.num_peeks == 0
    assert ids_in_order(queue)[:10] == [f"r{i}" for i in range(10, 20)]
    assert cache.num_peeks == 0
    queue.check_integrity()


def test_a_fall_is_seen_when_it_matters() -> None:
    cache = counting_cache(4, 257)
    queue, make = WaitingQueue(lpm, cache), RequestMaker()
    short, long, cold = (RequestState(make([*range(first, first + 20), 999]), 4) for first in (0, 100, 200))
    for state in (cold, short, long):
        queue.add(state)
    put(queue, cache, long, 20)
    put(queue, cache, short, 8)
    assert ids_in_order(queue) == ["r1", "r0", "r2"]
    cache.free(cache.tree.evict(20))
    assert cache.tree.match_len(long.prompt) == 0
    assert ids_in_order(queue) == ["r0", "r1", "r2"]
    queue.check_integrity()
    # Back again, deeper than what the queue remembers.
    put(queue, cache, long, 20)
    queue.check_integrity()
    assert ids_in_order(queue) == ["r1", "r0", "r2"]


def test_each_yielded_match_is_current_even_if_eviction_comes_in_between() -> None:
    cache = counting_cache(4, 257)
    queue, make = WaitingQueue(lpm, cache), RequestMaker()
    states = [RequestState(make([*range(first, first + 20), 999]), 4) for first in (0, 100)]
    for state in states:
        queue.add(state)
        put(queue, cache, state, 20)
    order = queue.in_order()
    assert next(order).matched_len == 20
    queue.remove("r0")
    cache.free(cache.tree.evict(40))
    entry = next(order)
    assert (entry.state.request_id, entry.matched_len) == ("r1", 0)
    assert len(queue) == 1
    assert "r0" not in queue


@pytest.mark.parametrize("page_size", [1, 4])
def test_kept_lengths_equal_a_full_rematch_under_random_changes(page_size: int) -> None:
    rng = random.Random(page_size)
    cache = counting_cache(page_size, 65)
    queue, make = WaitingQueue(lpm, cache), RequestMaker()
    for _ in range(600):
        ids = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        namespace = rng.choice([None, "a"])
        state = RequestState(make(ids, namespace=namespace), page_size)
        num_full = len(ids) // page_size * page_size
        action = rng.randrange(4)
        if action == 0 and len(queue) < 12:
            queue.add(state)
        elif action == 1 and num_full // page_size <= cache.num_available:
            put(queue, cache, state, num_full)
        elif action == 2:
            cache.free(cache.tree.evict(rng.randrange(8)))
        else:
            entries = list(queue.in_order())
            lengths = [cache.match_len(entry.state.prompt[:-1], entry.state.request.namespace) for entry in entries]
            assert [entry.matched_len for entry in entries] == lengths
            keys = [(-length, entry.state.request.arrival) for length, entry in zip(lengths, entries, strict=True)]
            assert keys == sorted(keys)
            if entries and len(queue) > 8:
                queue.remove(rng.choice(entries).state.request_id)
        queue.check_integrity()


@pytest.mark.parametrize("policy", ["lpm", "shortest-prefill-first", "fcfs"])
def test_waiting_neither_splits_a_node_nor_refreshes_recency(policy: str) -> None:
    cache = counting_cache(1, 33)
    scheduler = make_scheduler(num_pages=33, max_running_requests=1, schedule_policy=policy, cache=cache)
    model, make = FakeModel(33, 1), RequestMaker()
    older, newer = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]
    for prompt in (older, newer):
        scheduler.add(make(prompt, 1))
        run_all(scheduler, model)
    scheduler.add(make([9, 9], 12))
    step(scheduler, model)
    before = repr(cache.tree.snapshot())
    scheduler.add(make([*older[:3], 7], 2))
    for _ in range(5):
        step(scheduler, model)
    assert scheduler.num_waiting == 1
    assert repr(cache.tree.snapshot()) == before
    cache.free(cache.tree.evict(1))
    assert (cache.tree.match_len(older), cache.tree.match_len(newer)) == (0, 6)
