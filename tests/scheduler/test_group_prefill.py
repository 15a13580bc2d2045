"""Pages that are shared in the very step that computes them: groups, duplicates, and parts that must not be copied."""

import numpy as np
import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, spans, step

from radix_jax.request import Request
from radix_jax.scheduler import RequestState, Scheduler


def start(page_size: int = 4, num_pages: int = 257, **fields) -> tuple[Scheduler, FakeModel, RequestMaker]:
    scheduler = make_scheduler(page_size=page_size, num_pages=num_pages, **fields)
    return scheduler, FakeModel(num_pages, page_size), RequestMaker()


def assert_outputs(requests: list[Request], finished: dict[str, RequestState]) -> None:
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_a_row_continues_the_pages_that_another_row_of_the_plan_fills() -> None:
    scheduler, model, make = start()
    requests = [make(range(10), 5), make([*range(8), 90, 91, 92, 93, 94], 5), make([*range(8), 90, 91, 92, 93, 95], 5)]
    for request in requests:
        scheduler.add(request)
    plan, _ = step(scheduler, model)
    # Each in the order in which its pages are there: the third continues the second, that one the first.
    assert spans(plan) == [("r0", 0, 10, True), ("r1", 8, 13, True), ("r2", 12, 13, True)]
    assert plan is not None
    first, second, third = (row.pages.tolist() for row in plan.rows)
    assert first[:2] == second[:2] == third[:2]
    assert second[2] == third[2] != first[2]
    assert scheduler.stats.num_cached_tokens == 8 + 12
    assert_outputs(requests, run_all(scheduler, model))


def test_a_group_joins_the_chunk_of_its_leader_as_far_as_that_goes() -> None:
    scheduler, model, make = start(max_prefill_tokens=10, schedule_policy="fcfs")
    requests = [make(range(30), 5), make([*range(8), 90, 91], 5), make([*range(13), 92], 5), make(range(27), 5)]
    for request in requests:
        scheduler.add(request)
    # Of 10 tokens the leader's chunk takes two pages. r1 has shared all that it can; r2 waits for the next page.
    assert spans(step(scheduler, model)[0]) == [("r0", 0, 8, False), ("r1", 8, 10, True)]
    assert spans(step(scheduler, model)[0]) == [("r0", 8, 16, False), ("r2", 12, 14, True)]
    assert spans(step(scheduler, model)[0]) == [("r0", 16, 24, False)]
    # The leader's last page is not full, so r3 shares six.
    assert spans(step(scheduler, model)[0]) == [("r0", 24, 30, True), ("r3", 24, 27, True)]
    assert_outputs(requests, run_all(scheduler, model))


def test_a_plan_ahead_continues_pages_that_are_still_to_be_computed() -> None:
    scheduler, model, make = start(max_prefill_tokens=8)
    requests = [make(range(20), 5), make([*range(19), 99], 5)]
    for request in requests:
        scheduler.add(request)
    ahead = Ahead(scheduler, model)
    assert spans(ahead.plan()) == [("r0", 0, 8, False)]
    assert spans(ahead.plan()) == [("r0", 8, 16, False)]
    ahead.commit()
    assert spans(ahead.plan()) == [("r0", 16, 20, True), ("r1", 16, 20, True)]
    assert_outputs(requests, ahead.run_all())


def test_a_leader_that_leaves_before_its_commit_leaves_its_pages_to_the_group() -> None:
    scheduler, model, make = start()
    requests = [make(range(10), 5), make([*range(8), 90, 91], 5)]
    for request in requests:
        scheduler.add(request)
    ahead = Ahead(scheduler, model)
    assert names(ahead.plan()) == ["r0", "r1"]
    scheduler.abort("r0")
    assert_outputs(requests[1:], ahead.run_all())


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_duplicate_is_given_back_once_the_plan_is_made(is_ahead: bool) -> None:
    """The last token is always computed, so a prompt of whole pages computes its last page again."""
    scheduler, model, make = start(partial_pages=False)
    scheduler.add(make(range(12), 1))
    run_all(scheduler, model)
    cached = scheduler.cache.tree.match_pages(range(12)).tolist()
    request = make(range(12), 6)
    scheduler.add(request)
    ahead = Ahead(scheduler, model)
    plan = ahead.plan()
    assert spans(plan) == [("r1", 8, 12, True)]
    assert plan is not None
    own = plan.rows[0].pages.tolist()
    assert own[:2] == cached[:2]
    assert own[2] != cached[2]
    # The row still writes it; whoever takes it now writes it later.
    assert scheduler.cache.pool.num_free == 256 - 3
    assert scheduler.states["r1"].pages.tolist() == cached
    assert scheduler.cache.tree.protected_size == 12
    if not is_ahead:
        ahead.commit()
    plan = ahead.plan()
    assert plan is not None
    assert plan.rows[0].pages[:3].tolist() == cached
    assert scheduler.cache.pool.num_free == 256 - 4
    assert_outputs([request], ahead.run_all())


