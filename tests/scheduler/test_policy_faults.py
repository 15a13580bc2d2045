"""A rule of one's own that raises: no row of a plan is lost, and nothing is cached that was not computed."""

import pytest
from scheduling import Ahead, FakeModel, RequestMaker, expected_output

from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.config import SchedulerLimits
from radix_jax.scheduler import Buckets, QueueView, Scheduler


class RaisesWhere:
    """First come, first served, until `is_broken`; then it raises for requests with so many tokens cached."""

    def __init__(self, matched_len: int):
        self.matched_len = matched_len
        self.is_broken = False

    def __call__(self, view: QueueView) -> float:
        if self.is_broken and view.matched_len == self.matched_len:
            raise ZeroDivisionError("of the rule")
        return view.arrival


def start(rule: RaisesWhere) -> tuple[Scheduler, Ahead]:
    scheduler = Scheduler(
        PrefixCache(RadixTree(4), PagePool(257)),
        Buckets(page_size=4, max_model_len=4096, max_running_requests=8, max_prefill_tokens=10),
        SchedulerLimits(max_running_requests=8, max_prefill_tokens=10),
        max_model_len=4096,
        schedule_policy=rule,
    )
    return scheduler, Ahead(scheduler, FakeModel(257, 4))


@pytest.mark.parametrize("matched_len", [4, 8])
def test_it_raises_in_the_first_plan_that_would_have_no_row(matched_len: int) -> None:
    """The first request's pages make others match more, in the middle of the pass; that is where it raises."""
    rule, make = RaisesWhere(matched_len), RequestMaker()
    scheduler, ahead = start(rule)
    requests = [make(range(8), 3), make([*range(matched_len), 99], 3)]
    for request in requests:
        scheduler.add(request)
    rule.is_broken = True
    plan = ahead.plan()
    assert plan is not None
    assert [row.request.request_id for row in plan.rows] == ["r0"]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            scheduler.plan()
        scheduler.check_integrity()
    rule.is_broken = False
    finished = ahead.run_all()
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)


def test_an_unfinished_prompt_goes_on() -> None:
    rule, make = RaisesWhere(0), RequestMaker()
    scheduler, ahead = start(rule)
    requests = [make(range(30), 3), make([99, 98], 3)]
    scheduler.add(requests[0])
    ahead.plan()
    scheduler.add(requests[1])
    rule.is_broken = True
    plan = ahead.plan()
    assert plan is not None
    assert [(row.request.request_id, row.start, row.end) for row in plan.rows] == [("r0", 8, 16)]
    rule.is_broken = False
    finished = ahead.run_all()
    for request in requests:
        assert finished[request.request_id].output_ids.tolist() == expected_output(request)
