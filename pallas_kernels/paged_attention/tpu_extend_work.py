"""Work list, query layout and tile sizes of the TPU extend kernel, all made outside of it.

The kernel takes a row's queries in tiles of whole tokens. Those of one kv head lie one below the other, token by token,

    rows of the matmuls of kv head g: (token 0, head gR), .., (token 0, head gR + R - 1), (token 1, head gR), ..

and each row's first token begins at a multiple of `ALIGNED_ROWS` of them: copies begin at whole tiles of memory.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from radix_jax.pallas_kernels.paged_attention.backends import UnsupportedOption
from radix_jax.pallas_kernels.paged_attention.tpu_copies import TileShape
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES, HeadLayout
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import (
    MIB,
    VMEM_MARGIN_BYTES,
    TpuChip,
    vmem_array_bytes,
)
from radix_jax.pallas_kernels.paged_attention.tpu_work import flat_items

ALIGNED_ROWS = 16
# An item is a word: the q tile in bits [15, 31), the KV tile in bits [0, 15).
TILE_SHIFT = 15
KV_MASK = (1 << TILE_SHIFT) - 1
# Rows of one matmul, at most; the longest that pays on a v5e.
MAX_CHUNK_ROWS = 512
# What is asked for at most, whatever the chip has.
VMEM_BUDGET_BYTES = 30 * MIB
NUM_BUFFERS = 3
# Fewer queries than this are decode's.
MIN_QUERIES = 2


@dataclass(frozen=True)
class ExtendTiles:
    """tile_len: tokens of a KV tile. chunk_tokens: of a step, which is one matmul for scores and one for values.
    chunks_per_head: steps of one kv head. vmem_bytes: of the kernel, by estimate."""

    tile_len: int
    chunk_tokens: int
    chunks_per_head: int
    vmem_bytes: int

    @property
    def tokens(self) -> int:
        """Of a q tile."""
        return self.chunk_tokens * self.chunks_per_head


@dataclass(frozen=True)
class ExtendSpec:
    """What is static in the kernel. score_cap: of scores in base 2, or None."""

    layout: HeadLayout
    page_size: int
    table_width: int
    tiles: ExtendTiles
    pool_dtype: Any
    compute_dtype: Any
    out_dtype: Any
    sliding_window: int | None
    score_cap: float | None
    return_lse: bool

    @property
    def shape(self) -> TileShape:
        """How a KV tile lies in pages."""
        return TileShape(self.page_size, self.tiles.tile_len)

    @property
    def group_size(self) -> int:
        """Query heads on a kv head."""
        return self.layout.num_heads // self.layout.num_kv_heads

    @property
    def chunk_rows(self) -> int:
        """Rows of the matmuls of a step."""
        return self.tiles.chunk_tokens * self.group_size

    @property
    def head_rows(self) -> int:
        """Rows of one kv head in a q tile."""
        return self.tiles.tokens * self.group_size

    @property
    def num_steps(self) -> int:
        """Of an item; even."""
        return self.layout.num_kv_heads * self.tiles.chunks_per_head


class ExtendWork(NamedTuple):
    """items: q tile and KV tile of each, as one word; `counts` of them. rows, slots, first_positions, last_positions:
    of each q tile, its row, where its queries begin among those laid out, and the positions of its outermost queries.
    """

    items: Int32[jax.Array, " I"]
    counts: Int32[jax.Array, " 1"]
    rows: Int32[jax.Array, " X"]
    slots: Int32[jax.Array, " X"]
    first_positions: Int32[jax.Array, " X"]
    last_positions: Int32[jax.Array, " X"]


class QueryPlaces(NamedTuple):
    """tokens: which token is at each place of the layout. slots: at which place each token is; any for those of no row.
    taken: whether a token has one."""

    tokens: Int32[jax.Array, " Z"]
    slots: Int32[jax.Array, " T"]
    taken: jax.Array


def token_alignment(group_size: int) -> int:
    """Tokens whose rows are whole tiles of memory."""
    return ALIGNED_ROWS // math.gcd(group_size, ALIGNED_ROWS)


def extend_work(
    spec: ExtendSpec, kv_lens: Int32[jax.Array, " B"], cu_q_lens: Int32[jax.Array, " B_plus_1"], *, num_tokens: int
) -> tuple[ExtendWork, QueryPlaces]:
    """The work of rows of MIN_QUERIES queries or more."""
    tile_tokens, tile_len, window = spec.tiles.tokens, spec.tiles.tile_len, spec.sliding_window
    align = token_alignment(spec.group_size)
    starts = cu_q_lens[:-1]
    q_lens = cu_q_lens[1:] - starts
    q_lens = jnp.where((q_lens >= MIN_QUERIES) & (kv_lens > 0), q_lens, 0)
    num_rows = min(kv_lens.shape[0], max(1, num_tokens // MIN_QUERIES))
    padded = -(-q_lens // align) * align
    slot_starts = jnp.cumsum(padded, dtype=jnp.int32) - padded
    tiles_of_row, index = flat_items(-(-q_lens // tile_tokens), num_tokens // tile_tokens + num_rows + 1)
    row = jnp.minimum(tiles_of_row, kv_lens.shape[0] - 1)
    is_tile = tiles_of_row < kv_lens.shape[0]
    first = (kv_lens - q_lens)[row] + index * tile_tokens
    last = jnp.minimum(first + tile_tokens, kv_lens[row]) - 1
    begin = jnp.zeros_like(first) if window is None else jnp.maximum(first - window + 1, 0) // tile_len
    counts = jnp.where(is_tile, last // tile_len + 1 - begin, 0)
    longest = -(-spec.table_width * spec.page_size // tile_len)
    if window is not None:
        longest = min(longest, (window + tile_tokens - 2) // tile_len + 2)
    tile, place = flat_items(counts, counts.shape[0] * longest + NUM_BUFFERS)
    # Behind the last item 0, as the kernel looks the pages up of whatever is there.
    kv_tile = jnp.where(tile < counts.shape[0], jnp.append(begin, 0)[tile] + place, 0)
    work = ExtendWork(
        items=(tile << TILE_SHIFT) | (kv_tile & KV_MASK),
        counts=counts.sum(dtype=jnp.int32).reshape(1),
        rows=_pad(row),
        slots=_pad(jnp.where(is_tile, slot_starts[row] + index * tile_tokens, 0)),
        first_positions=_pad(jnp.where(is_tile, first, 0)),
        last_positions=_pad(jnp.where(is_tile, last, -1), -1),
    )
    num_slots = -(-(num_tokens + num_rows * (align - 1)) // align) * align + tile_tokens
    slot_row, in_row = flat_items(padded, num_slots)
    token = jnp.append(starts, 0)[slot_row] + jnp.minimum(in_row, jnp.append(q_lens, 1)[slot_row] - 1)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    row_of = jnp.minimum((cu_q_lens[None, 1:] <= tokens[:, None]).sum(axis=1, dtype=jnp.int32), kv_lens.shape[0] - 1)
    taken = (q_lens[row_of] > 0) & (tokens < cu_q_lens[-1])
    slots = jnp.where(taken, slot_starts[row_of] + tokens - starts[row_of], 0)
    return work, QueryPlaces(jnp.clip(token, 0, num_tokens - 1), slots, taken)


def _pad(of_tiles: Int32[jax.Array, " X"], value: int = 0) -> Int32[jax.Array, " Y"]:
    return jnp.append(of_tiles, value)


def k_start(layout: HeadLayout, head: Any) -> Any:
    """First lane of what is read for a kv head's K: whole lane groups, `q_width` of them in lanes."""
    return _window_start(2 * head * layout.head_dim, layout.width - layout.q_width)


