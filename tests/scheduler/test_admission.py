"""Who is refused at once, who waits, and that what was admitted always ends."""

import pytest
from scheduling import FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, step

from radix_jax.cache import OutOfPages


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (1002, 16, "request of 1002 prompt \\+ 16 output tokens needs 64 pages of 16 tokens, the pool has 48; raise"),
        (4000, 97, "request of 4000 prompt \\+ 97 output tokens exceeds max_model_len=4096; raise max_model_len or"),
        (0, 16, "request of 0 prompt \\+ 16 output tokens has nothing to do; both must be at least 1"),
        (5, 0, "request of 5 prompt \\+ 0 output tokens has nothing to do; both must be at least 1"),
    ],
)
def test_what_can_never_run_is_refused_with_numbers(prompt_len: int, max_tokens: int, message: str) -> None:
    scheduler = make_scheduler(page_size=16, num_pages=49)
    request = RequestMaker()([1] * prompt_len, max_tokens)
    with pytest.raises(ValueError, match=message):
        scheduler.check_admissible(request)
    with pytest.raises(ValueError, match=message):
        scheduler.add(request)
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_a_namespace_that_cannot_be_looked_up_is_refused_on_arrival(enable_prefix_cache: bool) -> None:
    scheduler = make_scheduler(enable_prefix_cache=enable_prefix_cache)
    with pytest.raises(TypeError, match=r"namespace \('a', \['b'\]\) is not hashable"):
        scheduler.add(RequestMaker()([1, 2], namespace=("a", ["b"])))
    assert not scheduler.has_unfinished
    scheduler.check_integrity()


def test_locks_of_others_that_leave_no_room_are_named_and_may_be_taken_off() -> None:
    scheduler = make_scheduler(page_size=4, num_pages=6)
    model, make, tree = FakeModel(6, 4), RequestMaker(), scheduler.cache.tree
    first, second = make(range(12), 1), make(range(20, 36), 1)
    scheduler.add(first)
    run_all(scheduler, model)
    pinned = tree.match_prefix(range(12)).handle
    tree.lock(pinned)
    scheduler.add(second)
    for _ in range(2):
        with pytest.raises(OutOfPages, match=r"1 requests wait, none runs, .* 12 cached tokens are locked by others"):
            scheduler.plan()
    scheduler.check_integrity()
    tree.unlock(pinned)
    assert run_all(scheduler, model)[second.request_id].output_ids.tolist() == expected_output(second)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_a_request_that_fills_the_pool_to_the_last_page_runs(page_size: int, enable_prefix_cache: bool) -> None:
    num_pages = 7
    scheduler = make_scheduler(page_size=page_size, num_pages=num_pages, enable_prefix_cache=enable_prefix_cache)
    model, make = FakeModel(num_pages, page_size), RequestMaker()
    # The last output token needs no KV.
    num_slots = (num_pages - 1) * page_size
    requests = [make(range(num_slots - 3), 4), make(range(1, num_slots - 2), 4)]
    for request in requests:
        scheduler.add(request)
    finished = run_all(scheduler, model)
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
    with pytest.raises(ValueError, match=r"needs 7 pages"):
        scheduler.check_admissible(make(range(num_slots - 3), 5))


def test_of_those_admitted_together_the_whole_output_is_reserved() -> None:
    scheduler = make_scheduler(num_pages=21, schedule_policy="fcfs")
    make = RequestMaker()
    scheduler.add(make([1, 2], 11))
    scheduler.add(make([3, 4], 8))
    # 2 + 10 of 20 slots are spoken for, and 2 + 7 are asked for.
    assert names(scheduler.plan()) == ["r0"]


@pytest.mark.parametrize(("max_tokens", "is_admitted"), [(8, True), (9, True), (10, False)])
def test_of_those_that_run_a_share_of_the_output_is_reserved(max_tokens: int, is_admitted: bool) -> None:
    scheduler = make_scheduler(num_pages=21, schedule_policy="fcfs")
    model, make = FakeModel(21, 1), RequestMaker()
    scheduler.add(make([1, 2], 11))
    scheduler.add(make([3, 4], max_tokens))
    step(scheduler, model)
    # Of 20 slots r0 has 2 and needs 1 for its known token. Of its 9 others, 0.7 make 6.3, so 7.
    # That leaves 20 - 2 - 1 - 7 = 10 for r1: 2 + max_tokens - 1.
    plan, _ = step(scheduler, model)
    assert names(plan) == (["r1"] if is_admitted else ["r0"])


def test_the_count_is_made_again_under_the_lock() -> None:
    scheduler = make_scheduler(num_pages=11, schedule_policy="fcfs")
    model, make = FakeModel(11, 1), RequestMaker()
    stem = [1, 2, 3, 4]
    scheduler.add(make(stem, 1))
    run_all(scheduler, model)
    # 10 slots are available as long as the 4 cached ones may be evicted. The first takes 5 of them.
    scheduler.add(make([9, 9, 9], 3))
    step(scheduler, model)
    # Beyond its cached 4 it needs 4, and 5 seem available; but locked, its own 4 are no longer to be had.
    scheduler.add(make([*stem, 5, 6, 7], 2))
    plan, _ = step(scheduler, model)
    assert plan is not None
    assert plan.kind == "decode"
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    finished = run_all(scheduler, model)
    assert finished["r2"].cached_len == 4


def test_a_pass_that_admits_nobody_is_none_that_anybody_waited() -> None:
    scheduler = make_scheduler(num_pages=21, schedule_policy="fcfs")
    model, make = FakeModel(21, 1), RequestMaker()
    scheduler.add(make([1, 2], 9))
    step(scheduler, model)
    scheduler.add(make(range(10, 25), 5))
    for i in range(4):
        scheduler.add(make([30 + i], 2))  # for which the queue is looked through again
        assert names(step(scheduler, model)[0]) == ["r0"]
    standing = scheduler.explain("r1").standing
    assert standing is not None
    assert standing.passes_waited == 0


@pytest.mark.parametrize(("policy", "num_let_through"), [("fcfs", 0), ("lpm", 0), ("shortest-prefill-first", 7)])
def test_small_ones_overtake_a_large_one_only_while_they_sort_ahead_of_it(policy: str, num_let_through: int) -> None:
    scheduler = make_scheduler(num_pages=41, max_model_len=64, schedule_policy=policy)
    model, make = FakeModel(41, 1), RequestMaker()
    for i in range(4):
        scheduler.add(make([i, i], 8))
    step(scheduler, model)
    scheduler.add(make(range(100, 138), 2, request_id="large"))
    admitted_before_large = 0
    for i in range(400):
        plan, _ = step(scheduler, model)
        if plan is not None and plan.kind == "prefill":
            names = [row.request.request_id for row in plan.rows]
            if "large" in names:
                break
            admitted_before_large += len(names)
        scheduler.add(make([200 + i, i], 8))
    else:
        raise AssertionError("the large request starved")
    # They have 30 tokens less to do, and one pass outweighs that: only those get ahead that came in the 7 steps before
    # the first pass.
    assert admitted_before_large == num_let_through
