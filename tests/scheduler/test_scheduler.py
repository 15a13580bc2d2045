"""Plans and commits: rows, chunks, the in-batch prefix check, ends, aborts, counts."""

import numpy as np
import pytest
from scheduling import (
    VOCAB_SIZE,
    FakeModel,
    RequestMaker,
    expected_output,
    make_scheduler,
    names,
    run_all,
    spans,
    step,
)

from radix_jax.scheduler import Scheduler


def test_nothing_to_do_is_none() -> None:
    scheduler = make_scheduler()
    assert scheduler.plan() is None
    assert not scheduler.has_unfinished
    assert (scheduler.num_waiting, scheduler.num_running, dict(scheduler.states)) == (0, 0, {})


def test_prefill_comes_before_decode_and_all_running_decode_together() -> None:
    scheduler, model, make = make_scheduler(), FakeModel(257, 1), RequestMaker()
    scheduler.add(make([1, 2, 3], 3))
    scheduler.add(make([4, 5], 3))
    assert (scheduler.num_waiting, scheduler.num_running) == (2, 0)
    plan, changed = step(scheduler, model)
    assert spans(plan) == [("r0", 0, 3, True), ("r1", 0, 2, True)]
    assert [state.request_id for state in changed] == ["r0", "r1"]
    assert plan is not None
    assert plan.kind == "prefill"
    plan, _ = step(scheduler, model)
    assert spans(plan) == [("r0", 3, 4, True), ("r1", 2, 3, True)]
    assert plan is not None
    assert (plan.kind, plan.bucket.num_tokens) == ("decode", 8)
    scheduler.add(make([6], 3))
    plan, _ = step(scheduler, model)
    assert spans(plan) == [("r2", 0, 1, True)]


def test_a_plan_stays_as_it_is_whatever_happens_later() -> None:
    scheduler, model, make = make_scheduler(page_size=4), FakeModel(257, 4), RequestMaker()
    scheduler.add(make(range(10), 8))
    plan = scheduler.plan()
    assert plan is not None
    [row] = plan.rows
    ids, pages = row.token_ids.copy(), row.pages.copy()
    assert not np.shares_memory(row.token_ids, scheduler.states["r0"].tokens)
    scheduler.commit(plan, model.run(plan))
    run_all(scheduler, model)
    scheduler.add(make(range(20, 30), 8))
    run_all(scheduler, model)
    assert np.array_equal(row.token_ids, ids)
    assert np.array_equal(row.pages, pages)


def test_long_prompts_are_cut_at_pages_one_at_a_time() -> None:
    scheduler = make_scheduler(page_size=4, max_prefill_tokens=10)
    model, make = FakeModel(257, 4), RequestMaker()
    first, second, third = make(range(21), 3), make(range(100, 117), 3), make([7], 3)
    for request in (first, second, third):
        scheduler.add(request)
    assert spans(step(scheduler, model)[0]) == [("r0", 0, 8, False)]
    assert spans(step(scheduler, model)[0]) == [("r0", 8, 16, False)]
    # The end of the first leaves room for a page of the second, and that leaves a token for the whole third.
    assert spans(step(scheduler, model)[0]) == [("r0", 16, 21, True), ("r1", 0, 4, False), ("r2", 0, 1, True)]
    assert spans(step(scheduler, model)[0]) == [("r1", 4, 12, False)]
    assert spans(step(scheduler, model)[0]) == [("r1", 12, 17, True)]
    assert names(step(scheduler, model)[0]) == ["r0", "r1", "r2"]
    finished = run_all(scheduler, model)
    for request in (first, second, third):
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_each_chunk_is_shared_as_soon_as_it_is_computed() -> None:
    scheduler = make_scheduler(page_size=4, max_prefill_tokens=8)
    model, cached_lens = FakeModel(257, 4), []
    scheduler.add(RequestMaker()(range(21), 1))
    while scheduler.has_unfinished:
        step(scheduler, model)
        cached_lens.append(scheduler.cache.match_len(range(21)))
    assert cached_lens == [8, 16, 20]


def test_chunks_below_a_page_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_prefill_tokens=15 is below page_size=16"):
        make_scheduler(page_size=16, max_prefill_tokens=15)


