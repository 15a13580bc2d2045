"""EngineStats: what an engine has done, and the pages of now."""

from dataclasses import dataclass

from radix_jax.runner import CompileLedger
from radix_jax.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started; all but the compiles begin anew after a step that failed.

    hit_rate: cached / all prompt tokens of admitted requests, each request counted once, however many its samples.
    num_prefill_tokens: prompt tokens computed, after a retraction known outputs too.
    num_evicted_tokens: cached tokens given up for room.
    num_free_pages, num_evictable_pages, num_protected_pages: now; private pages of running requests are in none.
    num_pinned_tokens: cached tokens under a pin now, each counted once.
    num_running, num_waiting: now, each sample of a request counted.
    num_retractions: times that a running sample lost its pages and waited again. num_timed_out: requests ended by a
        time-out.
    padding_waste: share of the computed token places that were padding.
    num_compiles, compile_s: warm-up included.
    """

    hit_rate: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_evicted_tokens: int
    num_free_pages: int
    num_evictable_pages: int
    num_protected_pages: int
    num_pinned_tokens: int
    num_running: int
    num_waiting: int
    num_retractions: int
    num_timed_out: int
    num_prefill_steps: int
    num_decode_steps: int
    num_mixed_steps: int
    padding_waste: float
    num_compiles: int
    compile_s: float

    @classmethod
    def of(cls, scheduler: Scheduler, ledger: CompileLedger) -> "EngineStats":
        """The counts of now."""
        counts, cache = scheduler.stats, scheduler.cache
        num_padded = sum(counts.num_padded_tokens.values())
        return cls(
            hit_rate=counts.num_cached_tokens / max(1, counts.num_prompt_tokens),
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_prefill_tokens=counts.num_prefill_tokens,
            num_output_tokens=counts.num_output_tokens,
            num_evicted_tokens=cache.num_evicted_tokens,
            num_free_pages=cache.pool.num_free,
            num_evictable_pages=cache.num_evictable,
            num_protected_pages=cache.num_protected,
            num_pinned_tokens=cache.tree.pinned_size,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_retractions=counts.num_retractions,
            num_timed_out=counts.num_timed_out,
            num_prefill_steps=counts.num_steps["prefill"],
            num_decode_steps=counts.num_steps["decode"],
            num_mixed_steps=counts.num_steps["mixed"],
            padding_waste=1 - sum(counts.num_tokens.values()) / num_padded if num_padded else 0.0,
            num_compiles=len(ledger.records),
            compile_s=ledger.total_s,
        )
