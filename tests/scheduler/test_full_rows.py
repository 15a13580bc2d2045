"""While all rows are taken, and nobody who waits may take one, no step goes through the queue."""

from typing import Any

import pytest
from scheduling import FakeModel, RequestMaker, make_scheduler, names, step

from radix_jax.scheduler.waiting import WaitingQueue


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a queue is gone through."""
    found: list[int] = []
    in_order = WaitingQueue.in_order

    def counted(self: WaitingQueue, *args: Any) -> Any:
        found.append(len(self))
        return in_order(self, *args)

    monkeypatch.setattr(WaitingQueue, "in_order", counted)
    return found


def test_the_queue_is_gone_through_once_and_again_when_a_row_is_free(passes: list[int]) -> None:
    scheduler, model, make = make_scheduler(max_running_requests=2), FakeModel(257, 1), RequestMaker()
    for place, max_tokens in enumerate((6, 20, 5, 5)):
        scheduler.add(make([10 * place, 1, 2], max_tokens))
    for _ in range(6):  # a prefill and five decode steps end r0
        plan, _ = step(scheduler, model)
        assert names(plan) == ["r0", "r1"]
    assert passes == [4, 2]
    plan, _ = step(scheduler, model)
    assert names(plan) == ["r2"]
    assert passes == [4, 2, 2]
    plan, _ = step(scheduler, model)
    assert sorted(names(plan)) == ["r1", "r2"]
    assert passes == [4, 2, 2, 1]


def test_who_may_take_a_row_gets_it_and_others_are_looked_at_once(passes: list[int]) -> None:
    scheduler, model, make = make_scheduler(max_running_requests=2), FakeModel(257, 1), RequestMaker()
    for priority in (1, 1, 0):
        scheduler.add(make([5 + priority, 1, 2], 40, priority=priority))
    for _ in range(4):
        step(scheduler, model)
    assert passes == [3, 1]
    scheduler.add(make([7, 1], 2, priority=1))
    for _ in range(3):
        step(scheduler, model)
    assert passes == [3, 1, 2]
    scheduler.add(make([8, 1], 2, priority=2))
    plan, _ = step(scheduler, model)
    assert names(plan) == ["r4"]
    assert scheduler.stats.num_retractions == 1


def test_a_row_of_one_who_was_aborted_goes_to_the_next(passes: list[int]) -> None:
    scheduler, model, make = make_scheduler(max_running_requests=1), FakeModel(257, 1), RequestMaker()
    for place in range(2):
        scheduler.add(make([10 * place, 1, 2], 40))
    for _ in range(4):
        step(scheduler, model)
    assert passes == [2, 1]
    scheduler.abort("r0")
    plan, _ = step(scheduler, model)
    assert names(plan) == ["r1"]
