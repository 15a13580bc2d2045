"""Whose time is over."""

from collections.abc import Iterable

from radix_jax.config import SchedulerLimits
from radix_jax.scheduler.request_state import RequestState


def overdue(states: Iterable[RequestState], limits: SchedulerLimits, now: float) -> list[tuple[RequestState, str]]:
    """The samples of the requests whose time is over at `now` by the caller's clock, each with the limit: until a
    request's first sample is admitted for the first time queue_timeout_s counts, from there run_timeout_s."""
    queue_s, run_s = limits.queue_timeout_s, limits.run_timeout_s
    if queue_s is None and run_s is None:
        return []
    late = []
    for state in states:
        if state.group.admitted_s is None:
            since_s, name, limit_s = state.queued_s, "queue_timeout_s", queue_s
        else:
            since_s, name, limit_s = state.group.admitted_s, "run_timeout_s", run_s
        if limit_s is not None and now - since_s >= limit_s:
            late.append((state, f"{name}={limit_s}"))
    return late
