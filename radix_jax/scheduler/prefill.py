"""Prefill: whose prompt is computed in a step, and how far."""

from collections.abc import Callable
from dataclasses import dataclass

from radix_jax.config import SchedulerLimits
from radix_jax.plan import StepRow
from radix_jax.scheduler.admission import Admission
from radix_jax.scheduler.budget import NewTokenRatio, num_pages_to_come
from radix_jax.scheduler.policy import QueueContext
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.retraction import preemption_order
from radix_jax.scheduler.running import RunningBatch
from radix_jax.scheduler.waiting import WaitingEntry, WaitingQueue


@dataclass(frozen=True)
class Refusal:
    """Why the first request in order was not let in. Pages: needed by it, reserved for the running ones, available
    (free and evictable)."""

    request_id: str
    num_needed: int
    num_reserved: int
    num_available: int


class Prefill:
    """Lets waiting requests in, in the order of the policy, and makes the rows of their prompts.

    The first request in order that does not fit the pool ends the pass: nothing behind it is let through, so that small
    requests do not starve a large one. One exception: a request whose next page will be computed by a later chunk of
    another one is left for the step in which that page is in the tree. Whose page is computed in this very step is
    there already: the device writes the KV of all rows before any row attends.

    retract: takes a running request's pages away; called only where nothing is in flight.

    refusal: why the last pass ended, where pages were short. needs_commit: the last pass would have taken somebody's
    place, had nothing been in flight.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningBatch,
        admission: Admission,
        limits: SchedulerLimits,
        retract: Callable[[RequestState], None],
    ):
        self._waiting = waiting
        self._running = running
        self._admission = admission
        self._limits = limits
        self._retract = retract
        self._page_size = admission.page_size
        self.refusal: Refusal | None = None
        self.needs_commit = False

    def retry(self) -> None:
        """Something changed that may let the first in order in."""
        self.refusal = None

    def rows(self, num_left: int, ratio: NewTokenRatio, context: QueueContext, may_retract: bool) -> list[StepRow]:
        """The unfinished prompt, then waiting requests, while rows, tokens and pages last."""
        rows: list[StepRow] = []
        self.needs_commit = False
        if self._running.unfinished is not None:
            rows.append(self._running.prompt_row(self._running.unfinished, num_left))
            num_left -= len(rows[0].token_ids)
        if len(self._waiting) and num_left and self._may_succeed(ratio):
            num_before = len(rows)
            self._admit_waiting(rows, num_left, ratio, context, may_retract)
            if len(rows) > num_before:
                self._waiting.end_pass()
        if rows:
            self.refusal = None  # the tree has grown, so that the next in order may need less
        return rows

    def _may_succeed(self, ratio: NewTokenRatio) -> bool:
        """Until something changes, a pass ends as the last one did."""
        refusal = self.refusal
        if refusal is None:
            return True
        return refusal.num_needed + self._running.num_reserved(ratio) <= self._admission.num_available

    def _admit_waiting(
        self, rows: list[StepRow], num_left: int, ratio: NewTokenRatio, context: QueueContext, may_retract: bool
    ) -> None:
        num_reserved = self._running.num_reserved(ratio)
        for entry in self._waiting.in_order(context):
            if self._waiting.would_repeat(entry):
                continue
            if not self._tokens_suffice(entry, num_left):
                return
            if not self._admit(entry, num_reserved, ratio, may_retract, rows):
                return
            state = entry.state
            self._waiting.remove(state.request_id)
            self._running.enter(state)
            rows.append(self._running.prompt_row(state, num_left))
            num_left -= len(rows[-1].token_ids)
            num_reserved += num_pages_to_come(state, 1.0, self._page_size)
            if num_left == 0:
                return

    def _admit(
        self, entry: WaitingEntry, num_reserved: int, ratio: NewTokenRatio, may_retract: bool, rows: list[StepRow]
    ) -> bool:
        state = entry.state
        if len(self._running) < self._limits.max_running_requests and self._admission.admit(
            state, entry.matched_len, num_reserved
        ):
            return True
        if self._preempt_for(entry, ratio, may_retract, rows):
            return True
        if len(self._running) < self._limits.max_running_requests:
            num_needed = self._admission.num_needed(state, entry.matched_len)
            self.refusal = Refusal(state.request_id, num_needed, num_reserved, self._admission.num_available)
        return False

    def _preempt_for(
        self, entry: WaitingEntry, ratio: NewTokenRatio, may_retract: bool, rows: list[StepRow]
    ) -> bool:
        """Take running requests of lower priority out, one after the other, until the entry's request is admitted.
        Those that have a row in this step stay."""
        threshold = self._limits.preemption_threshold
        if threshold is None:
            return False
        state = entry.state
        planned = {row.request.request_id for row in rows}
        weaker = [
            victim
            for victim in preemption_order(self._running, state.request.priority, threshold)
            if victim.request_id not in planned
        ]
        num_at_best = self._admission.num_available + sum(victim.num_pages for victim in weaker)
        if not weaker or self._admission.num_needed(state, entry.matched_len) > num_at_best:
            return False
        if not may_retract:
            self.needs_commit = True
            return False
        for victim in weaker:
            self._retract(victim)
            if self._admission.admit(state, entry.matched_len, self._running.num_reserved(ratio)):
                return True
        return False

    def _tokens_suffice(self, entry: WaitingEntry, num_left: int) -> bool:
        """Whether the rest of the step takes all known tokens, or a page of them.

        An unfinished prompt leaves less than a page, so there is never a second one.
        """
        return num_left >= min(self._page_size, entry.state.num_tokens - entry.matched_len)
