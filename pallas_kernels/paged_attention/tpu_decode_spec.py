"""What the decode kernel is compiled for, what it works on, and its items."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from radix_jax.pallas_kernels.paged_attention.tpu_copies import Index, Ref, Scalar, TileBuffers, TileShape
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES, SUBLANES, HeadLayout
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import (
    Tiles,
    TpuChip,
    choose_tiles,
    vmem_array_bytes,
    write_group,
)
from radix_jax.pallas_kernels.paged_attention.tpu_work import FIRST_BIT, ROW_SHIFT, TILE_MASK

# Rows whose results are in VMEM at a time: one is made, the other on its way to HBM.
NUM_RESULTS = 2
# Rows whose records are: as many as there are buffers, at the most, where each row has one tile.
NUM_RECORDS = 4


@dataclass(frozen=True)
class DecodeSpec:
    """What the kernel is compiled for.

    score_cap: c of c * tanh(scores), in base 2 as the scores are, which q is scaled for; None: no cap.
    """

    layout: HeadLayout
    page_size: int
    table_width: int
    chip: TpuChip
    pool_dtype: Any
    compute_dtype: Any
    out_dtype: Any
    sliding_window: int | None
    score_cap: float | None
    writes: bool
    return_lse: bool

    @functools.cached_property
    def tiles(self) -> Tiles:
        """Chosen for the shape and the chip."""
        return choose_tiles(
            self.chip,
            tile_bytes=self.layout.width * self.pool_dtype.itemsize,
            fixed_bytes=sum(vmem_array_bytes(*array) for array in self.vmem_arrays),
            table_len=self.table_width * self.page_size,
        )

    @property
    def vmem_arrays(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of what is in VMEM beside the tiles: records, results, new tile rows, running softmax."""
        layout, f32 = self.layout, jnp.dtype(jnp.float32)
        state = (layout.num_rows, LANES)
        return [
            ((NUM_RECORDS, self.record_rows, LANES), f32),
            ((NUM_RESULTS, layout.num_rows, layout.out_width), self.out_dtype),
            ((NUM_RESULTS, *(state if self.return_lse else (SUBLANES, LANES))), f32),
            ((NUM_RESULTS, self.new_rows, layout.width if self.writes else LANES), self.pool_dtype),
            (state, f32),
            (state, f32),
            ((layout.num_rows, layout.out_width), f32),
        ]

    @property
    def shape(self) -> TileShape:
        """Of a KV tile."""
        return TileShape(self.page_size, self.tiles.tile_len)

    @property
    def chunks(self) -> range:
        """Of a tile, 128 tokens each: what one vector register of scores covers."""
        return range(self.tiles.tile_len // LANES)

    @property
    def new_rows(self) -> int:
        """Rows of a tile that are read and merged with a new token; of them, as many as a write takes are written."""
        if self.chip.has_tall_tiles:
            return SUBLANES * 4 // self.pool_dtype.itemsize
        return write_group(self.pool_dtype)

    @property
    def new_row(self) -> int:
        """Of a record, where the new token's lanes begin."""
        return self.layout.num_rows * self.layout.q_width // LANES

    @property
    def words_row(self) -> int:
        """Of a record, where the words of the new token begin."""
        return self.new_row + (0 if words_follow(self.pool_dtype) else self.layout.width // LANES)

    @property
    def record_rows(self) -> int:
        """Of a record, in whole tiles."""
        rows = self.words_row + self.layout.width // LANES if self.writes else self.new_row
        return -(-rows // SUBLANES) * SUBLANES


def words_follow(dtype: Any) -> bool:
    """Whether the words of a pool of `dtype` follow from its values in float32."""
    return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)


class Refs(NamedTuple):
    """What the kernel reads and writes; see `scratch_shapes` for those in VMEM."""

    items: Ref
    kv_lens: Ref
    row_ids: Ref
    tokens: Ref
    records: Ref
    out: Ref
    lse: Ref
    tiles: TileBuffers
    done: Ref
    record: Ref
    out_rows: Ref
    lse_rows: Ref
    new_rows: Ref
    top: Ref
    total: Ref
    values: Ref


class Item(NamedTuple):
    """An item of the work list. row: among rows with work. num_tokens: from the tile's first to the row's end."""

    row: Scalar
    tile: Scalar
    is_first: Scalar
    num_tokens: Scalar

    @property
    def record(self) -> Scalar:
        """Where the row's record lies in VMEM."""
        return jax.lax.bitwise_and(self.row, NUM_RECORDS - 1)

    @property
    def result(self) -> Scalar:
        """Where its results do."""
        return jax.lax.bitwise_and(self.row, NUM_RESULTS - 1)


def read_item(spec: DecodeSpec, refs: Refs, index: Index) -> Item:
    """An item, or one without tokens behind the last."""
    word = refs.items[index]
    row, tile = jax.lax.shift_right_logical(word, ROW_SHIFT), jax.lax.bitwise_and(word, TILE_MASK)
    return Item(row, tile, jax.lax.bitwise_and(word, FIRST_BIT), refs.kv_lens[row] - tile * spec.tiles.tile_len)


def num_live(spec: DecodeSpec, item: Item) -> Scalar:
    """Rows of an item's tile that the row's tokens in the pool fill; the new token is not yet among them."""
    return jnp.minimum(item.num_tokens - 1 if spec.writes else item.num_tokens, spec.tiles.tile_len)


def num_copied(spec: DecodeSpec, item: Item) -> Scalar:
    """Rows of an item's tile that are copied."""
    return spec.shape.copies_for(item.num_tokens) * spec.shape.copy_len