def test_rows_and_tokens_of_a_step_are_limited() -> None:
    scheduler = make_scheduler(max_running_requests=3, max_prefill_tokens=5, schedule_policy="fcfs")
    model, make = FakeModel(257, 1), RequestMaker()
    for i in range(5):
        scheduler.add(make([10 * i, 1], 2))
    assert spans(step(scheduler, model)[0]) == [("r0", 0, 2, True), ("r1", 0, 2, True), ("r2", 0, 1, False)]
    assert spans(step(scheduler, model)[0]) == [("r2", 1, 2, True)]
    plan, _ = step(scheduler, model)
    assert names(plan) == ["r0", "r1", "r2"]
    assert plan is not None
    assert plan.kind == "decode"
    assert names(step(scheduler, model)[0]) == ["r3", "r4"]


def test_the_first_of_a_group_computes_and_the_others_hit_in_the_same_step() -> None:
    scheduler, model, make = make_scheduler(page_size=4), FakeModel(257, 4), RequestMaker()
    stem = list(range(9))
    for tail in (1, 2, 3):
        scheduler.add(make([*stem, tail, tail], 2))
    scheduler.add(make([50, 51], 2))
    assert sorted(spans(step(scheduler, model)[0])) == [
        ("r0", 0, 11, True),
        ("r1", 8, 11, True),
        ("r2", 8, 11, True),
        ("r3", 0, 2, True),
    ]


def test_the_group_waits_for_the_chunk_that_holds_its_pages_and_no_longer() -> None:
    scheduler = make_scheduler(page_size=4, max_prefill_tokens=8, schedule_policy="fcfs", partial_pages=False)
    model, make = FakeModel(257, 4), RequestMaker()
    scheduler.add(make(range(17), 2))
    scheduler.add(make([*range(5), 99], 2))
    assert spans(step(scheduler, model)[0]) == [("r0", 0, 8, False)]
    assert spans(step(scheduler, model)[0]) == [("r0", 8, 16, False)]
    assert spans(step(scheduler, model)[0]) == [("r0", 16, 17, True), ("r1", 4, 6, True)]


def test_a_like_page_after_unlike_beginnings_does_not_wait() -> None:
    scheduler, model, make = make_scheduler(page_size=4), FakeModel(257, 4), RequestMaker()
    beginnings = ([1, 2, 3, 4], [5, 6, 7, 8])
    for beginning in beginnings:
        scheduler.add(make(beginning, 1))
    run_all(scheduler, model)
    for beginning in beginnings:
        scheduler.add(make([*beginning, 9, 9, 9, 9, 0], 1))
    assert spans(step(scheduler, model)[0]) == [("r2", 4, 9, True), ("r3", 4, 9, True)]


def test_a_group_goes_on_though_another_request_waits_for_room() -> None:
    scheduler, model, make = make_scheduler(page_size=4, num_pages=9), FakeModel(9, 4), RequestMaker()
    scheduler.add(make([*range(9), 1], 6))
    scheduler.add(make(range(50, 70), 6))
    scheduler.add(make([*range(9), 2], 6))
    # r1 came before r2, but asks for 7 of 8 pages.
    assert spans(step(scheduler, model)[0]) == [("r0", 0, 10, True), ("r2", 8, 10, True)]
    assert run_all(scheduler, model).keys() == {"r0", "r1", "r2"}


def test_shares_below_a_page_and_other_namespaces_do_not_wait() -> None:
    scheduler, model, make = make_scheduler(page_size=4), FakeModel(257, 4), RequestMaker()
    scheduler.add(make([1, 2, 3, 4, 5], 2))
    scheduler.add(make([1, 2, 3, 9, 9], 2))
    for namespace in (1, True, 1.0, "1", (1,), (True,)):
        scheduler.add(make([1, 2, 3, 4, 5], 2, namespace=namespace))
    plan, _ = step(scheduler, model)
    assert [span[1:] for span in spans(plan)] == [(0, 5, True)] * 8
    # The last token is always computed, so a page that it ends in cannot be waited for.
    scheduler.add(make([20, 21, 22, 23], 2))
    scheduler.add(make([20, 21, 22, 23], 2))
    run_all(scheduler, model)
    assert scheduler.stats.num_cached_tokens == 0


