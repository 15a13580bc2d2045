"""Partial pages in the scheduler: copies in plans, locks while they last, and hits token by token."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, step

from radix_jax.plan import PageCopy
from radix_jax.scheduler import Scheduler


def start(page_size: int = 4, num_pages: int = 257, **fields) -> tuple[Scheduler, FakeModel, RequestMaker]:
    scheduler = make_scheduler(page_size=page_size, num_pages=num_pages, **fields)
    return scheduler, FakeModel(num_pages, page_size), RequestMaker()


def common_len(a: np.ndarray, b: np.ndarray) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def num_locks(scheduler: Scheduler) -> int:
    return scheduler.cache.num_protected


def test_the_first_step_of_a_request_names_its_copy() -> None:
    scheduler, model, make = start()
    scheduler.add(make(range(12), 1))
    run_all(scheduler, model)
    before = {page.tobytes() for page in [scheduler.cache.tree.match_pages(range(12))]}
    assert before
    [_, donor, _] = scheduler.cache.tree.match_pages(range(12)).tolist()
    request = make([*range(7), 90, 91], 3)
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    [row] = plan.rows
    assert (row.start, row.token_ids.tolist()) == (7, [90, 91])
    assert plan.copies == (PageCopy(donor, int(row.pages[1]), 3),)
    assert scheduler.states[request.request_id].cached_len == 7
    scheduler.check_integrity()
    [state] = scheduler.commit(plan, model.run(plan))
    assert state.copy is None
    plan, _ = step(scheduler, model)
    assert plan is not None
    assert plan.copies == ()
    assert run_all(scheduler, model)[request.request_id].output_ids.tolist() == expected_output(request)
    assert num_locks(scheduler) == 0
    assert scheduler.stats.num_cached_tokens == 7


def test_a_donor_is_locked_while_the_plan_is_made_and_no_longer() -> None:
    """4 pages: one donor, three free. The copies of a step come before all that it writes, not of the one after it."""
    scheduler, model, make = start(num_pages=5, schedule_policy="fcfs")
    scheduler.add(make(range(4), 1))
    run_all(scheduler, model)
    first, second = make([0, 1, 9], 2), make(range(50, 60), 1)
    scheduler.add(first)
    scheduler.add(second)
    ahead = Ahead(scheduler, model)
    plan = ahead.plan()
    # Unlocked, the donor could be evicted for the second one's third page, and be overwritten before it is copied.
    assert names(plan) == ["r1"]
    assert plan is not None
    assert len(plan.copies) == 1
    assert num_locks(scheduler) == 0
    # In the next step it may.
    plan = ahead.plan()
    assert names(plan) == ["r2"]
    assert scheduler.cache.num_evicted_tokens == 4
    finished = ahead.run_all()
    for request in (first, second):
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_a_donor_may_be_split_and_evicted_between_plan_and_commit() -> None:
    scheduler, model, make = start()
    scheduler.add(make(range(8), 1))
    run_all(scheduler, model)
    request = make([0, 1, 9], 2)
    scheduler.add(request)
    ahead = Ahead(scheduler, model)
    assert ahead.plan() is not None
    assert scheduler.cache.match_prefix([0, 1, 2, 3, 4]).cached_len == 4
    scheduler.cache.pool.free(scheduler.cache.tree.evict(100))
    assert ahead.run_all()[request.request_id].output_ids.tolist() == expected_output(request)


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_a_request_that_goes_before_its_copy_is_made_leaves_no_lock_and_no_tail(how: str) -> None:
    scheduler, model, make = start()
    scheduler.add(make(range(8), 1))
    run_all(scheduler, model)
    num_evictable = scheduler.cache.num_evictable
    request = make([0, 1, 9], 2)
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.copies
    if how == "abort":
        scheduler.abort(request.request_id)
        assert scheduler.commit(plan, model.run(plan)) == []
    else:
        scheduler.reset()
    scheduler.check_integrity()
    assert num_locks(scheduler) == 0
    assert scheduler.cache.num_evictable == num_evictable


def test_without_room_for_a_locked_donor_it_is_not_copied() -> None:
    """Three pages in all: the request needs every one of them, the donor's too."""
    scheduler, model, make = start(num_pages=4)
    scheduler.add(make(range(12), 1))
    run_all(scheduler, model)
    request = make([0, 1, *range(50, 58)], 2)
    scheduler.add(request)
    plan, _ = step(scheduler, model)
    assert plan is not None
    assert plan.copies == ()
    assert plan.rows[0].start == 0
    assert run_all(scheduler, model)[request.request_id].output_ids.tolist() == expected_output(request)


