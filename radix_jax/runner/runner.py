"""Runner: holds params and pool, compiles one step a bucket, and turns plans into tokens."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, Shaped

from radix_jax.arrays import KVPool, PageCopies, SamplerState, StepInputs
from radix_jax.attention_backends import AttentionFn, registered_backends
from radix_jax.functional import decode, init_kv, last_places, logits_of, prefill_hidden
from radix_jax.models.base import ModelParams
from radix_jax.pallas_kernels.paged_attention import copy_pages, read_pages, write_pages
from radix_jax.plan import Bucket, PromptLogprobs, StepPlan, TokenLogprobs
from radix_jax.runner.compile_ledger import CompileLedger, CompileReason
from radix_jax.runner.logprobs import prompt_logprobs
from radix_jax.runner.pack import Packer, buffer_len, empty_copies, pack_copies, split
from radix_jax.runner.sampler_state import (
    empty_sampler_row,
    empty_sampler_state,
    fill_sampler_row,
    needs_sampler_row,
    sampler_row,
)
from radix_jax.runner.sampling import Sampled, sample
from radix_jax.sharding import make_mesh, named_sharding

Tokens = Int32[jax.Array, " R"]
StepOutputs = tuple[KVPool, SamplerState, Tokens, TokenLogprobs, PromptLogprobs | None]
# The program that fills a request's row of SamplerState.
SAMPLER_BUCKET = Bucket("sampler", 0, 1, 0)
CARRIED_BYTES = 32 * 1024**2  # of pages that are read or written in one call


@dataclass(frozen=True)
class StepHandle:
    """A step that was sent to the device.

    tokens: what its rows sample, still on the device; None: none of them does. logprobs: of those tokens; None: no row
        asks. prompt_logprobs: of the tokens behind those computed; None: no row asks.
    """

    tokens: Int32[Any, " R"] | None
    num_rows: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class StepTokens(NamedTuple):
    """What the rows of a step sampled, on the host: a token each, 0 for rows that sample none; and log-probabilities of
    those and of the prompts' tokens, where any row asks."""

    token_ids: Int32[np.ndarray, " B"]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


def prefill_step(
    params: ModelParams,
    kv: KVPool,
    state: SamplerState,
    last_tokens: Tokens,
    buffer: Int32[jax.Array, " N"],
    *,
    bucket: Bucket,
    attention_backend: str | AttentionFn = "auto",
) -> StepOutputs:
    """`functional.prefill`, then one sampled token a row, as last_tokens [R >= B] of the next step, 0 behind the rows,
    and log-probabilities of those and of the prompts' tokens.

    buffer: a packed step of the bucket. The engine donates `kv` and `state`.
    """
    packed, sampling = split(buffer, bucket)
    inputs = _resolve(packed, last_tokens)
    kv, hidden = prefill_hidden(params, kv, inputs, attention_backend=attention_backend)
    head = functools.partial(logits_of, params)
    of_prompts = prompt_logprobs(hidden, packed, head, params.config.vocab_size)
    return *_outputs(kv, sample(head(hidden[last_places(inputs)]), sampling, state), last_tokens), of_prompts


def decode_step(
    params: ModelParams,
    kv: KVPool,
    state: SamplerState,
    last_tokens: Tokens,
    buffer: Int32[jax.Array, " N"],
    *,
    bucket: Bucket,
    attention_backend: str | AttentionFn = "auto",
) -> StepOutputs:
    """`functional.decode`, then as `prefill_step`."""
    inputs, sampling = split(buffer, bucket)
    kv, logits = decode(params, kv, _resolve(inputs, last_tokens), attention_backend=attention_backend)
    return *_outputs(kv, sample(logits, sampling, state), last_tokens), None


def _resolve(inputs: StepInputs, last_tokens: Tokens) -> StepInputs:
    """Put the tokens in that the step before sampled."""
    sources = jnp.asarray(inputs.token_src)
    token_ids = jnp.where(sources < 0, jnp.asarray(inputs.token_ids), last_tokens[jnp.maximum(sources, 0)])
    return dataclasses.replace(inputs, token_ids=token_ids, token_src=None, next_ids=None, num_prompt_logprobs=None)


def _outputs(kv: KVPool, sampled: Sampled, last_tokens: Tokens) -> tuple[KVPool, SamplerState, Tokens, TokenLogprobs]:
    """Tokens of one length for all buckets, so that any step can follow any other."""
    tokens = jnp.zeros_like(last_tokens).at[: sampled.tokens.shape[0]].set(sampled.tokens)
    return kv, sampled.state, tokens, sampled.logprobs


def copy_step(kv: KVPool, copies: PageCopies, *, num_layers: int) -> KVPool:
    """The pool with pages copied, before the step that reads them. The engine donates `kv`."""
    return copy_pages(kv, jnp.asarray(copies.sources), jnp.asarray(copies.targets), num_layers=num_layers)


