"""Plans of several decode steps in a row: when, how many, and what an early end leaves."""

import numpy as np
import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, step

from radix_jax.plan import StepPlan
from radix_jax.scheduler import Scheduler


def num_steps(scheduler: Scheduler, max_steps: int) -> int:
    plan = scheduler.plan(max_steps=max_steps)
    assert plan is not None
    assert plan.kind == "decode"
    return plan.num_steps


def start(*max_tokens: int, num_pages: int = 257, page_size: int = 1, **fields) -> tuple[Scheduler, FakeModel]:
    """Requests of one token that have their first output."""
    scheduler, make = make_scheduler(num_pages=num_pages, page_size=page_size, **fields), RequestMaker()
    model = FakeModel(num_pages, page_size)
    for i, each in enumerate(max_tokens):
        scheduler.add(make([i], each))
    step(scheduler, model)
    return scheduler, model


@pytest.mark.parametrize(("max_steps", "expected"), [(1, 1), (5, 5), (8, 8), (12, 11)])
def test_never_beyond_the_first_end_that_is_known(max_steps: int, expected: int) -> None:
    assert num_steps(start(30, 12)[0], max_steps) == expected


def test_pages_of_all_steps_are_in_the_rows() -> None:
    scheduler, model = start(30, page_size=4)
    ahead = Ahead(scheduler, model)
    plan = ahead.plan(max_steps=9)
    assert plan is not None
    [row] = plan.rows
    # Tokens 1 to 9: three pages.
    assert (row.start, row.end, len(row.pages), plan.num_tokens) == (1, 2, 3, 9)
    [state] = ahead.commit()
    assert state.num_outputs == 10
    assert scheduler.stats.num_steps["decode"] == 9
    assert scheduler.stats.num_tokens["decode"] == 9
    assert scheduler.stats.num_padded_tokens["decode"] == 72
    plan = scheduler.plan(max_steps=3)
    assert plan is not None
    with pytest.raises(ValueError, match=r"for 1 rows and 3 steps; give one a row and step"):
        scheduler.commit(plan, np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("num_left", "expected"), [(254, 16), (32, 16), (31, 8), (16, 8), (15, 4), (8, 4), (7, 2), (3, 1)]
)
def test_as_many_as_the_pool_has_pages_for(num_left: int, expected: int) -> None:
    """Two rows of one slot each, and one more each for every step; halved until that fits."""
    scheduler, make = make_scheduler(num_pages=257), RequestMaker()
    model = FakeModel(257, 1)
    for i in range(2):
        scheduler.add(make([i], 40))
    step(scheduler, model)
    scheduler.cache.allocate(254 - num_left)
    assert num_steps(scheduler, 16) == expected


def test_one_where_somebody_may_be_let_in_meanwhile() -> None:
    """The next one in order fits by tokens and rows, and only the limit of prefill steps in a row keeps it out."""
    scheduler, make = make_scheduler(limits={"max_consecutive_prefills": 1}), RequestMaker()
    model = FakeModel(257, 1)
    for i in range(3):
        scheduler.add(make([i], 30))
        if i < 2:
            step(scheduler, model)
    assert num_steps(scheduler, 8) == 1
    assert scheduler.num_waiting == 1


def test_one_while_a_prompt_is_unfinished() -> None:
    scheduler, make = make_scheduler(max_prefill_tokens=4, limits={"max_consecutive_prefills": 1}), RequestMaker()
    model = FakeModel(257, 1)
    scheduler.add(make([1], 30))
    step(scheduler, model)
    scheduler.add(make(range(10, 22), 30))
    assert names(step(scheduler, model)[0]) == ["r1"]
    assert num_steps(scheduler, 8) == 1


def test_one_where_somebody_waits_for_pages_until_the_ratio_is_at_its_least() -> None:
    """r1 asks for 991 of 1000 slots, so that it waits for the end of r0; which is not known before that."""
    scheduler, make = make_scheduler(num_pages=1001, schedule_policy="fcfs"), RequestMaker()
    model = FakeModel(1001, 1)
    scheduler.add(make([1], 700))
    step(scheduler, model)
    scheduler.add(make(range(10, 1000), 2))
    ahead = Ahead(scheduler, model)
    for i in range(600):
        plan = ahead.plan(max_steps=8)
        assert plan is not None
        assert (names(plan), plan.num_steps) == (["r0"], 1), i
        ahead.commit()
    plan = ahead.plan(max_steps=8)
    assert plan is not None
    assert plan.num_steps == 8


