"""Requests whose pages are taken away for a while: who, what stays, and how they go on."""

import numpy as np
import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, spans, step

from radix_jax.cache import OutOfPages
from radix_jax.request import Request
from radix_jax.scheduler import RequestState, Scheduler
from radix_jax.scheduler.retraction import preemption_order, retraction_order


def states_of(*each: tuple[int, int, int]) -> list[RequestState]:
    """Of (priority, num_outputs, prompt_len), in the order of arrival."""
    make, states = RequestMaker(), []
    for priority, num_outputs, prompt_len in each:
        state = RequestState(make(range(prompt_len), 50, priority=priority), 4)
        for _ in range(num_outputs):
            state.append_token(0)
        states.append(state)
    return states


def ids_of(states: list[RequestState]) -> list[str]:
    return [state.request_id for state in states]


def test_lowest_priority_fewest_outputs_longest_prompt_newest_first() -> None:
    states = states_of((1, 0, 99), (0, 5, 9), (0, 2, 5), (0, 2, 8), (0, 2, 8), (0, 5, 10), (-1, 9, 1))
    assert ids_of(retraction_order(states)) == ["r6", "r4", "r3", "r2", "r5", "r1", "r0"]


def test_a_place_is_taken_from_the_lowest_and_newest_below_the_threshold() -> None:
    states = states_of((2, 0, 9), (0, 5, 9), (3, 0, 9), (1, 2, 5), (0, 9, 1), (2, 1, 1))
    assert ids_of(preemption_order(states, 3, 1)) == ["r4", "r1", "r3", "r5", "r0"]
    assert ids_of(preemption_order(states, 3, 2)) == ["r4", "r1", "r3"]
    assert preemption_order(states, 3, 4) == []
    assert preemption_order(states, 0, 1) == []


def short_pool(num_decodes: int = 12) -> tuple[Scheduler, FakeModel, list[Request]]:
    """29 slots for two requests of 16: r1 is let in for 16 + 2 + 1 + ceil(0.7 * 13), and 12 decode steps fit."""
    scheduler, model, make = make_scheduler(num_pages=30, schedule_policy="fcfs"), FakeModel(30, 1), RequestMaker()
    requests = [make([1, 2], 15), make([3, 4], 15)]
    for request in requests:
        scheduler.add(request)
    assert names(step(scheduler, model)[0]) == ["r0"]
    assert names(step(scheduler, model)[0]) == ["r1"]
    for _ in range(num_decodes):
        assert names(step(scheduler, model)[0]) == ["r0", "r1"]
    return scheduler, model, requests


def test_what_is_retracted_keeps_output_kv_and_seniority() -> None:
    scheduler, model, requests = short_pool()
    state = scheduler.states["r1"]
    output, ticket = state.output_ids.tolist(), state.ticket
    plan, _ = step(scheduler, model)
    assert names(plan) == ["r0"]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.states["r1"] is state
    assert (state.num_retractions, scheduler.stats.num_retractions) == (1, 1)
    assert (state.handle, state.num_pages, state.num_computed) == (None, 0, 0)
    assert state.ticket is ticket
    standing = scheduler.explain("r1").standing
    assert standing is not None
    assert standing.passes_waited == 2, "since it came, not since it was retracted"
    assert state.output_ids.tolist() == output == expected_output(requests[1])[:13]
    # All that was computed: 2 + 13 tokens, less the last.
    assert scheduler.cache.match_len(state.known) == 14
    scheduler.abort("r0")
    assert spans(step(scheduler, model)[0]) == [("r1", 14, 15, True)]
    assert run_all(scheduler, model)["r1"].output_ids.tolist() == expected_output(requests[1])
    # Its hit is that of its first admission: none.
    assert state.cached_len == 0
    stats = scheduler.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_prefill_tokens) == (4, 0, 5)


def test_its_kv_gives_way_to_those_who_run_and_is_computed_again() -> None:
    scheduler, model, requests = short_pool()
    for _ in range(2):  # r0 comes to its end, and for its last slot the end of r1's output goes
        assert names(step(scheduler, model)[0]) == ["r0"]
    assert "r0" not in scheduler.states
    assert scheduler.cache.match_len(scheduler.states["r1"].known) == 13
    assert spans(step(scheduler, model)[0]) == [("r1", 13, 15, True)]
    assert run_all(scheduler, model)["r1"].output_ids.tolist() == expected_output(requests[1])
    stats = scheduler.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_prefill_tokens) == (4, 0, 6)


def test_nobody_is_retracted_before_the_plan_in_flight_is_committed() -> None:
    scheduler, model, requests = short_pool(num_decodes=11)
    ahead = Ahead(scheduler, model)
    assert names(ahead.plan()) == ["r0", "r1"]
    # One slot is left, and two are needed.
    assert ahead.plan() is None
    assert scheduler.stats.num_retractions == 0
    assert [state.request_id for state in ahead.commit()] == ["r0", "r1"]
    assert names(ahead.plan()) == ["r0"]
    assert scheduler.stats.num_retractions == 1
    finished = ahead.run_all()
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_an_unfinished_prompt_goes_on_where_it_was_and_its_sibling_does_not_wait_for_it() -> None:
    """12 pages of 4; an old prompt of 5 pages is locked by somebody while r1 has 6 of its 10."""
    scheduler = make_scheduler(page_size=4, num_pages=13, max_prefill_tokens=8, schedule_policy="fcfs")
    model, make = FakeModel(13, 4), RequestMaker()
    scheduler.add(make(range(100, 120), 1))
    run_all(scheduler, model)
    long, sibling = make(range(40), 1), make([*range(39), 99], 1)
    for request in (long, sibling):
        scheduler.add(request)
    assert spans(step(scheduler, model)[0]) == [("r1", 0, 8, False)]
    old = scheduler.cache.match_prefix(range(100, 120)).handle
    scheduler.cache.lock(old)
    assert spans(step(scheduler, model)[0]) == [("r1", 8, 16, False)]
    assert spans(step(scheduler, model)[0]) == [("r1", 16, 24, False)]
    # One page is left, two are needed. r1 gives way, and asks for 4 beside its own 6; its sibling as well.
    with pytest.raises(OutOfPages, match="2 requests wait, none runs"):
        scheduler.plan()
    scheduler.check_integrity()
    assert scheduler.stats.num_retractions == 1
    assert scheduler.cache.match_len(range(40)) == 24
    scheduler.abort("r1")
    scheduler.cache.unlock(old)
    assert spans(step(scheduler, model)[0]) == [("r2", 24, 32, False)]
    assert run_all(scheduler, model)["r2"].output_ids.tolist() == expected_output(sibling)


def test_many_retractions_leave_the_pool_whole() -> None:
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(page_size=2, num_pages=25, max_prefill_tokens=8, schedule_policy="fcfs")
    model, make = FakeModel(25, 2), RequestMaker()
    requests = [make(rng.integers(0, 3, rng.integers(1, 8)), 24) for _ in range(30)]
    for request in requests:
        scheduler.add(request)
    finished = Ahead(scheduler, model).run_all()
    assert scheduler.stats.num_retractions >= 5
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
    assert scheduler.cache.num_available == 24
    assert scheduler.cache.num_protected == 0
