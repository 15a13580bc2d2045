"""The pure core: `init_kv`, `prefill`, `decode`. The engine runs exactly these, and so can any other JAX code.

    kv = init_kv(config, num_pages, page_size, dtype)
    kv, logits = jax.jit(prefill, donate_argnums=1)(params, kv, inputs)     # ragged rows, any number of tokens a row
    kv, logits = jax.jit(decode, donate_argnums=1)(params, kv, inputs)      # one token a row

Both write the K and V of the new tokens into the pool, attend over the pages of each row, and return the logits of each
row's last token. Shapes are static, lengths are data. Letters as in `radix_jax.arrays`.
"""

import functools

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool, StepInputs
from radix_jax.attention_backends import AttentionFn
from radix_jax.models.base import ModelConfig, ModelParams
from radix_jax.models.layers import linear
from radix_jax.models.registry import family_for_config
from radix_jax.pallas_kernels.paged_attention import pool_width, write_and_attend

# Slots are int32 and padding slots lie past the pool's end, a layer's offset further still.
MAX_SLOTS = 2**30


def kv_width(config: ModelConfig, attention_backend: str | AttentionFn = "auto") -> int:
    """W: lanes that the K and V of one token take in one layer, 2 * G * H; the TPU kernels need a multiple of 128."""
    return pool_width(config.num_kv_heads, config.head_dim, attention_backend)


def init_kv(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: str = "float32",
    *,
    attention_backend: str | AttentionFn = "auto",
) -> KVPool:
    """An empty pool [num_layers * num_pages, page_size, W] of `dtype`; page 0 of each layer is the null page.

    attention_backend: that of the steps which use the pool.

    Raises:
        ValueError: fewer than 2 pages (one usable), or more slots than int32 can name.
    """
    if num_pages < 2 or page_size < 1:
        raise ValueError(
            f"num_pages={num_pages}, page_size={page_size}: a pool needs 2 pages (0 is the null page) of 1"
        )
    if config.num_layers * num_pages * page_size > MAX_SLOTS:
        raise ValueError(
            f"{config.num_layers} layers x {num_pages} pages x {page_size} tokens exceed {MAX_SLOTS} slots; "
            "lower num_pages"
        )
    return jnp.zeros((config.num_layers * num_pages, page_size, kv_width(config, attention_backend)), dtype)


def prefill(
    params: ModelParams, kv: KVPool, inputs: StepInputs, *, attention_backend: str | AttentionFn = "auto"
) -> tuple[KVPool, Float32[jax.Array, "B V"]]:
    """Compute ragged rows: row b's tokens are [cu_q_lens[b], cu_q_lens[b + 1]) of the flat T, after a cached prefix of
    any length. Returns (kv, logits of each row's last token). Logits of padding rows are undefined.

    Raises:
        AssertionError: a pool of another model, or shapes that don't fit each other.
    """
    kv, hidden = prefill_hidden(params, kv, inputs, attention_backend=attention_backend)
    return kv, logits_of(params, hidden[last_places(inputs)])


def prefill_hidden(
    params: ModelParams, kv: KVPool, inputs: StepInputs, *, attention_backend: str | AttentionFn = "auto"
) -> tuple[KVPool, Float[jax.Array, "T D"]]:
    """As `prefill`, up to what the head takes, of every token: `logits_of` is the rest."""
    return _forward(params, kv, inputs, inputs.token_ids.shape[0], attention_backend)


def last_places(inputs: StepInputs) -> Int32[jax.Array, " B"]:
    """Where in the flat tokens each row's last one is."""
    return jnp.maximum(jnp.asarray(inputs.cu_q_lens)[1:] - 1, 0)


def decode(
    params: ModelParams, kv: KVPool, inputs: StepInputs, *, attention_backend: str | AttentionFn = "auto"
) -> tuple[KVPool, Float32[jax.Array, "B V"]]:
    """Compute one token a row: T == B and token b is row b's. Returns (kv, logits). Padding rows come last.

    Raises:
        ValueError: T differs from B.
        AssertionError: a pool of another model, or shapes that don't fit each other.
    """
    num_tokens, num_rows = inputs.token_ids.shape[0], inputs.page_table.shape[0]
    if num_tokens != num_rows:
        raise ValueError(f"decode computes one token a row, got {num_tokens} tokens in {num_rows} rows; use prefill")
    kv, hidden = _forward(params, kv, inputs, 1, attention_backend)
    return kv, logits_of(params, hidden)


def _forward(
    params: ModelParams, kv: KVPool, inputs: StepInputs, max_q_len: int, backend: str | AttentionFn
) -> tuple[KVPool, Float32[jax.Array, "T D"]]:
    config = params.config
    _check_shapes(config, kv, inputs, kv_width(config, backend))
    write_slots = jnp.asarray(inputs.write_slots)
    rows = jnp.asarray(inputs.page_table), jnp.asarray(inputs.kv_lens), jnp.asarray(inputs.cu_q_lens)
    num_pages = kv.shape[0] // config.num_layers
    write_and_attend_pages = functools.partial(
        write_and_attend,
        write_slots=write_slots,
        scale=config.head_dim**-0.5,
        num_kv_heads=config.num_kv_heads,
        max_q_len=max_q_len,
        backend=backend,
    )

    # Matmuls give float32; attention is computed in what K is kept in, or in the weights' dtype over a float8 pool.
    q_dtype = kv.dtype if kv.dtype.itemsize > 1 else params.weights["embed"].dtype

    def attend(kv: KVPool, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[KVPool, jax.Array]:
        return write_and_attend_pages(q.astype(q_dtype), k, v, kv, *rows, page_offset=layer * num_pages)

    forward = family_for_config(config).forward
    return forward(params.weights, config, jnp.asarray(inputs.token_ids), jnp.asarray(inputs.positions), kv, attend)


def _check_shapes(config: ModelConfig, kv: KVPool, inputs: StepInputs, width: int) -> None:
    num_tokens, num_rows = inputs.token_ids.shape[0], inputs.page_table.shape[0]
    chex.assert_shape([inputs.token_ids, inputs.positions, inputs.write_slots], (num_tokens,))
    chex.assert_shape(inputs.kv_lens, (num_rows,))
    chex.assert_shape(inputs.cu_q_lens, (num_rows + 1,))
    chex.assert_shape(kv, (None, None, width))
    chex.assert_is_divisible(kv.shape[0], config.num_layers)


def logits_of(params: ModelParams, hidden: Float[jax.Array, "B D"]) -> Float32[jax.Array, "B V"]:
    """What the head makes of hidden states."""
    return linear(hidden, params.weights["embed"].T if params.head is None else params.head)
