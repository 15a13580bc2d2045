"""The flat work list of the TPU kernels: one item for each KV tile that a row's queries see, and nothing else.

It is made of arrays, outside the kernels, and lies in scalar memory while they run. Rows without a query or without a
token have no item, so no kernel ever waits for something of length 0. It depends on lengths alone: all layers of a step
share one, which the compiler makes once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32

# An item is a word: row in bits [16, 31), whether it is the row's first in bit 15, tile in bits [0, 15).
ROW_SHIFT = 16
FIRST_BIT = 1 << 15
TILE_MASK = FIRST_BIT - 1
MAX_ROWS = 1 << 15


class WorkList(NamedTuple):
    """Items of rows that have work; `rows` are numbered through those alone, in their order.

    items: row, first and tile of each, as one word; those behind the last are tile 0 of a row without a token.
    counts: (number of items, number of rows).
    kv_lens, row_ids, tokens: of each row, its length, its place in the page table, and the token that asks.
    """

    items: Int32[jax.Array, " I"]
    counts: Int32[jax.Array, " 2"]
    kv_lens: Int32[jax.Array, " B_plus_1"]
    row_ids: Int32[jax.Array, " B_plus_1"]
    tokens: Int32[jax.Array, " B_plus_1"]


def num_items_bound(num_rows: int, table_len: int, tile_len: int, num_spare: int) -> int:
    """Items that a work list has room for. table_len: tokens of a row of the page table."""
    return num_rows * -(-table_len // tile_len) + num_spare


def decode_work(
    kv_lens: Int32[jax.Array, " B"],
    cu_q_lens: Int32[jax.Array, " B_plus_1"],
    *,
    table_len: int,
    tile_len: int,
    num_spare: int,
    sliding_window: int | None = None,
) -> WorkList:
    """The work of rows of one query each. num_spare: items behind the last that the kernel looks at."""
    num_rows = kv_lens.shape[0]
    is_live = (cu_q_lens[1:] > cu_q_lens[:-1]) & (kv_lens > 0)
    row_ids = jnp.argsort(~is_live, stable=True).astype(jnp.int32)
    lens = jnp.where(is_live[row_ids], kv_lens[row_ids], 0)
    first_tiles = jnp.zeros_like(lens)
    if sliding_window is not None:
        first_tiles = jnp.maximum(lens - sliding_window, 0) // tile_len
    counts = -(-lens // tile_len) - first_tiles
    rows, index = flat_items(counts, num_items_bound(num_rows, table_len, tile_len, num_spare))
    tiles = jnp.where(rows < num_rows, index + _pad(first_tiles)[rows], 0)
    items = (rows << ROW_SHIFT) | jnp.where(index == 0, FIRST_BIT, 0) | (tiles & TILE_MASK)
    return WorkList(
        items=items,
        counts=jnp.stack([counts.sum(dtype=jnp.int32), is_live.sum(dtype=jnp.int32)]),
        kv_lens=_pad(lens),
        row_ids=_pad(row_ids),
        tokens=_pad(cu_q_lens[:-1][row_ids]),
    )


def flat_items(counts: Int32[jax.Array, " B"], num_items: int) -> tuple[Int32[jax.Array, " I"], Int32[jax.Array, " I"]]:
    """(row, place in the row) of `num_items` items, counts[b] of them row b's; B and undefined behind the last."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    item = jnp.arange(num_items, dtype=jnp.int32)
    is_behind: Bool[jax.Array, "I B"] = ends[None, :] <= item[:, None]
    rows = is_behind.sum(axis=1, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return rows, item - starts[rows]


def _pad(of_rows: Int32[jax.Array, " B"]) -> Int32[jax.Array, " B_plus_1"]:
    return jnp.concatenate([of_rows, jnp.zeros(1, jnp.int32)])
