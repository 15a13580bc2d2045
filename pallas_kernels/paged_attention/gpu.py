"""Paged attention on a GPU, by Pallas Triton kernels: the decode and extend kernels put together for one step.

Every jax from 0.10 on picks Triton for a kernel that is given Triton's CompilerParams, as all of ours are.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import ASSUMED_LEN, GpuBlocks, choose_blocks
from radix_jax.pallas_kernels.paged_attention.gpu_decode import combine_parts, decode_parts
from radix_jax.pallas_kernels.paged_attention.gpu_extend import extend
from radix_jax.pallas_kernels.paged_attention.gpu_tiles import check_addressable, spec_of


def paged_attention_gpu(
    q: Float[jax.Array, "T N H"],
    kv_pages: KVPool,
    page_table: Int32[jax.Array, "B P"],
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    return_lse: bool,
    num_kv_heads: int,
    kv_scales: Float32[jax.Array, "G 2"] | None,
    max_q_len: int,
    blocks: GpuBlocks | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "T N H"] | tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"]]:
    """See `paged_attention`. Tokens of no row come out as 0, with -inf for their log sum.

    blocks: sizes of the tiles; None: those chosen for the shape and the GPU at hand. interpret: run the kernels as
    plain XLA, on any platform, slowly.

    Rows of one query go through decode, the others through extend, in one step too.

    Raises:
        ValueError: a pool of a size that Pallas can't address.
    """
    check_addressable("the KV pool", kv_pages)
    spec = spec_of(
        q,
        kv_pages,
        num_kv_heads=num_kv_heads,
        scale=scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
    )
    num_tokens, num_rows = q.shape[0], page_table.shape[0]
    if blocks is None:
        blocks = choose_blocks(
            head_dim=spec.head_dim,
            num_heads=spec.num_heads,
            num_kv_heads=num_kv_heads,
            q_dtype=q.dtype,
            pool_dtype=kv_pages.dtype,
            num_rows=num_rows,
            visible_len=min(page_table.shape[1] * spec.page_size, sliding_window or ASSUMED_LEN),
        )
    operands = (
        q,
        # Merging pages is free on a GPU. Its layout there is row-major.
        kv_pages.reshape(-1, kv_pages.shape[2]),
        page_table,
        kv_lens,
        cu_q_lens,
        # An array and no constant: the layers of a model then share one compiled kernel.
        jnp.asarray(page_offset, jnp.int32).reshape(1),
        jnp.ones((num_kv_heads, 2), jnp.float32) if kv_scales is None else kv_scales,
    )
    if max_q_len == 1:
        into = None
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        rows = (cu_q_lens[None, 1:] <= tokens[:, None]).sum(axis=1, dtype=jnp.int32)
    else:
        into = extend(spec, blocks.extend, *operands, interpret=interpret)
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        tokens = jnp.where(cu_q_lens[1:] - cu_q_lens[:-1] == 1, cu_q_lens[:-1], num_tokens)
    means, log_sums = decode_parts(spec, blocks.decode, *operands, interpret=interpret)
    out, lse = combine_parts(
        means, log_sums, rows, tokens, num_tokens=num_tokens, dtype=q.dtype, into=into, interpret=interpret
    )
    return (out, lse) if return_lse else out