def compiler_options(platform: str) -> dict[str, str | bool]:
    """What XLA is told when it compiles a step for "gpu", "tpu" or "cpu"."""
    # XLA for GPUs takes a pool that custom kernels update in place for several pools, and would compute values twice to
    # save memory that the program never takes.
    return {"xla_disable_hlo_passes": "rematerialization"} if platform == "gpu" else {}


class Runner:
    """Device side of an engine: params, pool, sampler state, and one compiled program a bucket.

    num_seats: requests that run at once. max_rows: rows of the largest bucket.

    Not thread-safe. After a step that failed or was interrupted the pool may be gone; `renew_pool` then makes another.
    Asleep, it has neither pool nor sampler state, and no step may be sent.
    """

    def __init__(
        self,
        params: ModelParams,
        *,
        num_pages: int,
        page_size: int,
        num_seats: int,
        max_rows: int,
        kv_dtype: str,
        attention_backend: str,
    ) -> None:
        mesh = make_mesh()
        self._replicated = named_sharding(mesh)
        self._kv_sharding = named_sharding(mesh, "replicated", "replicated", "kv")
        self._params, self._weight_version = self.place(params), 0
        self._is_asleep = False
        self._num_pages = num_pages
        self._packer = Packer(page_size=page_size, num_slots=params.config.num_layers * num_pages * page_size)
        # The function itself, so that all steps run the same one, whatever takes its name later.
        backend = registered_backends().get(attention_backend, attention_backend)
        # Jitted once, so that a pool that is made anew compiles nothing.
        self._new_pool = jax.jit(
            functools.partial(init_kv, params.config, num_pages, page_size, kv_dtype, attention_backend=backend),
            out_shardings=self._kv_sharding,
        )
        self._vocab_size = params.config.vocab_size
        self._new_state = jax.jit(
            functools.partial(empty_sampler_state, num_seats, self._vocab_size), out_shardings=self._replicated
        )
        self._kv, self._state = self._new_pool(), self._new_state()
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
    def weight_version(self) -> int:
        """How often the params were replaced."""
        return self._weight_version

    @property
    def is_asleep(self) -> bool:
        """Whether the memory of pool and sampler state is given away."""
        return self._is_asleep

    @property
    def kv(self) -> KVPool:
        """The pool as it is now; the next step donates it."""
        return self._kv

    @property
    def sampler_state(self) -> SamplerState:
        """The sampler's state as it is now; the next step donates it."""
        return self._state

    def compile(self, bucket: Bucket, reason: CompileReason) -> Callable[..., Any]:
        """The compiled program of a bucket, made on first use."""
        if bucket not in self._compiled:
            args = self._abstract_args(bucket)
            step = self._jitted(bucket)
            self._compiled[bucket] = self.ledger.timed(bucket, reason, lambda: self._build(step, args))
        return self._compiled[bucket]

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Send a step to the device, behind those sent before, and don't wait for it.

        Pages are copied first, where the plan has copies, in one call of their own; and the sampler's row of each
        request that needs one is filled before its first token since it was let in.
        """
        step = self.compile(plan.bucket, "first use")
        if plan.copies:
            copy = self.compile(plan.bucket.copies, "first use")
            self._kv = copy(self._kv, jax.device_put(pack_copies(plan, self._num_pages), self._replicated))
        for row in filter(needs_sampler_row, plan.rows[: plan.num_prompt_rows]):
            fill = self.compile(SAMPLER_BUCKET, "first use")
            self._state = fill(self._state, jax.device_put(sampler_row(row, self._vocab_size), self._replicated))
        packed = self._packer.pack(plan)
        buffer = jax.device_put(packed.buffer, self._replicated)
        self._kv, self._state, self._last_tokens, logprobs, of_prompts = step(
            self._params, self._kv, self._state, self._last_tokens, buffer
        )
        return StepHandle(
            self._last_tokens if plan.samples else None,
            len(plan.rows),
            logprobs if (packed.sampling.num_logprobs >= 0).any() else None,
            of_prompts if plan.asks_prompt_logprobs else None,
        )

    def read(self, handle: StepHandle) -> StepTokens:
        """What the rows of a step sample. Waits for the step.

        One explicit device-to-host read, none where no row samples or asks.
        """
        if handle.tokens is None and handle.prompt_logprobs is None:
            return StepTokens(np.zeros(handle.num_rows, np.int32))
        tokens, *logprobs = jax.device_get((handle.tokens, handle.logprobs, handle.prompt_logprobs))
        none = np.zeros(handle.num_rows, np.int32)
        return StepTokens(none if tokens is None else tokens[: handle.num_rows], *logprobs)

    def place(self, params: Any) -> Any:
        """Params, or any tree of them, on the device as the compiled steps take them; what is there is not copied."""
        return jax.device_put(params, self._replicated)

    def replace_params(self, params: ModelParams) -> None:
        """Steps that are sent from here on run on these, which `place` gave: leaf by leaf like those before."""
        self._params, self._weight_version = params, self._weight_version + 1

    @property
    def num_carried_pages(self) -> int:
        """Pages that `read_pages` and `write_pages` carry in one call."""
        page_bytes = self._params.config.num_layers * math.prod(self._kv.shape[1:]) * self._kv.dtype.itemsize
        return min(max(1, CARRIED_BYTES // page_bytes), self._num_pages)

    def read_pages(self, pages: Int32[np.ndarray, " C"]) -> Shaped[np.ndarray, "C L K W"]:
        """What up to num_carried_pages pages hold, in the pool's dtype, behind the steps sent so far."""
        num_places = self.num_carried_pages
        read = self.compile(Bucket("read", 0, num_places, 1), "first use")
        places = np.zeros(num_places, np.int32)
        places[: len(pages)] = pages
        return np.asarray(jax.device_get(read(self._kv, jax.device_put(places, self._replicated))))[: len(pages)]

    def write_pages(self, pages: Int32[np.ndarray, " C"], values: Shaped[np.ndarray, "C L K W"]) -> None:
        """Put `values`, of the pool's dtype, into up to num_carried_pages pages."""
        num_places = self.num_carried_pages
        write = self.compile(Bucket("write", 0, num_places, 1), "first use")
        places = np.full(num_places, self._num_pages, np.int32)  # padding is dropped
        places[: len(pages)] = pages
        padded = np.zeros((num_places, *values.shape[1:]), values.dtype)
        padded[: len(pages)] = values
        self._kv = write(self._kv, *jax.device_put((places, padded), self._replicated))

    def renew_pool(self) -> None:
        """Put a new, empty pool in the place of one that a failed step may have lost or left half written; and a new
        sampler state. Asleep: nothing."""
        if self._is_asleep:
            return
        self._delete_pool()
        self._kv, self._state = self._new_pool(), self._new_state()
        self._last_tokens = self._no_tokens()

    def sleep(self) -> None:
        """Give the memory of pool and sampler state back; a second call changes nothing."""
        self._is_asleep = True
        self._delete_pool()

    def wake(self) -> None:
        """Make a new, empty pool and sampler state; awake, nothing."""
        if self._is_asleep:
            self._kv, self._state = self._new_pool(), self._new_state()
            self._is_asleep = False

    def close(self) -> None:
        """Give the pool's memory back and let go of params and compiled steps; a second call changes nothing."""
        self._delete_pool()
        self._compiled.clear()
        if hasattr(self, "_params"):
            del self._params

    def _delete_pool(self) -> None:
        for array in jax.tree.leaves((self._kv, self._state)):
            if not array.is_deleted():
                array.delete()

    def _no_tokens(self) -> Tokens:
        return jax.device_put(np.zeros(self._max_rows, np.int32), self._replicated)

    @staticmethod
    def _build(step: jax.stages.Wrapped, args: tuple[Any, ...]) -> jax.stages.Compiled:
        return step.lower(*args).compile(compiler_options=compiler_options(jax.default_backend()))

    def _jitted(self, bucket: Bucket) -> jax.stages.Wrapped:
        if bucket.kind == "copy":
            return jax.jit(functools.partial(copy_step, num_layers=self._params.config.num_layers), donate_argnums=0)
        if bucket.kind in ("read", "write"):
            carry = read_pages if bucket.kind == "read" else write_pages
            donated = 0 if bucket.kind == "write" else ()
            return jax.jit(functools.partial(carry, num_layers=self._params.config.num_layers), donate_argnums=donated)
        if bucket.kind == "sampler":
            return jax.jit(fill_sampler_row, donate_argnums=0)
        return jax.jit(functools.partial(self._steps[bucket.kind], bucket=bucket), donate_argnums=(1, 2))

    def _abstract_args(self, bucket: Bucket) -> tuple[Any, ...]:
        """Shapes of all that a bucket's program takes."""
        kv = jax.ShapeDtypeStruct(self._kv.shape, self._kv.dtype, sharding=self._kv.sharding)
        if bucket.kind == "copy":
            return kv, self._abstract(empty_copies(bucket.num_rows, self._num_pages))
        if bucket.kind in ("read", "write"):
            num_layers, num_pages = self._params.config.num_layers, bucket.num_rows
            carried = jax.ShapeDtypeStruct((num_pages, num_layers, *kv.shape[1:]), kv.dtype)
            pages = jax.ShapeDtypeStruct((num_pages,), jnp.int32)
            return kv, *self._abstract((pages,) if bucket.kind == "read" else (pages, carried))
        state = self._abstract(self._state)
        if bucket.kind == "sampler":
            return state, self._abstract(empty_sampler_row(self._vocab_size))
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._params)
        last_tokens = self._abstract(self._last_tokens)
        return params, kv, state, last_tokens, self._abstract(np.empty(buffer_len(bucket), np.int32))

    def _abstract(self, inputs: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated), inputs)
