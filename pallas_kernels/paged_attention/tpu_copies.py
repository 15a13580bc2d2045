"""Copies of KV tiles from the pool to VMEM: several buffers, page by page, one wait for all pages of a tile.

A buffer holds what its last copies brought and, behind the live rows of its tile, what earlier ones did or what VMEM
held at the start. Scores there are masked; V must be 0, for 0 * NaN is NaN. `clean_rows` sees to it, and a mark for
each buffer tells how far up it may hold anything, so that nothing is cleaned twice.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int32

from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES, SUBLANES, HeadLayout

# Memory on the device while a kernel is traced.
Ref = Any
Scalar = Int32[jax.Array, ""]
Index = Scalar | int


@dataclass(frozen=True)
class TileShape:
    """How a KV tile lies in pages. Both lengths are powers of two."""

    page_size: int
    tile_len: int

    @property
    def copy_len(self) -> int:
        """Tokens that one copy brings."""
        return min(self.page_size, self.tile_len)

    @property
    def num_copies(self) -> int:
        """Of a whole tile."""
        return self.tile_len // self.copy_len

    def copies_for(self, num_tokens: Scalar) -> Scalar:
        """Copies that bring the first `num_tokens` of a tile; none where it is negative."""
        shift = self.copy_len.bit_length() - 1
        return jax.lax.shift_right_arithmetic(jnp.minimum(num_tokens, self.tile_len) + self.copy_len - 1, shift)


class TileBuffers(NamedTuple):
    """pool [L * P, K, W] in HBM; buffers [X, S, W] in VMEM with a semaphore each; dirty [X] in scalar memory: the row
    from which on a buffer's V lanes are 0; pages and page_offset: the page table, flat, and the layer's first page."""

    pool: Ref
    buffers: Ref
    semaphores: Ref
    dirty: Ref
    pages: Ref
    page_offset: Scalar


def start_copies(
    shape: TileShape, tiles: TileBuffers, slot: Index, table_row: Scalar, tile: Scalar, num: Scalar, which: range
) -> None:
    """Start those copies of a tile that are in `which` and below `num`. table_row: where the row's pages begin."""
    for index in which:
        if shape.page_size <= shape.tile_len:
            entry = table_row + tile * shape.num_copies + index
            source = tiles.pool.at[tiles.pages[entry] + tiles.page_offset]
        else:
            per_page = shape.page_size // shape.tile_len
            entry = table_row + jax.lax.shift_right_logical(tile, per_page.bit_length() - 1)
            row = pl.multiple_of(jax.lax.bitwise_and(tile, per_page - 1) * shape.tile_len, shape.tile_len)
            source = tiles.pool.at[tiles.pages[entry] + tiles.page_offset, pl.ds(row, shape.tile_len)]
        target = tiles.buffers.at[slot, pl.ds(index * shape.copy_len, shape.copy_len)]
        copy = pltpu.make_async_copy(source, target, tiles.semaphores.at[slot])
        pl.when(index < num)(copy.start)


def wait_for_copies(shape: TileShape, tiles: TileBuffers, slot: Index, num: Scalar) -> None:
    """Wait for `num` copies into a buffer, by the bytes of all of them."""
    rows = pl.ds(0, pl.multiple_of(num * shape.copy_len, shape.copy_len))
    wait_for(tiles.buffers.at[slot, rows], tiles.semaphores.at[slot])


def wait_for(ref: Ref, semaphore: Ref) -> None:
    """Wait until as many bytes have arrived as `ref` has."""
    pltpu.make_async_copy(ref, ref, semaphore).wait()


def mark_all_dirty(tiles: TileBuffers) -> None:
    """Before the first copy: VMEM holds anything."""
    num_buffers, tile_len, _ = tiles.buffers.shape
    for slot in range(num_buffers):
        tiles.dirty[slot] = tile_len


def clean_rows(layout: HeadLayout, tiles: TileBuffers, slot: Scalar, live: Scalar, copied: Scalar) -> None:
    """Make the V lanes of rows [live, tile_len) of a buffer 0. copied: rows that the last copies brought.

    The mark is left as it is.
    """
    dirty = dirty_end(tiles, slot, copied)

    @pl.when(live < dirty)
    def _() -> None:
        group = SUBLANES * 4 // tiles.buffers.dtype.itemsize
        shift = group.bit_length() - 1
        first = jax.lax.shift_right_logical(live, shift)
        end = jax.lax.shift_right_logical(dirty + group - 1, shift)

        def clean(index: Scalar, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(index * group, group), group)
            keep = words_below(live - index * group, group, tiles.buffers.dtype)
            for lane in v_lane_groups(layout):
                part = (slot, rows, slice(lane, lane + LANES))
                words = pltpu.bitcast(tiles.buffers[part], jnp.int32)
                tiles.buffers[part] = pltpu.bitcast(words & keep, tiles.buffers.dtype)
            return carry

        jax.lax.fori_loop(first, end, clean, None)


def dirty_end(tiles: TileBuffers, slot: Scalar, copied: Scalar) -> Scalar:
    """The row from which on a buffer's V lanes are 0, when `copied` rows have been brought in."""
    return jnp.maximum(tiles.dirty[slot], copied)


def v_lane_groups(layout: HeadLayout) -> list[int]:
    """First lanes of the groups in which any V lies."""
    windows = [layout.v_window(head) for head in range(layout.num_kv_heads)]
    return sorted({lane for w in windows for lane in range(w.start, w.start + w.width, LANES)})


def words_below(count: Scalar, num_rows: int, dtype: Any) -> Int32[jax.Array, "X D"]:
    """A mask of the words that `num_rows` rows of `dtype` are: ones in the first `count` rows.

    Rows of 16 or 8 bits share words, the lower row the lower bits.
    """
    per_word = 4 // jnp.dtype(dtype).itemsize
    word = jax.lax.broadcasted_iota(jnp.int32, (num_rows // per_word, LANES), 0) * per_word
    mask = jnp.zeros_like(word)
    for part in range(per_word):
        mask = mask | jnp.where(word + part < count, part_mask(part, per_word), 0)
    return mask


def part_mask(part: int, per_word: int) -> int:
    """Bits of one of the rows that share a word, as an int32."""
    bits = 32 // per_word
    mask = ((1 << bits) - 1) << (part * bits)
    return mask - (1 << 32) if mask >= 1 << 31 else mask
