"""Random arrivals, aborts, time-outs, locks of others and steps in small pools: every request ends once, with its
tokens, and no page is lost."""

import dataclasses
from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import FakeModel, RequestMaker, expected_output, make_scheduler, samples_of

from radix_jax.cache import OutOfPages, PagePool, PrefixCache, PrefixHandle, RadixTree
from radix_jax.config import SCHEDULE_POLICIES
from radix_jax.plan import StepPlan
from radix_jax.request import CACHE_MODES, CacheMode, FinishAt, Request
from radix_jax.scheduler import QueueFull, RequestState

QUEUE_TIMEOUT_S, RUN_TIMEOUT_S = 25.0, 40.0
MOST_UNFINISHED = 12  # so that what fails can be shrunk in reasonable time
# Prompts are made of few words, so that they often share a beginning.
WORDS = tuple(tuple(range(10 * i, 10 * i + length)) for i, length in enumerate((1, 3, 4, 9, 14)))
PROMPTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(
    lambda words: [id for word in words for id in word]
)


class EndsAtMultiples:
    """A check that ends a sample at the first id of which `divisor` is a divisor, and fails at others if told to."""

    def __init__(self, divisor: int, failing_id: int):
        self._divisor, self._failing_id = divisor, failing_id

    def __call__(self, index: int, new_ids: list[int]) -> FinishAt | None:
        for num_ids, token_id in enumerate(new_ids, 1):
            if token_id == self._failing_id:
                raise ZeroDivisionError
            if token_id % self._divisor == 0:
                return FinishAt(num_ids, "multiple")
        return None


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler with its model; `plan` and `commit` are rules of their own, so that aborts come in between."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4, 16)),
        num_usable_pages=st.integers(1, 40),
        chunk_pages=st.integers(1, 4),
        max_running_requests=st.integers(1, 5),
        policy=st.sampled_from(SCHEDULE_POLICIES),
        eviction_policy=st.sampled_from(("lru", "reuse-rate", "cost-aware")),
        enable_prefix_cache=st.booleans(),
        partial_pages=st.booleans(),
        mixed_steps=st.booleans(),
        max_consecutive_prefills=st.integers(1, 3),
        preemption_threshold=st.sampled_from((None, 1, 2)),
        max_queued_requests=st.sampled_from((None, None, 1, 3)),
        has_timeouts=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        num_usable_pages: int,
        chunk_pages: int,
        max_running_requests: int,
        policy: str,
        eviction_policy: str,
        enable_prefix_cache: bool,
        partial_pages: bool,
        mixed_steps: bool,
        max_consecutive_prefills: int,
        preemption_threshold: int | None,
        max_queued_requests: int | None,
        has_timeouts: bool,
    ) -> None:
        self.num_usable_pages, self.page_size = num_usable_pages, page_size
        self.enable_prefix_cache = enable_prefix_cache
        tree = RadixTree(page_size, eviction_policy, partial_pages=partial_pages)
        self.max_prefill_tokens = chunk_pages * page_size + 1
        self.scheduler = make_scheduler(
            page_size=page_size,
            max_running_requests=max_running_requests,
            max_prefill_tokens=self.max_prefill_tokens,
            schedule_policy=policy,
            enable_prefix_cache=enable_prefix_cache,
            cache=PrefixCache(tree, PagePool(num_usable_pages + 1)),
            limits={
                "mixed_steps": mixed_steps,
                "max_consecutive_prefills": max_consecutive_prefills,
                "preemption_threshold": preemption_threshold,
                "max_queued_requests": max_queued_requests,
                "queue_timeout_s": QUEUE_TIMEOUT_S if has_timeouts else None,
                "run_timeout_s": RUN_TIMEOUT_S if has_timeouts else None,
            },
        )
        self.model, self.make = FakeModel(num_usable_pages + 1, page_size), RequestMaker()
        self.in_flight: deque[tuple[StepPlan, np.ndarray]] = deque()
        self.unfinished: dict[str, Request] = {}
        self.num_ended, self.num_timed_out, self.now = 0, 0, 0.0
        self.max_queued_requests, self.has_timeouts = max_queued_requests, has_timeouts
        self.locked: list[PrefixHandle] = []
        self.came: dict[str, float] = {}
        self.admitted: dict[str, float] = {}
        self.prompts: dict[int, int] = {}  # of admitted requests, by arrival

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        stop_id=st.integers(0, 60),
        namespace=st.sampled_from((None, "a")),
        cache=st.sampled_from(("use", "use", *CACHE_MODES)),
        priority=st.sampled_from((0, 0, 0, 1, 2)),
        ignore_eos=st.booleans(),
        needs_values=st.booleans(),
        routing_key=st.sampled_from((None, "x", 1)),
        finish_check=st.sampled_from((None, None, EndsAtMultiples(7, -1), EndsAtMultiples(11, 5))),
        num_samples=st.sampled_from((1, 1, 2, 4)),
    )
    @precondition(lambda self: len(self.unfinished) < MOST_UNFINISHED)
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        stop_id: int,
        namespace: str | None,
        cache: CacheMode,
        priority: int,
        ignore_eos: bool,
        needs_values: bool,
        routing_key: str | int | None,
        finish_check: EndsAtMultiples | None,
        num_samples: int,
    ) -> None:
        request = self.make(
            prompt,
            max_tokens,
            stop_ids=[stop_id],
            namespace=namespace,
            cache=cache,
            priority=priority,
            ignore_eos=ignore_eos,
            needs_values=needs_values,
            routing_key=routing_key,
            finish_check=finish_check,
        )
        samples = samples_of(request, num_samples)
        num_pages = -(-(len(prompt) + max_tokens - 1) // self.page_size)
        try:
            self.scheduler.add_samples(samples, self.now)
        except ValueError:
            assert num_pages > self.num_usable_pages or num_samples > (self.max_queued_requests or num_samples)
        except QueueFull:
            assert self.max_queued_requests is not None
            assert self.scheduler.num_waiting + num_samples > self.max_queued_requests
        else:
            assert num_pages <= self.num_usable_pages
            for sample in samples:
                self.unfinished[sample.request_id] = sample
                self.came[sample.request_id] = self.now

    @rule(data=st.data())
    @precondition(lambda self: self.unfinished)
    def abort(self, data: st.DataObject) -> None:
        state = self.scheduler.abort(data.draw(st.sampled_from(sorted(self.unfinished))))
        assert state is not None
        self._note_abort(state)

    @rule(seconds=st.sampled_from((1.0, 10.0)))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        late = set()
        for request_id in self.unfinished if self.has_timeouts else ():
            first_id = request_id.partition(".")[0]  # of the request, whose first admission counts for all its samples
            if first_id in self.admitted:
                is_late = self.now >= self.admitted[first_id] + RUN_TIMEOUT_S
            else:
                is_late = self.now >= self.came[request_id] + QUEUE_TIMEOUT_S
            if is_late:
                late.add(request_id)
        expired = self.scheduler.expire(self.now)
        assert {state.request_id for state in expired} == late
        self.num_timed_out += len({request_id.partition(".")[0] for request_id in late})
        for state in expired:
            self._note_abort(state)

    def _note_abort(self, state: RequestState) -> None:
        request = self.unfinished.pop(state.request_id)
        assert state.finish_reason == "abort"
        output = state.output_ids.tolist()
        endless = dataclasses.replace(request, finish_check=None)
        assert output == expected_output(endless)[: len(output)]
        self.num_ended += 1

    @rule(prompt=PROMPTS)
    @precondition(lambda self: len(self.locked) < 2)
    def lock(self, prompt: list[int]) -> None:
        """Others keep something that is cached."""
        handle = self.scheduler.cache.match_prefix(prompt).handle
        self.scheduler.cache.lock(handle)
        self.locked.append(handle)

    @rule()
    @precondition(lambda self: self.locked)
    def unlock(self) -> None:
        self.scheduler.cache.unlock(self.locked.pop())

    @rule(max_steps=st.sampled_from((1, 1, 3)))
    @precondition(lambda self: len(self.in_flight) < 2)
    def plan(self, max_steps: int = 1) -> None:
        try:
            plan = self.scheduler.plan(self.now, max_steps)
        except OutOfPages:
            assert self.locked
            assert self.scheduler.num_running == 0
            return
        if plan is None:
            assert self.in_flight or not self.unfinished
            return
        assert plan.num_tokens <= self.max_prefill_tokens or plan.kind == "decode"
        assert plan.bucket.num_tokens * plan.num_steps >= plan.num_tokens
        assert plan.bucket.num_rows >= len(plan.rows)
        assert plan.num_steps <= max_steps
        assert plan.num_steps == 1 or not self.in_flight
        for row in plan.rows:
            assert row.source is None or (self.in_flight and not row.request.needs_values)
            assert plan.num_steps == 1 or not row.request.needs_values
            self.admitted.setdefault(row.request.request_id.partition(".")[0], self.now)
            self.prompts[row.request.arrival] = row.request.prompt_len
        self.in_flight.append((plan, self.model.run(plan)))

    @rule()
    @precondition(lambda self: self.in_flight)
    def commit(self) -> None:
        plan, tokens = self.in_flight.popleft()
        for state in self.scheduler.commit(plan, tokens):
            if state.finish_reason is None:
                continue
            if state.stop_reason == "finish_check: ZeroDivisionError: ":
                self._note_abort(state)
                continue
            request, output = self.unfinished.pop(state.request_id), state.output_ids.tolist()
            assert output == expected_output(request)
            if output[-1] in request.stop_ids:
                assert (state.finish_reason, state.stop_reason) == ("stop", output[-1])
            elif request.finish_check is not None and request.finish_check(0, output[-1:]):
                assert (state.finish_reason, state.stop_reason) == ("stop", "multiple")
            else:
                assert (state.finish_reason, state.stop_reason) == ("length", None)
            self.num_ended += 1

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.scheduler.states.keys() == self.unfinished.keys()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.locked:
            self.unlock()
        # No deadlock: each request needs a bounded number of steps, and in each step somebody advances.
        # A retracted request is computed again, so that the bound is a multiple of what is left to do.
        for _ in range(10 * sum(request.prompt_len + request.max_tokens for request in self.unfinished.values()) + 2):
            if len(self.in_flight) < 2:
                self.plan()
            if not self.in_flight:
                break
            self.commit()
            self.scheduler.check_integrity()
        assert not self.unfinished
        assert not self.scheduler.has_unfinished
        stats = self.scheduler.stats
        assert stats.num_finished + stats.num_aborted == self.num_ended
        assert stats.num_timed_out == self.num_timed_out
        assert stats.num_prompt_tokens == sum(self.prompts.values()), "a prompt counts once, however many its samples"
        assert self.scheduler.cache.num_available == self.num_usable_pages
        left = {node.namespace for node in self.scheduler.cache.tree.snapshot().nodes}
        assert left <= ({None, "a"} if self.enable_prefix_cache else set()), "what samples share alone is dropped"
        self.scheduler.cache.reset()
        assert self.scheduler.cache.pool.num_free == self.num_usable_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=40)