def test_what_waited_for_a_donors_pages_is_admitted_right_after_the_step() -> None:
    scheduler, model, make = start(num_pages=8, schedule_policy="fcfs")
    scheduler.add(make(range(16), 1))
    run_all(scheduler, model)
    small, large = make([0, 1, 99], 4), make(range(100, 116), 5)
    scheduler.add(small)
    scheduler.add(large)
    plan, _ = step(scheduler, model)
    assert plan is not None
    assert [row.request.request_id for row in plan.rows] == [small.request_id]
    assert plan.copies
    plan, _ = step(scheduler, model)
    assert plan is not None
    assert [row.request.request_id for row in plan.rows] == [large.request_id]
    run_all(scheduler, model)


@pytest.mark.parametrize("chunk_len", [4, 5, 7, 13])
def test_chunks_that_start_inside_a_page_end_at_one(chunk_len: int) -> None:
    scheduler, model, make = start(max_prefill_tokens=chunk_len)
    scheduler.add(make(range(30), 1))
    run_all(scheduler, model)
    request = make([*range(6), *range(100, 120)], 3)
    scheduler.add(request)
    spans = []
    finished = run_all(
        scheduler,
        model,
        on_plan=lambda plan: spans.extend((row.start, row.end) for row in plan.rows if plan.kind == "prefill"),
    )
    assert spans[0][0] == 6
    assert all(end % 4 == 0 for _, end in spans[:-1])
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert spans[-1][1] == 26
    assert max(end - start for start, end in spans) <= chunk_len
    assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_a_repeated_prompt_computes_one_token() -> None:
    for page_size in (1, 2, 4, 16):
        scheduler, model, make = start(page_size)
        for prompt_len in (1, 4, 5, 16, 17, 32, 33):
            prompt = range(100 * prompt_len, 101 * prompt_len)
            for cached_len in (0, prompt_len - 1, prompt_len - 1):
                request = make(prompt, 3)
                scheduler.add(request)
                state = run_all(scheduler, model)[request.request_id]
                assert state.cached_len == cached_len
                assert state.output_ids.tolist() == expected_output(request)
        scheduler.check_integrity()


@given(data=st.data(), page_size=st.sampled_from((2, 4, 16)), max_prefill_tokens=st.sampled_from((16, 19, 64)))
@settings(max_examples=40)
def test_one_after_the_other_each_takes_all_that_was_computed_before(
    data: st.DataObject, page_size: int, max_prefill_tokens: int
) -> None:
    """Against the list of all that has KV: the longest common prefix, token by token, at most prompt - 1."""
    scheduler, model, make = start(page_size, 513, max_prefill_tokens=max_prefill_tokens)
    computed: dict[str | None, list[np.ndarray]] = {None: [], "a": []}
    for _ in range(data.draw(st.integers(1, 12))):
        namespace = data.draw(st.sampled_from((None, "a")))
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=40))
        if computed[namespace] and data.draw(st.booleans()):  # the next turn of a talk
            prompt = [*data.draw(st.sampled_from(computed[namespace])).tolist(), *prompt][:80]
        request = make(prompt, data.draw(st.integers(1, 20)), namespace=namespace)
        scheduler.add(request)
        state = run_all(scheduler, model)[request.request_id]
        scheduler.check_integrity()
        ids = request.token_ids[:-1]
        assert state.cached_len == max((common_len(before, ids) for before in computed[namespace]), default=0)
        assert state.output_ids.tolist() == expected_output(request)
        computed[namespace].append(state.tokens[: state.num_tokens - 1].copy())
    assert scheduler.cache.num_evictable + scheduler.cache.pool.num_free == 512
