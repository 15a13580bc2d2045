"""Engine: the loop plan -> run -> commit. Token ids in, token ids out; it knows no text."""

import math
import time
from collections.abc import Collection, Generator, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from radix_jax.cache import HandleError, Pin, PrefixCache, of_weights
from radix_jax.cache_file import CacheFiles
from radix_jax.config import EngineConfig
from radix_jax.engine_stats import EngineStats
from radix_jax.held_prefix import HeldPrefix, HeldPrefixes
from radix_jax.intake import Intake, TokenIds, check_labels
from radix_jax.models.base import ModelParams
from radix_jax.models.registry import params_of
from radix_jax.new_params import fitting_params
from radix_jax.outputs import Outputs
from radix_jax.recorder import Recorder
from radix_jax.request import FinishCheck, RequestOutput, SamplingParams
from radix_jax.rollouts import Rollouts, rollout, score
from radix_jax.runner import CompileLedger, Runner, keep_engine_compiles, resolve_config
from radix_jax.scheduler import Explanation, NoRoom, OnUpdate, QueueFull, RequestState, Scheduler, check_on_update
from radix_jax.step_loop import StepLoop, whole
from radix_jax.streaming import stream_request


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
        self._intake = Intake(config, model_params.config.vocab_size, eos_token_ids)
        self._num_requests = 0
        self._recorder = None if config.record is None else Recorder(config.record, time.monotonic())
        self._outputs = Outputs()
        keep_engine_compiles(config.compile_cache_dir)
        self._loop = StepLoop(config, model_params)
        self._runner = self._loop.runner
        self._cache_files = CacheFiles(config, self._runner)
        self._held = HeldPrefixes(self, shares=config.enable_prefix_cache)
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
        return self._intake.eos_token_ids

    def warm_up(self) -> None:
        """Compile every bucket, those of page copies and sampler rows included, so that no later step has to."""
        self._loop.warm_up()

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
        cached, and cache what is computed; "read" leaves nothing behind; "write" computes all anew; "off" does neither
        (docs/cache_control.md). priority: higher ones go first, and may take the place of lower ones. routing_key: what
        schedule_policy "routing-key" groups by.

        max_tokens is cut to the room that the context leaves; None takes all that context and pool leave. An interrupt
        half-way is one of a step: every request is dropped and the cache emptied.

        Raises:
            TypeError: token_ids are no ints, sampling is no SamplingParams, finish_check is no function, priority is no
                int, namespace or routing_key are not hashable, or the namespace can't be recorded.
            ValueError: no ids, ids outside the vocabulary, in logit_bias too, a prompt or output that context or pool
                can't hold, stop strings without a finish_check, another `cache` than those four, more samples than
                max_queued_requests, or a priority that takes more than 64 bits.
            QueueFull: with its samples, more than max_queued_requests would wait.
            RuntimeError: the engine is closed or asleep.
        """
        check_labels(namespace, priority, routing_key)
        if self._recorder is not None:
            self._recorder.check(namespace)
        self._loop.check_ready()
        requests = self._intake.make_requests(
            self._num_requests,
            token_ids,
            sampling,
            finish_check=finish_check,
            namespace=namespace,
            cache=cache,
            priority=priority,
            routing_key=routing_key,
        )
        with whole(self._start_over, (TypeError, ValueError, QueueFull)):
            states = self._scheduler.add_samples(requests, time.monotonic())
            if self._recorder is not None:
                self._recorder.begin(states)
            self._num_requests += 1
            return self._outputs.begin(states)

    def step(self) -> list[RequestOutput]:
        """Finish one scheduler step: a state of each request of which a sample got a token or ended; may be empty.

        With `overlap` the next step is planned and sent to the device before the tokens of this one are read. Right
        after `update_params` it gives what that ended or committed, if anything, in the place of a step.

        If the step fails or is interrupted, every request is dropped and the cache emptied, and the error raised: no
        page is then half written and named.

        Raises:
            OutOfPages: nothing runs, and locks on prefixes leave no room for the next request; nothing was changed, and
                prefixes that are held are named.
            RuntimeError: the engine is asleep. Exception: what made the step fail.
        """
        if kept := self._outputs.take_kept():
            return kept
        self._loop.check_awake()
        with self._held.named(), whole(self._start_over, (NoRoom,)):
            return self._give_out(self._loop.step(time.monotonic()))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever its samples stand and give back what they hold; its last state, None if there is no
        such id.

        An interrupt half-way is one of a step: every request is dropped and the cache emptied.
        """
        if request_id not in self._outputs:
            return None
        with whole(self._start_over):
            now, states = time.monotonic(), self._outputs.states(request_id)
            aborted = [self._scheduler.abort(state.request_id, now) for state in states]
            self._loop.drop_surplus()
            self._outputs.forget_kept(request_id)
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
        """Whether any request waits or runs, or ended by `update_params` and `step` has yet to tell."""
        return self._scheduler.has_unfinished or self._outputs.num_kept > 0

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
        outputs = stream_request(self, self._outputs, token_ids, sampling, finish_check, namespace, cache)
        next(outputs)
        return outputs

    def rollout(
        self,
        prompts: Sequence[TokenIds],
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        seq_len: int | None = None,
        pad_id: int = 0,
        sharding: Any = None,
        finish_checks: Sequence[FinishCheck | None] = (),
        namespace: Hashable = None,
    ) -> Rollouts:
        """n samples of each prompt, run to their ends, as padded arrays ready for a loss: `rollouts.rollout`."""
        return rollout(
            self,
            prompts,
            sampling or SamplingParams(),
            n=n,
            seq_len=seq_len,
            pad_id=pad_id,
            sharding=sharding,
            finish_checks=finish_checks,
            namespace=namespace,
        )

    def score(self, sequences: Sequence[TokenIds], *, namespace: Hashable = None) -> list[Float32[np.ndarray, " T"]]:
        """log p(token j | tokens before it) of each sequence, for j = 1 ... T - 1: `rollouts.score`."""
        return score(self, sequences, namespace)

    def prefix(self, token_ids: TokenIds, *, namespace: Hashable = None) -> HeldPrefix:
        """Hold the KV of a prefix until it is released: to sample from, to extend, to fork. Use it in a `with`.

        What is not cached of it is computed now, as a request of one token that is dropped; other requests go on beside
        it, as with `stream`. The last id is left to whoever samples, since its logits have to be computed anyway.

        Raises:
            TypeError, ValueError: ids or namespace as in `add_request`, or the engine has no prefix cache.
            OutOfPages: as `step`. QueueFull: as `add_request`.
            RuntimeError: the engine is closed, or computing it was ended by a time-out or by a step that failed.
        """
        check_labels(namespace, 0, None)
        self._loop.check_open()
        return self._held.hold(self._intake.checked_ids(token_ids), namespace)

    def pin(self, token_ids: TokenIds, *, namespace: Hashable = None, ttl_s: float | None = None) -> Pin:
        """Keep what is cached of these ids now, in whole pages (its `cached_len`), until nothing else is left to evict.

        It ends after `ttl_s` seconds (None: never), with `unpin` or new weights, and when the cache is emptied.

        Raises:
            TypeError: the namespace is not hashable. ValueError: more than max_pinned_tokens would be pinned, ttl_s is
                not above 0, or no flat list of ids. RuntimeError: the engine is closed or asleep.
        """
        self._loop.check_ready()
        namespace, ttl = of_weights(namespace, self.weight_version), math.inf if ttl_s is None else ttl_s
        with whole(self._start_over, (TypeError, ValueError)):
            return self.cache.tree.pin(token_ids, ttl, time.monotonic(), namespace)

    def unpin(self, pin: Pin) -> None:
        """Take a pin off. Raises HandleError where it is over, was taken off before, or a failed step ended it."""
        with whole(self._start_over, (HandleError,)):
            self.cache.tree.unpin(pin)

    def save_cache(self, path: str | Path) -> int:
        """Write what is cached, of the weights of now, to one file, for `load_cache`; returns the tokens.

        Raises:
            RuntimeError: requests are unfinished, or the engine is closed or asleep.
            OSError: the file can't be written; what was there before still is.
        """
        self._loop.check_ready()
        self._loop.check_idle()
        return self._cache_files.save(self.cache, Path(path))

    def load_cache(self, path: str | Path) -> int:
        """Take in what `save_cache` wrote and is not cached, as far as pages are free; returns the tokens.

        Raises:
            RuntimeError: as `save_cache`. OSError: the file can't be read.
            ValueError: it is damaged or not of this engine's model, weights and settings, or there is no prefix cache.
        """
        self._loop.check_ready()
        self._loop.check_idle()
        with whole(self._start_over, (ValueError, OSError)):
            return self._cache_files.load(self.cache, Path(path))

    def flush_cache(self) -> None:
        """Drop all that is cached. Raises RuntimeError while requests are unfinished, or prefixes are held."""
        self._held.check_none()
        self._loop.check_idle()
        self.cache.reset()

    @property
    def weight_version(self) -> int:
        """Of the params in use: 0 at first, one more with each `update_params`."""
        return self._runner.weight_version

    def update_params(self, params: Any, *, on_update: OnUpdate = "continue") -> None:
        """Go on with new params of the same model. Leaves that lie where they belong are not copied, and nothing is
        compiled. What was computed with the old ones is never shared with what the new ones compute.

        params: a module, its `nnx.State` or nested dict, or ModelParams; leaves of numpy go to the device.
        on_update: what becomes of requests that run, or were retracted with some output. "continue": they go on, those
        that run with the KV they have. "restart": without their output so far. "abort": all their samples end. Those
        that only wait are computed by the new params.

        Waits for the step in flight, which is of the old params. Its outputs, and those of aborted requests, come from
        the next `step` and to their streams. An interrupt half-way is one of a step.

        Raises:
            TypeError, ValueError: params are none, or of another tree, shape or dtype, or deleted; or on_update is none
                of the three. RuntimeError: the engine is closed; or "restart", and a request that has output has a
                finish_check. Nothing has changed then.
        """
        check_on_update(on_update)
        self._loop.check_open()
        placed = fitting_params(self._runner.params, params, self._runner.place)
        self._scheduler.check_update(on_update)
        with whole(self._start_over):
            self._held.end_all("the weights were updated", unlock=True)
            self._outputs.keep(self._give_out(self._loop.update_params(placed, on_update, time.monotonic())))

    def sleep(self) -> None:
        """Give the device memory of pool and sampler state to others, until `wake`; what is cached is dropped. The
        params stay where they are, since they are the caller's: `update_params` works meanwhile. Twice is once. Raises
        RuntimeError where the engine is closed, or requests are unfinished."""
        self._loop.check_open()
        if self._outputs.num_kept:
            raise RuntimeError(f"{self._outputs.num_kept} outputs wait for the next step(); take them first")
        self.flush_cache()
        self._runner.sleep()

    def wake(self) -> None:
        """Make pool and sampler state anew, empty; nothing is compiled. Where memory is short it stays asleep. Awake:
        nothing. Raises RuntimeError where the engine is closed."""
        self._loop.check_open()
        self._runner.wake()

    def stats(self) -> EngineStats:
        """Counts so far, and the pages of now."""
        self.cache.tree.expire_pins(time.monotonic())
        return EngineStats.of(self._scheduler, self.ledger)

    def check_integrity(self) -> None:
        """Prove the invariants of scheduler, tree, pool and held prefixes. Raises AssertionError: what is off."""
        self._held.check_integrity()
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Drop every request and give the pool's memory back; the engine is of no use afterwards. Prefixes that are
        still held then are told of in a ResourceWarning."""
        self._held.close()
        self._loop.close()
        self._outputs.clear()
        if self._recorder is not None:
            self._recorder.end_all()

    @property
    def _scheduler(self) -> Scheduler:
        return self._loop.scheduler

    def _start_over(self) -> None:
        self._held.end_all("a step failed, which emptied the cache", unlock=False)
        self._loop.start_over()
        self._outputs.clear()
        if self._recorder is not None:
            self._recorder.end_all()

    def _give_out(self, changed: list[RequestState]) -> list[RequestOutput]:
        """States of the requests of these samples."""
        if self._recorder is not None:
            self._recorder.end_finished(changed)
        return self._outputs.of(changed)
