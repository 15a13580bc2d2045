"""What a request takes from the cache and leaves in it: "use", "off", "read" and "write"."""

from itertools import takewhile
from typing import Any

import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, samples_of, step

from radix_jax.cache import of_weights
from radix_jax.request import CACHE_MODES, CacheMode, Request
from radix_jax.scheduler import RequestState, Scheduler

PROMPT = [*range(100, 141)]
MAX_TOKENS = 4
# Tokens of PROMPT that an earlier request had: none, so many that they end inside a page, and all; and how many tokens
# a step takes.
WARM_LENS = ((0, 16), (18, 4096), (41, 16))


def start(**fields: Any) -> tuple[Scheduler, FakeModel, RequestMaker]:
    scheduler = make_scheduler(**({"page_size": 4} | fields))
    return scheduler, FakeModel(scheduler.cache.pool.num_pages, scheduler.cache.page_size), RequestMaker()


def run(scheduler: Scheduler, model: FakeModel, requests: list[Request]) -> list[RequestState]:
    """All samples of one request, their outputs checked, every page audited after every step."""
    states = scheduler.add_samples(requests)
    while scheduler.has_unfinished:
        step(scheduler, model)
    assert [state.output_ids.tolist() for state in states] == [expected_output(request) for request in requests]
    return states


def computed(request: Request) -> list[int]:
    """The tokens whose KV a request leaves."""
    return [*request.token_ids.tolist(), *expected_output(request)[:-1]]


def pages_in_tree(scheduler: Scheduler) -> set[tuple[int, ...]]:
    """All of its pages, each as the tokens from the beginning to its end."""
    page_size, ends, pages = scheduler.cache.page_size, {}, set()
    for node in scheduler.cache.tree.snapshot().nodes:
        before = ends.get(node.parent_id, ())
        ends[node.node_id] = before + tuple(node.token_ids.tolist())
        pages |= {ends[node.node_id][:end] for end in range(len(before), len(ends[node.node_id]) + 1, page_size) if end}
    return pages


def whole_pages(ids: list[int], page_size: int) -> set[tuple[int, ...]]:
    return {tuple(ids[:end]) for end in range(page_size, len(ids) + 1, page_size)}


@pytest.mark.parametrize(("page_size", "partial_pages"), [(1, True), (4, True), (4, False), (16, True), (16, False)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", CACHE_MODES)
def test_exact_hits_and_pages(mode: CacheMode, n: int, page_size: int, partial_pages: bool) -> None:
    for warm_len, max_prefill_tokens in WARM_LENS:
        scheduler, model, make = start(
            page_size=page_size, partial_pages=partial_pages, max_prefill_tokens=max_prefill_tokens
        )
        warm: list[int] = []
        if warm_len:
            request = make(PROMPT[:warm_len], MAX_TOKENS)
            run(scheduler, model, [request])
            warm = computed(request)
        pages_before, num_free = pages_in_tree(scheduler), scheduler.cache.pool.num_free
        before = scheduler.stats.num_prefill_tokens
        requests = samples_of(make(PROMPT, MAX_TOKENS, cache=mode), n)
        states = run(scheduler, model, requests)

        copies = partial_pages and mode in ("use", "read")
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(PROMPT[:-1], warm, strict=False)))
        hit_len = num_common if copies else num_common // page_size * page_size
        first_len = hit_len if mode in ("use", "read") else 0
        prompt_pages_len = (len(PROMPT) - 1) // page_size * page_size
        other_len = {"use": max(hit_len, prompt_pages_len), "read": hit_len}.get(mode, prompt_pages_len)
        assert {state.cached_len for state in states} == {first_len}
        assert scheduler.stats.num_prefill_tokens - before == n * len(PROMPT) - first_len - (n - 1) * other_len

        pages = pages_before
        if mode in ("use", "write"):
            pages = pages.union(*(whole_pages(computed(request), page_size) for request in requests))
        assert pages_in_tree(scheduler) == pages
        if mode in ("off", "read"):
            assert scheduler.cache.pool.num_free == num_free, "no tails either"
        assert scheduler.cache.num_available == scheduler.cache.pool.num_pages - 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", CACHE_MODES)
