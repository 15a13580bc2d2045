"""Who takes whose place: by priority, of the lowest and newest, never in vain."""

import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, spans, step


def test_the_lowest_and_newest_gives_way_and_comes_back() -> None:
    scheduler = make_scheduler(max_running_requests=3)
    model, make = FakeModel(257, 1), RequestMaker()
    requests = [make([i, i], 9, priority=priority) for i, priority in enumerate((0, 0, 1))]
    for request in requests:
        scheduler.add(request)
    assert names(step(scheduler, model)[0]) == ["r2", "r0", "r1"]
    requests.append(make([3, 3], 9, priority=1))
    scheduler.add(requests[3])
    assert names(step(scheduler, model)[0]) == ["r3"]
    assert names(step(scheduler, model)[0]) == ["r2", "r0", "r3"]
    assert scheduler.states["r1"].num_retractions == 1
    requests += [make([i, i], 9, priority=2) for i in (4, 5)]
    for request in requests[4:]:
        scheduler.add(request)
    # r0 is of the lowest priority; of the two behind it r3 came last.
    assert names(step(scheduler, model)[0]) == ["r4", "r5"]
    assert names(step(scheduler, model)[0]) == ["r2", "r4", "r5"]
    assert [scheduler.states[name].num_retractions for name in ("r0", "r1", "r2", "r3")] == [1, 1, 0, 1]
    finished = run_all(scheduler, model)
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
    assert scheduler.stats.num_retractions == 3
    assert scheduler.stats.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("threshold", "priority", "is_taken"), [(1, 1, True), (1, 0, False), (2, 1, False), (2, 2, True), (None, 99, False)]
)
def test_a_place_is_taken_from_the_threshold_on(threshold: int | None, priority: int, is_taken: bool) -> None:
    scheduler = make_scheduler(max_running_requests=1, limits={"preemption_threshold": threshold})
    model, make = FakeModel(257, 1), RequestMaker()
    scheduler.add(make([1, 2], 9))
    step(scheduler, model)
    scheduler.add(make([3, 4], 9, priority=priority))
    assert names(step(scheduler, model)[0]) == (["r1"] if is_taken else ["r0"])
    assert scheduler.stats.num_retractions == is_taken


def test_no_more_give_way_than_are_needed() -> None:
    """20 slots. Three have 3 each and ask for 3 more each: one of them is enough for 14, two for 20 - 6 = 14 + 1."""
    scheduler, model, make = make_scheduler(num_pages=21), FakeModel(21, 1), RequestMaker()
    for i in range(3):
        scheduler.add(make([i, i], 5, ignore_eos=True))
    for _ in range(2):
        step(scheduler, model)
    assert [state.num_pages for state in scheduler.states.values()] == [3, 3, 3]
    # 20 - 9 = 11 are left, of which 9 are reserved. Without the newest, 14 and 6.
    scheduler.add(make(range(10, 18), 1, priority=1))
    assert names(step(scheduler, model)[0]) == ["r3"]
    assert [state.num_retractions for state in scheduler.states.values()] == [0, 0, 1]


def test_one_more_slot_takes_one_more_place() -> None:
    scheduler, model, make = make_scheduler(num_pages=21), FakeModel(21, 1), RequestMaker()
    for i in range(3):
        scheduler.add(make([i, i], 5, ignore_eos=True))
    for _ in range(2):
        step(scheduler, model)
    scheduler.add(make(range(10, 19), 1, priority=1))
    assert names(step(scheduler, model)[0]) == ["r3"]
    assert [state.num_retractions for state in scheduler.states.values()] == [0, 1, 1]


def test_nobody_gives_way_for_one_that_would_not_fit_in_the_end() -> None:
    """The one below it shares 9 of its 10 pages with one above it, so that taking them away gives two slots."""
    scheduler, model, make = make_scheduler(num_pages=21, schedule_policy="fcfs"), FakeModel(21, 1), RequestMaker()
    scheduler.add(make(range(10), 5, priority=5, request_id="strong"))
    scheduler.add(make([*range(9), 99], 5, request_id="weak"))
    assert names(step(scheduler, model)[0]) == ["strong", "weak"]
    newcomer = make(range(50, 62), 4, priority=1, request_id="new")
    scheduler.add(newcomer)
    ahead = Ahead(scheduler, model)
    assert names(ahead.plan()) == ["strong", "weak"]
    # Nor does overlap stop for it.
    assert names(ahead.plan()) == ["strong", "weak"]
    assert ahead.run_all()["new"].output_ids.tolist() == expected_output(newcomer)
    assert scheduler.stats.num_retractions == 0


