"""Write new keys and values into the pool on a GPU: a scatter in place, without atomics."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import power_of_two
from radix_jax.pallas_kernels.paged_attention.gpu_tiles import Ref, check_addressable

# Tokens of a program: with 128 lanes of 2 bytes one 16-byte access for each of its threads.
TOKENS_PER_PROGRAM = 8
NUM_WARPS = 4


def write_kv_gpu(
    kv_pages: KVPool,
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    write_slots: Int32[jax.Array, " T"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    kv_scales: Float32[jax.Array, "G 2"] | None = None,
    interpret: bool = False,
) -> KVPool:
    """See `write_kv`. In place where the pool is donated. Lanes past the heads' are left alone.

    Values are stored divided by `kv_scales`; those past the range of a float8 pool become its largest.

    Raises:
        ValueError: a pool of a size that Pallas can't address.
    """
    check_addressable("the KV pool", kv_pages)
    num_tokens, num_kv_heads, _ = k.shape
    slots = kv_pages.reshape(-1, kv_pages.shape[2])
    scales = jnp.ones((num_kv_heads, 2), jnp.float32) if kv_scales is None else kv_scales
    offset = (jnp.asarray(page_offset, jnp.int32) * kv_pages.shape[1]).reshape(1)
    written = pl.pallas_call(
        functools.partial(write_kernel, is_scaled=kv_scales is not None),
        out_shape=jax.ShapeDtypeStruct(slots.shape, slots.dtype),
        grid=(-(-num_tokens // TOKENS_PER_PROGRAM), num_kv_heads),
        input_output_aliases={5: 0},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
    )(k, v, write_slots, offset, scales, slots)
    return written.reshape(kv_pages.shape)


def write_kernel(
    k_ref: Ref,
    v_ref: Ref,
    write_slots_ref: Ref,
    slot_offset_ref: Ref,
    kv_scales_ref: Ref,
    _: Ref,
    slots_ref: Ref,
    *,
    is_scaled: bool,
) -> None:
    """TOKENS_PER_PROGRAM tokens of one kv head."""
    (num_tokens, _, head_dim), num_slots = k_ref.shape, slots_ref.shape[0]
    kv_head = pl.program_id(1)
    tokens = pl.program_id(0) * TOKENS_PER_PROGRAM + jnp.arange(TOKENS_PER_PROGRAM)
    slots = plgpu.load(write_slots_ref.at[tokens], mask=tokens < num_tokens, other=num_slots)
    # Padding lies past the pool before a layer's offset is added.
    is_real = slots < num_slots
    slots = slots + slot_offset_ref[0]
    lanes = jnp.arange(power_of_two(head_dim))
    mask = is_real[:, None] & (lanes < head_dim)[None, :]
    for which, ref in enumerate((k_ref, v_ref)):
        values = plgpu.load(ref.at[tokens[:, None], kv_head, lanes[None, :]], mask=mask, other=0.0)
        if is_scaled:
            values = values.astype(jnp.float32) / kv_scales_ref[kv_head, which]
        place = slots_ref.at[slots[:, None], kv_head * (2 * head_dim) + which * head_dim + lanes[None, :]]
        plgpu.store(place, to_pool_dtype(values, slots_ref.dtype), mask=mask)


def to_pool_dtype(values: Float[jax.Array, "X D"], dtype: jnp.dtype) -> Float[jax.Array, "X D"]:
    """Cast; for float8, which may have no infinity, after cutting values to its range. NaN stays NaN."""
    if dtype.itemsize > 1:
        return values.astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    values = values.astype(jnp.float32)
    values = jnp.where(values > largest, largest, values)
    return jnp.where(values < -largest, -largest, values).astype(dtype)