def test_the_group_goes_on_when_its_first_is_aborted() -> None:
    scheduler = make_scheduler(page_size=4, max_prefill_tokens=8)
    model, make = FakeModel(257, 4), RequestMaker()
    first, second = make(range(30), 2), make([*range(25), 99], 2)
    scheduler.add(first)
    scheduler.add(second)
    assert names(step(scheduler, model)[0]) == ["r0"]
    scheduler.abort("r0")
    assert spans(step(scheduler, model)[0]) == [("r1", 8, 16, False)]
    assert run_all(scheduler, model)["r1"].output_ids.tolist() == expected_output(second)


@pytest.mark.parametrize("page_size", [1, 4])
def test_stop_ids_end_a_request_and_are_part_of_the_output(page_size: int) -> None:
    scheduler, model, make = make_scheduler(page_size=page_size), FakeModel(257, page_size), RequestMaker()
    endless = make([1, 2, 3], 50)
    stop_id = expected_output(endless)[5]
    stopped = make([1, 2, 3], 50, stop_ids=[stop_id, VOCAB_SIZE + 1])
    scheduler.add(stopped)
    state = run_all(scheduler, model)[stopped.request_id]
    output = state.output_ids.tolist()
    assert (state.finish_reason, state.stop_reason) == ("stop", stop_id)
    assert output == expected_output(stopped)
    assert output[-1] == stop_id
    assert stop_id not in output[:-1]


def test_max_tokens_end_a_request_with_length() -> None:
    scheduler, model, make = make_scheduler(max_model_len=6), FakeModel(257, 1), RequestMaker()
    requests = [make([1, 2, 3], max_tokens) for max_tokens in (1, 2, 3)]
    for request in requests:
        scheduler.add(request)
    finished = run_all(scheduler, model)
    for request in requests:
        state = finished[request.request_id]
        assert (state.finish_reason, state.stop_reason) == ("length", None)
        assert state.output_ids.tolist() == expected_output(request)


def test_what_was_generated_is_cached_but_for_the_last_token_and_split_at_the_prompt() -> None:
    scheduler, model, make = make_scheduler(page_size=2), FakeModel(257, 2), RequestMaker()
    request = make([1, 2, 3, 4, 5], 6)
    scheduler.add(request)
    run_all(scheduler, model)
    turn = [*request.token_ids.tolist(), *expected_output(request)]
    follow_up = make([*turn, 7, 8], 1)
    scheduler.add(follow_up)
    [state] = run_all(scheduler, model).values()
    # 11 tokens, of which the last one has no KV.
    assert state.cached_len == 10
    depths = [len(node.token_ids) for node in scheduler.cache.tree.snapshot().nodes]
    assert depths == [0, 4, 6, 2]


def test_without_the_prefix_cache_everything_is_computed_and_nothing_kept() -> None:
    scheduler = make_scheduler(page_size=4, max_prefill_tokens=8, enable_prefix_cache=False)
    model, make = FakeModel(257, 4), RequestMaker()
    requests = [make(range(19), 5) for _ in range(4)]
    for request in requests:
        scheduler.add(request)
    finished = run_all(scheduler, model)
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
        assert finished[request.request_id].cached_len == 0
    assert scheduler.stats.num_prefill_tokens == 4 * 19
    assert scheduler.cache.tree.total_size == 0
    assert scheduler.cache.pool.num_free == 256


def all_given_back(scheduler: Scheduler) -> bool:
    scheduler.check_integrity()
    return scheduler.cache.num_available == 256 and scheduler.cache.tree.protected_size == 0


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_gives_everything_back_in_every_state(num_steps: int) -> None:
    scheduler = make_scheduler(page_size=4, max_prefill_tokens=8)
    model, make = FakeModel(257, 4), RequestMaker()
    scheduler.add(make(range(20), 8))
    for _ in range(num_steps):
        step(scheduler, model)
    state = scheduler.abort("r0")
    assert state is not None
    assert state.finish_reason == "abort"
    assert len(state.output_ids) == max(0, num_steps - 2)
    assert scheduler.abort("r0") is None
    assert not scheduler.has_unfinished
    assert all_given_back(scheduler)
    assert scheduler.plan() is None
    assert scheduler.stats.num_aborted == 1


