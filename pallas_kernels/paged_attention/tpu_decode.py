"""Decode on a TPU: one query a row, over a flat list of (row, KV tile) items, and the row's new K and V in passing.

One program walks the items. While it computes one, the copies of the next ones are under way. All kv heads of an item
are one straight run of code, in the order of `decode_steps`: the compiler schedules within such a run only, and keeps
the matmul units busy where the scores of a slab are far ahead of its softmax.

The new token of a row (`decode` with `new_kv`) is not read back from the pool: the running softmax starts with it, its
score the maximum, its V the values. Its K and V go into a copy of the tile rows that surround its place, taken from the
row's last tile, and from there to the pool.

A row's record holds what the kernel reads of it beside the pool, as float32 rows of 128 lanes:

    [0, M * D / 128)  q, by lane groups: rows of slabs, scaled so that scores are in base 2
    [.., + W / 128)   the new token's lanes, as the pool will hold them
    [.., + W / 128)   the same as words, each row of a word the same, unless they follow from the lanes
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.pallas_kernels.paged_attention.tpu_copies import (
    Index,
    Ref,
    Scalar,
    TileBuffers,
    clean_rows,
    dirty_end,
    mark_all_dirty,
    wait_for,
    wait_for_copies,
)
from radix_jax.pallas_kernels.paged_attention.tpu_decode_item import (
    ItemParts,
    start_record,
    start_tile,
    wait_for_results,
)
from radix_jax.pallas_kernels.paged_attention.tpu_decode_spec import (
    NUM_RESULTS,
    DecodeSpec,
    Item,
    Refs,
    num_copied,
    num_live,
    read_item,
    words_follow,
)
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES, HeadLayout
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import (
    TpuChip,
    check_pool,
    check_scalars,
)
from radix_jax.pallas_kernels.paged_attention.tpu_work import WorkList, decode_work
from radix_jax.pallas_kernels.paged_attention.tpu_write import rounded_lanes

LOG2_E = 1.4426950408889634


def decode(
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
    new_kv: tuple[Float[jax.Array, "T G H"], Float[jax.Array, "T G H"]] | None,
    chip: TpuChip,
    interpret: Any = False,
) -> tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"] | None, KVPool]:
    """(out, lse or None, pool) of rows of one query each; see `paged_attention`. Tokens of no row get 0 and -inf.

    new_kv: K and V of each token, which the kernel attends to and writes into the pool as token kv_lens[b] - 1 of row
    b, in place where the pool is donated. None: they are in the pool already. interpret: as of pallas_call.

    Raises:
        UnsupportedOption: a pool that can't be copied by pages, or one too large for the chip's VMEM or scalar memory.
    """
    check_pool(kv_pages.shape[1], kv_pages.shape[2], kv_pages.dtype)
    spec = spec_of(
        q,
        kv_pages,
        page_table.shape[1],
        num_kv_heads=num_kv_heads,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        is_scaled=kv_scales is not None,
        writes=new_kv is not None,
        chip=chip,
    )
    work = decode_work(
        kv_lens,
        cu_q_lens,
        table_len=page_table.shape[1] * kv_pages.shape[1],
        tile_len=spec.tiles.tile_len,
        num_spare=spec.tiles.num_buffers,
        sliding_window=sliding_window,
    )
    # A tile's pages are looked up before it is known which it has.
    pages = jnp.pad(page_table.reshape(-1), (0, spec.shape.num_copies))
    check_scalars(sum(x.size for x in work) + pages.size + 1, page_table.shape)
    # An array and no constant: the layers of a model then share one compiled kernel.
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    k_scale, v_scale = _head_scales(kv_scales, q.shape[1])
    factor = scale * LOG2_E if logit_soft_cap is None else scale / logit_soft_cap
    lanes = None if new_kv is None else rounded_lanes(*new_kv, kv_pages.shape[2], kv_pages.dtype, kv_scales)
    records = make_records(spec, q.astype(jnp.float32) * (factor * k_scale), lanes)
    out, lse, kv_pages = call_decode_kernel(work, pages, offset, records, kv_pages, spec=spec, interpret=interpret)
    if lse is not None:
        lse = spec.layout.unstack_rows(lse)[..., 0].reshape(q.shape[:2])
    return (spec.layout.unstack(out) * v_scale).astype(q.dtype), lse, kv_pages


def _head_scales(kv_scales: Float32[jax.Array, "G 2"] | None, num_heads: int) -> tuple[Any, Any]:
    """Of the K and of the V that each query head reads, [N, 1] or 1."""
    if kv_scales is None:
        return 1, 1
    scales = jnp.repeat(kv_scales, num_heads // kv_scales.shape[0], axis=0)
    return scales[:, :1], scales[:, 1:]


def spec_of(
    q: Any,
    kv_pages: Any,
    table_width: int,
    *,
    num_kv_heads: int,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    return_lse: bool,
    is_scaled: bool,
    writes: bool,
    chip: TpuChip,
) -> DecodeSpec:
    """The kernel for arrays, or shapes and dtypes, of a call."""
    return DecodeSpec(
        layout=HeadLayout(q.shape[1], num_kv_heads, q.shape[2], kv_pages.shape[2]),
        page_size=kv_pages.shape[1],
        table_width=table_width,
        chip=chip,
        pool_dtype=jnp.dtype(kv_pages.dtype),
        compute_dtype=compute_dtype(q.dtype, kv_pages.dtype),
        # What is scaled is so before it is rounded, and there is no float16 in a kernel.
        out_dtype=jnp.dtype(jnp.float32 if is_scaled or q.dtype == jnp.float16 else q.dtype),
        sliding_window=sliding_window,
        score_cap=None if logit_soft_cap is None else logit_soft_cap * LOG2_E,
        writes=writes,
        return_lse=return_lse,
    )


def compute_dtype(q_dtype: Any, pool_dtype: Any) -> Any:
    """What goes into the matmuls: bfloat16 where both are no wider, else float32; there is no float16 matmul."""
    narrow = all(d == jnp.bfloat16 or d.itemsize == 1 for d in (jnp.dtype(q_dtype), jnp.dtype(pool_dtype)))
    return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)


def make_records(
    spec: DecodeSpec, q: Float32[jax.Array, "T N H"], lanes: Float[jax.Array, "T W"] | None
) -> Float32[jax.Array, "T R 128"]:
    """What the kernel reads of each token beside the pool; see above. q: scaled."""
    num_tokens = q.shape[0]
    # As it goes into the matmuls, so that the new token's score, which does not, is like the others.
    rows = spec.layout.stack(q.astype(spec.compute_dtype).astype(jnp.float32))
    groups = rows.reshape(num_tokens, rows.shape[1], -1, LANES).swapaxes(1, 2)
    parts = [groups.reshape(num_tokens, -1, LANES)]
    if lanes is not None:
        parts.append(lanes.astype(jnp.float32).reshape(num_tokens, -1, LANES))
        if not words_follow(lanes.dtype):
            bits = lanes.dtype.itemsize * 8
            word = jax.lax.bitcast_convert_type(lanes, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
            copies = sum(1 << (bits * i) for i in range(32 // bits))
            words = jax.lax.bitcast_convert_type(word * jnp.uint32(copies), jnp.float32)
            parts.append(words.reshape(num_tokens, -1, LANES))
    record = jnp.concatenate(parts, axis=1)
    return jnp.pad(record, ((0, 0), (0, spec.record_rows - record.shape[1]), (0, 0)))


@functools.partial(jax.jit, static_argnames=("spec", "interpret", "kernel"))
def call_decode_kernel(
    work: WorkList,
    pages: Int32[jax.Array, " Z"],
    page_offset: Int32[jax.Array, " 1"],
    records: Float32[jax.Array, "T R 128"],
    kv_pages: KVPool,
    *,
    spec: DecodeSpec,
    interpret: Any,
    kernel: Callable[..., None] | None = None,
) -> tuple[Float[jax.Array, "T M D"], Float32[jax.Array, "T M 128"] | None, KVPool]:
    """(rows of slabs, their log sums in every lane or None, pool).

    kernel: what runs in the place of `decode_kernel`, over the same memory; benchmarks measure parts of it.
    """
    num_tokens, layout = records.shape[0], spec.layout
    # Aliased, as the kernel leaves tokens of no row alone.
    results = [jnp.zeros((num_tokens, layout.num_rows, layout.out_width), spec.out_dtype)]
    if spec.return_lse:
        results.append(jnp.full((num_tokens, layout.num_rows, LANES), -jnp.inf, jnp.float32))
    if spec.writes:
        results.append(kv_pages)
    scalars = (*work, pages, page_offset)
    # Else XLA may place what is small in VMEM, which the kernel copies from by loads and stores.
    inputs = [records, *([] if spec.writes else [kv_pages]), *results]
    inputs = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in inputs]
    first_result = len(scalars) + len(inputs) - len(results)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    given = pl.pallas_call(
        functools.partial(kernel or decode_kernel, spec=spec),
        out_shape=tuple(pltpu.HBM(x.shape, x.dtype) for x in results),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=[in_hbm] * len(inputs),
            out_specs=(in_hbm,) * len(results),
            scratch_shapes=_scratch_shapes(spec),
        ),
        input_output_aliases={first_result + index: index for index in range(len(results))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=spec.tiles.vmem_limit_bytes, disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention_decode",
    )(*scalars, *inputs)
    lse = given[1] if spec.return_lse else None
    return given[0], lse, given[-1] if spec.writes else kv_pages


def _scratch_shapes(spec: DecodeSpec) -> list[Any]:
    """In the order in which `name_refs` takes them."""
    num_buffers, width = spec.tiles.num_buffers, spec.layout.width
    return [
        pltpu.VMEM((num_buffers, spec.tiles.tile_len, width), spec.pool_dtype),
        pltpu.SemaphoreType.DMA((num_buffers,)),
        pltpu.SMEM((num_buffers,), jnp.int32),
        pltpu.SemaphoreType.DMA((NUM_RESULTS,)),
        *(pltpu.VMEM(shape, dtype) for shape, dtype in spec.vmem_arrays),
    ]


def name_refs(spec: DecodeSpec, args: tuple[Ref, ...]) -> tuple[Refs, Ref]:
    """(refs by name, counts) of the kernel's arguments: scalars, inputs, outputs, scratch."""
    items, counts, kv_lens, row_ids, tokens, pages, page_offset, records, *rest = args
    num_results = 1 + spec.return_lse + spec.writes
    # Of what is aliased the output alone is used.
    outputs, scratch = rest[-11 - num_results : -11], rest[-11:]
    pool = outputs[-1] if spec.writes else rest[0]
    buffers, semaphores, dirty, done, *in_vmem = scratch
    tiles = TileBuffers(pool, buffers, semaphores, dirty, pages, page_offset[0])
    lse = outputs[1] if spec.return_lse else None
    return Refs(items, kv_lens, row_ids, tokens, records, outputs[0], lse, tiles, done, *in_vmem), counts


