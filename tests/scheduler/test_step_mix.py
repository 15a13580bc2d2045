"""How prefill and decode take turns, and steps that do both."""

import numpy as np
import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output, make_scheduler, names, run_all, spans, step

from radix_jax.plan import StepPlan
from radix_jax.scheduler import Scheduler


def mixed(page_size: int = 1, max_prefill_tokens: int = 8, **fields) -> tuple[Scheduler, FakeModel, RequestMaker]:
    scheduler = make_scheduler(
        page_size=page_size, max_prefill_tokens=max_prefill_tokens, limits={"mixed_steps": True}, **fields
    )
    return scheduler, FakeModel(257, page_size), RequestMaker()


def kinds(scheduler: Scheduler, model: FakeModel, num_steps: int) -> str:
    """One letter a step."""
    plans = [step(scheduler, model)[0] for _ in range(num_steps)]
    return "".join(plan.kind[0] if plan is not None else "-" for plan in plans)


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, "pdpdpdpdpdddd"), (2, "ppdppdpddd"), (3, "pppdppdd"), (5, "pppppd"), (9, "pppppd")]
)
def test_a_decode_step_comes_after_so_many_prefill_steps(limit: int, expected: str) -> None:
    scheduler = make_scheduler(max_prefill_tokens=4, limits={"max_consecutive_prefills": limit})
    model, make = FakeModel(257, 1), RequestMaker()
    scheduler.add(make([1, 2], 9))
    step(scheduler, model)
    scheduler.add(make(range(10, 30), 9))
    assert kinds(scheduler, model, len(expected)) == expected


def test_where_nothing_could_decode_prefill_steps_are_not_counted() -> None:
    scheduler = make_scheduler(max_prefill_tokens=4, limits={"max_consecutive_prefills": 2})
    model, make = FakeModel(257, 1), RequestMaker()
    scheduler.add(make(range(20), 9))
    assert kinds(scheduler, model, 6) == "pppppd"
    scheduler.add(make(range(30, 42), 9))
    assert kinds(scheduler, model, 5) == "ppdpd"


def test_what_decodes_waits_no_longer_than_the_limit_under_a_stream_of_prompts() -> None:
    scheduler = make_scheduler(max_prefill_tokens=4, limits={"max_consecutive_prefills": 3})
    model, make = FakeModel(257, 1), RequestMaker()
    scheduler.add(make([1], 20))
    steps = []
    while "r0" in scheduler.states:
        scheduler.add(make(np.arange(4) + 100 * len(steps), 1))
        steps.append("r0" in names(step(scheduler, model)[0]))
    # After its prompt, one in four steps for each of the other 19 tokens.
    assert steps == [True] + [False, False, False, True] * 19


def test_mixed_prompts_first_then_those_that_decode() -> None:
    scheduler, model, make = mixed()
    requests = [make([1, 2], 9), make([3, 4], 9)]
    for request in requests:
        scheduler.add(request)
    plan, _ = step(scheduler, model)
    assert plan is not None
    assert (plan.kind, plan.num_prompt_rows, plan.bucket.kind) == ("prefill", 2, "prefill")
    requests.append(make(range(10, 20), 9))
    scheduler.add(requests[2])
    plan, changed = step(scheduler, model)
    # Of 8 tokens two are for those that decode.
    assert spans(plan) == [("r2", 0, 6, False), ("r0", 2, 3, True), ("r1", 2, 3, True)]
    assert [state.request_id for state in changed] == ["r0", "r1"]
    assert plan is not None
    assert (plan.kind, plan.num_prompt_rows, plan.num_tokens, plan.num_prefill_tokens) == ("mixed", 1, 8, 6)
    assert (plan.bucket.kind, plan.bucket.num_tokens, plan.bucket.num_rows) == ("prefill", 64, 8)
    plan, _ = step(scheduler, model)
    assert spans(plan) == [("r2", 6, 10, True), ("r0", 3, 4, True), ("r1", 3, 4, True)]
    plan, _ = step(scheduler, model)
    assert plan is not None
    assert (plan.kind, plan.num_prompt_rows, plan.bucket.kind) == ("decode", 0, "decode")
    assert names(plan) == ["r0", "r1", "r2"]
    finished = run_all(scheduler, model)
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
    stats = scheduler.stats
    assert stats.num_steps["mixed"] == 2
    assert stats.num_tokens["mixed"] == 14
    assert stats.num_padded_tokens["mixed"] == 128
    assert stats.num_prefill_tokens == 14
    assert stats.num_output_tokens == 27


