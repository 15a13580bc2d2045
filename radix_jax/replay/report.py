"""What a simulation comes to: one flat set of figures, for people and for JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from radix_jax.config import EngineConfig
from radix_jax.replay.belady import optimal_hit_tokens
from radix_jax.replay.simulator import Simulation
from radix_jax.replay.trace import Trace

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """Seconds of many requests: mean and percentiles; all 0 where there were none."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        """The spread of some times."""
        values = np.fromiter(seconds, np.float64)
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        return cls(float(values.mean()), *(float(value) for value in np.percentile(values, _PERCENTILES)))


@dataclass(frozen=True)
class ReplayReport:
    """The figures of one run; times are of the virtual clock.

    schedule_policy, eviction_policy, page_size, num_pages: the settings. pool_tokens: that the pool holds.
    num_requests: of the trace. num_refused: that were not let in, most as they could never run.
    prompt_tokens, cached_tokens: of the requests that ran; hit_rate: their quotient.
    optimal_hit_rate: with the evictions of one who knows the future, requests one at a time in the same order, whole
        pages alone. regret: share of the optimum that was missed; below 0 where parts of pages made up for it.
    duration_s: from the first arrival to the last end. output_tokens_per_s: over the duration.
    ttft: from arrival to the first token. latency: to the last one. waiting: to the first admission.
    max_waiting: requests in the longest queue. num_retractions: requests that were put back to wait.
    num_steps: forward passes by kind. padding: share of the computed tokens that were padding.
    """

    trace: str
    schedule_policy: str
    eviction_policy: str
    page_size: int
    num_pages: int
    pool_tokens: int
    num_requests: int
    num_refused: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    optimal_hit_rate: float | None
    regret: float | None
    duration_s: float
    output_tokens_per_s: float
    ttft: Spread
    latency: Spread
    waiting: Spread
    max_waiting: int
    num_retractions: int
    num_steps: dict[str, int]
    padding: float

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


def make_report(trace: Trace, config: EngineConfig, simulation: Simulation, *, optimum: bool) -> ReplayReport:
    """The figures of a run. optimum: compare with Belady's, which takes a pass over all prompt tokens."""
    assert config.num_pages is not None
    ran = [one for one in simulation.requests if one.finished_s is not None]
    stats = simulation.stats
    prompt_tokens = sum(one.prompt_len for one in ran)
    cached_tokens = sum(one.cached_len for one in ran)
    hit_rate = cached_tokens / max(prompt_tokens, 1)
    optimal = None
    if optimum:
        hits = optimal_hit_tokens(trace, simulation.admitted, config.page_size, config.num_pages - 1)
        optimal = hits / max(prompt_tokens, 1)
    padded = sum(stats.num_padded_tokens.values())
    return ReplayReport(
        trace=trace.name,
        schedule_policy=config.schedule_policy,
        eviction_policy=config.eviction_policy,
        page_size=config.page_size,
        num_pages=config.num_pages,
        pool_tokens=(config.num_pages - 1) * config.page_size,
        num_requests=len(trace),
        num_refused=sum(one.refused is not None for one in simulation.requests),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=hit_rate,
        optimal_hit_rate=optimal,
        regret=None if optimal is None else (1 - hit_rate / optimal if optimal else 0.0),
        duration_s=simulation.end_s,
        output_tokens_per_s=stats.num_output_tokens / max(simulation.end_s, 1e-9),
        ttft=Spread.of(one.first_token_s - one.arrival_s for one in ran if one.first_token_s is not None),
        latency=Spread.of(one.finished_s - one.arrival_s for one in ran if one.finished_s is not None),
        waiting=Spread.of(one.admitted_s - one.arrival_s for one in ran if one.admitted_s is not None),
        max_waiting=simulation.max_waiting,
        num_retractions=stats.num_retractions,
        num_steps={**stats.num_steps},
        padding=1 - sum(stats.num_tokens.values()) / padded if padded else 0.0,
    )
