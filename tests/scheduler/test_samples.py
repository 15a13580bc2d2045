"""Samples of one request: one prefill, states of their own, one request for limits, time-outs and counts."""

from typing import Any

import pytest
from scheduling import (
    Ahead,
    FakeModel,
    RequestMaker,
    expected_output,
    make_scheduler,
    names,
    run_all,
    samples_of,
    spans,
    step,
)

from radix_jax.request import Request
from radix_jax.scheduler import QueueFull, QueueView, RequestState, Scheduler

PROMPT_LENS = (1, 3, 4, 5, 8, 9, 17)


def start(**fields: Any) -> tuple[Scheduler, FakeModel, RequestMaker]:
    scheduler = make_scheduler(**({"page_size": 4} | fields))
    return scheduler, FakeModel(scheduler.cache.pool.num_pages, scheduler.cache.page_size), RequestMaker()


def check_outputs(requests: list[Request], states: list[RequestState]) -> None:
    assert [state.request for state in states] == requests
    assert [state.output_ids.tolist() for state in states] == [expected_output(request) for request in requests]


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_len", PROMPT_LENS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_prefill_and_the_last_tokens_of_each(n: int, prompt_len: int, enable_prefix_cache: bool) -> None:
    scheduler, model, make = start(enable_prefix_cache=enable_prefix_cache)
    requests = samples_of(make(range(prompt_len), 6), n)
    states = scheduler.add_samples(requests)
    shared_len = (prompt_len - 1) // 4 * 4
    plan, _ = step(scheduler, model)
    assert spans(plan) == [
        (request.request_id, shared_len if place else 0, prompt_len, True) for place, request in enumerate(requests)
    ]
    run_all(scheduler, model)
    stats = scheduler.stats
    assert stats.num_prefill_tokens == prompt_len + (n - 1) * (prompt_len - shared_len)
    assert stats.num_steps["prefill"] == 1
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (prompt_len, 0)
    check_outputs(requests, states)
    assert {state.cached_len for state in states} == {0}


def test_the_hit_is_that_of_the_first_sample() -> None:
    scheduler, model, make = start()
    scheduler.add(make(range(9), 1))
    run_all(scheduler, model)
    states = scheduler.add_samples(samples_of(make(range(20), 4), 3))
    run_all(scheduler, model)
    assert {state.cached_len for state in states} == {9}
    assert (scheduler.stats.num_prompt_tokens, scheduler.stats.num_cached_tokens) == (29, 9)


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", [4, 8, 32])
def test_chunks_are_computed_once(chunk: int, enable_prefix_cache: bool) -> None:
    """The others wait for the chunk that ends the prompt."""
    scheduler, model, make = start(
        max_prefill_tokens=chunk, enable_prefix_cache=enable_prefix_cache, partial_pages=False
    )
    requests = samples_of(make(range(30), 6), 4)
    states = scheduler.add_samples(requests)
    run_all(scheduler, model)
    assert scheduler.stats.num_prefill_tokens == 30 + 3 * 2
    check_outputs(requests, states)


def test_who_comes_later_copies_what_is_left_of_the_prompt() -> None:
    scheduler, model, make = start(max_running_requests=2)
    requests = samples_of(make(range(11), 6), 6)
    states = scheduler.add_samples(requests)
    run_all(scheduler, model)
    # Two at once, the second of which shares two pages; then each from the tail of one that ended.
    assert scheduler.stats.num_prefill_tokens == 11 + 3 + 4 * 1
    check_outputs(requests, states)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_running_requests", [1, 2, 3, 8])
def test_without_the_cache_the_prompt_is_kept_until_the_last_sample_ends(
    max_running_requests: int, overlap: bool
) -> None:
    scheduler, model, make = start(enable_prefix_cache=False, max_running_requests=max_running_requests)
    requests = [samples_of(make(range(11), 6), 7), samples_of(make(range(11), 6), 2)]
    states = [scheduler.add_samples(group) for group in requests]
    run_all(scheduler, model) if not overlap else Ahead(scheduler, model).run_all()
    for group, group_states in zip(requests, states, strict=True):
        check_outputs(group, group_states)
    # Two prompts, of which the two requests share nothing, and the tokens behind the whole pages of each other sample.
    assert scheduler.stats.num_prefill_tokens == 11 + 6 * 3 + 11 + 1 * 3
    assert scheduler.stats.num_cached_tokens == 0
    assert scheduler.cache.num_evictable == 0
    assert scheduler.cache.pool.num_free == 256