def test_the_bucket_of_a_mixed_step_counts_all_its_rows() -> None:
    scheduler, model, make = mixed(max_prefill_tokens=200, max_running_requests=20)
    for i in range(9):
        scheduler.add(make([i], 9))
    step(scheduler, model)
    scheduler.add(make(range(100, 156), 9))
    plan, _ = step(scheduler, model)
    assert plan is not None
    # 56 + 9 tokens, 1 + 9 rows.
    assert (plan.num_tokens, len(plan.rows)) == (65, 10)
    assert (plan.bucket.num_tokens, plan.bucket.num_rows) == (128, 32)


def test_chunks_of_a_mixed_step_end_at_a_page_of_what_is_left() -> None:
    scheduler, model, make = mixed(page_size=4, max_prefill_tokens=11)
    for i in range(2):
        scheduler.add(make([50 + i], 9))
    step(scheduler, model)
    scheduler.add(make(range(20), 9))
    assert spans(step(scheduler, model)[0])[0] == ("r2", 0, 8, False)
    # With a third one that could decode 8 are left, with a fourth 7.
    scheduler.add(make([60], 9, priority=1))
    assert [span[0] for span in spans(step(scheduler, model)[0])] == ["r2", "r3", "r0", "r1"]


@pytest.mark.parametrize(("num_decoding", "expected"), [(4, "mmm"), (5, "ppdppd")])
def test_where_a_page_does_not_fit_beside_those_that_decode_they_take_turns(num_decoding: int, expected: str) -> None:
    scheduler = make_scheduler(
        page_size=4, max_prefill_tokens=8, limits={"mixed_steps": True, "max_consecutive_prefills": 2}
    )
    model, make = FakeModel(257, 4), RequestMaker()
    for i in range(num_decoding):
        scheduler.add(make([i], 30))
    step(scheduler, model)
    scheduler.add(make(range(100, 140), 9))
    assert kinds(scheduler, model, len(expected)) == expected


def test_in_mixed_steps_those_that_decode_never_wait() -> None:
    scheduler, model, make = mixed()
    scheduler.add(make([1], 20))
    num_steps = 0
    while "r0" in scheduler.states:
        scheduler.add(make(np.arange(4) + 100 * num_steps, 1))
        assert "r0" in names(step(scheduler, model)[0])
        num_steps += 1
    assert num_steps == 20


def test_mixed_steps_are_planned_ahead_too() -> None:
    scheduler, model, make = mixed()
    requests = [make([1, 2], 9), make(range(10, 20), 9)]
    for request in requests:
        scheduler.add(request)
    ahead = Ahead(scheduler, model)

    def sources(plan: StepPlan | None) -> list[tuple[str, int | None]]:
        assert plan is not None
        return [(row.request.request_id, row.source) for row in plan.rows]

    assert sources(ahead.plan()) == [("r0", None), ("r1", None)]
    assert sources(ahead.plan()) == [("r1", None), ("r0", 0)]
    ahead.commit()
    assert sources(ahead.plan()) == [("r0", 1), ("r1", 0)]
    finished = ahead.run_all()
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_of_a_mixed_step_pages_are_kept_for_those_that_decode() -> None:
    """r0 takes its next slot in the step in which r1 is let in for all that is left, and one that is not left."""
    for max_tokens, expected in ((9, ["r1", "r0"]), (10, ["r0"])):
        scheduler = make_scheduler(num_pages=21, schedule_policy="fcfs", limits={"mixed_steps": True})
        model, make = FakeModel(21, 1), RequestMaker()
        scheduler.add(make([1, 2], 11))
        step(scheduler, model)
        scheduler.add(make([3, 4], max_tokens))
        # As in steps of one kind: 20 - 2 - 1 - 7 = 10.
        assert names(step(scheduler, model)[0]) == expected


def test_who_gives_way_in_a_mixed_step_does_not_decode_in_it() -> None:
    scheduler, model, make = mixed(max_running_requests=2)
    for i in range(2):
        scheduler.add(make([i], 9))
    step(scheduler, model)
    scheduler.add(make([5], 9, priority=1))
    assert names(step(scheduler, model)[0]) == ["r2", "r0"]
    assert len(run_all(scheduler, model)) == 3
