"""Random arrivals, aborts and steps in small pools: every request ends once, with its tokens, and no page is lost."""

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import FakeModel, RequestMaker, expected_output, make_scheduler, num_trie_edges, run_all

from radix_jax.plan import StepPlan
from radix_jax.request import Request

POLICIES = ("lpm", "fcfs", "shortest-prefill-first")
# Prompts are made of few words, so that they often share a beginning.
WORDS = tuple(tuple(range(10 * i, 10 * i + length)) for i, length in enumerate((1, 3, 4, 9, 17)))
PROMPTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(
    lambda words: [id for word in words for id in word]
)


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler with its model; `plan` and `commit` are rules of their own, so that aborts come in between."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4, 16)),
        num_usable_pages=st.integers(1, 40),
        chunk_pages=st.integers(1, 4),
        max_running_requests=st.integers(1, 5),
        policy=st.sampled_from(POLICIES),
        enable_prefix_cache=st.booleans(),
        partial_pages=st.booleans(),
        mixed_steps=st.booleans(),
        max_consecutive_prefills=st.integers(1, 3),
        preemption_threshold=st.sampled_from((None, 1, 2)),
    )
    def start(
        self,
        page_size: int,
        num_usable_pages: int,
        chunk_pages: int,
        max_running_requests: int,
        policy: str,
        enable_prefix_cache: bool,
        partial_pages: bool,
        mixed_steps: bool,
        max_consecutive_prefills: int,
        preemption_threshold: int | None,
    ) -> None:
        self.num_usable_pages, self.page_size = num_usable_pages, page_size
        self.max_prefill_tokens = chunk_pages * page_size + 1
        self.scheduler = make_scheduler(
            page_size=page_size,
            num_pages=num_usable_pages + 1,
            max_running_requests=max_running_requests,
            max_prefill_tokens=self.max_prefill_tokens,
            schedule_policy=policy,
            enable_prefix_cache=enable_prefix_cache,
            partial_pages=partial_pages,
            limits={
                "mixed_steps": mixed_steps,
                "max_consecutive_prefills": max_consecutive_prefills,
                "preemption_threshold": preemption_threshold,
            },
        )
        self.model, self.make = FakeModel(num_usable_pages + 1, page_size), RequestMaker()
        self.in_flight: deque[tuple[StepPlan, np.ndarray]] = deque()
        self.unfinished: dict[str, Request] = {}
        self.num_ended = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        stop_id=st.integers(0, 60),
        namespace=st.sampled_from((None, "a")),
        priority=st.sampled_from((0, 0, 0, 1, 2)),
        ignore_eos=st.booleans(),
        needs_values=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        stop_id: int,
        namespace: str | None,
        priority: int,
        ignore_eos: bool,
        needs_values: bool,
    ) -> None:
        request = self.make(
            prompt,
            max_tokens,
            stop_ids=[stop_id],
            namespace=namespace,
            priority=priority,
            ignore_eos=ignore_eos,
            needs_values=needs_values,
        )
        num_pages = -(-(len(prompt) + max_tokens - 1) // self.page_size)
        try:
            self.scheduler.add(request)
        except ValueError:
            assert num_pages > self.num_usable_pages
        else:
            assert num_pages <= self.num_usable_pages
            self.unfinished[request.request_id] = request

    @rule(data=st.data())
    @precondition(lambda self: self.unfinished)
    def abort(self, data: st.DataObject) -> None:
        request = self.unfinished.pop(data.draw(st.sampled_from(sorted(self.unfinished))))
        state = self.scheduler.abort(request.request_id)
        assert state is not None
        assert state.finish_reason == "abort"
        output = state.output_ids.tolist()
        assert output == expected_output(request)[: len(output)]
        self.num_ended += 1

    @rule(max_steps=st.sampled_from((1, 1, 3)))
    @precondition(lambda self: len(self.in_flight) < 2)
    def plan(self, max_steps: int = 1) -> None:
        plan = self.scheduler.plan(max_steps=max_steps)
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
        self.in_flight.append((plan, self.model.run(plan)))

    @rule()
    @precondition(lambda self: self.in_flight)
    def commit(self) -> None:
        plan, tokens = self.in_flight.popleft()
        for state in self.scheduler.commit(plan, tokens):
            if state.finish_reason is None:
                continue
            request = self.unfinished.pop(state.request_id)
            assert state.output_ids.tolist() == expected_output(request)
            assert state.finish_reason == ("stop" if state.output_ids[-1] in request.stop_ids else "length")
            self.num_ended += 1

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.scheduler.states.keys() == self.unfinished.keys()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
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
        assert self.scheduler.cache.num_available == self.num_usable_pages
        self.scheduler.cache.reset()
        assert self.scheduler.cache.pool.num_free == self.num_usable_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40)


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=12),
    page_size=st.sampled_from((1, 2, 4, 16)),
    partial_pages=st.booleans(),
    chunk_len=st.integers(16, 60),
    max_running_requests=st.integers(1, 8),
    policy=st.sampled_from(POLICIES),
)
@settings(max_examples=60)
def test_a_cold_batch_that_fits_computes_each_trie_edge_once(
    prompts: list[list[int]],
    page_size: int,
    partial_pages: bool,
    chunk_len: int,
    max_running_requests: int,
    policy: str,
) -> None:
    """With partial pages, pages are still waited for, and parts of a page are shared where they are cached already."""
    # A last id of its own, so that no prompt is the beginning of another.
    prompts = [[*prompt, 1000 + i] for i, prompt in enumerate(prompts)]
    num_pages = 1 + sum(-(-len(prompt) // page_size) + 3 for prompt in prompts)
    scheduler = make_scheduler(
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=max_running_requests,
        max_prefill_tokens=chunk_len,
        schedule_policy=policy,
        partial_pages=partial_pages,
    )
    model, make = FakeModel(num_pages, page_size), RequestMaker()
    for prompt in prompts:
        scheduler.add(make(prompt, 3))
    run_all(scheduler, model)
    scheduler.check_integrity()
    assert scheduler.cache.num_evicted_tokens == 0
    fewest = num_trie_edges(prompts, 1 if partial_pages else page_size)
    assert fewest <= scheduler.stats.num_prefill_tokens <= num_trie_edges(prompts, page_size)
