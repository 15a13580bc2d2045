"""Plans made before the one before them is committed: where tokens come from, ends seen late, and what has to wait."""

import numpy as np
import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, spans

from radix_jax.plan import StepPlan
from radix_jax.request import Request
from radix_jax.scheduler import Scheduler


def start(page_size: int = 1, num_pages: int = 257, **fields) -> tuple[Scheduler, Ahead, RequestMaker]:
    scheduler = make_scheduler(page_size=page_size, num_pages=num_pages, **fields)
    return scheduler, Ahead(scheduler, FakeModel(num_pages, page_size)), RequestMaker()


def sources(plan: StepPlan | None) -> list[tuple[str, int | None, list[int]]]:
    """(request, source, ids) of each row."""
    assert plan is not None
    return [(row.request.request_id, row.source, row.token_ids.tolist()) for row in plan.rows]


def ends_at(request: Request, num_outputs: int, make: RequestMaker) -> Request:
    """The same request, with a stop id that ends it after so many outputs."""
    full = expected_output(request)
    stop_id = full[num_outputs - 1]
    assert full.index(stop_id) == num_outputs - 1
    return make(request.token_ids, request.max_tokens, stop_ids=[stop_id])


def test_rows_name_the_row_that_samples_their_token() -> None:
    scheduler, ahead, make = start()
    requests = [make([1, 2], 9), make([3, 4], 9)]
    for request in requests:
        scheduler.add(request)
    first, second = (expected_output(request) for request in requests)
    assert sources(ahead.plan()) == [("r0", None, [1, 2]), ("r1", None, [3, 4])]
    assert sources(ahead.plan()) == [("r0", 0, [0]), ("r1", 1, [0])]
    ahead.commit()
    assert sources(ahead.plan()) == [("r0", 0, [0]), ("r1", 1, [0])]
    ahead.commit()
    ahead.commit()
    # Nothing is in flight, so all tokens are known.
    assert sources(ahead.plan()) == [("r0", None, [first[2]]), ("r1", None, [second[2]])]
    scheduler.abort("r0")
    # The row of the plan before counts, not that of this one.
    assert sources(ahead.plan()) == [("r1", 1, [0])]
    ahead.commit()
    assert sources(ahead.plan()) == [("r1", 0, [0])]
    assert ahead.run_all()["r1"].output_ids.tolist() == second


def test_a_token_that_was_sampled_two_plans_ago_is_known() -> None:
    scheduler, ahead, make = start()
    scheduler.add(request := make([1, 2], 9))
    ahead.plan()
    scheduler.add(make([3, 4], 9))
    assert sources(ahead.plan()) == [("r1", None, [3, 4])]
    ahead.commit()
    assert sources(ahead.plan()) == [("r0", None, [expected_output(request)[0]]), ("r1", 0, [0])]


def test_nothing_is_sampled_twice_and_ends_by_length_are_foreseen() -> None:
    scheduler, ahead, make = start()
    requests = [make([1, 2], 1), make([3, 4], 2), make([5, 6], 4)]
    for request in requests:
        scheduler.add(request)
    assert names(ahead.plan()) == ["r0", "r1", "r2"]
    assert names(ahead.plan()) == ["r1", "r2"]
    ahead.commit()
    assert names(ahead.plan()) == ["r2"]
    ahead.commit()
    assert names(ahead.plan()) == ["r2"]
    ahead.commit()
    assert ahead.plan() is None
    [state] = ahead.commit()
    assert state.finish_reason == "length"
    assert not scheduler.has_unfinished
    assert scheduler.stats.num_tokens == {"prefill": 6, "decode": 4, "mixed": 0}
    assert scheduler.stats.num_output_tokens == 7


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_outputs", [1, 2, 3, 4, 5, 6])
def test_a_surplus_token_is_dropped_and_its_page_given_back_at_once(page_size: int, num_outputs: int) -> None:
    scheduler, ahead, make = start(page_size, partial_pages=False)
    request = ends_at(make([1, 2, 3], 30), num_outputs, make)
    other = make([7, 8], 30)
    scheduler.add(request)
    scheduler.add(other)
    ahead.plan()
    changed = []
    for _ in range(num_outputs):
        assert len(names(ahead.plan())) == 2
        changed = ahead.commit()
    [ended] = [state for state in changed if state.request_id == request.request_id]
    assert (ended.finish_reason, ended.output_ids.tolist()) == ("stop", expected_output(request))
    assert request.request_id not in scheduler.states
    # The plan in flight computes its last token; nobody counts on it. All but the other one's pages can be had.
    assert (
        scheduler.cache.match_len([*request.token_ids, *ended.output_ids, 0])
        == (2 + num_outputs) // page_size * page_size
    )
    assert scheduler.cache.num_available == 256 - scheduler.states[other.request_id].num_pages
    assert names(ahead.plan()) == [other.request_id]
    # The plan with the surplus row changes the other one alone.
    assert [state.request_id for state in ahead.commit()] == [other.request_id]
    assert ended.output_ids.tolist() == expected_output(request)
    assert ahead.run_all()[other.request_id].output_ids.tolist() == expected_output(other)


def test_the_page_of_a_surplus_token_may_be_taken_by_the_next_plan() -> None:
    """5 slots: the prompt has three, the first decode the fourth, the surplus one the fifth."""
    scheduler, ahead, make = start(num_pages=6)
    request = ends_at(make([1, 2, 3], 3), 2, make)
    newcomer = make([7, 8, 9], 3)
    scheduler.add(request)
    ahead.plan()
    ahead.plan()
    ahead.commit()
    ahead.plan()
    scheduler.add(newcomer)
    [ended] = ahead.commit()
    assert ended.finish_reason == "stop"
    assert len(ahead.in_flight) == 1
    assert spans(ahead.plan()) == [(newcomer.request_id, 0, 3, True)]
    assert ahead.run_all()[newcomer.request_id].output_ids.tolist() == expected_output(newcomer)