class Walk(NamedTuple):
    """Where the kernel is: an item, the buffer its tile is in, and whether it can be computed as it is."""

    number: Scalar
    slot: Scalar
    item: Item
    is_plain: Scalar


def decode_kernel(*args: Ref, spec: DecodeSpec) -> None:
    """All items. `args`: as `name_refs` takes them.

    The inner loop is all computation: it ends where an item needs something first, a record or a clean buffer.
    """
    refs, counts = name_refs(spec, args)
    num_items, num_rows = counts[0], counts[1]

    def compute(walk: Walk) -> Walk:
        return compute_item(spec, refs, walk, num_items)

    def prepare_and_compute(walk: Walk) -> Walk:
        _prepare(spec, refs, walk)
        return jax.lax.while_loop(lambda walk: walk.is_plain != 0, compute, walk._replace(is_plain=jnp.int32(1)))

    jax.lax.while_loop(lambda walk: walk.number < num_items, prepare_and_compute, first_item(spec, refs))
    for back in range(1, NUM_RESULTS + 1):
        pl.when(num_rows >= back)(lambda back=back: wait_for_results(spec, refs, num_rows - back))


def first_item(spec: DecodeSpec, refs: Refs) -> Walk:
    """Where the walk begins, when the first tile has come and those behind it are on their way."""
    mark_all_dirty(refs.tiles)
    for index in range(spec.tiles.num_buffers - 1):
        item = read_item(spec, refs, index)
        start_record(refs, item, index)
        start_tile(spec, refs, item, index, range(spec.shape.num_copies))
    first = read_item(spec, refs, 0)
    _wait_for_tile(spec, refs, first, 0)
    return Walk(jnp.int32(0), jnp.int32(0), first, jnp.int32(0))


