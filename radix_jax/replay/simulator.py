"""A trace run on the engine's own scheduler, tree and pool, with a virtual clock in place of a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.config import EngineConfig
from radix_jax.plan import StepPlan
from radix_jax.replay.cost_model import CostModel, StepCounts
from radix_jax.replay.trace import Trace
from radix_jax.request import Request, SamplingParams
from radix_jax.scheduler import Buckets, QueueFull, RequestState, Scheduler, SchedulerStats

_ANY_SAMPLING = SamplingParams(temperature=0.0)


@dataclass
class RequestTimes:
    """What happened to one request; times are seconds since the trace began, None where it did not come to that.

    place: in the trace. cached_len: prompt tokens that the cache held when it was admitted.
    refused: why it was not let in.
    """

    place: int
    arrival_s: float
    prompt_len: int
    cached_len: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Simulation:
    """Everything that a run left.

    requests: by place in the trace. admitted: places in the order of admission. stats: the scheduler's own.
    end_s: when the last step ended. max_waiting: the longest queue that a step was planned with.
    """

    requests: list[RequestTimes]
    admitted: list[int]
    stats: SchedulerStats
    end_s: float
    max_waiting: int


def simulate(
    trace: Trace,
    config: EngineConfig,
    costs: CostModel | None = None,
    on_finished: Callable[[int], object] | None = None,
) -> Simulation:
    """Run a trace: requests come when the clock says so, and every step takes what the cost model says.

    The clock jumps over decode steps before the next arrival, as far as the scheduler plans several at once; that
    changes no time. A request ends after its `output_len` tokens. One that can never run, or comes when
    max_queued_requests wait, is refused, as the engine would, and noted.
    config: as an engine's; num_pages must be given; max_model_len None is the longest request of the trace.
    on_finished: gets the number of requests that ended or were refused so far, for a progress bar.

    Raises:
        ValueError: num_pages is not given, a time-out is, or a limit that the scheduler refuses.
    """
    for name in ("queue_timeout_s", "run_timeout_s"):
        if getattr(config, name) is not None:
            raise ValueError(f"a replay ends no request early; leave {name} out")
    return _Run(trace, config, costs or CostModel(), on_finished or (lambda count: None)).run()


def make_scheduler(config: EngineConfig, max_model_len: int) -> Scheduler:
    """The scheduler that an engine of this config would have, with an empty cache.

    Raises:
        ValueError: num_pages is not given, or a limit that the scheduler refuses.
    """
    if config.num_pages is None:
        raise ValueError("a replay has no device whose memory would size the pool; give num_pages")
    buckets = Buckets(
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_running_requests=config.max_running_requests,
        max_prefill_tokens=config.max_prefill_tokens,
        deterministic=config.deterministic,
    )
    tree = RadixTree(config.page_size, config.eviction_policy, partial_pages=config.partial_pages)
    return Scheduler(
        PrefixCache(tree, PagePool(config.num_pages)),
        buckets,
        config.limits,
        max_model_len=max_model_len,
        schedule_policy=config.schedule_policy,
        enable_prefix_cache=config.enable_prefix_cache,
        seed=config.seed,
    )


@dataclass
class _Run:
    trace: Trace
    config: EngineConfig
    costs: CostModel
    on_finished: Callable[[int], object]
    now_s: float = 0.0
    next_place: int = 0
    num_ended: int = 0
    max_waiting: int = 0
    requests: list[RequestTimes] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    outputs: dict[str, Int32[np.ndarray, " N"]] = field(default_factory=dict)

    def run(self) -> Simulation:
        """From the first arrival to the last end."""
        max_model_len = self.config.max_model_len or max(self.trace.max_len, 2)
        scheduler = make_scheduler(self.config, max_model_len)
        while True:
            self.add_arrivals(scheduler)
            self.max_waiting = max(self.max_waiting, scheduler.num_waiting)
            plan = scheduler.plan(self.now_s, self.steps_until_arrival(scheduler))
            if plan is not None:
                self.note_admissions(plan, scheduler.states)
                self.now_s += self.costs.seconds_s(StepCounts.of(plan))
                self.note_tokens(scheduler.commit(plan, self.tokens_of(plan)))
            elif self.next_place < len(self.trace):
                self.now_s = max(self.now_s, self.trace[self.next_place].arrival_s)
            else:
                break
        return Simulation(self.requests, self.admitted, scheduler.stats, self.now_s, self.max_waiting)

    def add_arrivals(self, scheduler: Scheduler) -> None:
        """Queue what has come by now."""
        while self.next_place < len(self.trace) and self.trace[self.next_place].arrival_s <= self.now_s:
            place = self.next_place
            self.next_place += 1
            one = self.trace[place]
            times = RequestTimes(place, one.arrival_s, one.prompt_len)
            self.requests.append(times)
            request = Request(
                request_id=str(place),
                token_ids=one.prompt_ids(),
                sampling=_ANY_SAMPLING,
                max_tokens=one.output_len,
                stop_ids=frozenset(),
                seed=place,
                arrival=place,
                namespace=one.namespace,
                priority=one.priority,
            )
            try:
                scheduler.add(request, self.now_s)
            except (ValueError, QueueFull) as error:
                times.refused = str(error)
                self.count_ended()
            else:
                self.outputs[request.request_id] = self.trace.output_ids(place)

    def steps_until_arrival(self, scheduler: Scheduler) -> int:
        """How many decode steps of all that run begin before the next request comes, at least one."""
        if scheduler.num_waiting or not scheduler.num_running:
            return 1
        if self.next_place == len(self.trace):
            return self.trace.max_len
        context_len = sum(state.num_tokens for state in scheduler.states.values())
        gap_s = self.trace[self.next_place].arrival_s - self.now_s
        few, enough = 0, 1
        # Steps that cost nothing would never fill the gap, but by max_len of them everybody has ended.
        while enough < self.trace.max_len and self.decode_s(scheduler, context_len, enough) < gap_s:
            few, enough = enough, 2 * enough
        while enough - few > 1:
            middle = (few + enough) // 2
            if self.decode_s(scheduler, context_len, middle) < gap_s:
                few = middle
            else:
                enough = middle
        return enough

    def decode_s(self, scheduler: Scheduler, context_len: int, num_steps: int) -> float:
        """Seconds of so many decode steps of all that run."""
        return self.costs.seconds_s(StepCounts.of_decode(scheduler.num_running, context_len, num_steps))

    def tokens_of(self, plan: StepPlan) -> Int32[np.ndarray, " B S"]:
        """The next tokens of each row that samples, 0 for the others."""
        tokens = np.zeros((len(plan.rows), plan.num_steps), np.int32)
        for place, row in enumerate(plan.rows):
            if row.samples:
                start = row.end - row.request.prompt_len
                tokens[place] = self.outputs[row.request.request_id][start : start + plan.num_steps]
        return tokens

    def note_admissions(self, plan: StepPlan, states: Mapping[str, RequestState]) -> None:
        """Note who runs for the first time."""
        for row in plan.rows[: plan.num_prompt_rows]:
            times = self.requests[row.request.arrival]
            if times.admitted_s is None:
                times.admitted_s = self.now_s
                times.cached_len = states[row.request.request_id].cached_len
                self.admitted.append(times.place)

    def note_tokens(self, changed: list[RequestState]) -> None:
        """Note first tokens and ends."""
        for state in changed:
            times = self.requests[state.request.arrival]
            if times.first_token_s is None:
                times.first_token_s = self.now_s
            if state.finish_reason is not None:
                times.finished_s = self.now_s
                del self.outputs[state.request_id]
                self.count_ended()

    def count_ended(self) -> None:
        """One request more is done with."""
        self.num_ended += 1
        self.on_finished(self.num_ended)