def test_abort_between_plan_and_commit_drops_the_result() -> None:
    scheduler, model, make = make_scheduler(page_size=4), FakeModel(257, 4), RequestMaker()
    gone, stays = make(range(9), 4), make(range(50, 59), 4)
    for request in (gone, stays):
        scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    tokens = model.run(plan)
    scheduler.abort(gone.request_id)
    # The id is free again, and its new owner must not take the old one's token.
    again = make(range(20, 29), 4, request_id=gone.request_id)
    scheduler.add(again)
    assert [state.request_id for state in scheduler.commit(plan, tokens)] == [stays.request_id]
    scheduler.check_integrity()
    finished = run_all(scheduler, model)
    for request in (again, stays):
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
    assert all_given_back(scheduler)


def test_abort_of_a_waiting_request_wakes_the_one_behind_it() -> None:
    scheduler = make_scheduler(num_pages=21, schedule_policy="fcfs")
    model, make = FakeModel(21, 1), RequestMaker()
    for prompt_len in (10, 15, 3):
        scheduler.add(make(range(prompt_len * 10, prompt_len * 11), 4))
    for _ in range(2):
        step(scheduler, model)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    scheduler.abort("r1")
    assert names(step(scheduler, model)[0]) == ["r2"]


def test_each_plan_is_committed_once_in_order_with_one_token_a_row() -> None:
    scheduler, make = make_scheduler(), RequestMaker()
    scheduler.add(make([1, 2]))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(RuntimeError, match="2 plans are not committed; commit the older one first"):
        scheduler.plan()
    one = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        scheduler.commit(second, one)
    for shape in (2, (1, 2), 0):
        with pytest.raises(ValueError, match=r"for 1 rows and 1 steps; give one a row"):
            scheduler.commit(first, np.zeros(shape, np.int32))
    scheduler.commit(first, one)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        scheduler.commit(first, one)
    scheduler.commit(second, one)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        scheduler.commit(second, one)
    assert scheduler.states["r0"].output_ids.tolist() == [0, 0]


def test_an_id_in_use_is_refused() -> None:
    scheduler, make = make_scheduler(), RequestMaker()
    scheduler.add(make([1], request_id="a"))
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        scheduler.add(make([2], request_id="a"))
    assert scheduler.num_waiting == 1


def test_counts() -> None:
    scheduler, model, make = make_scheduler(page_size=4, max_prefill_tokens=64), FakeModel(257, 4), RequestMaker()
    for _ in range(2):
        scheduler.add(make(range(10), 3))
    run_all(scheduler, model)
    scheduler.add(make([5]))
    scheduler.abort("r2")
    stats = scheduler.stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_prefill_tokens) == (20, 8, 12)
    assert (stats.num_output_tokens, stats.num_finished, stats.num_aborted) == (6, 2, 1)
    assert stats.num_steps == {"prefill": 1, "decode": 2, "mixed": 0}
    assert stats.num_tokens == {"prefill": 12, "decode": 4, "mixed": 0}
    assert stats.num_padded_tokens == {"prefill": 64, "decode": 16, "mixed": 0}


def test_reset_drops_all_requests_and_keeps_the_cache() -> None:
    scheduler, model, make = make_scheduler(page_size=4, max_prefill_tokens=8), FakeModel(257, 4), RequestMaker()
    for first in (0, 100, 200):
        scheduler.add(make(range(first, first + 12), 4))
    step(scheduler, model)
    plan = scheduler.plan()
    assert plan is not None
    model.run(plan)
    scheduler.reset()
    assert not scheduler.has_unfinished
    assert all_given_back(scheduler)
    assert scheduler.stats.num_steps == {"prefill": 0, "decode": 0, "mixed": 0}
    # The plan in flight counts as run: 8 + 4 tokens of r0, 4 of r1.
    assert scheduler.cache.tree.total_size == 16
    with pytest.raises(ValueError, match="not the oldest in flight"):
        scheduler.commit(plan, np.zeros(2, np.int32))
    request = make(range(12), 4)
    scheduler.add(request)
    [state] = run_all(scheduler, model).values()
    assert state.cached_len == 11
    assert state.output_ids.tolist() == expected_output(request)