def test_without_a_prefix_cache_every_request_is_off(mode: CacheMode, n: int) -> None:
    scheduler, model, make = start(enable_prefix_cache=False)
    for _ in range(2):
        states = run(scheduler, model, samples_of(make(PROMPT, MAX_TOKENS, cache=mode), n))
        assert {state.cached_len for state in states} == {0}
        assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_pages - 1


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_more_samples_than_may_run_share_one_prefill_but_those_that_only_read(mode: CacheMode) -> None:
    scheduler, model, make = start(max_running_requests=2)
    run(scheduler, model, [make(PROMPT[:8], 1)])
    before = scheduler.stats.num_prefill_tokens
    requests = samples_of(make(PROMPT, MAX_TOKENS, cache=mode), 5)
    run(scheduler, model, requests)
    num_computed = {"use": 41 - 8 + 4, "read": 5 * (41 - 8)}.get(mode, 41 + 4)
    assert scheduler.stats.num_prefill_tokens - before == num_computed


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_all_samples_join_the_step_of_the_first(mode: CacheMode) -> None:
    scheduler, model, make = start()
    run(scheduler, model, [make(PROMPT[:9], 1)])
    scheduler.add_samples(samples_of(make(PROMPT, cache=mode), 3))
    assert names(scheduler.plan()) == ["r1", "r1.1", "r1.2"]


@pytest.mark.parametrize("mode", ["off", "read"])
def test_nobody_else_is_served_by_what_leaves_nothing_behind(mode: CacheMode) -> None:
    """Not even while it runs, nor by another of its kind."""
    scheduler, model, make = start()
    requests = [make(PROMPT, 20, cache=mode), make(PROMPT, 20, cache=mode), make(PROMPT, 20)]
    states = [scheduler.add_samples(samples_of(request, 2)) for request in requests[:2]]
    step(scheduler, model)
    states.append([scheduler.add(requests[2])])
    run_all(scheduler, model)
    assert [{state.cached_len for state in group} for group in states] == [{0}, {0}, {0}]
    assert pages_in_tree(scheduler) == whole_pages(computed(requests[2]), 4)


def test_what_a_write_computes_serves_others_while_it_runs() -> None:
    scheduler, model, make = start(max_prefill_tokens=16)
    write, use = make(PROMPT, 20, cache="write"), make([*PROMPT, 1], 4)
    scheduler.add(write)
    ahead = Ahead(scheduler, model)
    ahead.plan()
    scheduler.add(use)
    finished = ahead.run_all()
    assert finished["r1"].cached_len == 40
    assert finished["r1"].output_ids.tolist() == expected_output(use)


def test_a_read_goes_on_when_the_prefix_it_began_with_is_evicted() -> None:
    """Two of three samples wait until the pool is full of others; they then compute all of it."""
    scheduler, model, make = start(num_pages=21, max_running_requests=1, partial_pages=False)
    run(scheduler, model, [make(PROMPT[:20], 1)])
    requests = samples_of(make(PROMPT[:30], 30, cache="read"), 3)
    others = [make([500 + i] * 40, 30, priority=2) for i in range(2)]
    states = scheduler.add_samples(requests)
    for _ in range(3):
        step(scheduler, model)
    for other in others:
        scheduler.add(other)
    while scheduler.has_unfinished:
        step(scheduler, model)
    assert [state.output_ids.tolist() for state in states] == [expected_output(request) for request in requests]
    assert sum(state.num_retractions for state in states) == 1
    assert states[0].cached_len == 20
    assert {node.namespace for node in scheduler.cache.tree.snapshot().nodes} <= {None}


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_new_weights_are_met_as_the_mode_says(mode: CacheMode) -> None:
    """The sample that runs is retracted for another request, so all three are computed by the new weights, beside what
    that one cached of them."""
    scheduler, model, make = start(max_running_requests=1, partial_pages=False)
    run(scheduler, model, [make(PROMPT, 1)])
    states = scheduler.add_samples(samples_of(make(PROMPT, 20, cache=mode), 3))
    step(scheduler, model)
    scheduler.update_weights(1)
    before = scheduler.stats.num_prefill_tokens
    scheduler.add(make(PROMPT, 1, priority=1))
    while scheduler.has_unfinished:
        step(scheduler, model)
    # The retracted one has an output token by then.
    first_len = 2 if mode in ("use", "read") else 42
    assert scheduler.stats.num_prefill_tokens - before == 41 + first_len + 1 + 1
    assert [state.output_ids.tolist() for state in states] == [expected_output(state.request) for state in states]
    left = {node.namespace for node in scheduler.cache.tree.snapshot().nodes}
    assert left == {of_weights(None, 1)}


def test_a_reset_leaves_nothing_of_what_samples_shared_alone() -> None:
    for mode in ("off", "read"):
        scheduler, model, make = start()
        scheduler.add_samples(samples_of(make(PROMPT, 20, cache=mode), 3))
        step(scheduler, model)
        scheduler.reset()
        scheduler.check_integrity()
        assert scheduler.cache.pool.num_free == 256
