"""How many pages a request is let in for, and the share of the outputs that is reserved."""

import numpy as np
import pytest
from scheduling import FakeModel, RequestMaker, make_scheduler, names, run_all, step

from radix_jax.scheduler import RequestState
from radix_jax.scheduler.budget import NewTokenRatio, num_pages_to_come


def state_of(
    prompt_len: int, max_tokens: int, *, page_size: int = 4, num_outputs: int = 0, ignore_eos: bool = False
) -> RequestState:
    state = RequestState(RequestMaker()(range(prompt_len), max_tokens, ignore_eos=ignore_eos), page_size)
    for token in range(num_outputs):
        state.append_token(token)
    return state


def test_the_ratio_falls_from_0_7_to_0_098_in_600_decode_steps() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == 0.7
    for _ in range(300):
        ratio.count_decode_steps(1)
    assert ratio.value == pytest.approx(0.399)
    ratio.count_decode_steps(299)
    assert not ratio.is_least
    ratio.count_decode_steps(100)
    assert ratio.value == 0.098
    assert ratio.is_least
    ratio.reset()
    assert ratio.value == 0.7


def test_a_retraction_makes_room_for_20_steps_of_those_that_run_on() -> None:
    ratio = NewTokenRatio()
    ratio.note_retraction([state_of(3, 30, num_outputs=5), state_of(9, 50, num_outputs=7)])
    assert ratio.value == pytest.approx((12 + 20 * 2) / (80 + 1))
    ratio.note_retraction([state_of(3, 4, num_outputs=1)])
    assert ratio.value == 1.0


@pytest.mark.parametrize(
    ("ratio", "ignore_eos", "num_pages"),
    # 6 known tokens: 2 pages. 6 + 10 - 1 tokens in the end: 4 pages, so that 2 are for the output.
    [(1.0, False, 4), (0.7, False, 4), (0.5, False, 3), (0.1, False, 3), (0.0, False, 2), (0.1, True, 4)],
)
def test_pages_to_come(ratio: float, ignore_eos: bool, num_pages: int) -> None:
    assert num_pages_to_come(state_of(6, 10, ignore_eos=ignore_eos), ratio, 4) == num_pages


def test_pages_that_a_request_has_are_not_to_come() -> None:
    state = state_of(6, 10, num_outputs=3)
    state.append_pages(np.array([1, 2], np.int32))
    # 9 known tokens: the third page is asked for in full, of the fourth half of it.
    assert num_pages_to_come(state, 0.5, 4) == 2
    assert num_pages_to_come(state, 0.0, 4) == 1
    # One on its way makes no difference here, four do.
    state.num_pending = 1
    assert num_pages_to_come(state, 0.0, 4) == 1
    state.num_pending = 4
    assert num_pages_to_come(state, 0.0, 4) == 2
    # The last output token needs no KV.
    state.num_pending = 7
    assert num_pages_to_come(state, 0.0, 4) == 2


def test_4096_output_tokens_are_looked_ahead_at_most() -> None:
    state = state_of(16, 10_000, page_size=16)
    assert num_pages_to_come(state, 1.0, 16) == 1 + 256
    assert num_pages_to_come(state, 0.7, 16) == 1 + 180
    assert num_pages_to_come(state_of(16, 10_000, page_size=16, ignore_eos=True), 0.7, 16) == 1 + 256


@pytest.mark.parametrize(("num_pages", "is_admitted"), [(118, True), (119, False)])
def test_the_4096_count_at_admission(num_pages: int, is_admitted: bool) -> None:
    scheduler = make_scheduler(page_size=16, num_pages=301, max_model_len=8192, schedule_policy="fcfs")
    model, make = FakeModel(301, 16), RequestMaker()
    scheduler.add(make(range(16), 4700))
    step(scheduler, model)
    scheduler.add(make(range(100, 100 + 16 * num_pages), 1))
    # Of 300 pages r0 has one, and with its first output two are known to be needed. 0.7 of 256 more are 180.
    plan, _ = step(scheduler, model)
    assert names(plan) == (["r1"] if is_admitted else ["r0"])


