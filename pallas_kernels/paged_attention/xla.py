"""Paged attention in plain XLA, for every platform.

The queries are cut into tiles that each lie inside one row; a tile walks its row's KV in blocks of whole pages, from
the first to the last that it can see, keeping a running maximum and sum (online softmax). So the work follows the real
lengths while every shape is static. On a CPU the tiles run one after the other, which keeps a block in its cache;
elsewhere all at once.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int32

from radix_jax.arrays import KVPool

Q_TILE_LEN = 32
BLOCK_LEN = 128
# Stands for minus infinity: exp(x - NEG) is 0 and NEG - NEG is 0, where infinities would give NaN.
NEG = -1e30


class _Walk(NamedTuple):
    """The blocks that a tile sees: `load` gives one and who sees what of it; `cap` finishes its scores."""

    first_block: int | Int32[jax.Array, ""]
    end_block: Int32[jax.Array, ""]
    load: Callable[[Int32[jax.Array, ""]], tuple[jax.Array, jax.Array]]
    cap: Callable[[jax.Array], jax.Array]


@functools.partial(
    jax.jit,
    static_argnames=(
        "scale",
        "sliding_window",
        "logit_soft_cap",
        "return_lse",
        "num_kv_heads",
        "max_q_len",
        "sequential",
    ),
)
def paged_attention_xla(
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
    sequential: bool | None = None,
) -> Float[jax.Array, "T N H"] | tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"]]:
    """See `paged_attention`. `sequential` runs the tiles one after the other; None: on a CPU."""
    num_tokens, num_rows, page_size = q.shape[0], page_table.shape[0], kv_pages.shape[1]
    tile_len = min(Q_TILE_LEN, max_q_len)
    pages_per_block = max(1, BLOCK_LEN // page_size)
    block_len = pages_per_block * page_size
    attend = _attend_token if tile_len == 1 else _attend_tile
    tile_rows, tile_starts, tile_of_token = _cut_tiles(cu_q_lens, num_tokens, num_rows, tile_len)
    padded_table = _pad_end(page_table, 1, -page_table.shape[1] % pages_per_block) + page_offset
    k_scales, v_scales = _head_scales(kv_scales, q.shape[1])
    padded_q = _pad_end(q.astype(jnp.float32) * (scale * k_scales), 0, tile_len)

    def run_tile(row: Int32[jax.Array, ""], start: Int32[jax.Array, ""]) -> tuple[jax.Array, jax.Array]:
        kv_len = kv_lens[row]
        # The row's queries are the last of its kv_len tokens.
        q_pos = kv_len - cu_q_lens[row + 1] + start + jnp.arange(tile_len, dtype=jnp.int32)
        pages = padded_table[row]

        def load(i: Int32[jax.Array, ""]) -> tuple[Float32[jax.Array, "S W"], Bool[jax.Array, "Q S"]]:
            block_pages = jax.lax.dynamic_slice_in_dim(pages, i * pages_per_block, pages_per_block)
            block = kv_pages.at[block_pages].get(mode="promise_in_bounds").reshape(block_len, -1)
            block = block[:, : 2 * num_kv_heads * q.shape[2]]
            kv_pos = i * block_len + jnp.arange(block_len, dtype=jnp.int32)
            # What lies past the row's end was never written by it and may be anything, NaN included: 0 * NaN is NaN.
            block = jnp.where((kv_pos < kv_len)[:, None], block.astype(jnp.float32), 0.0)
            sees = kv_pos <= jnp.minimum(q_pos, kv_len - 1)[:, None]
            if sliding_window is not None:
                sees &= kv_pos > (q_pos - sliding_window)[:, None]
            return block, sees

        first_block = 0
        if sliding_window is not None:
            first_block = jnp.maximum(q_pos[0] - sliding_window + 1, 0) // block_len
        visible_len = jnp.where(start < cu_q_lens[row + 1], jnp.minimum(q_pos[-1] + 1, kv_len), 0)
        walk = _Walk(first_block, -(-visible_len // block_len), load, functools.partial(_cap_scores, logit_soft_cap))
        return attend(jax.lax.dynamic_slice_in_dim(padded_q, start, tile_len), walk, num_kv_heads)

    out, lse = _run_tiles(run_tile, tile_rows, tile_starts, sequential)
    out = out.reshape(-1, *q.shape[1:])[tile_of_token] * v_scales
    if not return_lse:
        return out.astype(q.dtype)
    lse = lse.reshape(-1, q.shape[1])[tile_of_token]
    of_a_row = jnp.arange(num_tokens) < cu_q_lens[-1]
    return out.astype(q.dtype), jnp.where(of_a_row[:, None], lse, -jnp.inf)


def _run_tiles(
    run_tile: Callable, rows: Int32[jax.Array, " I"], starts: Int32[jax.Array, " I"], sequential: bool | None
) -> tuple[Float32[jax.Array, "I Q N H"], Float32[jax.Array, "I Q N"]]:
    def one_by_one(rows: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.map(lambda tile: run_tile(*tile), (rows, starts))

    if sequential is None:
        # Of the platform that is lowered for, which need not be the one at hand.
        return jax.lax.platform_dependent(rows, starts, cpu=one_by_one, default=jax.vmap(run_tile))
    return one_by_one(rows, starts) if sequential else jax.vmap(run_tile)(rows, starts)


def _head_scales(
    kv_scales: Float32[jax.Array, "G 2"] | None, num_heads: int
) -> tuple[float | Float32[jax.Array, "N 1"], float | Float32[jax.Array, "N 1"]]:
    """Of the K and of the V that each query head reads."""
    if kv_scales is None:
        return 1.0, 1.0
    scales = jnp.repeat(kv_scales, num_heads // kv_scales.shape[0], axis=0)
    return scales[:, :1], scales[:, 1:]


def _cut_tiles(
    cu_q_lens: Int32[jax.Array, " B_plus_1"], num_tokens: int, num_rows: int, tile_len: int
) -> tuple[Int32[jax.Array, " I"], Int32[jax.Array, " I"], Int32[jax.Array, " T"]]:
    """(row of each tile, first token of each tile, place of each token among the tiles' tokens).

    Tiles past the last real one are given to the last row and start behind it: they see nothing.
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    if tile_len == 1:
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        # Elementwise, so that the compiler does it once for all layers.
        places = (cu_q_lens[1:] <= tokens[:, None]).sum(axis=1, dtype=jnp.int32)
        return rows, cu_q_lens[:-1], jnp.minimum(places, num_rows - 1)
    tiles = jnp.arange(num_rows + num_tokens // tile_len, dtype=jnp.int32)
    tiles_per_row = -(-(cu_q_lens[1:] - cu_q_lens[:-1]) // tile_len)
    cu_tiles = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles_per_row, dtype=jnp.int32)])
    rows = _last_not_above(cu_tiles, tiles)
    token_rows = _last_not_above(cu_q_lens, tokens)
    in_row = tokens - cu_q_lens[token_rows]
    places = (cu_tiles[token_rows] + in_row // tile_len) * tile_len + in_row % tile_len
    starts = jnp.minimum(cu_q_lens[rows] + (tiles - cu_tiles[rows]) * tile_len, num_tokens)
    return rows, starts, jnp.minimum(places, tiles.shape[0] * tile_len - 1)


def _last_not_above(cumulative: Int32[jax.Array, " B_plus_1"], x: Int32[jax.Array, " X"]) -> Int32[jax.Array, " X"]:
    """The row that x falls in; past the end, the last row."""
    found = jnp.searchsorted(cumulative, x, side="right").astype(jnp.int32) - 1
    return jnp.minimum(found, cumulative.shape[0] - 2)


def _attend_token(
    q: Float32[jax.Array, "1 N H"], walk: _Walk, num_kv_heads: int
) -> tuple[Float32[jax.Array, "1 N H"], Float32[jax.Array, "1 N"]]:
    """One query over its blocks, without taking K and V apart: the query is spread over the pool's lanes, zero but in
    its own head's K, so that one matmul a block gives the scores of all heads, and one more the sums of all V lanes."""
    _, num_heads, head_dim = q.shape
    own = jnp.arange(num_heads) // (num_heads // num_kv_heads) == jnp.arange(num_kv_heads)[:, None]
    k_lanes = jnp.where(own.T[:, :, None], q[0][:, None, :], 0.0)
    lanes = jnp.stack([k_lanes, jnp.zeros_like(k_lanes)], axis=2).reshape(num_heads, -1)
    out, lse = _online_softmax(
        walk,
        scores=lambda block: lanes @ block.T,
        sums=lambda weights, block: weights @ block,
        scores_shape=(num_heads,),
        num_lanes=lanes.shape[1],
    )
    v_lanes = out.reshape(num_heads, num_kv_heads, 2, head_dim)[:, :, 1]
    return jnp.where(own.T[:, :, None], v_lanes, 0.0).sum(axis=1)[None], lse[None]


def _attend_tile(
    q: Float32[jax.Array, "Q N H"], walk: _Walk, num_kv_heads: int
) -> tuple[Float32[jax.Array, "Q N H"], Float32[jax.Array, "Q N"]]:
    """Many queries of one row over its blocks, a matmul for each kv head."""
    tile_len, num_heads, head_dim = q.shape
    grouped = q.reshape(tile_len, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)

    def part(block: Float32[jax.Array, "S W"], which: int) -> Float32[jax.Array, "S G H"]:
        return block.reshape(-1, num_kv_heads, 2, head_dim)[:, :, which]

    out, lse = _online_softmax(
        walk,
        scores=lambda block: jnp.einsum("grqh,sgh->grqs", grouped, part(block, 0)),
        sums=lambda weights, block: jnp.einsum("grqs,sgh->grqh", weights, part(block, 1)),
        scores_shape=grouped.shape[:3],
        num_lanes=head_dim,
    )
    return out.transpose(2, 0, 1, 3).reshape(q.shape), lse.reshape(num_heads, tile_len).T


def _online_softmax(
    walk: _Walk, *, scores: Callable, sums: Callable, scores_shape: tuple[int, ...], num_lanes: int
) -> tuple[Float32[jax.Array, "..."], Float32[jax.Array, "..."]]:
    """(softmax-weighted sums over the blocks, log of the sum of exp of the scores), Milakov and Gimelshein 2018,
    algorithm 3; 0 and -inf where there is no block."""

    def step(i: Int32[jax.Array, ""], state: tuple[jax.Array, jax.Array, jax.Array]):
        top, total, acc = state
        block, mask = walk.load(i)
        s = jnp.where(mask, walk.cap(scores(block)), NEG)
        new_top = jnp.maximum(top, s.max(axis=-1))
        weights = jnp.exp(s - new_top[..., None])
        decay = jnp.exp(top - new_top)
        return new_top, total * decay + weights.sum(axis=-1), acc * decay[..., None] + sums(weights, block)

    start = (jnp.full(scores_shape, NEG), jnp.zeros(scores_shape), jnp.zeros((*scores_shape, num_lanes)))
    top, total, acc = jax.lax.fori_loop(walk.first_block, walk.end_block, step, start)
    return acc / jnp.maximum(total, 1e-30)[..., None], top + jnp.log(total)


def _cap_scores(logit_soft_cap: float | None, scores: Float32[jax.Array, "..."]) -> Float32[jax.Array, "..."]:
    return scores if logit_soft_cap is None else logit_soft_cap * jnp.tanh(scores / logit_soft_cap)


def _pad_end(x: jax.Array, axis: int, amount: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, amount)
    return jnp.pad(x, widths)
