"""Explanation: why a request waits or waited, and what happened to it, for people to read."""

import itertools
from dataclasses import dataclass
from typing import Literal

from radix_jax.cache.evicted import EvictedSpan
from radix_jax.scheduler.admission import Admission
from radix_jax.scheduler.budget import NewTokenRatio
from radix_jax.scheduler.policy import KeyParts
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.running import RunningBatch
from radix_jax.scheduler.timeline import Budget, Entry, Event, Hold, HoldKind, Timelines
from radix_jax.scheduler.waiting import Standing, WaitingQueue

WaitKind = HoldKind | Literal["queue"]

_LISTED_EVENTS = 40  # that are shown; of more, those in the middle are left out


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the scheduler knows of one request; `str()` tells it in words.

    policy: what the waiting requests are sorted by.
    standing: its place in the queue and what it is sorted by; None unless it waits.
    hold: why it is not let in; None unless it waits, or where it was not looked at: the queue in front of it ended the
        pass. blocker: who did so, and why that one is not let in; None if nobody.
    budget: pages: of a waiting request as they are now, else as they were when it was let in; None if it never was.
    num_pages: that it holds now.
    num_evicted_pages, evicted: cached pages given up for it so far, and some of their prefixes.
    events: the oldest first. num_left_out: events in the middle of them that were forgotten.
    """

    request_id: str
    priority: int
    status: Literal["waiting", "running", "ended"]
    policy: str
    standing: Standing | None
    hold: Hold | None
    blocker: tuple[str, Hold] | None
    budget: Budget | None
    num_pages: int
    num_evicted_pages: int
    evicted: tuple[EvictedSpan, ...]
    events: tuple[Event, ...]
    num_left_out: int

    @property
    def waits_s(self) -> dict[WaitKind, float]:
        """How long it waited for what, after a retraction too; without the wait that still lasts.

        "queue": nobody had looked at it yet. Else the last reason that it was not let in for.
        """
        waits_s: dict[WaitKind, float] = {}
        reason: WaitKind | None = None
        for before, event in itertools.pairwise(self.events):
            if before.kind in ("queued", "retracted", "restarted"):
                reason = "queue"
            elif isinstance(before.detail, Hold):
                reason = before.detail.kind
            elif before.kind == "admitted":
                reason = None
            if reason is not None:
                waits_s[reason] = waits_s.get(reason, 0.0) + event.now_s - before.now_s
        return waits_s

    def __str__(self) -> str:
        lines = [f"request {self.request_id}: {self.status}", *(f"  {line}" for line in self._reasons())]
        shown = [(event, _event_line(event, self.events[0].now_s)) for event in self.events]
        half = _LISTED_EVENTS // 2
        num_hidden = self.num_left_out + max(len(shown) - _LISTED_EVENTS, 0)
        first, last = (shown, []) if not num_hidden else (shown[:half], shown[-half:])
        lines += ["    seconds   step", *(line for _, line in first)]
        if num_hidden:
            lines += [f"             ... {num_hidden} more", *(line for _, line in last)]
        return "\n".join(lines)

    def _reasons(self) -> list[str]:
        lines = []
        if self.standing is not None:
            lines += [
                f"place {self.standing.num_ahead + 1} in the queue by {self.policy}: priority {self.priority}, "
                f"generation {self.standing.generation}, key {_key_words(self.standing.key)}",
                f"passes that let others in since it came: {self.standing.passes_waited}",
                f"tokens of it in the cache: {self.standing.matched_len}",
                f"it waits for {self._cause()}",
            ]
        if waits_s := self.waits_s:
            parts = ", ".join(f"{seconds_s:.3f} s ({kind})" for kind, seconds_s in waits_s.items())
            lines.append(f"waited{' before' * (self.standing is not None)}: {parts}")
        if self.budget is not None:
            when = "now" if self.standing is not None else "as it was let in"
            lines.append(f"pages {when}: {_budget_words(self.budget)}")
        if self.num_pages:
            lines.append(f"pages that it holds: {self.num_pages}")
        if self.num_evicted_pages:
            spans = "; ".join(_span_words(span) for span in self.evicted)
            lines.append(
                f"cached pages given up for it: {self.num_evicted_pages}{', among them ' * bool(spans)}{spans}"
            )
        return lines

    def _cause(self) -> str:
        if self.hold is not None:
            return _hold_words(self.hold)
        if self.blocker is not None:
            return f"the queue: request {self.blocker[0]} goes first, and waits for {_hold_words(self.blocker[1])}"
        return "the next step that lets requests in"


def explain(
    request_id: str,
    state: RequestState | None,
    timelines: Timelines,
    waiting: WaitingQueue,
    running: RunningBatch,
    admission: Admission,
    ratio: NewTokenRatio,
) -> Explanation:
    """Put together what is known of a request. state: None once it ended.

    Raises:
        KeyError: as `Timelines.find`. TypeError: as `WaitingQueue.standing`.
    """
    timeline = timelines.find(request_id)
    standing = hold = blocker = None
    budget = next((event.detail.budget for event in timeline.events[::-1] if isinstance(event.detail, Entry)), None)
    if request_id in waiting:
        assert state is not None
        standing, hold = waiting.standing(request_id), timelines.holds.get(request_id)
        num_needed = admission.num_needed(state, standing.matched_len)
        budget = Budget(num_needed, running.num_reserved(ratio), admission.num_available)
        if hold is None:
            blocker = _blocker(timelines, waiting, standing)
    return Explanation(
        request_id=request_id,
        priority=timeline.priority,
        status="waiting" if standing is not None else "ended" if state is None else "running",
        policy=waiting.policy_name,
        standing=standing,
        hold=hold,
        blocker=blocker,
        budget=budget,
        num_pages=0 if state is None else state.num_pages,
        num_evicted_pages=timeline.num_evicted_pages,
        evicted=tuple(timeline.evicted),
        events=tuple(timeline.events),
        num_left_out=timeline.num_left_out,
    )


def _blocker(timelines: Timelines, waiting: WaitingQueue, standing: Standing) -> tuple[str, Hold] | None:
    """Who ended the last pass, if that one is still in front."""
    ends = [(request_id, hold) for request_id, hold in timelines.holds.items() if hold.kind != "prefix"]
    if ends and waiting.standing(ends[-1][0]).num_ahead < standing.num_ahead:
        return ends[-1]
    return None


def _hold_words(hold: Hold) -> str:
    match hold.kind:
        case "row":
            return "a row: max_running_requests run"
        case "pages":
            assert hold.budget is not None
            return f"pages: {_budget_words(hold.budget)}"
        case "tokens":
            return "tokens: the step has none left for it"
        case "prefix":
            return f"its prefix, which a later chunk of request {hold.other} computes"
        case "commit":
            return "the step in flight, after which requests of lower priority give way"


def _key_words(key: KeyParts) -> str:
    return ", ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in key)


def _budget_words(budget: Budget) -> str:
    return (
        f"{budget.num_needed} needed, {budget.num_reserved} kept for running requests, {budget.num_available} available"
    )


def _span_words(span: EvictedSpan) -> str:
    namespace = "" if span.namespace is None else f" of namespace {span.namespace!r}"
    return f"tokens [{span.start}, {span.end}){namespace}"


def _event_line(event: Event, began_s: float) -> str:
    return f"{event.now_s - began_s:>+11.3f} {event.step:>6}   {_event_words(event)}"


def _event_words(event: Event) -> str:
    detail = event.detail
    if isinstance(detail, Hold):
        return f"waits for {_hold_words(detail)}"
    if isinstance(detail, Entry):
        return f"admitted by key {_key_words(detail.key)} with {event.end} tokens from the cache"
    if event.kind == "chunk":
        return f"computes tokens [{event.start}, {event.end})"
    if event.kind == "retracted":
        return "retracted: the pool is short" if detail is None else f"retracted for request {detail}"
    return event.kind if detail is None else f"{event.kind}: {detail}"
