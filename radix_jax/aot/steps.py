"""An engine's steps, compiled for a target from a model's config alone: no weights, no device."""

import functools
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from radix_jax.aot.compiling import CompiledProgram, compile_for
from radix_jax.aot.devices import AnyTarget
from radix_jax.aot.targets import Target
from radix_jax.aot.tpu_compiling import TpuProgram, compile_for_tpu
from radix_jax.aot.tpu_targets import TpuTarget
from radix_jax.config import EngineConfig
from radix_jax.functional import init_kv
from radix_jax.models.base import ModelParams
from radix_jax.models.registry import family_for_config
from radix_jax.plan import Bucket
from radix_jax.runner.pack import buffer_len
from radix_jax.runner.resolve import tpu_limits
from radix_jax.runner.runner import compiler_options, decode_step, prefill_step
from radix_jax.runner.sampler_state import empty_sampler_state
from radix_jax.scheduler.buckets import Buckets

# What "auto" is where the kernels run.
_KERNELS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
_STEPS = {"prefill": prefill_step, "decode": decode_step}


@dataclass(frozen=True)
class StepSettings:
    """What of an engine's settings shapes its steps, all filled in."""

    page_size: int
    max_model_len: int
    max_running_requests: int
    max_prefill_tokens: int
    dtype: str
    kv_dtype: str
    attention_backend: str

    @property
    def buckets(self) -> Buckets:
        """The engine's padded shapes."""
        return Buckets(
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            max_running_requests=self.max_running_requests,
            max_prefill_tokens=self.max_prefill_tokens,
        )

    @property
    def largest(self) -> tuple[Bucket, Bucket]:
        """The largest decode bucket and the largest prefill bucket."""
        return self._largest("decode"), self._largest("prefill")

    def _largest(self, kind: str) -> Bucket:
        return max((bucket for bucket in self.buckets.all() if bucket.kind == kind), key=_size)


def _size(bucket: Bucket) -> tuple[int, int]:
    return bucket.num_tokens, bucket.num_rows


def settings_of(config: EngineConfig, model: Any, platform: str = "gpu") -> StepSettings:
    """An engine's settings on a "gpu" or "tpu" that has the kernels: bfloat16, and the model's own context, unless told
    otherwise.

    Raises:
        ValueError: max_model_len or pages that model or kernels do not have, or a backend that interprets them or is
            another platform's.
    """
    dtype = config.dtype or "bfloat16"
    backend = _KERNELS[platform] if config.attention_backend == "auto" else config.attention_backend
    if backend in _KERNELS.values() and backend != _KERNELS[platform]:
        raise ValueError(f"attention_backend={backend!r} does not run on a {platform.upper()}; give auto or xla")
    longest = most = model.max_position_embeddings
    if backend == "pallas_tpu":
        backend, most = tpu_limits(config, model, dtype)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(f"max_model_len={config.max_model_len} exceeds the {longest} positions of the model; lower it")
    if config.attention_backend in ("pallas_interpret", "pallas_tpu_interpret"):
        raise ValueError(
            f"attention_backend={config.attention_backend!r} interprets the kernels on the host; give auto"
        )
    return StepSettings(
        page_size=config.page_size,
        max_model_len=config.max_model_len or most,
        max_running_requests=config.max_running_requests,
        max_prefill_tokens=config.max_prefill_tokens,
        dtype=dtype,
        kv_dtype=config.kv_dtype or dtype,
        attention_backend=backend,
    )


def abstract_params(config: Any, dtype: str) -> ModelParams:
    """Params of a model as abstract arrays of `dtype`, which take no memory."""
    weights: dict[Any, Any] = {}
    for spec in family_for_config(config).weight_specs(config):
        if spec.path == ("head",) and config.tie_word_embeddings:
            continue
        shape = spec.shape[::-1] if spec.transpose else spec.shape
        inner = functools.reduce(lambda tree, part: tree.setdefault(part, {}), spec.path[:-1], weights)
        inner[spec.path[-1]] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return jax.eval_shape(lambda given: ModelParams(weights=given, head=given.get("head"), config=config), weights)


@overload
def compile_step(
    target: Target, params: ModelParams, bucket: Bucket, settings: StepSettings, num_pages: int
) -> CompiledProgram: ...
@overload
def compile_step(
    target: TpuTarget, params: ModelParams, bucket: Bucket, settings: StepSettings, num_pages: int
) -> TpuProgram: ...
@overload
def compile_step(
    target: AnyTarget, params: ModelParams, bucket: Bucket, settings: StepSettings, num_pages: int
) -> CompiledProgram | TpuProgram: ...
def compile_step(
    target: AnyTarget, params: ModelParams, bucket: Bucket, settings: StepSettings, num_pages: int
) -> CompiledProgram | TpuProgram:
    """The step of a bucket over a pool of `num_pages` pages a layer, as the engine compiles it, pool and sampler state
    donated.

    On a TPU it is the step of one device, with the whole model on it.
    """
    backend = settings.attention_backend
    kv = jax.eval_shape(
        lambda: init_kv(params.config, num_pages, settings.page_size, settings.kv_dtype, attention_backend=backend)
    )
    state = jax.eval_shape(lambda: empty_sampler_state(settings.max_running_requests, params.config.vocab_size))
    last_tokens = jax.ShapeDtypeStruct((settings.buckets.max_rows,), np.int32)
    buffer = jax.ShapeDtypeStruct((buffer_len(bucket),), np.int32)
    step = functools.partial(_STEPS[bucket.kind], bucket=bucket, attention_backend=backend)
    args = params, kv, state, last_tokens, buffer
    if isinstance(target, TpuTarget):
        return compile_for_tpu(target, step, *args, donate_argnums=(1, 2), compiler_options=compiler_options("tpu"))
    return compile_for(target, step, *args, donate_argnums=(1, 2), compiler_options=compiler_options("gpu"))
