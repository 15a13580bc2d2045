"""Runner: holds params and pool, compiles one step a bucket, and turns plans into tokens."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from radix_jax.arrays import KVPool, PageCopies, StepInputs
from radix_jax.attention_backends import AttentionFn, registered_backends
from radix_jax.functional import decode, init_kv, prefill
from radix_jax.models.base import ModelParams
from radix_jax.pallas_kernels.paged_attention import copy_pages
from radix_jax.plan import Bucket, StepPlan
from radix_jax.runner.compile_ledger import CompileLedger, CompileReason
from radix_jax.runner.pack import Packer, buffer_len, empty_copies, pack_copies, split
from radix_jax.runner.sampling import sample
from radix_jax.sharding import make_mesh, named_sharding

Tokens = Int32[jax.Array, " R"]
StepOutputs = tuple[KVPool, Tokens]


@dataclass(frozen=True)
class StepHandle:
    """A step that was sent to the device.

    tokens: what its rows sample, still on the device; None: none of them does.
    """

    tokens: Int32[Any, " R"] | None
    num_rows: int


def prefill_step(
    params: ModelParams,
    kv: KVPool,
    last_tokens: Tokens,
    buffer: Int32[jax.Array, " N"],
    *,
    bucket: Bucket,
    attention_backend: str | AttentionFn = "auto",
) -> StepOutputs:
    """`functional.prefill`, then one sampled token a row, as last_tokens [R >= B] of the next step, 0 behind the rows.

    buffer: a packed step of the bucket. The engine donates `kv`.
    """
    inputs, sampling = split(buffer, bucket)
    kv, logits = prefill(params, kv, _resolve(inputs, last_tokens), attention_backend=attention_backend)
    return kv, _as_last_tokens(sample(logits, sampling), last_tokens)


def decode_step(
    params: ModelParams,
    kv: KVPool,
    last_tokens: Tokens,
    buffer: Int32[jax.Array, " N"],
    *,
    bucket: Bucket,
    attention_backend: str | AttentionFn = "auto",
) -> StepOutputs:
    """`functional.decode`, then as `prefill_step`."""
    inputs, sampling = split(buffer, bucket)
    kv, logits = decode(params, kv, _resolve(inputs, last_tokens), attention_backend=attention_backend)
    return kv, _as_last_tokens(sample(logits, sampling), last_tokens)


def _resolve(inputs: StepInputs, last_tokens: Tokens) -> StepInputs:
    """Put the tokens in that the step before sampled."""
    sources = jnp.asarray(inputs.token_src)
    token_ids = jnp.where(sources < 0, jnp.asarray(inputs.token_ids), last_tokens[jnp.maximum(sources, 0)])
    return dataclasses.replace(inputs, token_ids=token_ids, token_src=None)


def _as_last_tokens(tokens: Int32[jax.Array, " B"], last_tokens: Tokens) -> Tokens:
    """One length for all buckets, so that any step can follow any other."""
    return jnp.zeros_like(last_tokens).at[: tokens.shape[0]].set(tokens)


def copy_step(kv: KVPool, copies: PageCopies, *, num_layers: int) -> KVPool:
    """The pool with pages copied, before the step that reads them. The engine donates `kv`."""
    return copy_pages(kv, jnp.asarray(copies.sources), jnp.asarray(copies.targets), num_layers=num_layers)


def compiler_options(platform: str) -> dict[str, str | bool]:
    """What XLA is told when it compiles a step for "gpu", "tpu" or "cpu"."""
    # XLA for GPUs takes a pool that custom kernels update in place for several pools, and would compute values twice to
    # save memory that the program never takes.
    return {"xla_disable_hlo_passes": "rematerialization"} if platform == "gpu" else {}


class Runner:
    """Device side of an engine: params, pool, and one compiled program a bucket.

    Not thread-safe. After a step that failed or was interrupted the pool may be gone; `renew_pool` then makes another.
    """

    def __init__(
        self,
        params: ModelParams,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        kv_dtype: str,
        attention_backend: str,
    ) -> None:
        mesh = make_mesh()
        self._replicated = named_sharding(mesh)
        self._kv_sharding = named_sharding(mesh, "replicated", "replicated", "kv")
        self._params = jax.device_put(params, self._replicated)
        self._num_pages = num_pages
        self._packer = Packer(page_size=page_size, num_slots=params.config.num_layers * num_pages * page_size)
        # The function itself, so that all steps run the same one, whatever takes its name later.
        backend = registered_backends().get(attention_backend, attention_backend)
        self._new_pool = functools.partial(
            init_kv, params.config, num_pages, page_size, kv_dtype, attention_backend=backend
        )
        self._kv = self._empty_pool()
        self._max_rows = max_rows
        self._last_tokens = self._no_tokens()
        self._steps = {
            "prefill": functools.partial(prefill_step, attention_backend=backend),
            "decode": functools.partial(decode_step, attention_backend=backend),
        }
        self._compiled: dict[Bucket, Callable[..., Any]] = {}
        self.ledger = CompileLedger()

    @property
    def params(self) -> ModelParams:
        """The params, on the device."""
        return self._params

    @property
    def kv(self) -> KVPool:
        """The pool as it is now; the next step donates it."""
        return self._kv

    def compile(self, bucket: Bucket, reason: CompileReason) -> Callable[..., Any]:
        """The compiled program of a bucket, made on first use."""
        if bucket not in self._compiled:
            args = self._abstract_args(bucket)
            step = self._jitted(bucket)
            self._compiled[bucket] = self.ledger.timed(bucket, reason, lambda: self._build(step, args))
        return self._compiled[bucket]

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Send a step to the device, behind those sent before, and don't wait for it.

        Pages are copied first, where the plan has copies, in one call of their own.
        """
        step = self.compile(plan.bucket, "first use")
        if plan.copies:
            copy = self.compile(plan.bucket.copies, "first use")
            self._kv = copy(self._kv, jax.device_put(pack_copies(plan, self._num_pages), self._replicated))
        buffer = jax.device_put(self._packer.pack(plan).buffer, self._replicated)
        self._kv, self._last_tokens = step(self._params, self._kv, self._last_tokens, buffer)
        return StepHandle(self._last_tokens if plan.samples else None, len(plan.rows))

    def read(self, handle: StepHandle) -> Int32[np.ndarray, " B"]:
        """The token that each row of a step samples; 0 for rows that sample none. Waits for the step.

        One explicit device-to-host read, none where no row samples.
        """
        if handle.tokens is None:
            return np.zeros(handle.num_rows, np.int32)
        return jax.device_get(handle.tokens)[: handle.num_rows]

    def renew_pool(self) -> None:
        """Put a new, empty pool in the place of one that a failed step may have lost or left half written."""
        if not self._kv.is_deleted():
            self._kv.delete()
        self._kv = self._empty_pool()
        self._last_tokens = self._no_tokens()

    def close(self) -> None:
        """Give the pool's memory back and let go of params and compiled steps; a second call changes nothing."""
        if not self._kv.is_deleted():
            self._kv.delete()
        self._compiled.clear()
        if hasattr(self, "_params"):
            del self._params

    def _no_tokens(self) -> Tokens:
        return jax.device_put(np.zeros(self._max_rows, np.int32), self._replicated)

    def _empty_pool(self) -> KVPool:
        return jax.jit(self._new_pool, out_shardings=self._kv_sharding)()

    @staticmethod
    def _build(step: jax.stages.Wrapped, args: tuple[Any, ...]) -> jax.stages.Compiled:
        return step.lower(*args).compile(compiler_options=compiler_options(jax.default_backend()))

    def _jitted(self, bucket: Bucket) -> jax.stages.Wrapped:
        if bucket.kind == "copy":
            return jax.jit(functools.partial(copy_step, num_layers=self._params.config.num_layers), donate_argnums=0)
        return jax.jit(functools.partial(self._steps[bucket.kind], bucket=bucket), donate_argnums=1)

    def _abstract_args(self, bucket: Bucket) -> tuple[Any, ...]:
        """Shapes of all that a bucket's program takes."""
        kv = jax.ShapeDtypeStruct(self._kv.shape, self._kv.dtype, sharding=self._kv.sharding)
        if bucket.kind == "copy":
            return kv, self._abstract(empty_copies(bucket.num_rows, self._num_pages))
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._params)
        last_tokens = self._abstract(self._last_tokens)
        return params, kv, last_tokens, self._abstract(np.empty(buffer_len(bucket), np.int32))

    def _abstract(self, inputs: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated), inputs)
