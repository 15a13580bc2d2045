"""Time-outs in every state, and how many may wait."""

import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, step

from radix_jax.scheduler import QueueFull, RequestState, Scheduler

LIMITS = {"queue_timeout_s": 10.0, "run_timeout_s": 20.0}


def assert_expires_at(scheduler: Scheduler, now: float, limit: str) -> RequestState:
    assert scheduler.expire(now - 0.25) == []
    [state] = scheduler.expire(now)
    assert (state.finish_reason, state.stop_reason) == ("abort", limit)
    assert state.request_id not in scheduler.states
    assert scheduler.expire(now) == []
    assert (scheduler.stats.num_timed_out, scheduler.stats.num_aborted) == (1, 1)
    return state


def assert_all_given_back(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert scheduler.cache.num_available == scheduler.cache.pool.num_pages - 1
    assert scheduler.cache.num_protected == 0


def test_while_it_waits() -> None:
    scheduler, make = make_scheduler(limits=LIMITS), RequestMaker()
    scheduler.add(make([1, 2]), now=3.0)
    assert_expires_at(scheduler, 13.0, "queue_timeout_s=10.0")
    assert_all_given_back(scheduler)
    assert scheduler.plan() is None


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_while_it_runs(num_steps: int) -> None:
    """The first three steps compute the prompt."""
    scheduler = make_scheduler(page_size=4, max_prefill_tokens=8, limits=LIMITS)
    model, make = FakeModel(257, 4), RequestMaker()
    scheduler.add(request := make(range(20), 9), now=3.0)
    ahead = Ahead(scheduler, model)
    for i in range(num_steps):
        ahead.plan(now=12.0 + i)
        ahead.commit()
    # It was admitted at 12, just before its time was over.
    state = assert_expires_at(scheduler, 32.0, "run_timeout_s=20.0")
    assert state.output_ids.tolist() == expected_output(request)[: max(num_steps - 2, 0)]
    assert_all_given_back(scheduler)


@pytest.mark.parametrize("num_ahead", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_with_plans_in_flight(num_steps: int, num_ahead: int) -> None:
    scheduler = make_scheduler(page_size=4, max_prefill_tokens=8, limits=LIMITS)
    model, make = FakeModel(257, 4), RequestMaker()
    gone, stays = make(range(20), 9), make(range(60, 80), 9)
    ahead = Ahead(scheduler, model)
    scheduler.add(gone)
    for _ in range(num_steps):
        ahead.plan()
        ahead.commit()
    for _ in range(num_ahead):
        ahead.plan()
    scheduler.add(stays, now=19.0)
    num_outputs = len(scheduler.states["r0"].output_ids)
    state = assert_expires_at(scheduler, 20.0, "run_timeout_s=20.0")
    assert state.num_outputs == num_outputs
    # Its pages are free at once, though a step still writes to them.
    scheduler.check_integrity()
    assert scheduler.cache.num_available == 256
    finished = ahead.run_all()
    assert finished.keys() == {"r1"}
    assert finished["r1"].output_ids.tolist() == expected_output(stays)
    assert_all_given_back(scheduler)


def test_one_that_was_retracted_runs_on_by_the_clock() -> None:
    scheduler = make_scheduler(max_running_requests=1, limits=LIMITS)
    model, make = FakeModel(257, 1), RequestMaker()
    scheduler.add(make([1, 2], 9), now=0.0)
    ahead = Ahead(scheduler, model)
    ahead.plan(now=1.0)
    ahead.commit()
    scheduler.add(make([3, 4], 9, priority=1), now=2.0)
    assert names(ahead.plan(now=5.0)) == ["r1"]
    ahead.commit()
    assert (scheduler.num_waiting, scheduler.states["r0"].num_retractions) == (1, 1)
    assert scheduler.expire(20.75) == []
    [state] = scheduler.expire(21.0)
    assert (state.request_id, state.stop_reason) == ("r0", "run_timeout_s=20.0")
    [state] = scheduler.expire(25.0)
    assert (state.request_id, state.stop_reason) == ("r1", "run_timeout_s=20.0")
    assert_all_given_back(scheduler)


def test_those_in_time_stay() -> None:
    scheduler = make_scheduler(schedule_policy="fcfs", max_running_requests=1, limits=LIMITS)
    model, make = FakeModel(257, 1), RequestMaker()
    for now in (0.0, 1.0, 2.0, 3.0):
        scheduler.add(make([int(now)], 30), now)
    ahead = Ahead(scheduler, model)
    ahead.plan(now=4.0)
    ahead.commit()
    assert [state.request_id for state in scheduler.expire(12.0)] == ["r1", "r2"]
    assert scheduler.states.keys() == {"r0", "r3"}
    assert run_all(scheduler, model).keys() == {"r0", "r3"}


@pytest.mark.parametrize("limits", [{}, {"queue_timeout_s": 5.0}, {"run_timeout_s": 5.0}])
def test_without_a_limit_time_does_not_matter(limits: dict[str, float]) -> None:
    scheduler, model, make = make_scheduler(max_running_requests=1, limits=limits), FakeModel(257, 1), RequestMaker()
    scheduler.add(make([1], 30))
    step(scheduler, model)
    scheduler.add(make([2], 30))
    expired = [state.request_id for state in scheduler.expire(1e9)]
    assert expired == {"queue_timeout_s": ["r1"], "run_timeout_s": ["r0"]}.get(next(iter(limits), ""), [])


def test_so_many_may_wait_and_no_more() -> None:
    scheduler = make_scheduler(max_running_requests=1, limits={"max_queued_requests": 2})
    model, make = FakeModel(257, 1), RequestMaker()
    for i in range(2):
        scheduler.add(make([i], 3))
    with pytest.raises(QueueFull, match=r"2 requests wait, max_queued_requests=2; try again later"):
        scheduler.add(make([2], 3, request_id="late"))
    assert scheduler.num_waiting == 2
    step(scheduler, model)
    scheduler.add(make([2], 3, request_id="late"))
    with pytest.raises(QueueFull):
        scheduler.add(make([3], 3))
    scheduler.abort("late")
    scheduler.add(make([4], 3))
    assert len(run_all(scheduler, model)) == 3


def test_what_can_never_run_is_refused_as_such_though_the_queue_is_full() -> None:
    scheduler, make = make_scheduler(num_pages=11, limits={"max_queued_requests": 1}), RequestMaker()
    scheduler.add(make([1], 3))
    with pytest.raises(ValueError, match="needs 12 pages"):
        scheduler.add(make(range(10), 3))


def test_a_retracted_request_waits_though_the_queue_is_full() -> None:
    scheduler = make_scheduler(max_running_requests=1, limits={"max_queued_requests": 1})
    model, make = FakeModel(257, 1), RequestMaker()
    scheduler.add(make([1], 5))
    step(scheduler, model)
    scheduler.add(make([2], 5, priority=1))
    step(scheduler, model)
    assert scheduler.states["r0"].num_retractions == 1
    with pytest.raises(QueueFull):
        scheduler.add(make([3], 5))
    assert len(run_all(scheduler, model)) == 2
