"""Seats: each running request has one to itself, and none is as high as the number of those that may run."""

import numpy as np
import pytest
from scheduling import RequestMaker, make_scheduler

from radix_jax.plan import StepPlan
from radix_jax.scheduler.seats import Seats


def test_numbers_stay_below_the_most_that_were_taken_at_once() -> None:
    rng, seats = np.random.default_rng(0), Seats()
    taken: list[int] = []
    most = 0
    for _ in range(500):
        if taken and rng.random() < 0.5:
            seats.give_back(taken.pop(int(rng.integers(len(taken)))))
        else:
            taken.append(seats.take())
        most = max(most, len(taken))
        assert len(set(taken)) == len(taken)
        assert max(taken, default=-1) < most
        seats.check_integrity(taken)


@pytest.mark.parametrize("taken", [[0, 0], [0], [0, 1, 2]])
def test_a_seat_that_two_have_or_nobody_is_seen(taken: list[int]) -> None:
    seats = Seats()
    seats.take()
    seats.take()
    with pytest.raises(AssertionError, match="of 2"):
        seats.check_integrity(taken)


def run(scheduler, num_steps: int) -> list[StepPlan]:
    plans = []
    for _ in range(num_steps):
        plan = scheduler.plan()
        if plan is None:
            break
        plans.append(plan)
        scheduler.commit(plan, np.full(len(plan.rows), 1, np.int32))
        scheduler.check_integrity()
    return plans


def test_rows_carry_the_seat_of_their_request_as_long_as_it_runs() -> None:
    scheduler, make = make_scheduler(max_running_requests=3, max_prefill_tokens=8), RequestMaker()
    for number in range(7):
        scheduler.add(make(range(10 * number, 10 * number + 5 + number), max_tokens=1 + number % 4))
    plans = run(scheduler, 200)
    seats_of: dict[str, set[int]] = {}
    for plan in plans:
        assert len({row.seat for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            seats_of.setdefault(row.request.request_id, set()).add(row.seat)
    assert len(seats_of) == 7
    assert all(len(seats) == 1 for seats in seats_of.values())
    assert set().union(*seats_of.values()) == {0, 1, 2}


def test_the_row_that_ends_a_prompt_tells_what_was_generated_before() -> None:
    """Nothing at first; after a retraction all of it. Chunks before it and decode rows tell nothing."""
    scheduler, make = make_scheduler(max_prefill_tokens=4), RequestMaker()
    state = scheduler.add(make(range(10), max_tokens=9))
    plans = run(scheduler, 6)
    assert [row.samples for plan in plans for row in plan.rows] == [False, False, True, True, True, True]
    assert all(len(row.output_ids) == 0 for plan in plans for row in plan.rows)
    scheduler._retract(state)
    scheduler.cache.reset()
    plans = run(scheduler, 5)
    assert [row.samples for plan in plans for row in plan.rows] == [False, False, False, True, True]
    assert [row.output_ids.tolist() for plan in plans for row in plan.rows] == [[], [], [], [1] * 4, []]
