"""StepLoop: plan -> run -> commit, over and over, with the next step sent before the last one is read."""

import logging
import time

import numpy as np

from radix_jax.cache import PagePool, PrefixCache, RadixTree
from radix_jax.config import EngineConfig
from radix_jax.plan import StepPlan
from radix_jax.runner import Runner, StepHandle
from radix_jax.scheduler import Buckets, RequestState, Scheduler, Timelines

_LOG = logging.getLogger("radix_jax")


class StepLoop:
    """Scheduler, cache and runner of an engine, kept in step.

    config: with all that was left open filled in. runner: with a pool of config.num_pages pages.
    """

    def __init__(self, config: EngineConfig, buckets: Buckets, runner: Runner) -> None:
        self._config = config
        self._buckets = buckets
        self._runner = runner
        self._timelines = Timelines()
        self._cache, self._scheduler = self._new_bookkeeping()
        self._in_flight: tuple[StepPlan, StepHandle] | None = None  # sent to the device, not read yet

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache; another one after `start_over`."""
        return self._cache

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; another one after `start_over`."""
        return self._scheduler

    @property
    def runner(self) -> Runner:
        """The device side."""
        return self._runner

    def step(self, now: float) -> list[RequestState]:
        """Finish one step: the samples that got a token or ended. now: `time.monotonic`."""
        self._cache.tree.expire_pins(now)
        states = self._scheduler.expire(now)
        states += self._finish_step(now)
        self.drop_surplus()
        return states

    def drop_surplus(self) -> None:
        """Commit a step in flight without reading it if all its requests have ended."""
        if self._in_flight is not None and not self._scheduler.is_live(self._in_flight[0]):
            plan, _ = self._in_flight
            self._in_flight = None
            self._scheduler.commit(plan, np.zeros(len(plan.rows), np.int32))

    def start_over(self) -> None:
        """After a step that did not finish: drop every request, empty the cache, renew the pool."""
        _LOG.warning("a step did not finish: its requests are dropped and the cache is emptied")
        self._cache, self._scheduler = self._new_bookkeeping()
        self._in_flight = None
        self._timelines.end_all("dropped: a step did not finish")
        self._runner.renew_pool()

    def close(self) -> None:
        """Drop every request and give the device's memory back."""
        self._scheduler.reset()
        self._in_flight = None
        self._runner.close()

    def _finish_step(self, now: float) -> list[RequestState]:
        """Read what the step in flight sampled, with the next one sent before it, and commit it."""
        if self._in_flight is None:
            self._in_flight = self._send(now)
        if self._in_flight is None:
            return []
        plan, handle = self._in_flight
        self._in_flight = self._send(now) if self._config.overlap else None
        tokens = self._runner.read(handle)
        return self._scheduler.commit(plan, tokens.token_ids, time.monotonic(), tokens.logprobs)

    def _send(self, now: float) -> tuple[StepPlan, StepHandle] | None:
        """Plan a step and send it; None where there is nothing to do, or nothing before the last one is committed."""
        plan = self._scheduler.plan(now)
        return None if plan is None else (plan, self._runner.dispatch(plan))

    def _new_bookkeeping(self) -> tuple[PrefixCache, Scheduler]:
        config = self._config
        assert config.num_pages is not None
        assert config.max_model_len is not None
        assert config.max_pinned_tokens is not None
        tree = RadixTree(
            page_size=config.page_size,
            eviction_policy=config.eviction_policy,
            max_pinned_tokens=config.max_pinned_tokens,
            partial_pages=config.partial_pages,
        )
        cache = PrefixCache(tree, PagePool(config.num_pages))
        scheduler = Scheduler(
            cache,
            self._buckets,
            config.limits,
            max_model_len=config.max_model_len,
            schedule_policy=config.schedule_policy,
            enable_prefix_cache=config.enable_prefix_cache,
            seed=config.seed,
            timelines=self._timelines,
        )
        return cache, scheduler
