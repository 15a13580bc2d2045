"""Decode on a GPU: rows of one query, each row's KV split among programs, and the merge of the parts.

`decode_parts` has a program for each (row, kv head, split). The splits of a row share its *actual* visible length, not
the table's capacity, so that a short row costs little beside a long one. Each leaves the softmax-weighted mean of its
share and the base-2 log of its sum, in float32; `combine_parts` merges them (Flash-Decoding).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Float32, Int32

from radix_jax.pallas_kernels.paged_attention.gpu_blocks import DecodeBlocks, power_of_two
from radix_jax.pallas_kernels.paged_attention.gpu_tiles import (
    LN_2,
    KVHead,
    Ref,
    TileSpec,
    attend_blocks,
    empty_softmax,
    finish_softmax,
    head_mask,
    load_tile,
)

# Splits that combine takes at a time.
COMBINE_TILE = 16


def decode_parts(
    spec: TileSpec,
    blocks: DecodeBlocks,
    q: Float[jax.Array, "T N H"],
    slots: Float[jax.Array, "Z W"],
    page_table: Int32[jax.Array, "B P"],
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    page_offset: Int32[jax.Array, " 1"],
    kv_scales: Float32[jax.Array, "G 2"],
    *,
    interpret: bool,
) -> tuple[Float32[jax.Array, "B X N H"], Float32[jax.Array, "B X N"]]:
    """(means, base-2 log sums) of the X splits of each row that has one query; see `paged_attention`.

    A split that saw nothing has -inf for its log sum, and its mean is not written. So are all of other rows.
    """
    num_rows, splits = page_table.shape[0], blocks.num_splits
    shape = (num_rows, splits, spec.num_heads, spec.head_dim)
    return pl.pallas_call(
        functools.partial(decode_kernel, spec=spec, blocks=blocks),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)),
        # Heads change first: programs that run together then read whole tokens, which lie together.
        grid=(spec.num_kv_heads, splits, num_rows),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
    )(q, slots, page_table, kv_lens, cu_q_lens, page_offset, kv_scales)


def decode_kernel(
    q_ref: Ref,
    slots_ref: Ref,
    page_table_ref: Ref,
    kv_lens_ref: Ref,
    cu_q_lens_ref: Ref,
    page_offset_ref: Ref,
    kv_scales_ref: Ref,
    means_ref: Ref,
    log_sums_ref: Ref,
    *,
    spec: TileSpec,
    blocks: DecodeBlocks,
) -> None:
    """One split of one kv head of one row. Rows of the tile are the heads of the group."""
    kv_head, split, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    token = cu_q_lens_ref[row]
    is_single = cu_q_lens_ref[row + 1] - token == 1
    kv_len = jnp.where(is_single, kv_lens_ref[row], 0)
    seen_from = 0 if spec.sliding_window is None else jnp.maximum(kv_len - spec.sliding_window, 0)
    first_block = seen_from // blocks.block_len
    num_blocks = (kv_len + blocks.block_len - 1) // blocks.block_len - first_block
    start = first_block + num_blocks * split // blocks.num_splits
    end = first_block + num_blocks * (split + 1) // blocks.num_splits

    in_group = jnp.arange(power_of_two(spec.group_size))
    # Past the group the index is past the array too, so that no masked store can hit another group's heads.
    heads = jnp.where(in_group < spec.group_size, kv_head * spec.group_size + in_group, spec.num_heads)
    lanes = jnp.arange(spec.lanes)
    q_mask = head_mask(spec, (in_group < spec.group_size) & is_single, in_group.shape[0])
    q = load_tile(q_ref, (token, heads[:, None], lanes[None, :]), q_mask).astype(spec.compute_dtype)
    kv = KVHead(slots_ref, page_table_ref, page_offset_ref[0], row, kv_head, kv_len)
    k_scale, v_scale = kv_scales_ref[kv_head, 0], kv_scales_ref[kv_head, 1]

    def sees(positions: Int32[jax.Array, "1 S"]) -> jax.Array:
        return (positions >= seen_from) & (positions < kv_len)

    state = empty_softmax(in_group.shape[0], spec.lanes)
    state = attend_blocks(spec, q, kv, k_scale, (start, end), blocks.block_len, state, sees)
    mean, log_sum = finish_softmax(state)
    written = (in_group < spec.group_size) & (end > start)
    plgpu.store(
        means_ref.at[row, split, heads[:, None], lanes[None, :]],
        mean * v_scale,
        mask=head_mask(spec, written, in_group.shape[0]),
    )
    log_sum = jnp.where(end > start, log_sum, -jnp.inf)
    plgpu.store(log_sums_ref.at[row, split, heads], log_sum, mask=in_group < spec.group_size)


def combine_parts(
    means: Float32[jax.Array, "B X N H"],
    log_sums: Float32[jax.Array, "B X N"],
    rows: Int32[jax.Array, " Y"],
    tokens: Int32[jax.Array, " Y"],
    *,
    num_tokens: int,
    dtype: Any,
    into: tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"]] | None = None,
    interpret: bool,
) -> tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"]]:
    """(out, natural log of the sum): token tokens[y] is what the splits of row rows[y] say together.

    rows[y] == B: the token belongs to no row, so 0 and -inf. tokens[y] == T: nothing is written. The other tokens stay
    as they are in `into`; without it every token has to be among `tokens`.
    """
    num_rows, num_splits, num_heads, head_dim = means.shape
    out_shape = (
        jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
    )
    operands = (means, log_sums, rows, tokens)
    return pl.pallas_call(
        functools.partial(combine_kernel, num_rows=num_rows, num_splits=num_splits, num_tokens=num_tokens),
        out_shape=out_shape,
        grid=(rows.shape[0], num_heads),
        input_output_aliases={} if into is None else {len(operands): 0, len(operands) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
    )(*operands, *(into or ()))


def combine_kernel(
    means_ref: Ref,
    log_sums_ref: Ref,
    rows_ref: Ref,
    tokens_ref: Ref,
    *out_refs: Ref,
    num_rows: int,
    num_splits: int,
    num_tokens: int,
) -> None:
    """One head of one token. `out_refs` end in out and its log sums; before them, if at all, what they alias."""
    out_ref, lse_ref = out_refs[-2:]
    row, token, head = rows_ref[pl.program_id(0)], tokens_ref[pl.program_id(0)], pl.program_id(1)
    head_dim = means_ref.shape[3]
    lanes = jnp.arange(power_of_two(head_dim))
    is_row = row < num_rows

    def load_log_sums(splits: Int32[jax.Array, " X"]) -> Float32[jax.Array, " X"]:
        return plgpu.load(log_sums_ref.at[row, splits, head], mask=(splits < num_splits) & is_row, other=-jnp.inf)

    top = load_log_sums(jnp.arange(power_of_two(num_splits))).max()
    top = jnp.where(top == -jnp.inf, 0.0, top)

    def merge(tile: Int32[jax.Array, ""], sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, values = sums
        splits = tile * COMBINE_TILE + jnp.arange(COMBINE_TILE)
        log_sums = load_log_sums(splits)
        # The mean of a split that saw nothing was never written, and 0 times it need not be 0.
        mask = (log_sums > -jnp.inf)[:, None] & (lanes < head_dim)[None, :]
        means = load_tile(means_ref, (row, splits[:, None], head, lanes[None, :]), mask)
        weights = jnp.exp2(log_sums - top)
        return total + weights.sum(), values + (weights[:, None] * means).sum(axis=0)

    num_tiles = (num_splits + COMBINE_TILE - 1) // COMBINE_TILE
    nothing = jnp.zeros((), jnp.float32), jnp.zeros(lanes.shape, jnp.float32)
    total, values = jax.lax.fori_loop(0, num_tiles, merge, nothing)
    seen = total > 0.0
    divisor = jnp.where(seen, total, 1.0)
    is_written = token < num_tokens
    plgpu.store(
        out_ref.at[token, head, lanes], (values / divisor).astype(out_ref.dtype), mask=(lanes < head_dim) & is_written
    )
    lse = jnp.where(seen, (top + jnp.log2(divisor)) * LN_2, -jnp.inf)
    plgpu.store(lse_ref.at[token, head], lse, mask=is_written)