def test_of_two_that_compute_one_page_in_one_plan_one_is_kept() -> None:
    scheduler, model, make = start(partial_pages=False)
    requests = [make(range(12), 6), make(range(12), 6)]
    for request in requests:
        scheduler.add(request)
    plan, _ = step(scheduler, model)
    assert spans(plan) == [("r0", 0, 12, True), ("r1", 8, 12, True)]
    assert plan is not None
    first, second = (row.pages.tolist() for row in plan.rows)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    plan, _ = step(scheduler, model)
    assert plan is not None
    assert [row.pages[:3].tolist() for row in plan.rows] == [first, first]
    assert scheduler.cache.pool.num_free == 256 - 5
    assert_outputs(requests, run_all(scheduler, model))


def test_an_output_that_others_compute_as_a_prompt_becomes_a_duplicate_when_it_ends() -> None:
    scheduler, model, make = start(max_prefill_tokens=8, schedule_policy="fcfs", limits={"max_consecutive_prefills": 1})
    talker = make(range(8), 10)
    scheduler.add(talker)
    for _ in range(2):
        step(scheduler, model)
    # Its turn with the whole output, before that is done: 8 + 10 tokens, and more.
    follower = make([*range(8), *expected_output(talker), *range(60, 74)], 6)
    scheduler.add(follower)
    finished = run_all(scheduler, model)
    assert_outputs([talker, follower], finished)
    assert finished["r1"].cached_len == 8
    scheduler.check_integrity()
    assert scheduler.cache.num_protected == 0


def test_what_enters_the_tree_between_two_chunks_is_taken_over() -> None:
    """While r0 computes [0, 8), somebody caches [8, 24) behind it; its own go back as they are planned."""
    scheduler, model, make = start(max_prefill_tokens=8, partial_pages=False)
    scheduler.add(make(range(30), 6))
    step(scheduler, model)
    cache = scheduler.cache
    handle = cache.match_prefix(range(8)).handle
    cache.lock(handle)
    pages = np.concatenate([cache.tree.match_pages(range(8)), cache.allocate(4)])
    result = cache.commit(range(24), pages, handle)
    cache.unlock(result.handle)
    num_free = cache.pool.num_free
    plan = scheduler.plan()
    assert spans(plan) == [("r0", 8, 16, False)]
    assert plan is not None
    assert plan.rows[0].pages[2:].tolist() != pages[2:4].tolist()
    assert scheduler.states["r0"].pages.tolist() == pages[:4].tolist()
    assert cache.pool.num_free == num_free
    scheduler.commit(plan, model.run(plan))
    scheduler.check_integrity()


@pytest.mark.parametrize("page_size", [4, 16])
def test_what_the_plan_itself_writes_is_not_copied(page_size: int) -> None:
    """Copies are made before anything is computed."""
    scheduler, model, make = start(page_size)
    stem = list(range(page_size + 2))
    requests = [make(range(2 * page_size + 1), 5), make([*stem, 99], 5)]
    for request in requests:
        scheduler.add(request)
    plan, _ = step(scheduler, model)
    assert spans(plan) == [("r0", 0, 2 * page_size + 1, True), ("r1", page_size, page_size + 3, True)]
    assert plan is not None
    assert plan.copies == ()
    # In the next plan it may be, committed or not.
    requests.append(make([*stem, 98], 5))
    scheduler.add(requests[2])
    plan, _ = step(scheduler, model)
    assert spans(plan) == [("r2", page_size + 2, page_size + 3, True)]
    assert plan is not None
    [copy] = plan.copies
    assert (copy.source, copy.num_tokens) == (int(scheduler.states["r0"].pages[1]), 2)
    assert_outputs(requests, run_all(scheduler, model))


def test_a_plan_ahead_copies_from_what_the_plan_before_it_writes() -> None:
    scheduler, model, make = start()
    requests = [make(range(9), 5), make([*range(6), 99], 5)]
    scheduler.add(requests[0])
    ahead = Ahead(scheduler, model)
    ahead.plan()
    scheduler.add(requests[1])
    plan = ahead.plan()
    assert spans(plan) == [("r1", 6, 7, True)]
    assert plan is not None
    assert len(plan.copies) == 1
    assert_outputs(requests, ahead.run_all())


def test_a_tail_that_a_surplus_row_still_writes_to_gives_its_known_tokens() -> None:
    """The surplus token goes behind the tail's tokens, in the same page."""
    scheduler, model, make = start()
    full = expected_output(make([1, 2, 3], 30))
    ended = make([1, 2, 3], 30, stop_ids=[full[2]])
    output = expected_output(ended)
    assert len(output) == 3
    scheduler.add(ended)
    ahead = Ahead(scheduler, model)
    for _ in range(3):
        ahead.plan()
        changed = ahead.commit() if len(ahead.in_flight) == 2 else []
    assert ahead.in_flight
    follower = make([1, 2, 3, *output[:2], 77], 6)
    scheduler.add(follower)
    while ended.request_id in scheduler.states:
        changed = ahead.commit()
    assert changed[0].finish_reason == "stop"
    plan = ahead.plan()
    # Five tokens are cached: a page, and one of the tail.
    assert spans(plan) == [(follower.request_id, 5, 6, True)]
    assert_outputs([follower], ahead.run_all())
