"""Schedulers to drive without a device: a model whose KV is real enough to tell a wrong page, and its oracle."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from radix_jax.cache.page_pool import PagePool
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.cache.radix_tree import RadixTree
from radix_jax.config import SchedulerLimits
from radix_jax.plan import PageCopy, StepPlan
from radix_jax.request import CacheMode, FinishCheck, Request, SamplingParams
from radix_jax.scheduler import Buckets, RequestState, Scheduler

VOCAB_SIZE = 50
_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def make_scheduler(
    *,
    page_size: int = 1,
    num_pages: int = 257,
    max_model_len: int = 4096,
    max_running_requests: int = 8,
    max_prefill_tokens: int = 4096,
    schedule_policy: str = "lpm",
    enable_prefix_cache: bool = True,
    partial_pages: bool = True,
    cache: PrefixCache | None = None,
    limits: dict[str, Any] | None = None,
) -> Scheduler:
    """A scheduler over a cache of its own, unless one is given. limits: fields of SchedulerLimits."""
    return Scheduler(
        cache
        if cache is not None
        else PrefixCache(RadixTree(page_size, partial_pages=partial_pages), PagePool(num_pages)),
        Buckets(
            page_size=page_size,
            max_model_len=max_model_len,
            max_running_requests=max_running_requests,
            max_prefill_tokens=max_prefill_tokens,
        ),
        SchedulerLimits(
            max_running_requests=max_running_requests, max_prefill_tokens=max_prefill_tokens, **(limits or {})
        ),
        max_model_len=max_model_len,
        schedule_policy=schedule_policy,
        enable_prefix_cache=enable_prefix_cache,
    )


class RequestMaker:
    """Makes requests that arrive one after the other: "r0", "r1", ..."""

    def __init__(self) -> None:
        self._arrivals = itertools.count()

    def __call__(
        self,
        ids: Sequence[int] | np.ndarray,
        max_tokens: int = 4,
        *,
        stop_ids: Iterable[int] = (),
        namespace: Hashable = None,
        cache: CacheMode = "use",
        request_id: str | None = None,
        priority: int = 0,
        ignore_eos: bool = False,
        needs_values: bool = False,
        routing_key: Hashable = None,
        finish_check: FinishCheck | None = None,
    ) -> Request:
        arrival = next(self._arrivals)
        return Request(
            request_id=request_id or f"r{arrival}",
            token_ids=np.asarray(ids, np.int32),
            sampling=SamplingParams(temperature=0.0, ignore_eos=ignore_eos),
            max_tokens=max_tokens,
            stop_ids=frozenset(stop_ids),
            seed=0,
            arrival=arrival,
            namespace=namespace,
            cache=cache,
            priority=priority,
            needs_values=needs_values,
            routing_key=routing_key,
            finish_check=finish_check,
        )


def samples_of(request: Request, num_samples: int) -> list[Request]:
    """The samples of a request, as an engine makes them."""
    others = (
        dataclasses.replace(request, request_id=f"{request.request_id}.{index}", sample_index=index)
        for index in range(1, num_samples)
    )
    return [request, *others]


class FakeModel:
    """Runs plans on a pool whose KV of a token is a number made from all ids up to it.

    It continues from the KV that the page table names, and the next token depends on all KV of the row and on the index
    of the sample. So a page that was overwritten, freed too early or named wrongly shows in the output. Of a copied
    page it takes only the tokens that the plan names.

    weight_version: of the plans that run from now on; the KV of other weights is other KV.
    """

    weight_version = 0

    def __init__(self, num_pages: int, page_size: int):
        self._page_size = page_size
        self._kv = np.zeros(num_pages * page_size, np.uint64)
        self._last = np.zeros(0, np.int32)  # what the last plan sampled

    def run(self, plan: StepPlan) -> np.ndarray:
        """Write the KV of the step's tokens, and give the next token of each row; int32 [rows], -1 where none; of a
        plan of several steps [rows, steps].

        As on a device: copies first, then the KV of all rows, of which a row may continue another one's.
        """
        copied = [(self._part(copy.target, copy), self._kv[self._part(copy.source, copy)]) for copy in plan.copies]
        for slots, kv in copied:
            self._kv[slots] = kv
        ids = [row.token_ids if row.source is None else self._last[row.source : row.source + 1] for row in plan.rows]
        tokens = [self._run_once(plan, ids, 0)]
        for step in range(1, plan.num_steps):
            tokens.append(self._run_once(plan, list(tokens[-1][:, None]), step))
        self._last = tokens[-1]
        return tokens[0] if plan.num_steps == 1 else np.stack(tokens, 1)

    def _run_once(self, plan: StepPlan, ids: Sequence[np.ndarray], step: int) -> np.ndarray:
        written: list[np.ndarray] = []
        # Rows that continue what this step writes come after the rows that write it: by where they start.
        for place in sorted(range(len(plan.rows)), key=lambda place: plan.rows[place].start):
            row, end = plan.rows[place], plan.rows[place].end + step
            assert len(ids[place]) == len(row.token_ids) > 0
            assert len(row.pages) == -(-(plan.rows[place].end + plan.num_steps - 1) // self._page_size)
            slots = self._slots(row.pages, end)
            start = end - len(ids[place])
            before = self._kv[slots[start - 1]] if start else np.uint64(0)
            self._kv[slots[start:]] = kv_of(ids[place], start, before, self.weight_version)
            written.append(slots[start:])
        all_written = np.concatenate(written)
        assert len(np.unique(all_written)) == len(all_written), "two rows write the same slot"
        assert all_written.min() >= self._page_size, "the null page is written"
        return np.array(
            [
                _next_token(self._kv[self._slots(row.pages, row.end + step)], row.request) if row.samples else -1
                for row in plan.rows
            ],
            np.int32,
        )

    def kv_in(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        """The KV of so many tokens, in the pages of their page table."""
        return self._kv[self._slots(pages, num_tokens)]

    def _part(self, page: int, copy: PageCopy) -> np.ndarray:
        assert page > 0, "the null page is copied"
        assert 0 < copy.num_tokens < self._page_size
        return page * self._page_size + np.arange(copy.num_tokens)

    def _slots(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        positions = np.arange(num_tokens)
        return pages[positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size


def expected_output(request: Request) -> list[int]:
    """What `FakeModel` generates for a request, computed from its ids alone. Its finish_check must have no memory."""
    ids, output = request.token_ids, []
    kv = kv_of(ids, 0, np.uint64(0))
    while True:
        token = _next_token(kv, request)
        output.append(token)
        is_last = request.finish_check is not None and request.finish_check(request.sample_index, [token]) is not None
        if is_last or token in request.stop_ids or len(output) == request.max_tokens:
            return output
        kv = np.append(kv, kv_of(np.array([token], np.int32), len(kv), kv[-1]))


def names(plan: StepPlan | None) -> list[str]:
    """The request of each row."""
    return [row.request.request_id for row in plan.rows] if plan is not None else []


def spans(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    """(request, start, end, samples) of each row."""
    assert plan is not None
    return [(row.request.request_id, row.start, row.end, row.samples) for row in plan.rows]


class Ahead:
    """Drives a scheduler as an engine with overlap does: plans run at once, in their order, and are committed later."""

    def __init__(self, scheduler: Scheduler, model: FakeModel):
        self.scheduler, self._model = scheduler, model
        self.in_flight: deque[tuple[StepPlan, np.ndarray]] = deque()

    def plan(self, now: float = 0.0, max_steps: int = 1) -> StepPlan | None:
        """Plan, and run what was planned."""
        plan = self.scheduler.plan(now, max_steps)
        if plan is not None:
            self.in_flight.append((plan, self._model.run(plan)))
        self.scheduler.check_integrity()
        return plan

    def commit(self) -> list[RequestState]:
        """Commit the oldest plan."""
        changed = self.scheduler.commit(*self.in_flight.popleft())
        self.scheduler.check_integrity()
        return changed

    def step(self) -> StepPlan | None:
        """Plan one step ahead of the commit; where that is not possible, commit first."""
        plan = self.plan()
        if plan is None and self.in_flight:
            self.commit()
            plan = self.plan()
        if len(self.in_flight) == 2:
            self.commit()
        return plan

    def run_all(self, max_steps: int = 10_000) -> dict[str, RequestState]:
        """Step until nothing is left; every finished request by id."""
        finished: dict[str, RequestState] = {}
        for _ in range(max_steps):
            plan = self.plan() if len(self.in_flight) < 2 else None
            if not self.in_flight:
                assert not self.scheduler.has_unfinished
                return finished
            if plan is None or len(self.in_flight) == 2:
                finished |= {state.request_id: state for state in self.commit() if state.finish_reason is not None}
        raise AssertionError(f"not finished after {max_steps} steps")


def step(scheduler: Scheduler, model: FakeModel) -> tuple[StepPlan | None, list[RequestState]]:
    """Plan, run, commit, audit."""
    plan = scheduler.plan()
    changed = scheduler.commit(plan, model.run(plan)) if plan is not None else []
    scheduler.check_integrity()
    return plan, changed


def run_all(
    scheduler: Scheduler,
    model: FakeModel,
    *,
    max_steps: int = 10_000,
    on_plan: Callable[[StepPlan], None] = lambda plan: None,
) -> dict[str, RequestState]:
    """Step until nothing is left; every finished request by id."""
    finished: dict[str, RequestState] = {}
    for _ in range(max_steps):
        plan = scheduler.plan()
        if plan is None:
            assert not scheduler.has_unfinished
            return finished
        on_plan(plan)
        for state in scheduler.commit(plan, model.run(plan)):
            if state.finish_reason is not None:
                assert state.request_id not in finished
                finished[state.request_id] = state
    raise AssertionError(f"not finished after {max_steps} steps")


def num_trie_edges(prompts: Iterable[Sequence[int]], page_size: int) -> int:
    """Tokens that must be computed for prompts of which none is a prefix of another: each shared full page once."""
    total, before = 0, np.empty(0, np.int32)
    for prompt in sorted(map(list, prompts)):
        ids = np.asarray(prompt, np.int32)
        num_both = min(len(ids), len(before))
        differs = np.flatnonzero(ids[:num_both] != before[:num_both])
        common_len = int(differs[0]) if len(differs) else num_both
        total += len(ids) - common_len // page_size * page_size
        before = ids
    return total


def kv_of(ids: np.ndarray, start: int, before: np.uint64, version: int | np.ndarray = 0) -> np.ndarray:
    """uint64 [tokens]: before + sum of (id + 1 + 100 * version) * weight(position) up to each token, modulo 2^64.

    version: of the weights, of all tokens or of each.
    """
    numbers = ids.astype(np.uint64) + np.uint64(1) + np.uint64(100) * np.asarray(version, np.uint64)
    return np.cumsum(numbers * _weights(start, len(ids)), dtype=np.uint64) + before


def _next_token(kv: np.ndarray, request: Request) -> int:
    mixed = int(np.bitwise_xor.reduce(kv * _weights(0, len(kv)))) + request.sample_index
    return ((mixed * _FACTOR & _MASK) >> 40) % VOCAB_SIZE


def _weights(start: int, num_tokens: int) -> np.ndarray:
    """An odd number for each position, so that no two tokens can change places unseen."""
    positions = np.arange(start, start + num_tokens, dtype=np.uint64)
    return positions * np.uint64(_FACTOR - 1) + np.uint64(1)
