"""Requests that are retracted in any state resume, abort or finish: no lock is left, and the tokens are the same."""

from collections.abc import Callable

import numpy as np
import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler

from radix_jax.cache import OutOfPages, PrefixCache
from radix_jax.scheduler import Scheduler

NUM_PAGES = 65
PROMPT = [*range(30), 99]  # two chunks of 16 tokens; the step that ends the second samples the first output
MAX_TOKENS = 24


def take_pages_away(scheduler: Scheduler, model: FakeModel) -> None:
    """Somebody takes all that is free or evictable, until the request has to give way; then they give it back."""
    taken = []
    while scheduler.num_running:
        taken.append(scheduler.cache.allocate(scheduler.cache.num_available))
        try:
            plan = scheduler.plan()
        except OutOfPages:
            break
        assert plan is not None
        scheduler.commit(plan, model.run(plan))
    for pages in taken:
        scheduler.cache.free(pages)
    scheduler.check_integrity()


def forget_all(cache: PrefixCache) -> None:
    cache.reset()


def forget_a_part(cache: PrefixCache) -> None:
    cache.free(cache.tree.evict(1))


def split(cache: PrefixCache) -> None:
    cache.match_prefix(PROMPT[:8])


def insert_others(cache: PrefixCache) -> None:
    """Another branch inside the prompt, cached by others."""
    ids = np.array([*PROMPT[:16], *[7] * 16], np.int32)
    pages = cache.allocate(32 // cache.page_size)
    shared_len = cache.tree.insert_prefix(ids, pages).cached_len
    cache.free(pages[: shared_len // cache.page_size])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("meanwhile", [None, forget_all, forget_a_part, split, insert_others])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 12])
def test_it_goes_on_from_what_is_left_of_it(
    num_steps: int, meanwhile: Callable[[PrefixCache], None] | None, page_size: int
) -> None:
    """After 1 step it is in the middle of its prompt; after 2 it has its first token; 12: after ten decode steps."""
    scheduler = make_scheduler(page_size=page_size, num_pages=NUM_PAGES, max_prefill_tokens=16)
    model, make = FakeModel(NUM_PAGES, page_size), RequestMaker()
    request = make(PROMPT, MAX_TOKENS)
    scheduler.add(request)
    ahead = Ahead(scheduler, model)
    for _ in range(num_steps):
        ahead.plan()
        ahead.commit()
    state = scheduler.states["r0"]
    take_pages_away(scheduler, model)
    assert (state.finish_reason, state.num_retractions) == (None, 1)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.cache.num_protected) == (1, 0, 0)
    if meanwhile is not None:
        meanwhile(scheduler.cache)
        scheduler.check_integrity()
    assert ahead.run_all()["r0"] is state
    assert state.output_ids.tolist() == expected_output(request)
    assert (state.cached_len, scheduler.stats.num_cached_tokens) == (0, 0)
    assert scheduler.cache.num_protected == 0
    forget_all(scheduler.cache)
    assert scheduler.cache.pool.num_free == NUM_PAGES - 1


@pytest.mark.parametrize("again", [0, 1, 5])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 12])
def test_it_may_be_aborted_before_or_after_it_resumed(num_steps: int, again: int) -> None:
    scheduler = make_scheduler(num_pages=NUM_PAGES, max_prefill_tokens=16)
    model, make = FakeModel(NUM_PAGES, 1), RequestMaker()
    scheduler.add(make(PROMPT, MAX_TOKENS))
    ahead = Ahead(scheduler, model)
    for _ in range(num_steps):
        ahead.plan()
        ahead.commit()
    take_pages_away(scheduler, model)
    assert scheduler.stats.num_retractions == 1
    for _ in range(again):
        ahead.step()
    scheduler.abort("r0")
    assert not scheduler.has_unfinished
    while ahead.in_flight:
        assert ahead.commit() == []
    assert scheduler.cache.num_protected == 0
    assert scheduler.plan() is None
    assert scheduler.cache.num_available == NUM_PAGES - 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_it_may_be_retracted_after_each_step(page_size: int) -> None:
    """Retracted whenever it needs a page, 23 slots or 6 pages behind its prompt's, it still ends."""
    scheduler = make_scheduler(page_size=page_size, num_pages=NUM_PAGES, max_prefill_tokens=64)
    model, make = FakeModel(NUM_PAGES, page_size), RequestMaker()
    request = make(PROMPT, MAX_TOKENS)
    state = scheduler.add(request)
    ahead = Ahead(scheduler, model)
    while scheduler.has_unfinished:
        ahead.plan()
        ahead.commit()
        take_pages_away(scheduler, model)
    assert state.output_ids.tolist() == expected_output(request)
    assert state.num_retractions == (23 if page_size == 1 else 6)
    assert scheduler.stats.num_prompt_tokens == len(PROMPT)
    assert scheduler.cache.num_protected == 0
