"""Scheduler: who runs in the next step, and what a step's tokens change. Host bookkeeping alone, no device."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.config import SchedulerLimits, check_int
from radix_jax.plan import PromptLogprobs, StepPlan, StepRow, TokenLogprobs
from radix_jax.request import Request
from radix_jax.scheduler.admission import Admission
from radix_jax.scheduler.buckets import Buckets
from radix_jax.scheduler.budget import NewTokenRatio
from radix_jax.scheduler.errors import check_queue
from radix_jax.scheduler.explanation import Explanation, explain
from radix_jax.scheduler.integrity import check_requests
from radix_jax.scheduler.new_weights import NewWeights, OnUpdate
from radix_jax.scheduler.policy import Rule, make_policy
from radix_jax.scheduler.prefill import Prefill
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.retraction import retraction_order
from radix_jax.scheduler.running import RunningBatch
from radix_jax.scheduler.stats import SchedulerStats
from radix_jax.scheduler.timeline import Timelines
from radix_jax.scheduler.timeouts import overdue
from radix_jax.scheduler.unfinished import Unfinished
from radix_jax.scheduler.waiting import WaitingQueue

MAX_PLANS_IN_FLIGHT = 2
Tokens = Int32[np.ndarray, " B"] | Int32[np.ndarray, "B steps"]


class Scheduler:
    """Continuous batching over a prefix cache: `plan()`, run the plan, `commit(plan, tokens)`, and again.

    A step is a prefill step while there are prompts to compute, else a decode step of all running requests; every
    `max_consecutive_prefills` prefill steps a decode step comes between. With `mixed_steps` both are in one.

    Overlap: `plan()` may be called once more before the plan before it is committed. Its rows then name, instead of a
    token that is not known yet, the row of the plan before that samples it. Every plan that is returned must run, and
    plans run in their order: the tree names the pages of a plan as soon as it is made, and a page that is given back
    may be taken by the next plan. An end that only the token's value shows is seen one plan late; the surplus token is
    dropped, and its page given back at once.

    Memory: requests are let in for less than they may need in the end (see `budget`). Where the pool falls short, some
    are retracted: they wait again, with their output so far.

    timelines: to go on with, of a scheduler before this one. weight_version: that it begins with.

    Raises:
        ValueError: an unknown policy, or max_prefill_tokens below page_size.
    """

    def __init__(
        self,
        cache: PrefixCache,
        buckets: Buckets,
        limits: SchedulerLimits,
        *,
        max_model_len: int,
        schedule_policy: str | Rule = "lpm",
        enable_prefix_cache: bool = True,
        seed: int = 0,
        timelines: Timelines | None = None,
        weight_version: int = 0,
    ):
        if limits.max_prefill_tokens < cache.page_size:
            raise ValueError(
                f"max_prefill_tokens={limits.max_prefill_tokens} is below page_size={cache.page_size}, the least share "
                "of a prompt; raise max_prefill_tokens or lower page_size"
            )
        self._page_size = cache.page_size
        self._limits = limits
        self._cache = cache
        self._buckets = buckets
        self._timelines = timelines or Timelines()
        self._admission = Admission(
            cache,
            self._timelines,
            num_pages=cache.pool.num_pages,
            max_model_len=max_model_len,
        )
        self._waiting = WaitingQueue(make_policy(schedule_policy, seed), cache)
        self._running = RunningBatch(self._admission, self._waiting, cache.page_size)
        self._prefill = Prefill(self._waiting, self._running, self._admission, limits, self._timelines, self._retract)
        self._unfinished = Unfinished(
            cache,
            self._waiting,
            self._running,
            self._prefill,
            self._timelines,
            enable_prefix_cache=enable_prefix_cache,
            weight_version=weight_version,
        )
        parts = cache, self._waiting, self._running, self._prefill, self._unfinished, self._timelines
        self._new_weights = NewWeights(*parts)
        self._ratio = NewTokenRatio()
        self._in_flight: deque[StepPlan] = deque()
        self._num_prefills_in_row = 0
        self._stats = SchedulerStats()

    @property
    def cache(self) -> PrefixCache:
        """The cache that requests share."""
        return self._cache

    @property
    def num_waiting(self) -> int:
        """Samples that wait: not admitted yet, or retracted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Admitted samples, an unfinished prompt included."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.states)

    @property
    def states(self) -> Mapping[str, RequestState]:
        """Unfinished samples by id; read-only."""
        return self._unfinished.states

    @property
    def stats(self) -> SchedulerStats:
        """Counts so far."""
        return self._stats

    def check_admissible(self, request: Request) -> None:
        """Refuse a request that could never run, whatever else is going on.

        Raises:
            ValueError: no prompt, no output, or more tokens than the context or the pool holds.
        """
        self._admission.check_admissible(request)

    def add(self, request: Request, now: float = 0.0) -> RequestState:
        """Queue a request of one sample; as `add_samples`."""
        return self.add_samples([request], now)[0]

    def add_samples(self, requests: Sequence[Request], now: float = 0.0) -> list[RequestState]:
        """Queue the samples of one request, which differ in id and sample_index alone: all of them, or none.

        now: the caller's clock, in seconds.

        Raises:
            ValueError: as `check_admissible`, an id is in use, more samples than max_queued_requests, or this very
                request ended while its step still runs.
            QueueFull: with them, more than max_queued_requests would wait.
        """
        self.check_admissible(requests[0])
        for request in requests:
            if request.request_id in self.states:
                raise ValueError(
                    f"request_id {request.request_id!r} is in use by an unfinished request; use another one"
                )
            if any(row.request is request for plan in self._in_flight for row in plan.rows):
                raise ValueError(f"request {request.request_id!r} ended while its step runs; make a new Request of it")
        check_queue(len(self._waiting), len(requests), self._limits.max_queued_requests)
        return self._unfinished.add(requests, now, self._stats)

    def abort(self, request_id: str, now: float | None = None) -> RequestState | None:
        """End a request, wherever it stands, and give back what it holds; None if there is none of that id.

        Between `plan` and `commit` too: the step's result for it is then dropped. now: as in `commit`.
        """
        state = self.states.get(request_id)
        if state is not None:
            self._timelines.at(now)
            self._unfinished.abort(state, None, self._stats)
        return state

    def expire(self, now: float) -> list[RequestState]:
        """Abort the requests whose time is over by the caller's clock, with all their samples; `stop_reason` names the
        limit."""
        late = overdue(self.states.values(), self._limits, now)
        for state, limit in late:
            self._timelines.at(now)
            self._unfinished.abort(state, limit, self._stats)
        self._stats.num_timed_out += len({id(state.group) for state, _ in late})
        return [state for state, _ in late]

    def check_update(self, on_update: OnUpdate) -> None:
        """Refuse an update that an unfinished request does not allow: see `NewWeights.check`."""
        self._new_weights.check(on_update)

    def update_weights(
        self, version: int, on_update: OnUpdate = "continue", now: float | None = None
    ) -> list[RequestState]:
        """Plans from here on run under weights of this version; see `NewWeights`. Returns the samples that this ended.

        Raises:
            RuntimeError: a plan is in flight.
        """
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} plans are in flight, of the old weights; commit them first")
        self._timelines.at(now)
        ended = self._new_weights.apply(version, on_update, self._stats)
        if not self._running:
            self._ratio.reset()
        return ended

    def plan(self, now: float = 0.0, max_steps: int = 1) -> StepPlan | None:
        """What to compute next; None if nothing is left to do, or nothing before the plan in flight is committed.

        now: the caller's clock, in seconds. max_steps: steps that a decode plan may span; more than one only where
        nothing is in flight, nobody could be let in meanwhile, and no request reaches its last token before the end.

        Raises:
            ValueError: max_steps below 1. RuntimeError: two plans are in flight already.
            NoRoom: nothing runs, and yet no waiting request fits: others than requests hold locks.
            Exception: what a schedule policy of one's own raised; another plan may be tried. What an eviction rule of
                one's own raised leaves the plan half made: the scheduler and its cache are of no use then.
        """
        check_int("max_steps", max_steps, at_least=1)
        if len(self._in_flight) == MAX_PLANS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_PLANS_IN_FLIGHT} plans are not committed; commit the older one first")
        self._timelines.begin_plan(now)
        plan = self._make_plan(max_steps)
        self._admission.end_plan()
        if plan is not None:
            self._in_flight.append(plan)
            self._timelines.end_plan()
        elif not self._in_flight:
            self._prefill.check_not_stuck()
        return plan

    def commit(
        self,
        plan: StepPlan,
        tokens: Tokens,
        now: float | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> list[RequestState]:
        """Take over what a step computed.

        tokens: one a row of the plan, in its order, or so many as the plan has steps; ignored for rows that sample
            none. now: the caller's clock, for `explain`; None: as it was told last. logprobs: of the tokens, in numpy;
            None where no row asks. A plan of several steps has none. prompt_logprobs: of the prompts' tokens, likewise.

        Returns the samples that got a token, finished ones (see finish_reason) included.

        Raises:
            ValueError: not the oldest plan in flight, or another number of tokens than rows and steps.
        """
        if not self._in_flight or plan is not self._in_flight[0]:
            raise ValueError("this plan is not the oldest in flight; commit each plan once, in their order")
        if tokens.shape not in ((len(plan.rows), plan.num_steps), (len(plan.rows),) if plan.num_steps == 1 else ()):
            raise ValueError(
                f"tokens of shape {tokens.shape} for {len(plan.rows)} rows and {plan.num_steps} steps; give one a row "
                "and step, padding left out"
            )
        self._in_flight.popleft()
        self._timelines.begin_commit(now, len(self._in_flight))
        self._stats.count_step(plan)
        if plan.kind != "prefill":
            self._ratio.count_decode_steps(plan.num_steps)
        for row in plan.rows[: plan.num_prompt_rows]:
            state = self._running.state_of(row)
            if state is not None and row.samples and not state.num_outputs:
                self._timelines.note(state.request_id, "first token")
        if prompt_logprobs is not None:
            self._running.take_prompt_logprobs(plan, prompt_logprobs)
        changed = []
        by_row = tokens.reshape(len(plan.rows), plan.num_steps).tolist()
        for place, (row, new_tokens) in enumerate(zip(plan.rows, by_row, strict=True)):
            state = self._running.state_of(row) if row.samples else None
            if state is not None:
                state.num_pending -= plan.num_steps
                if logprobs is not None and state.logprobs is not None:
                    state.logprobs.append(new_tokens[0], logprobs, place)
                self._unfinished.append(state, new_tokens, self._stats)
                changed.append(state)
        if not self._running:
            self._ratio.reset()
        return changed

    def is_live(self, plan: StepPlan) -> bool:
        """Whether any request of a plan still runs, so that its tokens matter."""
        return any(self._running.state_of(row) is not None for row in plan.rows)

    def explain(self, request_id: str) -> Explanation:
        """Why a request waits or waited, and what happened to it.

        Raises:
            KeyError: no request of that id, or it ended too long ago. TypeError: what a rule of one's own raises.
        """
        parts = self._timelines, self._waiting, self._running, self._admission, self._ratio
        return explain(request_id, self.states.get(request_id), *parts)

    def reset(self) -> None:
        """Drop every request, give back what they hold, and start the counts anew. What is cached stays; plans in
        flight count as run."""
        self._running.clear()
        self._waiting.clear()
        self._unfinished.clear()
        self._in_flight.clear()
        self._ratio.reset()
        self._stats = SchedulerStats()

    def check_integrity(self) -> None:
        """Prove the invariants: who is where, matched lengths, one owner a page.

        Raises:
            AssertionError: what is off.
        """
        parts = self._waiting, self._running, self._admission, self._limits
        check_requests(self.states, *parts, in_flight=bool(self._in_flight))

    def _make_plan(self, max_steps: int) -> StepPlan | None:
        ready = self._make_room()
        if ready is None:
            return None
        num_retractions = self._stats.num_retractions
        prompt_rows: list[StepRow] = []
        mixed = self._limits.mixed_steps and len(ready) + self._page_size <= self._limits.max_prefill_tokens
        if mixed or not ready or self._num_prefills_in_row < self._limits.max_consecutive_prefills:
            num_tokens = self._limits.max_prefill_tokens - (len(ready) if mixed else 0)
            prompt_rows = self._prefill.rows(num_tokens, self._ratio, self._stats, may_retract=not self._in_flight)
            if self._prefill.needs_commit and not prompt_rows:
                return None
            if self._stats.num_retractions != num_retractions:
                planned = {row.request.request_id for row in prompt_rows}
                ready = [state for state in self._running.decoding() if state.request_id not in planned]
        if prompt_rows and not mixed:
            self._num_prefills_in_row += bool(ready)
            return self._finish_plan(prompt_rows, [], 1)
        self._num_prefills_in_row = 0
        num_steps = 1 if prompt_rows else self._num_steps(ready, max_steps)
        decode_rows = self._running.decode_rows(ready, num_steps, len(prompt_rows))
        return self._finish_plan(prompt_rows, decode_rows, num_steps)

    def _finish_plan(self, prompt_rows: list[StepRow], decode_rows: list[StepRow], num_steps: int) -> StepPlan | None:
        rows = (*prompt_rows, *decode_rows)
        if not rows:
            return None
        if prompt_rows:
            bucket = self._buckets.for_prefill(sum(len(row.token_ids) for row in rows), len(rows))
            kind = "mixed" if decode_rows else "prefill"
        else:
            bucket, kind = self._buckets.for_decode(len(rows)), "decode"
        for place, row in enumerate(prompt_rows):
            if row.samples:
                state = self._running.get(row.request.request_id)
                assert state is not None
                state.num_pending += 1
                state.source = place
        return StepPlan(kind, rows, bucket, len(prompt_rows), num_steps)

    def _num_steps(self, ready: list[RequestState], max_steps: int) -> int:
        """Steps during which nobody comes or goes, as far as is known, and that the pool has pages for."""
        if max_steps == 1 or not ready or self._in_flight:
            return 1
        blocked = len(self._running) == self._limits.max_running_requests or (
            self._prefill.refusal is not None and self._ratio.is_least
        )
        waits = (len(self._waiting) and not blocked) or self._running.unfinished is not None
        needs_values = any(state.request.needs_values for state in ready)
        if waits or needs_values:
            return 1
        num_steps = min(max_steps, *(state.num_to_sample for state in ready))
        while num_steps > 1 and self._running.num_missing(ready, num_steps) > self._admission.num_available:
            num_steps //= 2
        return num_steps

    def _make_room(self) -> list[RequestState] | None:
        """Who decodes next, once so many are retracted that the others' next step has its pages. None: nobody can be
        retracted before the plan in flight is committed."""
        ready = self._running.decoding()
        while self._is_short(ready) and len(self._running):
            if self._in_flight:
                return None
            self._retract(retraction_order(self._running)[0])
            self._ratio.note_retraction(self._running)
            ready = self._running.decoding()
        return ready

    def _is_short(self, ready: list[RequestState]) -> bool:
        """Whether the next step of all takes more pages than there are."""
        num_available = self._admission.num_available
        unfinished = self._running.unfinished
        if unfinished is not None:
            end = min(unfinished.num_computed + self._limits.max_prefill_tokens, unfinished.num_tokens)
            num_available -= self._admission.num_missing(unfinished, end)
        # A decode step takes one page a row at most, which spares counting them as a rule.
        return len(ready) > num_available and self._running.num_missing(ready, 1) > num_available

    def _retract(self, state: RequestState, other: str | None = None) -> None:
        self._unfinished.retract(state, other, self._stats)
