"""SchedulerLimits: the numbers that bound what a scheduler lets in and how it mixes steps."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """max_running_requests: rows of a step. max_prefill_tokens: tokens of a prefill or mixed step; a longer prompt is
    cut at a page, one unfinished prompt at a time.
    mixed_steps: prefill steps carry the rows that decode, too.
    max_consecutive_prefills: prefill steps in a row while others could decode; then a decode step.
    max_queued_requests: that may wait; None: any number.
    queue_timeout_s, run_timeout_s: from arrival to first admission, and from there to the end; None: for ever.
    preemption_threshold: by how much a waiting request's priority must exceed a running one's to take its place; None:
        it never does.

    Raises:
        ValueError: a limit below 1, or a time-out that is not above 0.
    """

    max_running_requests: int
    max_prefill_tokens: int
    mixed_steps: bool = False
    max_consecutive_prefills: int = 8
    max_queued_requests: int | None = None
    queue_timeout_s: float | None = None
    run_timeout_s: float | None = None
    preemption_threshold: int | None = 1

    def __post_init__(self) -> None:
        for name in (
            "max_running_requests",
            "max_prefill_tokens",
            "max_consecutive_prefills",
            "max_queued_requests",
            "preemption_threshold",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is below its least value 1")
        for name in ("queue_timeout_s", "run_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
