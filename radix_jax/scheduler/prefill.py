"""Prefill: whose prompt is computed in a step, and how far."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from radix_jax.config import SchedulerLimits
from radix_jax.plan import StepRow
from radix_jax.scheduler.admission import Admission
from radix_jax.scheduler.budget import NewTokenRatio, num_pages_to_come
from radix_jax.scheduler.errors import NoRoom
from radix_jax.scheduler.policy import QueueContext
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.retraction import preemption_order
from radix_jax.scheduler.running import RunningBatch
from radix_jax.scheduler.stats import SchedulerStats
from radix_jax.scheduler.timeline import Budget, Entry, Hold, Timelines
from radix_jax.scheduler.waiting import WaitingEntry, WaitingQueue


@dataclass(frozen=True)
class Refusal:
    """Why the first request in order was not let in. Pages: needed by it, reserved for the running ones, available
    (free and evictable)."""

    request_id: str
    num_needed: int
    num_reserved: int
    num_available: int


@dataclass
class _Pass:
    """One look through the waiting requests. rows: of the plan so far. num_left: tokens that its step still takes.
    num_reserved: pages that those who run, admitted in this pass or before, are expected to take yet.
    stats: count first admissions."""

    rows: list[StepRow]
    num_left: int
    num_reserved: int
    ratio: NewTokenRatio
    stats: SchedulerStats
    may_retract: bool


class Prefill:
    """Lets waiting requests in, in the order of the policy, and makes the rows of their prompts.

    The first request in order that does not fit the pool ends the pass: nothing behind it is let through, so that small
    requests do not starve a large one. One exception: a request whose next page will be computed by a later chunk of
    another one is left for the step in which that page is in the tree. Whose page is computed in this very step is
    there already: the device writes the KV of all rows before any row attends.

    retract: takes a running request's pages away for another one; called only where nothing is in flight.

    refusal: why the last pass ended, where pages were short. needs_commit: the last pass would have taken somebody's
    place, had nothing been in flight.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningBatch,
        admission: Admission,
        limits: SchedulerLimits,
        timelines: Timelines,
        retract: Callable[[RequestState, str], None],
    ):
        self._waiting = waiting
        self._running = running
        self._admission = admission
        self._limits = limits
        self._timelines = timelines
        self._retract = retract
        self._page_size = admission.page_size
        self._are_rows_taken = False  # and nobody who waits may take one from those who run
        self.refusal: Refusal | None = None
        self.needs_commit = False

    def retry(self) -> None:
        """Something changed that may let the first in order in."""
        self.refusal = None
        self._are_rows_taken = False

    def check_not_stuck(self) -> None:
        """With nothing running, every request that was let in fits, unless somebody else keeps pages.

        Raises:
            NoRoom: nothing runs or was let in, and yet requests wait.
        """
        if not len(self._waiting):
            return
        self.retry()
        raise NoRoom(
            f"{len(self._waiting)} requests wait, none runs, and the next one does not fit: "
            f"{self._admission.num_protected_tokens} cached tokens are locked by others than requests; unlock those, "
            "or raise num_pages"
        )

    def rows(self, num_left: int, ratio: NewTokenRatio, stats: SchedulerStats, may_retract: bool) -> list[StepRow]:
        """The unfinished prompt, then waiting requests, while rows, tokens and pages last.

        stats: get the prompt and the hit of each request of which a sample is let in for the first time.

        Raises:
            Exception: what a rule of one's own raised while there was no row yet.
        """
        rows: list[StepRow] = []
        self.needs_commit = False
        if self._running.unfinished is not None:
            rows.append(self._prompt_row(self._running.unfinished, num_left))
            num_left -= len(rows[0].token_ids)
        if len(self._waiting) and num_left and self._may_succeed(ratio):
            num_before = len(rows)
            num_reserved = self._running.num_reserved(ratio)
            self._admit_waiting(_Pass(rows, num_left, num_reserved, ratio, stats, may_retract))
            if len(rows) > num_before:
                self._waiting.end_pass()
        if rows:
            self.retry()  # the tree has grown, so that the next in order may need less
        return rows

    def _may_succeed(self, ratio: NewTokenRatio) -> bool:
        """Until something changes, a pass ends as the last one did."""
        if self._are_rows_taken and not self._has_place():
            return False
        refusal = self.refusal
        if refusal is None:
            return True
        return refusal.num_needed + self._running.num_reserved(ratio) <= self._admission.num_available

    def _has_place(self) -> bool:
        return len(self._running) < self._limits.max_running_requests

    def _admit_waiting(self, this: _Pass) -> None:
        self._timelines.begin_pass()
        keys = Counter(state.request.routing_key for state in self._running if state.request.routing_key is not None)
        context = QueueContext(this.stats.num_prefill_tokens, keys)
        for entry in self._in_order(this, context):
            hold = self._let_in(entry, this)
            if hold is not None:
                self._timelines.hold(entry.state.request_id, hold)
                if hold.kind == "prefix":
                    continue
                return
            state = entry.state
            this.rows.append(self._prompt_row(state, this.num_left))
            this.num_left -= len(this.rows[-1].token_ids)
            this.num_reserved += num_pages_to_come(state, 1.0, self._page_size)
            if this.num_left == 0:
                return

    def _in_order(self, this: _Pass, context: QueueContext) -> Iterator[WaitingEntry]:
        """The waiting requests, best first; up to where a rule of one's own raises, if there are rows by then: those
        have to run."""
        entries = self._waiting.in_order(context)
        while True:
            try:
                entry = next(entries, None)
            except Exception:
                if this.rows:
                    return
                raise
            if entry is None:
                return
            yield entry

    def _prompt_row(self, state: RequestState, num_left: int) -> StepRow:
        row = self._running.prompt_row(state, num_left)
        self._timelines.note(state.request_id, "chunk", row.start, row.end)
        return row

    def _let_in(self, entry: WaitingEntry, this: _Pass) -> Hold | None:
        """Make a waiting request a running one; or why that can't be."""
        state = entry.state
        if self._waiting.would_repeat(entry):
            computing = self._running.unfinished
            return Hold("prefix", other=None if computing is None else computing.request_id)
        if not self._tokens_suffice(entry, this.num_left):
            return Hold("tokens")
        budget, rank = self._budget(entry, this), entry.rank
        assert rank is not None
        hold = self._admit(entry, this)
        if hold is not None:
            return hold
        group = state.group
        if group.admitted_s is None:
            group.admitted_s = self._timelines.now_s
        if group.cached_len is None:
            group.cached_len = state.num_computed
            this.stats.count_admission(state.request.prompt_len, group.cached_len)
        self._timelines.admit(state.request_id, Entry(budget, *rank[1:3]), state.num_computed)
        self._waiting.remove(state.request_id)
        self._running.enter(state)
        return None

    def _budget(self, entry: WaitingEntry, this: _Pass) -> Budget:
        num_needed = self._admission.num_needed(entry.state, entry.matched_len)
        return Budget(num_needed, this.num_reserved, self._admission.num_available)

    def _admit(self, entry: WaitingEntry, this: _Pass) -> Hold | None:
        state = entry.state
        has_place = self._has_place()
        if has_place and self._admission.admit(state, entry.matched_len, this.num_reserved):
            return None
        if self._preempt_for(entry, this):
            return None
        if self.needs_commit:
            return Hold("commit")
        if not has_place:
            self._are_rows_taken = not self._weaker(state, this)
            return Hold("row")
        budget = self._budget(entry, this)
        self.refusal = Refusal(state.request_id, *budget)
        return Hold("pages", budget)

    def _preempt_for(self, entry: WaitingEntry, this: _Pass) -> bool:
        """Take running requests of lower priority out, one after the other, until the entry's request is admitted;
        nobody, if it would not fit in the end. Those that have a row in this step stay."""
        state = entry.state
        weaker = self._weaker(state, this)
        if not weaker:
            return False
        num_reserved = this.num_reserved - sum(
            num_pages_to_come(victim, this.ratio.value, self._page_size) for victim in weaker
        )
        if not self._admission.would_fit(state, entry.matched_len, num_reserved, without=weaker):
            return False
        if not this.may_retract:
            self.needs_commit = True
            return False
        for victim in weaker:
            this.num_reserved -= num_pages_to_come(victim, this.ratio.value, self._page_size)
            self._retract(victim, state.request_id)
            if self._admission.admit(state, entry.matched_len, this.num_reserved):
                return True
        return False

    def _weaker(self, state: RequestState, this: _Pass) -> list[RequestState]:
        """Running requests whose place a waiting one may take, those first that go first."""
        threshold = self._limits.preemption_threshold
        if threshold is None:
            return []
        planned = {row.request.request_id for row in this.rows}
        order = preemption_order(self._running, state.request.priority, threshold)
        return [victim for victim in order if victim.request_id not in planned]

    def _tokens_suffice(self, entry: WaitingEntry, num_left: int) -> bool:
        """Whether the rest of the step takes all known tokens, or a page of them.

        An unfinished prompt leaves less than a page, so there is never a second one.
        """
        return num_left >= min(self._page_size, entry.state.num_tokens - entry.matched_len)