def test_pages_that_it_shares_with_the_one_that_gives_way_are_not_counted_twice() -> None:
    """17 slots. Both need 12 + 4 of their own; together they share 12, which stay locked by the newcomer itself."""
    scheduler, model, make = make_scheduler(num_pages=18), FakeModel(18, 1), RequestMaker()
    scheduler.add(make(range(12), 5, ignore_eos=True))
    step(scheduler, model)
    scheduler.add(make([*range(12), 99], 5, priority=1))
    # It has 12 of 17, its own 12th token is cached, and 13 + 4 - 12 = 5 are needed of the 5 that are left.
    assert spans(step(scheduler, model)[0]) == [("r1", 12, 13, True)]
    assert scheduler.states["r0"].num_retractions == 1
    assert run_all(scheduler, model).keys() == {"r0", "r1"}


def test_who_has_a_row_in_the_step_stays() -> None:
    scheduler = make_scheduler(page_size=4, max_running_requests=1, max_prefill_tokens=10)
    model, make = FakeModel(257, 4), RequestMaker()
    scheduler.add(make(range(20), 9))
    assert spans(step(scheduler, model)[0]) == [("r0", 0, 8, False)]
    scheduler.add(make([50, 51], 1, priority=1))
    # Each step has room for two tokens more, but r0's chunk is planned by then.
    assert spans(step(scheduler, model)[0]) == [("r0", 8, 16, False)]
    assert spans(step(scheduler, model)[0]) == [("r0", 16, 20, True)]
    assert scheduler.stats.num_retractions == 0
    assert names(step(scheduler, model)[0]) == ["r1"]
    assert scheduler.states["r0"].num_retractions == 1


def test_who_was_admitted_in_the_same_step_stays() -> None:
    scheduler = make_scheduler(max_running_requests=2)
    make = RequestMaker()
    for priority in (0, 1, 2):
        scheduler.add(make([priority], 9, priority=priority))
    assert names(scheduler.plan()) == ["r2", "r1"]


@pytest.mark.parametrize("num_pages", [21, 257])
def test_with_a_plan_in_flight_the_place_is_taken_right_after_its_commit(num_pages: int) -> None:
    scheduler = make_scheduler(num_pages=num_pages, max_running_requests=1 if num_pages == 257 else 8)
    model, make = FakeModel(num_pages, 1), RequestMaker()
    low, high = make(range(8), 12), make(range(50, 62), 5, priority=1)
    scheduler.add(low)
    ahead = Ahead(scheduler, model)
    ahead.plan()
    assert spans(ahead.plan()) == [("r0", 8, 9, True)]
    scheduler.add(high)
    ahead.commit()
    for _ in range(2):
        assert ahead.plan() is None
        assert scheduler.stats.num_retractions == 0
    ahead.commit()
    assert spans(ahead.plan()) == [("r1", 0, 12, True)]
    assert scheduler.states["r0"].output_ids.tolist() == expected_output(low)[:2]
    finished = ahead.run_all()
    for request in (low, high):
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_an_ahead_plan_goes_on_where_it_takes_no_place() -> None:
    """While the high one's prompt is computed, the chunk is planned ahead; nobody waits for a commit."""
    scheduler = make_scheduler(max_running_requests=2, max_prefill_tokens=4)
    model, make = FakeModel(257, 1), RequestMaker()
    scheduler.add(make([1, 2], 9))
    ahead = Ahead(scheduler, model)
    ahead.plan()
    scheduler.add(make(range(50, 62), 5, priority=1))
    assert spans(ahead.plan()) == [("r1", 0, 4, False)]
    ahead.commit()
    assert spans(ahead.plan()) == [("r1", 4, 8, False)]


def test_what_gave_way_is_admitted_again_in_the_same_pass_if_there_is_room() -> None:
    """20 slots: the newest is too small to make room for the newcomer, and the next one gives more than enough."""
    scheduler = make_scheduler(num_pages=21, schedule_policy="shortest-prefill-first")
    model, make = FakeModel(21, 1), RequestMaker()
    requests = [make(range(12), 3, ignore_eos=True), make([50, 51], 2, ignore_eos=True)]
    for request in requests:
        scheduler.add(request)
    step(scheduler, model)
    requests.append(make(range(60, 70), 1, priority=1))
    scheduler.add(requests[2])
    assert names(step(scheduler, model)[0]) == ["r2", "r1"]
    assert scheduler.num_waiting == 1
    finished = run_all(scheduler, model)
    assert finished["r0"].output_ids.tolist() == expected_output(requests[0])
