"""StepLoop: plan -> run -> commit, over and over, with the next step sent before the last one is read."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from radix_jax.cache import PagePool, PrefixCache, RadixTree
from radix_jax.config import EngineConfig
from radix_jax.models.base import ModelParams
from radix_jax.plan import StepPlan
from radix_jax.runner import SAMPLER_BUCKET, Runner, StepHandle
from radix_jax.scheduler import Buckets, NoRoom, OnUpdate, RequestState, Scheduler, Timelines

_LOG = logging.getLogger("radix_jax")


@contextmanager
def whole(start_over: Callable[[], None], refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Nothing half done: where it raises or is interrupted inside, `start_over` is called.

    refusals: what is raised while nothing has changed yet.
    """
    done = False
    try:
        yield
        done = True
    except refusals:
        done = True
        raise
    finally:
        if not done:
            start_over()


class StepLoop:
    """Scheduler, cache and runner of an engine, kept in step.

    config: with all that was left open filled in.
    """

    def __init__(self, config: EngineConfig, params: ModelParams) -> None:
        assert config.num_pages is not None
        assert config.max_model_len is not None
        self._config = config
        self._buckets = Buckets(
            page_size=config.page_size,
            max_model_len=config.max_model_len,
            max_running_requests=config.max_running_requests,
            max_prefill_tokens=config.max_prefill_tokens,
            deterministic=config.deterministic,
        )
        self._runner = Runner(
            params,
            num_pages=config.num_pages,
            page_size=config.page_size,
            num_seats=config.max_running_requests,
            max_rows=self._buckets.max_rows,
            kv_dtype=str(config.kv_dtype),
            attention_backend=config.attention_backend,
        )
        self._timelines = Timelines()
        self._cache, self._scheduler = self._new_bookkeeping()
        self._in_flight: tuple[StepPlan, StepHandle] | None = None  # sent to the device, not read yet
        self._is_closed = False

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

    def warm_up(self) -> None:
        """Compile all that steps may ever need."""
        config = self._config
        has_copies = config.partial_pages and config.enable_prefix_cache and config.page_size > 1
        for bucket in self._buckets.all():
            self._runner.compile(bucket, "warmup")
            if has_copies and bucket.kind == "prefill":
                self._runner.compile(bucket.copies, "warmup")
        self._runner.compile(SAMPLER_BUCKET, "warmup")

    def step(self, now: float) -> list[RequestState]:
        """Finish one step: the samples that got a token or ended. now: `time.monotonic`.

        Raises:
            NoRoom: as `Scheduler.plan`, where nobody's time was over; nothing was changed.
        """
        self._cache.tree.expire_pins(now)
        states = self._scheduler.expire(now)
        try:
            states += self._finish_step(now)
        except NoRoom:
            if not states:  # else those are told of first, and the next step raises
                raise
        self.drop_surplus()
        return states

    def update_params(self, params: ModelParams, on_update: OnUpdate, now: float) -> list[RequestState]:
        """Commit the step in flight, which runs on the old params, and go on with these, which `Runner.place` gave.

        Returns the samples that got a token or ended by either.
        """
        changed: list[RequestState] = []
        if self._in_flight is not None:
            changed += self._commit(*self._in_flight)
            self._in_flight = None
        changed += self._scheduler.update_weights(self._runner.weight_version + 1, on_update, now)
        self._runner.replace_params(params)
        return list(dict.fromkeys(changed))

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

    def check_open(self) -> None:
        """Raise RuntimeError if it is closed."""
        if self._is_closed:
            raise RuntimeError("the engine is closed; make a new one")

    def check_awake(self) -> None:
        """Raise RuntimeError if there is no pool now."""
        if self._runner.is_asleep:
            raise RuntimeError("the engine is asleep and has no memory for KV; call wake() first")

    def check_ready(self) -> None:
        """Raise RuntimeError if it is closed or there is no pool now."""
        self.check_open()
        self.check_awake()

    def check_idle(self) -> None:
        """Raise RuntimeError if requests are unfinished."""
        if self._scheduler.has_unfinished:
            raise RuntimeError(
                f"{self._scheduler.num_running} running and {self._scheduler.num_waiting} waiting requests use the "
                "cache; finish or abort them first"
            )

    def close(self) -> None:
        """Drop every request and give the device's memory back."""
        self._is_closed = True
        self._scheduler.reset()
        self._in_flight = None
        self._runner.close()

    def _finish_step(self, now: float) -> list[RequestState]:
        """Read what the step in flight sampled, with the next one sent before it, and commit it."""
        if self._in_flight is None:
            self._in_flight = self._send(now)
        if self._in_flight is None:
            return []
        sent = self._in_flight
        self._in_flight = self._send(now) if self._config.overlap else None
        return self._commit(*sent)

    def _commit(self, plan: StepPlan, handle: StepHandle) -> list[RequestState]:
        """Wait for a step, and take over what it sampled."""
        tokens = self._runner.read(handle)
        return self._scheduler.commit(plan, tokens.token_ids, time.monotonic(), *tokens[1:])

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
            weight_version=self._runner.weight_version,
        )
        return cache, scheduler
