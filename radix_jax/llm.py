"""LLM: the offline facade. Names and text on the outside, an Engine on the inside."""

import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from radix_jax.cache import PrefixCache
from radix_jax.checkpoints import load_weights, open_checkpoint, resolve
from radix_jax.config import EngineConfig
from radix_jax.engine import Engine, EngineStats
from radix_jax.models.base import ModelParams
from radix_jax.models.registry import family_for_hf_config, make_params
from radix_jax.request import CompletionOutput, FinishCheck, RequestOutput, SamplingParams
from radix_jax.rollouts import Rollouts
from radix_jax.runner.resolve import default_dtype
from radix_jax.scheduler import OnUpdate, QueueFull
from radix_jax.text import AnyTokenizer, StopText, as_tokenizer, load_tokenizer, with_decoded_tokens

_LOG = logging.getLogger("radix_jax")
Prompt = str | Sequence[int] | np.ndarray
Message = dict[str, Any]


class LLM:
    """A model, its tokenizer and an engine over them. A context manager; not thread-safe.

    model: a built-in name, a hub id, a folder of safetensors, a .gguf file, or a Flax module or config of one's own.
    params: leaves for a module or config of one's own, not copied. tokenizer: needed there where text goes in or out.
    engine_fields: the fields of EngineConfig.

    Raises:
        ValueError: an unknown name, a damaged checkpoint, a setting out of its range.
        TypeError: an argument that does not go with the kind of model, or an unknown setting.
    """

    def __init__(self, model: Any, *, params: Any = None, tokenizer: Any = None, **engine_fields: Any) -> None:
        config = EngineConfig(**engine_fields)
        if isinstance(model, str | Path):
            if params is not None:
                raise TypeError("params go with a Flax module or config; a named model brings its own")
            path = resolve(str(model))
            model_params, eos_token_ids = _load_params(path, config.dtype)
            self._engine = Engine(model_params.config, model_params, config, eos_token_ids=eos_token_ids)
            self._tokenizer = load_tokenizer(path) if tokenizer is None else as_tokenizer(tokenizer)
        else:
            self._tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
            eos_token_ids = frozenset() if self._tokenizer is None else self._tokenizer.eos_token_ids
            self._engine = Engine(model, params, config, eos_token_ids=eos_token_ids)

    @property
    def engine(self) -> Engine:
        """The engine, which takes token ids."""
        return self._engine

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache; `llm.cache.tree.render()` draws it."""
        return self._engine.cache

    @property
    def tokenizer(self) -> AnyTokenizer:
        """The tokenizer.

        Raises:
            ValueError: none was given with a model of one's own.
        """
        if self._tokenizer is None:
            raise ValueError("this LLM has no tokenizer: give token ids, or LLM(..., tokenizer=...)")
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: str = "use",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in the order of the prompts.

        prompts: text, token ids, or a list of either. sampling_params: one for all, or one each. cache: "use", "off",
        "read" or "write", as in `Engine.add_request`. use_tqdm: show a progress bar on a terminal when it takes long.

        A prompt that can't be served is refused by itself: its output has `error` set and no completions, the others
        are served. If no prompt can be served, the error is raised. An interrupt aborts what is unfinished.

        Raises:
            ValueError: every prompt was refused, or there is not one SamplingParams a prompt.
            TypeError: prompts are neither text nor token ids.
        """
        listed = _as_prompts(prompts)
        each = _one_each(SamplingParams() if sampling_params is None else sampling_params, len(listed))
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        encoders = [functools.partial(self._encode, prompt) for prompt in listed]
        return self._run(encoders, texts, each, cache, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: str = "use",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, put through the model's own chat template.

        sampling_params: as in `generate`, but None answers up to the end of the context. cache, refusals: as there.
        """
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], dict)
        talks: list[Any] = list(messages) if several else [messages]
        each = _one_each(SamplingParams(max_tokens=None) if sampling_params is None else sampling_params, len(talks))
        encoders = [functools.partial(self._encode_chat, talk) for talk in talks]
        return self._run(encoders, [None] * len(talks), each, cache, use_tqdm)

    def rollout(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        n: int = 1,
        seq_len: int | None = None,
        pad_id: int = 0,
        sharding: Any = None,
    ) -> Rollouts:
        """As `Engine.rollout`, of text or token ids, and with stop strings."""
        sampling = dataclasses.replace(sampling_params or SamplingParams(), n=n)
        stop_texts = [self._stop_texts(sampling) for _ in prompts]
        return self._engine.rollout(
            [self._encode(prompt) for prompt in prompts],
            sampling,
            n=n,
            seq_len=seq_len,
            pad_id=pad_id,
            sharding=sharding,
            finish_checks=list(map(_finish_check, stop_texts)),
        )

    def score(self, prompts: Sequence[Prompt]) -> list[Float32[np.ndarray, " T"]]:
        """As `Engine.score`, of text or token ids."""
        return self._engine.score([self._encode(prompt) for prompt in prompts])

    def stats(self) -> EngineStats:
        """Hit rate, tokens cached and computed, pages, steps, padding waste, compiles."""
        return self._engine.stats()

    def flush_cache(self) -> None:
        """Drop all that is cached."""
        self._engine.flush_cache()

    def update_params(self, params: Any, *, on_update: OnUpdate = "continue") -> None:
        """Go on with new params of the same model; as `Engine.update_params`."""
        self._engine.update_params(params, on_update=on_update)

    def sleep(self) -> None:
        """Give the device memory of the KV pool to others, until `wake`; as `Engine.sleep`."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the memory back; as `Engine.wake`."""
        self._engine.wake()

    def save_cache(self, path: str | Path) -> int:
        """As `Engine.save_cache`."""
        return self._engine.save_cache(path)

    def load_cache(self, path: str | Path) -> int:
        """As `Engine.load_cache`."""
        return self._engine.load_cache(path)

    def close(self) -> None:
        """Give the memory back; the LLM is of no use afterwards."""
        self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> Sequence[int] | np.ndarray:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _encode_chat(self, messages: Sequence[Message]) -> np.ndarray:
        return self.tokenizer.encode_chat(messages)

    def _run(
        self,
        encoders: list[Callable[[], Any]],
        texts: list[str | None],
        sampling_params: list[SamplingParams],
        cache: str,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Add what can be served, step until it is done, and put outputs and refusals in the order of the prompts."""
        before = self._engine.unfinished
        places: dict[str, int] = {}
        stop_texts: list[list[StopText]] = [[] for _ in encoders]
        outputs: list[RequestOutput | None] = [None] * len(encoders)
        refusals: list[ValueError] = []

        def collect() -> None:
            for output in self._engine.step():
                place = places.get(output.request_id)
                if output.finished and place is not None:
                    outputs[place] = self._with_text(output, texts[place], stop_texts[place])

        try:
            for i, (encode, params) in enumerate(zip(encoders, sampling_params, strict=True)):
                try:
                    stop_texts[i] = self._stop_texts(params)
                    places[self._add(encode(), params, cache, stop_texts[i], collect)] = i
                except ValueError as refusal:
                    refusals.append(refusal)
                    outputs[i] = _refused(refusal, texts[i])
            if refusals and not places:
                raise refusals[0]
            with _ProgressBar(len(places), self._engine, shown=use_tqdm) as bar:
                while any(outputs[i] is None for i in places.values()):
                    collect()
                    bar.update(sum(outputs[i] is not None for i in places.values()))
        except BaseException:
            # Not by `places`: an interrupt may come before an id is entered there.
            for request_id in self._engine.unfinished - before:
                self._engine.abort(request_id)
            raise
        for refusal in refusals:
            _LOG.warning("a prompt was refused: %s", refusal)
        return [output for output in outputs if output is not None]

    def _add(
        self,
        token_ids: Any,
        sampling: SamplingParams,
        cache: str,
        stop_texts: list[StopText],
        step: Callable[[], None],
    ) -> str:
        """Add a request, if need be after steps that make room in a full queue."""
        while True:
            try:
                finish_check = _finish_check(stop_texts)
                return self._engine.add_request(token_ids, sampling, finish_check=finish_check, cache=cache)
            except QueueFull:
                step()

    def _stop_texts(self, sampling: SamplingParams) -> list[StopText]:
        """What looks for the stop strings in each sample of a request; empty where there are none."""
        if not sampling.stop:
            return []
        if self._tokenizer is None:
            raise ValueError(
                f"stop={sampling.stop!r} needs text, and this LLM has no tokenizer: LLM(..., tokenizer=...), or "
                "stop_token_ids"
            )
        include_stop, min_tokens = sampling.include_stop_str_in_output, sampling.min_tokens
        return [
            StopText(self._tokenizer, tuple(sampling.stop), include_stop=include_stop, min_tokens=min_tokens)
            for _ in range(sampling.n)
        ]

    def _with_text(self, output: RequestOutput, prompt: str | None, stop_texts: list[StopText]) -> RequestOutput:
        """A finished output with its text, cut where a stop string ended it."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return output
        if stop_texts:
            texts = [text.finish() for text in stop_texts]
        else:
            texts = [tokenizer.decode(completion.token_ids) for completion in output.outputs]

        def with_text(completion: CompletionOutput, text: str) -> CompletionOutput:
            logprobs = completion.logprobs and with_decoded_tokens(completion.logprobs, tokenizer)
            return dataclasses.replace(completion, text=text, logprobs=logprobs)

        completions = list(map(with_text, output.outputs, texts))
        prompt_logprobs = output.prompt_logprobs
        if prompt_logprobs is not None:
            entries = [entry for entry in prompt_logprobs if entry is not None]  # all but the first
            prompt_logprobs = [None, *with_decoded_tokens(entries, tokenizer)]
        return dataclasses.replace(output, outputs=completions, prompt=prompt, prompt_logprobs=prompt_logprobs)


class _ProgressBar:
    """Requests done, tokens a second and hit rate, on a terminal and only when the work takes long."""

    PATIENCE_S = 1.0

    def __init__(self, num_requests: int, engine: Engine, *, shown: bool) -> None:
        self._engine = engine
        self._num_requests = num_requests
        self._start_s = time.monotonic()
        self._before = engine.stats()
        self._bar: Progress | None = None
        self._shown = shown and sys.stderr.isatty()

    def __enter__(self) -> "_ProgressBar":
        return self

    def update(self, num_done: int) -> None:
        """Show `num_done` finished requests."""
        seconds_s = time.monotonic() - self._start_s
        if not self._shown or seconds_s < self.PATIENCE_S:
            return
        if self._bar is None:
            columns = TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}")
            self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._bar.add_task("generating", total=self._num_requests, rates="")
            self._bar.start()
        now, before = self._engine.stats(), self._before
        num_prompt_tokens = max(1, now.num_prompt_tokens - before.num_prompt_tokens)
        hit_rate = (now.num_cached_tokens - before.num_cached_tokens) / num_prompt_tokens
        tokens_per_s = (now.num_output_tokens - before.num_output_tokens) / seconds_s
        rates = f"{tokens_per_s:.0f} tokens/s, hit rate {hit_rate:.0%}"
        self._bar.update(self._bar.task_ids[0], completed=num_done, rates=rates)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _load_params(path: Path, dtype: str | None) -> tuple[ModelParams, frozenset[int]]:
    """(params of a checkpoint on the device, its end-of-sequence ids)."""
    dtype = dtype or default_dtype()
    with open_checkpoint(path) as checkpoint:
        family = family_for_hf_config(checkpoint.hf_config)
        config = family.parse_config(checkpoint.hf_config)
        specs = family.weight_specs(config)
        leaves = load_weights(checkpoint, specs, dtype, lambda _, array: jnp.asarray(array))
        weights: dict[Any, Any] = {}
        for spec, leaf in zip(specs, leaves, strict=True):
            if leaf is not None:
                _put_at(weights, spec.path, leaf)
        return make_params(config, weights), checkpoint.eos_token_ids


def _put_at(tree: dict[Any, Any], path: tuple[str | int, ...], leaf: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = leaf


def _finish_check(stop_texts: Sequence[StopText]) -> FinishCheck | None:
    return (lambda index, new_ids: stop_texts[index].push(new_ids)) if stop_texts else None


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; one list of ints, or one flat array, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence | np.ndarray):
        raise TypeError(f"prompts are a {type(prompts).__name__}; give text, token ids, or a list of either")
    listed: list[Any] = list(prompts)
    if listed and not any(isinstance(prompt, str | Sequence | np.ndarray) for prompt in listed):
        return [listed if isinstance(prompts, Sequence) else prompts]
    return listed


def _one_each(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} SamplingParams for {num_prompts} prompts; give one for all, or one each")
    return list(params)


def _refused(refusal: ValueError, prompt: str | None) -> RequestOutput:
    return RequestOutput(
        request_id="", prompt_token_ids=[], cached_tokens=0, finished=True, prompt=prompt, error=str(refusal)
    )
