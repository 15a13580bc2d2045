"""Runner: holds params and pool, compiles one step a bucket, and turns plans into tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from radix_jax.arrays import KVPool, PageCopies, SamplingInputs, StepInputs
from radix_jax.functional import decode, init_kv, prefill
from radix_jax.models.base import ModelParams
from radix_jax.pallas_kernels.paged_attention import copy_pages
from radix_jax.plan import Bucket, StepPlan
from radix_jax.runner.compile_ledger import CompileLedger, CompileReason
from radix_jax.runner.pack import (
    empty_copies,
    empty_inputs,
    empty_sampling,
    pack_copies,
    pack_inputs,
    pack_sampling,
)
from radix_jax.runner.sampling import sample
from radix_jax.sharding import make_mesh, named_sharding

StepOutputs = tuple[KVPool, Int32[jax.Array, " B"]]


def prefill_step(
    params: ModelParams, kv: KVPool, inputs: StepInputs, sampling: SamplingInputs, *, attention_backend: str = "auto"
) -> StepOutputs:
    """`functional.prefill`, then one sampled token a row [B]. The engine donates `kv`."""
    kv, logits = prefill(params, kv, inputs, attention_backend=attention_backend)
    return kv, sample(logits, sampling)


def decode_step(
    params: ModelParams, kv: KVPool, inputs: StepInputs, sampling: SamplingInputs, *, attention_backend: str = "auto"
) -> StepOutputs:
    """`functional.decode`, then one sampled token a row [B]. The engine donates `kv`."""
    kv, logits = decode(params, kv, inputs, attention_backend=attention_backend)
    return kv, sample(logits, sampling)


def copy_step(kv: KVPool, copies: PageCopies, *, num_layers: int) -> KVPool:
    """The pool with pages copied, before the step that reads them. The engine donates `kv`."""
    return copy_pages(kv, jnp.asarray(copies.sources), jnp.asarray(copies.targets), num_layers=num_layers)


class Runner:
    """Device side of an engine: params, pool, and one compiled program a bucket.

    Not thread-safe. After a step that failed or was interrupted the pool may be gone; `renew_pool` then makes another.
    """

    def __init__(
        self, params: ModelParams, *, num_pages: int, page_size: int, kv_dtype: str, attention_backend: str
    ) -> None:
        mesh = make_mesh()
        self._replicated = named_sharding(mesh)
        self._kv_sharding = named_sharding(mesh, "replicated", "replicated", "kv")
        self._params = jax.device_put(params, self._replicated)
        self._page_size = page_size
        self._num_pages = num_pages
        self._num_slots = params.config.num_layers * num_pages * page_size
        self._new_pool = functools.partial(init_kv, params.config, num_pages, page_size, kv_dtype)
        self._kv = self._empty_pool()
        self._steps = {
            "prefill": jax.jit(functools.partial(prefill_step, attention_backend=attention_backend), donate_argnums=1),
            "decode": jax.jit(functools.partial(decode_step, attention_backend=attention_backend), donate_argnums=1),
            "copy": jax.jit(functools.partial(copy_step, num_layers=params.config.num_layers), donate_argnums=0),
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
            step = self._steps[bucket.kind]
            self._compiled[bucket] = self.ledger.timed(bucket, reason, lambda: step.lower(*args).compile())
        return self._compiled[bucket]

    def run(self, plan: StepPlan) -> Int32[np.ndarray, " B"]:
        """The token that each of the plan's rows samples; 0 for rows that sample none.

        Pages are copied first, where the plan has copies, in one call of their own. One explicit device-to-host read,
        none where no row samples.
        """
        step = self.compile(plan.bucket, "first use")
        if plan.copies:
            copy = self.compile(plan.bucket.copies, "first use")
            self._kv = copy(self._kv, jax.device_put(pack_copies(plan, self._num_pages), self._replicated))
        inputs = pack_inputs(plan, page_size=self._page_size, num_slots=self._num_slots)
        sampling = pack_sampling(plan)
        self._kv, tokens = step(self._params, self._kv, *jax.device_put((inputs, sampling), self._replicated))
        if not any(row.samples for row in plan.rows):
            return np.zeros(len(plan.rows), np.int32)
        return jax.device_get(tokens)[: len(plan.rows)]

    def renew_pool(self) -> None:
        """Put a new, empty pool in the place of one that a failed step may have lost or left half written."""
        if not self._kv.is_deleted():
            self._kv.delete()
        self._kv = self._empty_pool()

    def close(self) -> None:
        """Give the pool's memory back and let go of params and compiled steps; a second call changes nothing."""
        if not self._kv.is_deleted():
            self._kv.delete()
        self._compiled.clear()
        if hasattr(self, "_params"):
            del self._params

    def _empty_pool(self) -> KVPool:
        return jax.jit(self._new_pool, out_shardings=self._kv_sharding)()

    def _abstract_args(self, bucket: Bucket) -> tuple[Any, ...]:
        """Shapes of all that a bucket's program takes."""
        kv = jax.ShapeDtypeStruct(self._kv.shape, self._kv.dtype, sharding=self._kv.sharding)
        if bucket.kind == "copy":
            return kv, self._abstract(empty_copies(bucket.num_rows, self._num_pages))
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._params)
        return params, kv, *self._abstract((empty_inputs(bucket), empty_sampling(bucket.num_rows)))

    def _abstract(self, inputs: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated), inputs)
