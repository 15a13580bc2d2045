"""Proof of the scheduler's invariants."""

from collections.abc import Mapping

from radix_jax.config import SchedulerLimits
from radix_jax.scheduler.admission import Admission
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.running import RunningBatch
from radix_jax.scheduler.waiting import WaitingQueue


def check_requests(
    states: Mapping[str, RequestState],
    waiting: WaitingQueue,
    running: RunningBatch,
    admission: Admission,
    limits: SchedulerLimits,
    *,
    in_flight: bool,
) -> None:
    """Prove that each request waits or runs, that no more run than may, and what each part proves of itself.

    Raises:
        AssertionError: what is off.
    """
    if len(states) != len(waiting) + len(running):
        raise AssertionError(f"{len(states)} requests, {len(waiting)} waiting and {len(running)} running")
    if len(running) > limits.max_running_requests:
        raise AssertionError(f"{len(running)} running, max_running_requests={limits.max_running_requests}")
    running.check_integrity(may_wait=in_flight)
    waiting.check_integrity()
    admission.check_integrity(running)