def compute_item(spec: DecodeSpec, refs: Refs, walk: Walk, num_items: Scalar) -> Walk:
    """Compute an item, and go on to the next: a turn of the inner loop."""
    ItemParts(spec, refs, walk.number, walk.slot, walk.item).run()
    return _go_on(spec, refs, walk, num_items)


def _go_on(spec: DecodeSpec, refs: Refs, walk: Walk, num_items: Scalar) -> Walk:
    """To the next item, when its tile has come. Plain: neither a row's first, nor with rows behind its end to clean."""
    number, item = walk.number + 1, read_item(spec, refs, walk.number + 1)
    slot = jnp.where(walk.slot == spec.tiles.num_buffers - 1, 0, walk.slot + 1)
    is_clean = num_live(spec, item) >= dirty_end(refs.tiles, slot, num_copied(spec, item))
    is_plain = (item.is_first == 0) & is_clean & (number < num_items)
    _wait_for_tile(spec, refs, item, slot)
    return Walk(number, slot, item, is_plain.astype(jnp.int32))


def _wait_for_tile(spec: DecodeSpec, refs: Refs, item: Item, slot: Index) -> None:
    num = spec.shape.copies_for(item.num_tokens)
    pl.when(num > 0)(lambda: wait_for_copies(spec.shape, refs.tiles, slot, num))


def _prepare(spec: DecodeSpec, refs: Refs, walk: Walk) -> None:
    """Wait for the record of a row that begins, and until its results may be written; clean the buffer's end."""
    item, slot = walk.item, walk.slot
    is_first = item.is_first != 0
    pl.when(is_first)(lambda: wait_for(refs.record.at[item.record], refs.tiles.semaphores.at[slot]))
    pl.when(is_first & (item.row >= NUM_RESULTS))(lambda: wait_for_results(spec, refs, item.row))
    clean_rows(spec.layout, refs.tiles, slot, num_live(spec, item), num_copied(spec, item))
