"""What happened to each request and when: noted as it happens, kept while the request lives and for a while after.

Only what changes a request's standing is noted, nothing for a decode step, and what is kept is bounded.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from radix_jax.cache.evicted import EvictedSpan
from radix_jax.scheduler.policy import KeyParts

MAX_ENDED = 1000  # requests that are remembered after their end
MAX_EVENTS = 256  # of one request; beyond it, those in the middle are forgotten
MAX_SPANS = 8  # evicted spans of one request

EventKind = Literal[
    "queued", "held", "admitted", "chunk", "first token", "retracted", "new weights", "restarted", "ended"
]
HoldKind = Literal["row", "pages", "tokens", "prefix", "commit"]


class Budget(NamedTuple):
    """The pages in the way of a request, which is let in if num_needed + num_reserved <= num_available.

    num_needed: by it, besides those that the cache holds. num_reserved: kept for running requests. num_available: free
    or evictable.
    """

    num_needed: int
    num_reserved: int
    num_available: int


class Hold(NamedTuple):
    """Why a request that was looked at was not let in:

    - "row": max_running_requests run
    - "pages": the pool is short, by `budget`
    - "tokens": the step's tokens are given to others
    - "prefix": a later chunk of the request `other` computes the next page of its prompt
    - "commit": requests of lower priority give way as soon as no step is in flight
    """

    kind: HoldKind
    budget: Budget | None = None
    other: str | None = None


class Entry(NamedTuple):
    """How a request was let in: by which budget, and by what it was sorted, after its priority (see `policy`)."""

    budget: Budget
    generation: int
    key: KeyParts


class Event(NamedTuple):
    """One thing that happened to a request.

    now_s: the caller's clock. step: plans made by then, or the number of the plan that it is part of, counted from 1.
    start, end: tokens [start, end) of prompt + output: "admitted", those from the cache; "chunk", those computed.
    detail: "held", the Hold; "admitted", the Entry; "retracted", for which request, None where the pool was short;
        "new weights" and "restarted", by which the request started anew, the version; "ended", the reason.
    """

    now_s: float
    step: int
    kind: EventKind
    start: int = 0
    end: int = 0
    detail: Hold | Entry | str | None = None


class Timeline:
    """Of one request. hold: the last one, with its newest numbers. num_left_out: events that were forgotten."""

    __slots__ = ("events", "evicted", "hold", "num_evicted_pages", "num_left_out", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.events: list[Event] = []
        self.hold: Hold | None = None
        self.evicted: list[EvictedSpan] = []
        self.num_evicted_pages = 0
        self.num_left_out = 0


class Timelines:
    """Of all unfinished requests, and of those that ended last.

    holds: who was looked at in the last pass through the queue and not let in, in the order of the pass.
    """

    def __init__(self) -> None:
        self.holds: dict[str, Hold] = {}
        self._now_s = 0.0
        self._num_plans = self._step = 0
        self._living: dict[str, Timeline] = {}
        self._ended: dict[str, Timeline] = {}

    @property
    def now_s(self) -> float:
        """The caller's clock as it was told last."""
        return self._now_s

    def at(self, now_s: float | None) -> None:
        """What is noted from here on happens at this time, between plans. None: the time stays."""
        self._enter(now_s, self._num_plans)

    def begin_plan(self, now_s: float) -> None:
        """What is noted from here on is part of the next plan."""
        self._enter(now_s, self._num_plans + 1)

    def end_plan(self) -> None:
        """There is one plan more."""
        self._num_plans += 1

    def begin_commit(self, now_s: float | None, num_in_flight: int) -> None:
        """What is noted from here on comes from the plan behind which so many are in flight."""
        self._enter(now_s, self._num_plans - num_in_flight)

    def begin(self, request_id: str, priority: int) -> None:
        """A request came."""
        self._ended.pop(request_id, None)
        self._living[request_id] = Timeline(priority)
        self.note(request_id, "queued")

    def note(
        self, request_id: str, kind: EventKind, start: int = 0, end: int = 0, detail: Hold | Entry | str | None = None
    ) -> None:
        """Something happened to an unfinished request."""
        timeline = self._living[request_id]
        timeline.events.append(Event(self._now_s, self._step, kind, start, end, detail))
        if len(timeline.events) > MAX_EVENTS:
            del timeline.events[MAX_EVENTS // 2]
            timeline.num_left_out += 1

    def begin_pass(self) -> None:
        """The queue is gone through, best first."""
        if self.holds:
            self.holds = {}

    def hold(self, request_id: str, hold: Hold) -> None:
        """A request was looked at in this pass and not let in; an event where the reason is another than before."""
        self.holds[request_id] = hold
        timeline = self._living[request_id]
        last, timeline.hold = timeline.hold, hold
        if last is None or last.kind != hold.kind or last.other != hold.other:
            self.note(request_id, "held", detail=hold)

    def admit(self, request_id: str, entry: Entry, num_cached: int) -> None:
        """A request was let in, with so many tokens from the cache."""
        self._living[request_id].hold = None
        self.note(request_id, "admitted", 0, num_cached, entry)

    def note_evicted(self, request_id: str, num_pages: int, spans: Sequence[EvictedSpan]) -> None:
        """So many cached pages were given up for a request; spans: some of them."""
        timeline = self._living[request_id]
        timeline.num_evicted_pages += num_pages
        timeline.evicted.extend(spans[: MAX_SPANS - len(timeline.evicted)])

    def end(self, request_id: str, reason: str) -> None:
        """A request ended; it is remembered until MAX_ENDED others have."""
        self.note(request_id, "ended", detail=reason)
        self._ended[request_id] = self._living.pop(request_id)
        self.holds.pop(request_id, None)
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def end_all(self, reason: str) -> None:
        """Every request was dropped."""
        for request_id in list(self._living):
            self.end(request_id, reason)

    def find(self, request_id: str) -> Timeline:
        """What happened to a request.

        Raises:
            KeyError: no request of that id, or it ended too long ago.
        """
        timeline = self._living.get(request_id) or self._ended.get(request_id)
        if timeline is None:
            raise KeyError(
                f"nothing is known of request {request_id!r}: there was none of that id, or it is not among the last "
                f"{MAX_ENDED} that ended"
            )
        return timeline

    def _enter(self, now_s: float | None, step: int) -> None:
        self._step = step
        if now_s is not None:
            self._now_s = now_s
