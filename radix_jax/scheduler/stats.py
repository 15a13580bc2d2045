"""SchedulerStats: what the steps of a scheduler add up to."""

from dataclasses import dataclass, field

from radix_jax.plan import StepKind, StepPlan


def _zeros() -> dict[StepKind, int]:
    return {"prefill": 0, "decode": 0, "mixed": 0}


@dataclass
class SchedulerStats:
    """Counts since the start, or since the last `Scheduler.reset`.

    num_prompt_tokens, num_cached_tokens: of admitted requests, each counted once, when its first sample is admitted,
        and again where new weights made it start anew; their quotient is the hit rate.
    num_prefill_tokens: prompt tokens computed, and after a retraction known outputs too.
    num_output_tokens: tokens appended to requests.
    num_steps, num_tokens, num_padded_tokens: by kind of step; num_padded_tokens counts the bucket, padding included.
    num_finished: samples ended by stop or length. num_aborted: samples ended by abort, waiting ones too.
    num_timed_out: requests ended by a time-out. num_retractions: times that a running sample's pages were taken away.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_timed_out: int = 0
    num_retractions: int = 0
    num_steps: dict[StepKind, int] = field(default_factory=_zeros)
    num_tokens: dict[StepKind, int] = field(default_factory=_zeros)
    num_padded_tokens: dict[StepKind, int] = field(default_factory=_zeros)

    def count_admission(self, prompt_len: int, cached_len: int) -> None:
        """Count a prompt, and what the cache held of it."""
        self.num_prompt_tokens += prompt_len
        self.num_cached_tokens += cached_len

    def count_step(self, plan: StepPlan) -> None:
        """Count one step that ran."""
        num_tokens = plan.num_tokens
        self.num_steps[plan.kind] += plan.num_steps
        self.num_tokens[plan.kind] += num_tokens
        self.num_padded_tokens[plan.kind] += plan.bucket.num_tokens * plan.num_steps
        self.num_prefill_tokens += plan.num_prefill_tokens