@pytest.mark.parametrize(("max_tokens", "is_admitted"), [(7, True), (8, False)])
def test_what_ignores_its_end_is_reserved_in_full(max_tokens: int, is_admitted: bool) -> None:
    scheduler = make_scheduler(num_pages=21, schedule_policy="fcfs")
    model, make = FakeModel(21, 1), RequestMaker()
    scheduler.add(make([1, 2], 11, ignore_eos=True))
    step(scheduler, model)
    scheduler.add(make([3, 4], max_tokens))
    # r0 has 2 of 20 slots and 10 to come.
    plan, _ = step(scheduler, model)
    assert names(plan) == (["r1"] if is_admitted else ["r0"])


def test_the_falling_ratio_lets_a_request_in() -> None:
    scheduler = make_scheduler(num_pages=1201, schedule_policy="fcfs")
    model, make = FakeModel(1201, 1), RequestMaker()
    scheduler.add(make([1, 2], 1001))
    step(scheduler, model)
    scheduler.add(make(range(10, 510), 31))
    # After n decode steps r0 has 2 + n slots and asks for 1 + ceil((999 - n) * (0.7 - n * 0.602 / 600)); r1 for 530.
    # n = 49: 1149 are left, 530 + 1 + 619 asked for. n = 50: 1148 are left, and 530 + 1 + 617 asked for.
    num_decode_steps = 0
    while names(step(scheduler, model)[0]) == ["r0"]:
        num_decode_steps += 1
    assert num_decode_steps == 50
    assert scheduler.num_running == 2


@pytest.mark.parametrize(("num_steps", "is_admitted"), [(49, False), (50, True)])
def test_a_plan_of_several_steps_lowers_the_ratio_as_often(num_steps: int, is_admitted: bool) -> None:
    """The numbers of the test above."""
    scheduler = make_scheduler(num_pages=1201, schedule_policy="fcfs")
    model, make = FakeModel(1201, 1), RequestMaker()
    scheduler.add(make([1, 2], 1001))
    step(scheduler, model)
    plan = scheduler.plan(max_steps=num_steps)
    assert plan is not None
    assert plan.num_steps == num_steps
    scheduler.commit(plan, model.run(plan))
    scheduler.add(make(range(10, 510), 31))
    assert names(scheduler.plan()) == (["r1"] if is_admitted else ["r0"])


@pytest.mark.parametrize(("num_needed", "is_admitted"), [(144, True), (145, False)])
def test_after_a_retraction_more_is_reserved(num_needed: int, is_admitted: bool) -> None:
    scheduler = make_scheduler(num_pages=346, schedule_policy="fcfs", limits={"preemption_threshold": None})
    model, make = FakeModel(346, 1), RequestMaker()
    for first in (1, 2):
        scheduler.add(make([first, 2], 201))
    # r1 asks for 202, and r0 has 2 and asks for 1 + ceil(0.7 * 199): just the 345 that there are.
    assert names(step(scheduler, model)[0]) == ["r0"]
    assert names(step(scheduler, model)[0]) == ["r1"]
    for _ in range(170):
        assert names(step(scheduler, model)[0]) == ["r0", "r1"]
    scheduler.add(make(range(1000, 1000 + num_needed), 1, priority=1))
    # One slot is left and two are needed. r0 goes on with 171 outputs: (171 + 20) / (201 + 1) of the 29 behind the next
    # one are 28. It has 172, so that 345 - 172 - 1 - 28 = 144 are left. By the ratio of before, it had been 157.
    plan, _ = step(scheduler, model)
    assert scheduler.stats.num_retractions == 1
    assert names(plan) == (["r2"] if is_admitted else ["r0"])


@pytest.mark.parametrize(("max_tokens", "is_admitted"), [(9, True), (10, False)])
def test_the_ratio_starts_anew_when_nothing_runs(max_tokens: int, is_admitted: bool) -> None:
    scheduler = make_scheduler(num_pages=401, schedule_policy="fcfs")
    model, make = FakeModel(401, 1), RequestMaker()
    scheduler.add(make([8, 9], 350))
    run_all(scheduler, model)
    scheduler.cache.reset()
    scheduler.add(make([1, 2], 11))
    step(scheduler, model)
    taken = scheduler.cache.allocate(380)  # of 400
    scheduler.add(make([3, 4], max_tokens))
    # As in a new scheduler: r1 has 2 of 20 and asks for 1 + ceil(0.7 * 9).
    assert names(scheduler.plan()) == (["r2"] if is_admitted else ["r1"])
    scheduler.cache.free(taken)
    scheduler.check_integrity()
