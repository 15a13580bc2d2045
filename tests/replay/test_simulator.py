"""The simulation: worked out by hand, against counts of its own, and that it is the engine's scheduler that runs."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import radix_jax.engine
import radix_jax.replay.simulator
from radix_jax.config import EVICTION_POLICIES, EngineConfig
from radix_jax.plan import StepPlan
from radix_jax.replay import CostModel, Trace, TraceRequest, make_report, make_scheduler, read_trace, simulate
from radix_jax.replay.trace import FreshIds
from radix_jax.scheduler import Scheduler

DATA = Path(__file__).parent.parent / "data" / "traces"
COSTS = CostModel(per_step_s=1.0, per_prefill_token_s=0.125, per_decode_row_s=0.25, per_context_token_s=0.03125)


def small_config(**changes: object) -> EngineConfig:
    settings = {"page_size": 4, "num_pages": 33, "max_prefill_tokens": 64, "schedule_policy": "fcfs"}
    return EngineConfig(**settings | changes)  # type: ignore[arg-type]


def requests_of(*shapes: tuple[float, int, int, int]) -> Trace:
    """(arrival, prompt length, output length, first id)."""
    return Trace("by hand", [TraceRequest(at, prompt, output, FreshIds(first)) for at, prompt, output, first in shapes])


def test_a_trace_worked_out_by_hand():
    """Request 0: 8 tokens in a step of 1 + 8/8 = 2 s. Request 1 came at 1 and starts at 2; 8 of its 12 tokens are
    cached, 1 + 4/8 s; then a decode step with 13 tokens of context, 1 + 1/4 + 13/32 s. Request 2 finds nobody at 10."""
    trace = requests_of((0.0, 8, 1, 0), (1.0, 12, 2, 0), (10.0, 4, 1, 500))
    done = simulate(trace, small_config(), COSTS)
    times = [(one.cached_len, one.admitted_s, one.first_token_s, one.finished_s) for one in done.requests]
    assert times == [(0, 0.0, 2.0, 2.0), (8, 2.0, 3.5, 5.15625), (0, 10.0, 11.5, 11.5)]
    assert (done.admitted, done.end_s, done.max_waiting) == ([0, 1, 2], 11.5, 1)
    report = make_report(trace, small_config(), done, optimum=True)
    assert (report.prompt_tokens, report.cached_tokens, report.hit_rate) == (24, 8, 8 / 24)
    assert (report.optimal_hit_rate, report.regret) == (8 / 24, 0.0)
    assert (report.ttft.mean_s, report.ttft.p50_s) == ((2.0 + 2.5 + 1.5) / 3, 2.0)
    assert report.latency.mean_s == (2.0 + 4.15625 + 1.5) / 3
    assert (report.waiting.mean_s, report.duration_s) == (1 / 3, 11.5)
    assert report.padding == 1 - (8 + 4 + 1 + 4) / (3 * 64 + 8)


def test_requests_that_can_never_run_are_refused_and_the_others_run():
    trace = requests_of((0.0, 200, 1, 0), (0.0, 4, 2, 900))
    done = simulate(trace, small_config(), COSTS)
    refused, ran = done.requests
    assert "the pool has 32" in str(refused.refused)
    assert (refused.finished_s, ran.refused, done.admitted) == (None, None, [1])
    report = make_report(trace, small_config(), done, optimum=True)
    assert (report.num_refused, report.prompt_tokens, report.optimal_hit_rate) == (1, 4, 0.0)


def test_who_comes_while_the_queue_is_full_is_refused():
    """Request 0 takes 2 s, alone. By then one of the two that came at 1 may wait."""
    trace = requests_of((0.0, 8, 1, 0), (1.0, 8, 1, 100), (1.0, 8, 1, 200))
    done = simulate(trace, small_config(max_queued_requests=1), COSTS)
    assert done.admitted == [0, 1]
    assert "max_queued_requests=1" in str(done.requests[2].refused)


@pytest.mark.parametrize("name", ["queue_timeout_s", "run_timeout_s"])
def test_time_outs_are_refused(name: str):
    with pytest.raises(ValueError, match=f"a replay ends no request early; leave {name} out"):
        simulate(requests_of((0.0, 8, 1, 0)), small_config(**{name: 5.0}), COSTS)


def trie_hits(trace: Trace, page_size: int) -> int:
    """Tokens of whole pages that some request before has, the last prompt token aside."""
    trie: dict[bytes, dict] = {}
    hits = 0
    for one in trace:
        ids, here = one.prompt_ids(), trie
        for end in range(page_size, len(ids) + 1, page_size):
            page = ids[end - page_size : end].tobytes()
            hits += page_size * (page in here and end < len(ids))
            here = here.setdefault(page, {})
    return hits


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"])
def test_one_at_a_time_without_evictions_the_hits_are_those_of_a_trie(name: str):
    cut = read_trace(DATA / name, limit=40)
    trace = Trace(name, [replace(one, arrival_s=1e6 * place) for place, one in enumerate(cut)])
    config = EngineConfig(page_size=512, num_pages=2000, schedule_policy="fcfs", partial_pages=False)
    done = simulate(trace, config)
    assert done.max_waiting == 1
    expected = trie_hits(trace, 512)
    assert expected > 0
    assert sum(one.cached_len for one in done.requests) == expected
    report = make_report(trace, config, done, optimum=True)
    assert report.regret == 0.0


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
def test_every_request_ends_once_in_a_pool_that_is_too_small_and_runs_repeat(eviction_policy: str):
    trace = read_trace(DATA / "mooncake_conversation.jsonl", limit=12).sped_up(100.0)
    config = EngineConfig(page_size=64, num_pages=400, max_prefill_tokens=4096, eviction_policy=eviction_policy)
    seen: list[int] = []
    done = simulate(trace, config, on_finished=seen.append)
    assert seen == list(range(1, 13))
    assert sorted(done.admitted) == list(range(12))
    for one, request in zip(done.requests, trace, strict=True):
        times = [request.arrival_s, one.admitted_s, one.first_token_s, one.finished_s]
        assert None not in times
        assert times == sorted(times)  # type: ignore[type-var]
    assert done.stats.num_output_tokens == sum(request.output_len for request in trace)
    assert simulate(trace, config) == done


def test_jumps_change_no_time(monkeypatch: pytest.MonkeyPatch):
    trace = read_trace(DATA / "mooncake_conversation.jsonl", limit=20).sped_up(40.0)
    config = EngineConfig(page_size=64, num_pages=3000, max_prefill_tokens=4096)
    jumped = simulate(trace, config)
    plans: list[int] = []
    plan_once = Scheduler.plan

    def plan(self: Scheduler, now: float, max_steps: int) -> StepPlan | None:
        plans.append(max_steps)
        return plan_once(self, now, 1)

    monkeypatch.setattr(Scheduler, "plan", plan)
    stepped = simulate(trace, config)
    assert max(plans) > 100
    assert stepped.stats.num_steps == jumped.stats.num_steps
    assert stepped.admitted == jumped.admitted
    for one, other in zip(stepped.requests, jumped.requests, strict=True):
        assert (one.cached_len, one.admitted_s) == (other.cached_len, pytest.approx(other.admitted_s))
        assert one.finished_s == pytest.approx(other.finished_s)


def test_it_is_the_scheduler_of_the_engine():
    assert radix_jax.replay.simulator.Scheduler is radix_jax.engine.Scheduler is Scheduler
    scheduler = make_scheduler(small_config(eviction_policy="reuse-rate"), 64)
    assert type(scheduler) is Scheduler
    assert type(scheduler.cache) is radix_jax.engine.PrefixCache
    assert (scheduler.cache.page_size, scheduler.cache.pool.num_pages) == (4, 33)


@pytest.mark.parametrize("name", [field.name for field in fields(CostModel)])
def test_steps_may_cost_nothing(name: str):
    """A step whose kind costs nothing takes no time, whatever comes next."""
    trace = requests_of((0.0, 8, 5, 0), (1000.0, 8, 5, 500))
    costs = CostModel(**dict.fromkeys([field.name for field in fields(CostModel)], 0.0) | {name: 1.0})
    done = simulate(trace, small_config(), costs)
    ends = {"per_step_s": 5.0, "per_prefill_token_s": 8.0, "per_decode_row_s": 4.0, "per_context_token_s": 42.0}
    assert [one.finished_s for one in done.requests] == [ends[name], 1000 + ends[name]]


def test_a_pool_must_be_given():
    with pytest.raises(ValueError, match="give num_pages"):
        simulate(requests_of((0.0, 4, 1, 0)), small_config(num_pages=None))


def test_an_empty_queue_costs_no_time():
    done = simulate(requests_of((0.0, 4, 1, 0), (1e6, 4, 1, 100)), small_config(), COSTS)
    assert done.end_s == 1e6 + 1.5
    assert np.sum(list(done.stats.num_steps.values())) == 2