def test_several_while_all_rows_are_taken() -> None:
    scheduler, _ = start(30, 30, max_running_requests=2)
    scheduler.add(RequestMaker()([9], 9, request_id="waits"))
    assert num_steps(scheduler, 8) == 8


def test_one_while_a_plan_is_in_flight() -> None:
    scheduler, model = start(30)
    ahead = Ahead(scheduler, model)
    for expected in (4, 1):
        plan = ahead.plan(max_steps=4)
        assert plan is not None
        assert plan.num_steps == expected
    # It goes on from the last token of the first plan.
    assert [row.source for row in plan.rows] == [0]
    assert [row.start for row in plan.rows] == [5]
    ahead.commit()
    [state] = ahead.commit()
    assert state.output_ids.tolist() == expected_output(state.request)[:6]


def test_one_where_a_value_is_needed_after_each_step() -> None:
    scheduler, make = make_scheduler(), RequestMaker()
    model = FakeModel(257, 1)
    for needs_values in (False, True):
        scheduler.add(make([1, needs_values], 30, needs_values=needs_values))
    step(scheduler, model)
    assert num_steps(scheduler, 8) == 1


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("stop_at", range(2, 11))
def test_an_early_end_drops_the_rest_and_its_pages(stop_at: int, page_size: int) -> None:
    scheduler, make = make_scheduler(page_size=page_size, partial_pages=False), RequestMaker()
    model = FakeModel(257, page_size)
    endless, other = make([1, 2, 3], 60), make([4, 5], 60)
    full = expected_output(endless)
    stop_id = next(token for token in full[1:] if full.index(token) >= stop_at - 1)
    stopped = make([1, 2, 3], 60, stop_ids=[stop_id], request_id="stopped")
    output = expected_output(stopped)
    for request in (stopped, other):
        scheduler.add(request)
    step(scheduler, model)
    ahead = Ahead(scheduler, model)
    plan: StepPlan | None = ahead.plan(max_steps=16)
    assert plan is not None
    assert plan.num_steps == 16
    changed = ahead.commit()
    [state] = [state for state in changed if state.request_id == "stopped"]
    assert (state.output_ids.tolist(), state.finish_reason, state.stop_reason) == (output, "stop", stop_id)
    # Only the other one's pages are not available, and of the ended one whole pages are kept.
    num_pages = scheduler.states[other.request_id].num_pages
    assert scheduler.cache.num_available == 256 - num_pages
    assert scheduler.cache.tree.evictable_size == (3 + len(output) - 1) // page_size * page_size
    assert ahead.run_all()[other.request_id].output_ids.tolist() == expected_output(other)


@pytest.mark.parametrize("max_steps", [2, 3, 8])
def test_outputs_do_not_depend_on_how_many_steps_a_plan_has(max_steps: int) -> None:
    rng = np.random.default_rng(max_steps)
    scheduler, make = make_scheduler(page_size=4, num_pages=25, max_prefill_tokens=16), RequestMaker()
    ahead = Ahead(scheduler, FakeModel(25, 4))
    requests = [
        make(rng.integers(0, 2, rng.integers(1, 30)), int(rng.integers(30, 60)), stop_ids=[7] if i % 4 else [])
        for i in range(25)
    ]
    outputs, kinds = {}, set()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        plan = ahead.plan(max_steps=max_steps) if rng.random() < 0.6 and len(ahead.in_flight) < 2 else None
        if plan is not None:
            kinds.add((plan.kind, plan.num_steps))
        elif ahead.in_flight:
            outputs |= {state.request_id: state.output_ids.tolist() for state in ahead.commit()}
    assert ("decode", max_steps) in kinds
    for request in requests:
        assert outputs[request.request_id] == expected_output(request)