def test_who_needs_values_waits_for_the_commit_and_others_do_not() -> None:
    scheduler, ahead, make = start()
    requests = [make([1, 2], 6, needs_values=True), make([3, 4], 6)]
    for request in requests:
        scheduler.add(request)
    output = expected_output(requests[0])
    assert names(ahead.plan()) == ["r0", "r1"]
    assert sources(ahead.plan()) == [("r1", 1, [0])]
    ahead.commit()
    assert sources(ahead.plan()) == [("r0", None, [output[0]]), ("r1", 0, [0])]
    ahead.commit()
    assert names(ahead.plan()) == ["r1"]
    finished = ahead.run_all()
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_alone_it_makes_every_second_plan_wait() -> None:
    scheduler, ahead, make = start()
    scheduler.add(request := make([1, 2], 6, needs_values=True))
    for _ in range(6):
        assert ahead.plan() is not None
        assert ahead.plan() is None
        ahead.commit()
    assert not scheduler.has_unfinished
    assert scheduler.stats.num_output_tokens == len(expected_output(request))


def test_chunks_of_who_needs_values_are_planned_ahead() -> None:
    scheduler, ahead, make = start(max_prefill_tokens=4)
    scheduler.add(make(range(12), 6, needs_values=True))
    assert spans(ahead.plan()) == [("r0", 0, 4, False)]
    assert spans(ahead.plan()) == [("r0", 4, 8, False)]
    ahead.commit()
    assert spans(ahead.plan()) == [("r0", 8, 12, True)]
    ahead.commit()
    assert ahead.plan() is None


@pytest.mark.parametrize("how", ["abort", "expire"])
@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("num_steps", range(5))
def test_who_leaves_with_plans_in_flight_leaves_nothing_behind(how: str, num_in_flight: int, num_steps: int) -> None:
    """The first two steps compute the prompt; its id is free at once and may be used again."""
    scheduler, ahead, make = start(4, 33, max_prefill_tokens=8, limits={"run_timeout_s": 5.0})
    gone, stays = make(range(13), 20, request_id="a"), make(range(50, 54), 20)
    scheduler.add(gone)
    for _ in range(num_steps):
        ahead.plan()
        ahead.commit()
    ahead.plan()
    scheduler.add(stays)
    if num_in_flight == 2:
        ahead.plan(now=100.0)
    known = expected_output(gone)[: scheduler.states["a"].num_outputs]
    state = scheduler.abort("a") if how == "abort" else scheduler.expire(5.0)[0]
    assert state is not None
    assert state.output_ids.tolist() == known
    scheduler.check_integrity()
    again = make(range(80, 90), 20, request_id="a")
    scheduler.add(again)
    finished = ahead.run_all()
    assert state.output_ids.tolist() == known
    assert finished["a"].request is again
    for request in (again, stays):
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
    assert scheduler.cache.num_available == 32
    assert scheduler.cache.num_protected == 0
    scheduler.cache.reset()
    assert scheduler.cache.pool.num_free == 32


def test_what_was_planned_for_one_that_left_is_cached() -> None:
    """Its step runs anyway, so the pages that it fills may be used by plans behind it."""
    scheduler, ahead, make = start(4)
    scheduler.add(make(range(13), 9))
    ahead.plan()
    scheduler.abort("r0")
    follower = make([*range(12), 99], 5)
    scheduler.add(follower)
    assert spans(ahead.plan()) == [("r1", 12, 13, True)]
    assert ahead.run_all()["r1"].output_ids.tolist() == expected_output(follower)


def test_after_a_reset_plans_in_flight_count_as_run() -> None:
    scheduler, ahead, make = start(4)
    scheduler.add(make(range(13), 9))
    ahead.plan()
    ahead.plan()
    scheduler.reset()
    ahead.in_flight.clear()
    assert scheduler.plan() is None
    request = make([*range(12), 99], 5)
    scheduler.add(request)
    assert spans(ahead.plan()) == [("r1", 12, 13, True)]
    assert ahead.run_all()["r1"].output_ids.tolist() == expected_output(request)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mixed_steps", [False, True])
def test_outputs_are_those_without_overlap(seed: int, mixed_steps: bool) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 4, 16]))
    scheduler, ahead, make = start(
        page_size, 1 + 128 // page_size, max_prefill_tokens=20, limits={"mixed_steps": mixed_steps}
    )
    requests = [
        make(
            rng.integers(0, 2, rng.integers(1, 40)),
            int(rng.integers(1, 40)),
            stop_ids=rng.integers(0, 50, 2).tolist(),
            needs_values=bool(rng.integers(2)),
        )
        for _ in range(20)
    ]
    for request in requests:
        scheduler.add(request)
    finished = ahead.run_all()
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
    assert scheduler.cache.num_protected == 0


def test_a_request_that_ended_in_flight_is_not_added_again_before_its_step_is_committed() -> None:
    """Its row would pass for one of the new life."""
    scheduler, model, make = make_scheduler(), FakeModel(257, 1), RequestMaker()
    request = make([1, 2, 3], 3)
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    tokens = model.run(plan)
    scheduler.abort(request.request_id)
    with pytest.raises(ValueError, match="'r0' ended while its step runs; make a new Request of it"):
        scheduler.add(request)
    assert scheduler.commit(plan, tokens) == []
    scheduler.add(request)
    assert run_all(scheduler, model)["r0"].output_ids.tolist() == expected_output(request)


def test_a_plan_of_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="max_steps=0 is below its least value 1"):
        make_scheduler().plan(max_steps=0)
