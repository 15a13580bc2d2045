"""Extend on a GPU: rows of many queries (chunks of a prompt) over a cached prefix and themselves.

The chunk's own K and V are in the pool already, so prefix and chunk are one causal loop. The queries are cut into
tiles that each lie inside one row; a program has one tile and one kv head, and the rows of its matmuls are (token, head
of the group) pairs. Blocks that all of the tile sees need no mask; those at the causal edge and at the window's do.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Float32, Int32

from radix_jax.pallas_kernels.paged_attention.gpu_blocks import ExtendBlocks
from radix_jax.pallas_kernels.paged_attention.gpu_tiles import (
    LN_2,
    KVHead,
    Ref,
    Softmax,
    TileSpec,
    attend_blocks,
    empty_softmax,
    finish_softmax,
    head_mask,
    load_tile,
)


def extend_tiles(
    kv_lens: Int32[jax.Array, " B"], cu_q_lens: Int32[jax.Array, " B_plus_1"], *, num_tokens: int, tile_len: int
) -> Int32[jax.Array, "I 4"]:
    """(row, first token, end of the row's tokens, kv_len) of each tile of up to `tile_len` tokens.

    Rows of one query have no tiles: they are decode's. Tokens of no row are in tiles of kv_len 0. Tiles that are left
    over start and end at `num_tokens`.
    """
    ends = jnp.append(cu_q_lens[1:], num_tokens)
    starts = jnp.append(cu_q_lens[:-1], cu_q_lens[-1])
    lens = ends - starts
    is_row = jnp.arange(ends.shape[0]) < kv_lens.shape[0]
    tiles_per_row = jnp.where(is_row & (lens == 1), 0, -(-lens // tile_len))
    tile_ends = jnp.cumsum(tiles_per_row, dtype=jnp.int32)
    num_tiles = ends.shape[0] + num_tokens // tile_len
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    rows = (tile_ends[None, :] <= tiles[:, None]).sum(axis=1, dtype=jnp.int32)
    is_used = rows < ends.shape[0]
    rows = jnp.minimum(rows, ends.shape[0] - 1)
    first = starts[rows] + (tiles - (tile_ends - tiles_per_row)[rows]) * tile_len
    lens_of_rows = jnp.append(kv_lens, 0)
    return jnp.stack(
        [
            jnp.minimum(rows, kv_lens.shape[0] - 1),
            jnp.where(is_used, first, num_tokens),
            jnp.where(is_used, ends[rows], num_tokens),
            jnp.where(is_used, lens_of_rows[rows], 0),
        ],
        axis=1,
    ).astype(jnp.int32)


def extend(
    spec: TileSpec,
    blocks: ExtendBlocks,
    q: Float[jax.Array, "T N H"],
    slots: Float[jax.Array, "Z W"],
    page_table: Int32[jax.Array, "B P"],
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    page_offset: Int32[jax.Array, " 1"],
    kv_scales: Float32[jax.Array, "G 2"],
    *,
    interpret: bool,
) -> tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"]]:
    """(out, natural log of the sum) of all tokens but those of rows of one query, which it leaves unwritten.

    See `paged_attention`. Tokens of no row come out as 0, and -inf for their log sum.
    """
    tile_len = blocks.num_rows // spec.group_size
    tiles = extend_tiles(kv_lens, cu_q_lens, num_tokens=q.shape[0], tile_len=tile_len)
    return pl.pallas_call(
        functools.partial(extend_kernel, spec=spec, blocks=blocks),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)),
        grid=(spec.num_kv_heads, tiles.shape[0]),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
    )(q, slots, page_table, tiles, page_offset, kv_scales)


def extend_kernel(
    q_ref: Ref,
    slots_ref: Ref,
    page_table_ref: Ref,
    tiles_ref: Ref,
    page_offset_ref: Ref,
    kv_scales_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    spec: TileSpec,
    blocks: ExtendBlocks,
) -> None:
    """One tile of one kv head."""
    # A row's last tiles see most: they start first, so that the last programs to run are short ones.
    tile = tiles_ref.shape[0] - 1 - pl.program_id(1)
    kv_head = pl.program_id(0)
    row, first, row_end, kv_len = (tiles_ref[tile, i] for i in range(4))
    tile_len = blocks.num_rows // spec.group_size
    end = jnp.minimum(first + tile_len, row_end)

    in_tile = jnp.arange(blocks.num_rows)
    is_real = (in_tile < tile_len * spec.group_size) & (first + in_tile // spec.group_size < end)
    # Left out, an index lies past the array, so that no masked store can hit a real token.
    tokens = jnp.where(is_real, first + in_tile // spec.group_size, q_ref.shape[0])
    heads = kv_head * spec.group_size + in_tile % spec.group_size
    lanes = jnp.arange(spec.lanes)
    mask = head_mask(spec, is_real, blocks.num_rows)
    q = load_tile(q_ref, (tokens[:, None], heads[:, None], lanes[None, :]), mask).astype(spec.compute_dtype)
    kv = KVHead(slots_ref, page_table_ref, page_offset_ref[0], row, kv_head, kv_len)

    # The row's queries are the last of its kv_len tokens.
    first_pos, last_pos = kv_len - row_end + first, kv_len - row_end + end - 1
    positions = jnp.minimum(first_pos + in_tile // spec.group_size, last_pos)
    state = _attend_tile(spec, blocks, q, kv, kv_scales_ref[kv_head, 0], positions, (first_pos, last_pos))
    mean, log_sum = finish_softmax(state)
    out = (mean * kv_scales_ref[kv_head, 1]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[tokens[:, None], heads[:, None], lanes[None, :]], out, mask=mask)
    plgpu.store(lse_ref.at[tokens, heads], log_sum * LN_2, mask=is_real)


def _attend_tile(
    spec: TileSpec,
    blocks: ExtendBlocks,
    q: Float[jax.Array, "M D"],
    kv: KVHead,
    k_scale: Float32[jax.Array, ""],
    positions: Int32[jax.Array, " M"],
    span: tuple[Any, Any],
) -> Softmax:
    """The softmax state of a tile whose rows lie at `positions` of its row, the first and last of which are `span`."""
    block_len, window = blocks.block_len, spec.sliding_window
    first_pos, last_pos = span

    def sees(kv_positions: Int32[jax.Array, "1 S"]) -> jax.Array:
        causal = kv_positions <= positions[:, None]
        return causal if window is None else causal & (kv_positions > positions[:, None] - window)

    def run(begin: Any, end: Any, state: Softmax, *, masked: bool) -> Softmax:
        return attend_blocks(spec, q, kv, k_scale, (begin, end), block_len, state, sees if masked else None)

    # Blocks [begin, whole) hold the window's lower edge, [whole, edge) are seen by all of the tile.
    begin = whole = jnp.zeros((), jnp.int32)
    end = (jnp.maximum(last_pos + 1, 0) + block_len - 1) // block_len
    state = empty_softmax(blocks.num_rows, spec.lanes)
    if window is not None:
        begin = jnp.maximum(first_pos - window + 1, 0) // block_len
        whole = (jnp.maximum(last_pos - window + 1, 0) + block_len - 1) // block_len
        whole = jnp.minimum(whole, end)
        state = run(begin, whole, state, masked=True)
    edge = jnp.maximum((first_pos + 1) // block_len, whole)
    state = run(whole, edge, state, masked=False)
    return run(edge, end, state, masked=True)