def test_without_the_cache_nothing_is_copied_and_single_requests_share_nothing() -> None:
    scheduler, model, make = start(enable_prefix_cache=False)
    scheduler.add_samples(samples_of(make(range(11), 6), 3))
    states = [scheduler.add(make(range(11), 6)) for _ in range(2)]
    plans = []
    run_all(scheduler, model, on_plan=plans.append)
    assert not any(plan.copies for plan in plans)
    assert scheduler.stats.num_prefill_tokens == 11 + 2 * 3 + 2 * 11
    assert {state.cached_len for state in states} == {0}


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight", "hrrn", "random", "shortest-prefill-first"])
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_among_others_under_any_policy(policy: str, enable_prefix_cache: bool) -> None:
    scheduler, model, make = start(
        schedule_policy=policy, enable_prefix_cache=enable_prefix_cache, max_running_requests=4, max_prefill_tokens=16
    )
    prompts = [range(20), range(3), range(10, 40), range(12), [*range(12), 77, 78], range(30)]
    requests = [samples_of(make(prompt, 5), n) for prompt, n in zip(prompts, (1, 3, 5, 1, 2, 4), strict=True)]
    states = [scheduler.add_samples(group) for group in requests]
    run_all(scheduler, model)
    for group, group_states in zip(requests, states, strict=True):
        check_outputs(group, group_states)
    assert scheduler.stats.num_prompt_tokens == sum(map(len, prompts))
    assert scheduler.cache.num_available == 256


def test_the_queue_takes_all_samples_or_none() -> None:
    scheduler, model, make = start(limits={"max_queued_requests": 4})
    scheduler.add(make([1], 2))
    with pytest.raises(QueueFull, match="1 requests wait and 4 samples come, max_queued_requests=4; try again later"):
        scheduler.add_samples(samples_of(make([2], 2), 4))
    with pytest.raises(ValueError, match="n=5 samples never fit max_queued_requests=4; raise that or lower n"):
        scheduler.add_samples(samples_of(make([2], 2), 5))
    assert scheduler.states.keys() == {"r0"}
    scheduler.add_samples(samples_of(make([2], 2), 3))
    with pytest.raises(QueueFull, match="4 requests wait, max_queued_requests=4"):
        scheduler.add(make([3], 2))
    assert len(run_all(scheduler, model)) == 4


def test_a_rule_that_fails_for_one_sample_refuses_all() -> None:
    seen: list[QueueView] = []

    def rule(view: QueueView) -> int:
        seen.append(view)
        return 1 // (3 - len(seen))

    scheduler, model, make = start(schedule_policy=rule)
    with pytest.raises(ZeroDivisionError):
        scheduler.add_samples(samples_of(make(range(9), 2), 5))
    scheduler.check_integrity()
    assert not scheduler.has_unfinished
    assert scheduler.num_waiting == 0
    scheduler.add(make([3], 2))
    assert len(run_all(scheduler, model)) == 1


def test_time_outs_are_of_the_request() -> None:
    """Once a sample was admitted, the others wait on the time of those that run."""
    scheduler, model, make = start(
        max_running_requests=1, limits={"queue_timeout_s": 5.0, "run_timeout_s": 10.0}, num_pages=65
    )
    running = scheduler.add_samples(samples_of(make([1, 2], 30), 3), 0.0)
    waiting = scheduler.add_samples(samples_of(make([3, 4], 30), 2), 1.0)
    plan = scheduler.plan(2.0)
    assert names(plan) == ["r0"]
    assert plan is not None
    scheduler.commit(plan, model.run(plan), 2.0)
    assert scheduler.expire(5.9) == []
    assert scheduler.expire(6.0) == waiting
    assert scheduler.stats.num_timed_out == 1
    assert scheduler.expire(11.9) == []
    assert scheduler.expire(12.0) == running
    assert [state.stop_reason for state in running] == ["run_timeout_s=10.0"] * 3
    assert scheduler.stats.num_timed_out == 2
    assert scheduler.stats.num_aborted == 5
    scheduler.check_integrity()
    assert scheduler.cache.num_available == 64


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_samples_are_retracted_and_preempted_one_by_one(overlap: bool, enable_prefix_cache: bool) -> None:
    scheduler, model, make = start(
        num_pages=31, enable_prefix_cache=enable_prefix_cache, limits={"preemption_threshold": 1}
    )
    requests = [samples_of(make(range(10), 40), 6), samples_of(make(range(5), 8, priority=1), 3)]
    states = [scheduler.add_samples(requests[0])]
    ahead = Ahead(scheduler, model)
    for _ in range(20):
        ahead.step() if overlap else step(scheduler, model)
    states.append(scheduler.add_samples(requests[1]))
    ahead.run_all() if overlap else run_all(scheduler, model)
    for group, group_states in zip(requests, states, strict=True):
        check_outputs(group, group_states)
    assert scheduler.stats.num_retractions > 0
    assert scheduler.cache.num_available == 30
    assert scheduler.cache.num_evictable == 0 or enable_prefix_cache


@pytest.mark.parametrize("which", [0, 1, 3])
def test_an_abort_of_one_sample_leaves_the_others(which: int) -> None:
    scheduler, model, make = start(max_running_requests=3)
    requests = samples_of(make(range(10), 12), 4)
    states = scheduler.add_samples(requests)
    for _ in range(3):
        step(scheduler, model)
    scheduler.abort(requests[which].request_id)
    scheduler.check_integrity()
    run_all(scheduler, model)
    for place, (request, state) in enumerate(zip(requests, states, strict=True)):
        output = expected_output(request)
        assert state.output_ids.tolist() == (output[: state.num_outputs] if place == which else output)
    assert scheduler.cache.num_available == 256
