"""Engine: the loop plan -> run -> commit. Token ids in, token ids out; it knows no text."""

import math
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radix_jax.cache import HandleError, Pin, PrefixCache
from radix_jax.cache_file import CacheFiles
from radix_jax.config import EngineConfig
from radix_jax.engine_stats import EngineStats
from radix_jax.intake import TokenIds, check_bias, check_finish, check_labels, checked_ids, checked_mode, make_requests
from radix_jax.models.base import ModelParams
from radix_jax.models.registry import params_of
from radix_jax.outputs import Outputs
from radix_jax.recorder import Recorder
from radix_jax.request import FinishCheck, RequestOutput, SamplingParams
from radix_jax.runner import SAMPLER_BUCKET, CompileLedger, Runner, keep_engine_compiles, resolve_config
from radix_jax.scheduler import Buckets, Explanation, QueueFull, RequestState, Scheduler
from radix_jax.step_loop import StepLoop


class Engine:
    """Serves requests over one model and one prefix cache. Not thread-safe.

    model: a Flax module of a registered family, or its config. params: its leaves (`nnx.State`, their nested dict, or
    ModelParams); None takes the module's own. The leaves are used as they are, not copied.
    eos_token_ids: ids that end a request unless it ignores them.

    Raises:
        TypeError, ValueError: model, params and config don't fit each other, or the record can't be written.
    """

    def __init__(
        self,
        model: Any,
        params: Any = None,
        config: EngineConfig | None = None,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        model_params = params_of(model, params)
        self._config = config = resolve_config(config or EngineConfig(), model_params)
        self._vocab_size: int = model_params.config.vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._closed = False
        self._num_requests = 0
        self._recorder = None if config.record is None else Recorder(config.record, time.monotonic())
        self._outputs = Outputs()
        self._num_pages, self._max_model_len = _known(config.num_pages), _known(config.max_model_len)
        self._buckets = Buckets(
            page_size=config.page_size,
            max_model_len=self._max_model_len,
            max_running_requests=config.max_running_requests,
            max_prefill_tokens=config.max_prefill_tokens,
            deterministic=config.deterministic,
        )
        keep_engine_compiles(config.compile_cache_dir)
        self._runner = Runner(
            model_params,
            num_pages=self._num_pages,
            page_size=config.page_size,
            num_seats=config.max_running_requests,
            max_rows=self._buckets.max_rows,
            kv_dtype=str(config.kv_dtype),
            attention_backend=config.attention_backend,
        )
        self._loop = StepLoop(config, self._buckets, self._runner)
        self._cache_files = CacheFiles(config, self._runner)
        if config.warmup == "full":
            self.warm_up()

    @property
    def config(self) -> EngineConfig:
        """The settings, with all that was left open filled in."""
        return self._config

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache; `engine.cache.tree.render()` draws it."""
        return self._loop.cache

    @property
    def ledger(self) -> CompileLedger:
        """What was compiled, why, and how long it took."""
        return self._runner.ledger

    @property
    def runner(self) -> Runner:
        """The device side: params, pool and compiled steps."""
        return self._runner

    @property
    def params(self) -> ModelParams:
        """The params on the device, with the model's config: a second engine over them shares their memory."""
        return self._runner.params

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a request unless it ignores them."""
        return self._eos_token_ids

    def warm_up(self) -> None:
        """Compile every bucket, those of page copies and sampler rows included, so that no later step has to."""
        config = self._config
        has_copies = config.partial_pages and config.enable_prefix_cache and config.page_size > 1
        for bucket in self._buckets.all():
            self._runner.compile(bucket, "warmup")
            if has_copies and bucket.kind == "prefill":
                self._runner.compile(bucket.copies, "warmup")
        self._runner.compile(SAMPLER_BUCKET, "warmup")

    def add_request(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams | None = None,
        *,
        finish_check: FinishCheck | None = None,
        namespace: Hashable = None,
        cache: str = "use",
        priority: int = 0,
        routing_key: Hashable = None,
    ) -> str:
        """Queue a request, with all its samples, and return its id.

        token_ids: the prompt, at least one id. finish_check: may end a sample, whenever it got tokens; later ones, of a
        step that is under way, are dropped. namespace: KV is shared inside one namespace alone. cache: "use" what is
        cached, and cache what is computed; "read" leaves nothing behind; "write" computes all anew; "off" does neither.
        priority: higher ones go first, and may take the place of lower ones. routing_key: what schedule_policy
        "routing-key" groups by.
        max_tokens is cut to the room that the context leaves; None takes all that context and pool leave. An interrupt
        half-way is one of a step: every request is dropped and the cache emptied.

        Raises:
            TypeError: token_ids are no ints, sampling is no SamplingParams, finish_check is no function, priority is no
                int, namespace or routing_key are not hashable, or the namespace can't be recorded.
            ValueError: no ids, ids outside the vocabulary, in logit_bias too, a prompt or output that context or pool
                can't hold, stop strings without a finish_check, another `cache` than those four, more samples than
                max_queued_requests, or a priority that takes more than 64 bits.
            QueueFull: with its samples, more than max_queued_requests would wait.
            RuntimeError: the engine is closed.
        """
        check_labels(namespace, priority, routing_key)
        if self._recorder is not None:
            self._recorder.check(namespace)
        self._check_open()
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling is a {type(sampling).__name__}; give SamplingParams, or None for its defaults")
        sampling = sampling or SamplingParams()
        check_finish(sampling, finish_check)
        check_bias(sampling, self._vocab_size)
        requests = make_requests(
            checked_ids(token_ids, self._vocab_size, self._max_model_len),
            sampling,
            number=self._num_requests,
            max_len=self._max_model_len,
            pool_len=(self._num_pages - 1) * self._config.page_size,
            eos_token_ids=self._eos_token_ids,
            engine_seed=self._config.seed,
            finish_check=finish_check,
            namespace=namespace,
            cache=checked_mode(cache),
            priority=priority,
            routing_key=routing_key,
        )
        with self._whole(refusals=(TypeError, ValueError, QueueFull)):
            states = self._scheduler.add_samples(requests, time.monotonic())
            if self._recorder is not None:
                for state in states:
                    self._recorder.begin(state)
            self._num_requests += 1
            return self._outputs.begin(states)

    def step(self) -> list[RequestOutput]:
        """Finish one scheduler step: a state of each request of which a sample got a token or ended; may be empty.

        With `overlap` the next step is planned and sent to the device before the tokens of this one are read.

        If the step fails or is interrupted, every request is dropped and the cache emptied, and the error raised: no
        page is then half written and named.
        """
        with self._whole():
            return self._give_out(self._loop.step(time.monotonic()))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever its samples stand and give back what they hold; its last state, None if there is no
        such id.

        An interrupt half-way is one of a step: every request is dropped and the cache emptied.
        """
        if request_id not in self._outputs:
            return None
        with self._whole():
            now, states = time.monotonic(), self._outputs.states(request_id)
            aborted = [self._scheduler.abort(state.request_id, now) for state in states]
            self._loop.drop_surplus()
            [output] = self._give_out([state for state in aborted if state is not None])
            return output

    def explain(self, request_id: str) -> Explanation:
        """Why a request waits or waited, and what happened to it and when; print it. Works for unfinished requests and
        for the last 1,000 that ended. The clock is `time.monotonic`. Of the samples of a request, 1 and up are told of
        under its id, a dot and their index; the id alone is sample 0.

        Raises:
            KeyError: no request of that id, or it ended too long ago.
        """
        return self._scheduler.explain(request_id)

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of the requests that wait or run."""
        return self._outputs.request_ids

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_unfinished

    def stream(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams | None = None,
        *,
        finish_check: FinishCheck | None = None,
        namespace: Hashable = None,
        cache: str = "use",
    ) -> Generator[RequestOutput, None, None]:
        """The states of one request, token by token.

        Other requests go on beside it; their outputs reach their own streams, and nobody else. Closing the iterator
        aborts the request. Raises as `add_request`, on the call; and RuntimeError where the request was dropped, by a
        step of another stream that failed or since the engine was closed.
        """
        outputs = self._stream(
            lambda: self.add_request(token_ids, sampling, finish_check=finish_check, namespace=namespace, cache=cache)
        )
        next(outputs)
        return outputs

    def pin(self, token_ids: TokenIds, *, namespace: Hashable = None, ttl_s: float | None = None) -> Pin:
        """Keep what is cached of these ids now, in whole pages, until nothing else is left to evict; `cached_len` of
        the pin says how many tokens that is.

        It ends after `ttl_s` seconds (None: never), with `unpin`, and whenever the cache is emptied.

        Raises:
            TypeError: the namespace is not hashable.
            ValueError: more than max_pinned_tokens would be pinned, ttl_s is not above 0, or no flat list of ids.
        """
        with self._whole(refusals=(TypeError, ValueError)):
            return self.cache.tree.pin(token_ids, math.inf if ttl_s is None else ttl_s, time.monotonic(), namespace)

    def unpin(self, pin: Pin) -> None:
        """Take a pin off.

        Raises:
            HandleError: it is over, was taken off before, or a step that failed emptied the cache since.
        """
        with self._whole(refusals=(HandleError,)):
            self.cache.tree.unpin(pin)

    def flush_cache(self) -> None:
        """Drop all that is cached.

        Raises:
            RuntimeError: requests are unfinished and hold cached pages.
        """
        self._check_idle()
        self.cache.reset()

    def save_cache(self, path: str | Path) -> int:
        """Write what is cached to one file, for `load_cache`; returns the tokens. Prefixes of namespaces that JSON has
        no form for are left out and counted in the log; so are partial pages, pins and hits.

        Raises:
            RuntimeError: requests are unfinished, or the engine is closed.
            OSError: the file can't be written; what was there before still is.
        """
        self._check_open()
        self._check_idle()
        return self._cache_files.save(self.cache, Path(path))

    def load_cache(self, path: str | Path) -> int:
        """Take in what `save_cache` wrote and is not cached, as far as pages are free; returns the tokens. What is left
        for want of pages, the least recently used, is counted in the log.

        Raises:
            RuntimeError: as `save_cache`. OSError: the file can't be read.
            ValueError: it is damaged, of another model, page_size, kv_dtype or layout, or this engine has no prefix
                cache. Nothing is changed then.
        """
        self._check_open()
        self._check_idle()
        if not self._config.enable_prefix_cache:
            raise ValueError("enable_prefix_cache=False: nothing that is loaded would serve anybody; leave it out")
        with self._whole(refusals=(ValueError, OSError)):
            return self._cache_files.load(self.cache, Path(path))

    def stats(self) -> EngineStats:
        """Counts so far, and the pages of now."""
        self.cache.tree.expire_pins(time.monotonic())
        return EngineStats.of(self._scheduler, self.ledger)

    def check_integrity(self) -> None:
        """Prove the invariants of scheduler, tree and pool.

        Raises:
            AssertionError: what is off.
        """
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Drop every request and give the pool's memory back; the engine is of no use afterwards."""
        self._closed = True
        self._loop.close()
        self._outputs.clear()
        if self._recorder is not None:
            self._recorder.end_all()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")

    def _check_idle(self) -> None:
        if self._scheduler.has_unfinished:
            raise RuntimeError(
                f"{self._scheduler.num_running} running and {self._scheduler.num_waiting} waiting requests use the "
                "cache; finish or abort them first"
            )

    @property
    def _scheduler(self) -> Scheduler:
        return self._loop.scheduler

    @contextmanager
    def _whole(self, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Nothing half done: where it raises or is interrupted inside, every request is dropped and the cache emptied.

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
                self._start_over()

    def _start_over(self) -> None:
        self._loop.start_over()
        self._outputs.clear()
        if self._recorder is not None:
            self._recorder.end_all()

    def _give_out(self, changed: list[RequestState]) -> list[RequestOutput]:
        """States of the requests of these samples."""
        if self._recorder is not None:
            for state in changed:
                if state.finish_reason is not None:
                    self._recorder.end(state.request_id)
        return self._outputs.of(changed)

    def _stream(self, add: Callable[[], str]) -> Generator[Any, None, None]:
        """The states of one request, after one None: closing a generator that has not begun ends nothing."""
        request_id = add()
        try:
            outputs = self._outputs.open_stream(request_id)
            yield None
            while True:
                while outputs:
                    output = outputs.popleft()
                    yield output
                    if output.finished:
                        return
                if request_id not in self._outputs:
                    raise RuntimeError(f"request {request_id} was dropped: a step failed, or the engine was closed")
                self.step()
        finally:
            self._outputs.close_stream(request_id)
            self.abort(request_id)


def _known(value: int | None) -> int:
    assert value is not None
    return value