def v_start(layout: HeadLayout, head: Any) -> Any:
    """First lane of what is read for a kv head's V, `out_width` lanes."""
    return _window_start((2 * head + 1) * layout.head_dim, layout.width - layout.out_width)


def _window_start(lane: Any, last: int) -> Any:
    if isinstance(lane, int):
        return min(lane // LANES * LANES, last)
    return jnp.minimum(jax.lax.shift_left(jax.lax.shift_right_logical(lane, 7), 7), last)


def lay_out_queries(spec: ExtendSpec, q: Float[jax.Array, "T N H"], places: QueryPlaces) -> Float[jax.Array, "G M D"]:
    """Queries (scaled) as rows of each kv head, in the lanes of its K window; 0 in the others."""
    layout = spec.layout
    tokens = q.reshape(q.shape[0], -1)[places.tokens]
    grouped = tokens.reshape(-1, layout.num_kv_heads, spec.group_size, layout.head_dim)
    heads = grouped.transpose(1, 0, 2, 3).reshape(layout.num_kv_heads, -1, layout.head_dim)
    if layout.q_width == layout.head_dim:
        return heads
    parts = []
    for head in range(layout.num_kv_heads):
        offset = 2 * head * layout.head_dim - k_start(layout, head)
        parts.append(jnp.pad(heads[head], ((0, 0), (offset, layout.q_width - offset - layout.head_dim))))
    return jnp.stack(parts)


def take_results(spec: ExtendSpec, out: Float[jax.Array, "G M D"], places: QueryPlaces) -> Float[jax.Array, "T N H"]:
    """Of each token its heads, from the lanes of the V windows."""
    layout = spec.layout
    heads = out.reshape(layout.num_kv_heads, -1, spec.group_size, out.shape[-1])
    parts = []
    for head in range(layout.num_kv_heads):
        offset = (2 * head + 1) * layout.head_dim - v_start(layout, head)
        parts.append(heads[head, :, :, offset : offset + layout.head_dim])
    # Tokens first, and then taken: whole rows are fast to take, and quick to compile.
    rows = jnp.stack(parts, axis=1).reshape(-1, layout.num_heads * layout.head_dim)
    return rows[places.slots].reshape(-1, layout.num_heads, layout.head_dim)


def choose_extend_tiles(
    chip: TpuChip,
    layout: HeadLayout,
    *,
    pool_dtype: Any,
    compute_dtype: Any,
    out_dtype: Any,
    return_lse: bool,
    max_q_len: int,
    table_len: int,
) -> ExtendTiles:
    """The largest steps that fit, of long KV tiles first.

    Raises:
        UnsupportedOption: not even the smallest fit.
    """
    group_size = layout.num_heads // layout.num_kv_heads
    align = token_alignment(group_size)
    budget = min(chip.vmem_bytes, VMEM_BUDGET_BYTES) - VMEM_MARGIN_BYTES
    least = 1 + layout.num_kv_heads % 2
    smallest = 0
    for tile_len in (512, 256, 128):
        if tile_len > LANES and tile_len >= 2 * table_len:
            continue
        for limit in (MAX_CHUNK_ROWS, MAX_CHUNK_ROWS // 2, MAX_CHUNK_ROWS // 4, ALIGNED_ROWS):
            chunk_tokens = max(1, limit // group_size // align) * align
            # A head's steps: as many as a long chunk fills, an even number of steps in all.
            for chunks in (4, 2, 1):
                fills = (chunks == least) or (chunks > least and chunk_tokens * (chunks - 1) < max_q_len)
                if chunks < least or not fills or (chunks > least and layout.num_kv_heads * chunks > 8):
                    continue
                if chunks == least and limit > ALIGNED_ROWS and chunk_tokens * chunks >= 2 * max_q_len:
                    continue
                tiles = ExtendTiles(tile_len, chunk_tokens, chunks, 0)
                arrays = vmem_arrays(layout, tiles, pool_dtype, compute_dtype, out_dtype, return_lse=return_lse)
                smallest = sum(vmem_array_bytes(*array) for array in arrays)
                if smallest <= budget:
                    return ExtendTiles(tile_len, chunk_tokens, chunks, smallest)
    raise UnsupportedOption(
        f"attention backend 'pallas_tpu': the smallest tiles of a chunk take {smallest} bytes of VMEM, and {budget} "
        "are there; shard the kv heads over more chips, or use xla"
    )


def vmem_arrays(
    layout: HeadLayout, tiles: ExtendTiles, pool_dtype: Any, compute_dtype: Any, out_dtype: Any, *, return_lse: bool
) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of all that the kernel keeps in VMEM, in the order of its scratch."""
    group_size = layout.num_heads // layout.num_kv_heads
    rows, f32 = tiles.chunk_tokens * group_size, jnp.dtype(jnp.float32)
    head_rows, steps = rows * tiles.chunks_per_head, layout.num_kv_heads * tiles.chunks_per_head
    state = (steps // 2, rows, LANES)
    lse = (layout.num_kv_heads, head_rows, LANES) if return_lse else (1, 8, LANES)
    return [
        ((NUM_BUFFERS, tiles.tile_len, layout.width), jnp.dtype(pool_dtype)),
        ((2, layout.num_kv_heads, head_rows, layout.q_width), jnp.dtype(compute_dtype)),
        ((layout.num_kv_heads, head_rows, layout.out_width), jnp.dtype(out_dtype)),
        (lse, f32),
        *[((rows, tiles.tile_len), f32)] * 2,
        *[((rows, tiles.tile_len), jnp.dtype(compute_dtype))] * 2,
        *[((rows, LANES), f32)] * 2,
        *[(state, f32)] * 4,
        *[((steps // 2, rows, layout.out_width), f32)] * 2,
        ((rows, LANES), jnp.dtype(jnp.int32)),
    ]
