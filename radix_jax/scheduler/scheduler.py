"""Scheduler: who runs in the next step, and what a step's tokens change. Host bookkeeping alone, no device."""

import types
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int32

from radix_jax.cache.errors import OutOfPages
from radix_jax.cache.prefix_cache import PrefixCache
from radix_jax.plan import StepPlan, StepRow
from radix_jax.request import Request
from radix_jax.scheduler.admission import Admission
from radix_jax.scheduler.buckets import Buckets
from radix_jax.scheduler.policy import policy_by_name
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.stats import SchedulerStats
from radix_jax.scheduler.waiting import WaitingEntry, WaitingQueue


class Scheduler:
    """Continuous batching over a prefix cache: `plan()`, run the plan, `commit(plan, tokens)`, and again.

    A step is a prefill step while there are prompts to compute, else a decode step of all running requests.

    Order: the policy's. The first request in that order that does not fit the pool ends the pass: nothing behind it is
    let through, so that small requests do not starve a large one. One exception: a request whose next page is being
    computed by another one right now is left for the step in which that page is in the tree.

    num_pages: pages of the pool, the null page included. max_prefill_tokens: tokens of one prefill step; a longer
    prompt is cut at a page, one unfinished prompt at a time.

    Partial pages: where the tree names donors, a request starts with its first step behind what is copied from one.
    Order, what fits in a step, and who is left for a later one go by whole pages alone: a request computes no more than
    it would without donors, but may compute a part of a page that another one computes in the same step.

    Raises:
        ValueError: an unknown policy, a limit below 1, or max_prefill_tokens below page_size.
    """

    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int,
        max_model_len: int,
        max_running_requests: int,
        max_prefill_tokens: int,
        schedule_policy: str,
        cache: PrefixCache,
        enable_prefix_cache: bool,
        buckets: Buckets,
    ):
        if page_size != cache.page_size or num_pages != cache.pool.num_pages:
            raise ValueError(
                f"page_size={page_size}, num_pages={num_pages} differ from the cache's {cache.page_size} and "
                f"{cache.pool.num_pages}; give both the same"
            )
        if max_running_requests < 1:
            raise ValueError(f"max_running_requests={max_running_requests} is below its least value 1")
        if max_prefill_tokens < page_size:
            raise ValueError(
                f"max_prefill_tokens={max_prefill_tokens} is below page_size={page_size}, the least share of a prompt; "
                "raise max_prefill_tokens or lower page_size"
            )
        self._page_size = page_size
        self._max_running_requests = max_running_requests
        self._max_prefill_tokens = max_prefill_tokens
        self._cache = cache
        self._buckets = buckets
        self._admission = Admission(
            cache, num_pages=num_pages, max_model_len=max_model_len, enable_prefix_cache=enable_prefix_cache
        )
        self._waiting = WaitingQueue(policy_by_name(schedule_policy), cache if enable_prefix_cache else None)
        self._running: dict[str, RequestState] = {}
        self._states: dict[str, RequestState] = {}
        self._unfinished_prompt: RequestState | None = None
        self._plan_in_flight: StepPlan | None = None
        self._admission_may_succeed = True
        self._stats = SchedulerStats()

    @property
    def cache(self) -> PrefixCache:
        """The cache that requests share."""
        return self._cache

    @property
    def num_waiting(self) -> int:
        """Requests that were not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Admitted requests, an unfinished prompt included."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._states)

    @property
    def states(self) -> Mapping[str, RequestState]:
        """Unfinished requests by id; read-only."""
        return types.MappingProxyType(self._states)

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

    def add(self, request: Request) -> RequestState:
        """Queue a request.

        Raises:
            ValueError: as `check_admissible`, or the id is in use.
        """
        self.check_admissible(request)
        if request.request_id in self._states:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request; use another one")
        state = RequestState(request, self._page_size)
        self._waiting.add(state)
        self._states[state.request_id] = state
        self._admission_may_succeed = True
        return state

    def abort(self, request_id: str) -> RequestState | None:
        """End a request, wherever it stands, and give back what it holds; None if there is none of that id.

        Between `plan` and `commit` too: the step's result for it is then dropped.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        if request_id in self._waiting:
            self._waiting.remove(request_id)
            del self._states[request_id]
        else:
            self._leave(state)
        self._admission_may_succeed = True
        state.finish_reason = "abort"
        self._stats.num_aborted += 1
        return state

    def plan(self) -> StepPlan | None:
        """What to compute next; None if nothing is left to do.

        Raises:
            RuntimeError: the plan before was not committed.
            OutOfPages: nothing runs, and yet no waiting request fits: others than requests hold locks.
        """
        if self._plan_in_flight is not None and any(self._state_of(row) for row in self._plan_in_flight.rows):
            raise RuntimeError("the plan before was not committed; commit it, or abort its requests")
        rows = self._prefill_rows()
        if rows:
            num_tokens = sum(len(row.token_ids) for row in rows)
            plan = StepPlan("prefill", tuple(rows), self._buckets.for_prefill(num_tokens, len(rows)))
        elif self._running:
            rows = [self._row(state, state.num_tokens) for state in self._running.values()]
            plan = StepPlan("decode", tuple(rows), self._buckets.for_decode(len(rows)))
        else:
            plan = None
            self._check_nothing_waits()
        self._plan_in_flight = plan
        return plan

    def commit(self, plan: StepPlan, tokens: Int32[np.ndarray, " B"]) -> list[RequestState]:
        """Take over what a step computed.

        tokens: one a row of the plan, in its order; ignored for rows that sample none.

        Returns the requests that got a token, finished ones (see finish_reason) included.

        Raises:
            ValueError: not the plan in flight, or another number of tokens than rows.
        """
        if plan is not self._plan_in_flight:
            raise ValueError("this plan is not in flight; commit the last plan, once")
        if len(tokens) != len(plan.rows):
            raise ValueError(f"{len(tokens)} tokens for {len(plan.rows)} rows; give one a row, padding left out")
        self._plan_in_flight = None
        self._stats.count_step(plan)
        changed = []
        for row, token_id in zip(plan.rows, tokens.tolist(), strict=True):
            state = self._state_of(row)
            if state is None:
                continue
            if self._admission.end_copy(state):
                self._admission_may_succeed = True  # what its donor kept from eviction is there again
            state.num_computed = row.end
            if plan.kind == "prefill":
                self._share(state)
            if row.samples:
                self._append(state, token_id)
                changed.append(state)
        return changed

    def reset(self) -> None:
        """Drop every request, give back what they hold, and start the counts anew. What is cached stays."""
        for state in self._running.values():
            self._admission.release(state)
        self._running.clear()
        self._waiting.clear()
        self._states.clear()
        self._unfinished_prompt = None
        self._plan_in_flight = None
        self._admission_may_succeed = True
        self._stats = SchedulerStats()

    def check_integrity(self) -> None:
        """Prove the invariants: who is where, matched lengths, reservations, one owner a page.

        Raises:
            AssertionError: what is off.
        """
        if len(self._states) != len(self._waiting) + len(self._running):
            raise AssertionError(
                f"{len(self._states)} requests, {len(self._waiting)} waiting and {len(self._running)} running"
            )
        if len(self._running) > self._max_running_requests:
            raise AssertionError(f"{len(self._running)} running, max_running_requests={self._max_running_requests}")
        if self._plan_in_flight is None:
            for state in self._running.values():
                if state.num_computed != state.num_tokens - 1 and state is not self._unfinished_prompt:
                    raise AssertionError(
                        f"{state.request_id!r} computed {state.num_computed} of {state.num_tokens} tokens"
                    )
                if state.copy is not None:
                    raise AssertionError(f"{state.request_id!r} keeps {state.copy}, and no step is in flight")
        self._waiting.check_integrity()
        self._admission.check_integrity(self._running.values())

    def _state_of(self, row: StepRow) -> RequestState | None:
        """The row's request, unless it was aborted."""
        state = self._running.get(row.request.request_id)
        return state if state is not None and state.request is row.request else None

    def _check_nothing_waits(self) -> None:
        """With nothing running, every request that was let in fits, unless somebody else keeps pages."""
        if not len(self._waiting):
            return
        self._admission_may_succeed = True
        raise OutOfPages(
            f"{len(self._waiting)} requests wait, none runs, and the next one does not fit: "
            f"{self._cache.tree.protected_size} cached tokens are locked by others than requests; unlock those, or "
            "raise num_pages"
        )

    def _prefill_rows(self) -> list[StepRow]:
        rows: list[StepRow] = []
        num_left = self._max_prefill_tokens
        if self._unfinished_prompt is not None:
            rows.append(self._prompt_row(self._unfinished_prompt, num_left))
            num_left -= len(rows[0].token_ids)
        num_before = len(self._running)
        if len(self._waiting) and self._admission_may_succeed:
            self._admit_waiting(rows, num_left)
        if len(self._running) > num_before:
            self._waiting.end_pass()
        return rows

    def _admit_waiting(self, rows: list[StepRow], num_left: int) -> None:
        """Admit requests in order, and add their rows, while rows, tokens and pages last."""
        if len(self._running) == self._max_running_requests or num_left == 0:
            return
        computing = [self._running[row.request.request_id] for row in rows]
        for entry in self._waiting.in_order():
            if any(self._waiting.would_repeat(entry, other) for other in computing):
                continue
            if not self._tokens_suffice(entry, num_left):
                return
            if not self._admission.admit(entry.state, entry.matched_len):
                # Until a request ends or comes, or the tree grows, the same pass would end in the same way.
                self._admission_may_succeed = False
                return
            self._enter(entry.state)
            rows.append(self._prompt_row(entry.state, num_left))
            computing.append(entry.state)
            num_left -= len(rows[-1].token_ids)
            if len(self._running) == self._max_running_requests or num_left == 0:
                return

    def _tokens_suffice(self, entry: WaitingEntry, num_left: int) -> bool:
        """Whether the rest of the step takes the whole prompt, or a page of it.

        An unfinished prompt leaves less than a page, so there is never a second one.
        """
        return num_left >= min(self._page_size, entry.state.request.prompt_len - entry.matched_len)

    def _prompt_row(self, state: RequestState, num_left: int) -> StepRow:
        """As much of the prompt as `num_left` tokens allow, up to its end or to a page."""
        end = state.num_computed + num_left
        if end < state.request.prompt_len:
            end -= end % self._page_size
            self._unfinished_prompt = state
        else:
            end = state.request.prompt_len
            if self._unfinished_prompt is state:
                self._unfinished_prompt = None
        return self._row(state, end)

    def _row(self, state: RequestState, end: int) -> StepRow:
        """Tokens from the first one not computed up to `end`; copies, so that the plan stays as it is."""
        self._admission.extend(state, end)
        start = state.num_computed
        return StepRow(
            request=state.request,
            token_ids=state.tokens[start:end].copy(),
            start=start,
            pages=state.pages.copy(),
            samples=end == state.num_tokens,
            copy=state.copy,
        )

    def _enter(self, state: RequestState) -> None:
        """Count an admitted request as running."""
        self._waiting.remove(state.request_id)
        self._running[state.request_id] = state
        self._stats.num_prompt_tokens += state.request.prompt_len
        self._stats.num_cached_tokens += state.num_computed

    def _leave(self, state: RequestState) -> None:
        """Give back what a running request holds, and forget it."""
        self._admission.release(state)
        del self._running[state.request_id]
        del self._states[state.request_id]
        if self._unfinished_prompt is state:
            self._unfinished_prompt = None
        self._admission_may_succeed = True

    def _share(self, state: RequestState) -> None:
        """Give the full pages computed so far to the tree, and tell those who wait for them."""
        version = self._cache.tree.version
        tokens = self._admission.insert(state)
        if tokens:
            self._waiting.note_inserted(state, tokens, self._cache.tree.version - version)
            self._admission_may_succeed = True

    def _append(self, state: RequestState, token_id: int) -> None:
        """Append a token. At the end, share the output too: its nodes begin at the prompt's last full page."""
        state.append_token(token_id)
        self._stats.num_output_tokens += 1
        if state.finish_reason is not None:
            self._share(state)
            self._leave(state)
            self._stats.num_finished += 1
