"""Extend on a TPU: rows of many queries, chunks of a prompt over a cached prefix and themselves.

The rows' own K and V are in the pool already, so prefix and chunk are one causal loop. One program walks a flat list of
items, each a tile of a row's queries with a KV tile that they see, in the order of the queries: a tile's results are
written whole, and what its last one has beyond its row is overwritten by the next tile, or read by no one.

Rows of one query go through the decode kernel, in the same step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.pallas_kernels.paged_attention.tpu_copies import (
    Ref,
    TileBuffers,
    clean_rows,
    mark_all_dirty,
    start_copies,
    wait_for_copies,
)
from radix_jax.pallas_kernels.paged_attention.tpu_decode import LOG2_E, compute_dtype, decode
from radix_jax.pallas_kernels.paged_attention.tpu_extend_item import (
    ExtendItem,
    ExtendRefs,
    Place,
    finish_rows,
    next_buffer,
    num_live,
    query_copy,
    read_item,
    reset_state,
    result_copies,
    run_item,
    score,
)
from radix_jax.pallas_kernels.paged_attention.tpu_extend_work import (
    NUM_BUFFERS,
    ExtendSpec,
    ExtendWork,
    choose_extend_tiles,
    extend_work,
    lay_out_queries,
    take_results,
    vmem_arrays,
)
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES, HeadLayout
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import (
    VMEM_MARGIN_BYTES,
    TpuChip,
    check_pool,
    check_scalars,
)


def paged_attention_extend(
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
    chip: TpuChip,
    interpret: Any = False,
) -> Float[jax.Array, "T N H"] | tuple[Float[jax.Array, "T N H"], Float32[jax.Array, "T N"]]:
    """See `paged_attention`. Tokens of no row come out as 0, with -inf for their log sum.

    chip: that the tiles are chosen for. interpret: as of pallas_call.

    Raises:
        UnsupportedOption: a shape that the kernels can't do; the message tells the rule and the way out.
    """
    options: dict[str, Any] = {
        "page_offset": page_offset,
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
        "return_lse": return_lse,
        "num_kv_heads": num_kv_heads,
        "kv_scales": kv_scales,
        "chip": chip,
        "interpret": interpret,
    }
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    single_lens = jnp.where(q_lens == 1, kv_lens, 0)
    out, lse, _ = decode(q, kv_pages, page_table, single_lens, cu_q_lens, new_kv=None, **options)
    longer, longer_lse, taken = _extend(q, kv_pages, page_table, kv_lens, cu_q_lens, max_q_len=max_q_len, **options)
    out = jnp.where(taken[:, None, None], longer, out)
    if lse is None or longer_lse is None:
        return out
    return out, jnp.where(taken[:, None], longer_lse, lse)


def _extend(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    page_offset: Any,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    return_lse: bool,
    num_kv_heads: int,
    kv_scales: jax.Array | None,
    max_q_len: int,
    chip: TpuChip,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """(out, lse or None, which tokens they hold for): those of rows of more than one query."""
    check_pool(kv_pages.shape[1], kv_pages.shape[2], kv_pages.dtype)
    spec = extend_spec_of(
        q,
        kv_pages,
        page_table.shape[1],
        num_kv_heads=num_kv_heads,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        max_q_len=max_q_len,
        chip=chip,
    )
    work, places = extend_work(spec, kv_lens, cu_q_lens, num_tokens=q.shape[0])
    check_scalars(sum(x.size for x in work) + page_table.size + 1, page_table.shape)
    factor = scale * LOG2_E if logit_soft_cap is None else scale / logit_soft_cap
    k_scale, v_scales = _head_scales(spec, kv_scales)
    scaled = (q.astype(jnp.float32) * (factor * k_scale)).astype(spec.compute_dtype)
    queries = lay_out_queries(spec, scaled, places)
    # An array and no constant: the layers of a model then share one compiled kernel.
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    # A tile's copies look their pages up before they are known to be wanted.
    pages = jnp.pad(page_table.reshape(-1), (0, spec.shape.num_copies))
    out, lse = call_extend_kernel(spec, work, pages, offset, queries, v_scales, kv_pages, interpret)
    if lse is not None:
        by_slot = lse[..., 0].reshape(num_kv_heads, -1, spec.group_size).transpose(1, 0, 2)
        lse = by_slot.reshape(-1, q.shape[1])[places.slots]
    return take_results(spec, out, places).astype(q.dtype), lse, places.taken


def _head_scales(spec: ExtendSpec, kv_scales: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(of the K that each query head reads [N, 1], of the V of each kv head [G])."""
    if kv_scales is None:
        return jnp.ones((spec.layout.num_heads, 1), jnp.float32), jnp.ones(spec.layout.num_kv_heads, jnp.float32)
    return jnp.repeat(kv_scales[:, :1], spec.group_size, axis=0), kv_scales[:, 1]


def extend_spec_of(
    q: Any,
    kv_pages: Any,
    table_width: int,
    *,
    num_kv_heads: int,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    return_lse: bool,
    max_q_len: int,
    chip: TpuChip,
) -> ExtendSpec:
    """The kernel for arrays, or shapes and dtypes, of a call.

    Raises:
        UnsupportedOption: not even the smallest tiles fit into the chip's VMEM.
    """
    layout = HeadLayout(q.shape[1], num_kv_heads, q.shape[2], kv_pages.shape[2])
    computed = compute_dtype(q.dtype, kv_pages.dtype)
    # There is no float16 in a kernel.
    out_dtype = jnp.dtype(jnp.float32 if q.dtype == jnp.float16 else q.dtype)
    tiles = choose_extend_tiles(
        chip,
        layout,
        pool_dtype=kv_pages.dtype,
        compute_dtype=computed,
        out_dtype=out_dtype,
        return_lse=return_lse,
        max_q_len=max_q_len,
        table_len=table_width * kv_pages.shape[1],
    )
    return ExtendSpec(
        layout=layout,
        page_size=kv_pages.shape[1],
        table_width=table_width,
        tiles=tiles,
        pool_dtype=kv_pages.dtype,
        compute_dtype=computed,
        out_dtype=out_dtype,
        sliding_window=sliding_window,
        score_cap=None if logit_soft_cap is None else logit_soft_cap * LOG2_E,
        return_lse=return_lse,
    )


@functools.partial(jax.jit, static_argnames=("spec", "interpret"))
def call_extend_kernel(
    spec: ExtendSpec,
    work: ExtendWork,
    pages: Int32[jax.Array, " Z"],
    page_offset: Int32[jax.Array, " 1"],
    queries: Float[jax.Array, "G M D"],
    v_scales: Float32[jax.Array, " G"],
    kv_pages: KVPool,
    interpret: Any,
) -> tuple[Float[jax.Array, "G M O"], Float32[jax.Array, "G M X"] | None]:
    """(rows of each kv head, their log sums in every lane or None), where the work list has a tile."""
    layout, num_rows = spec.layout, queries.shape[1]
    results = [((layout.num_kv_heads, num_rows, layout.out_width), spec.out_dtype)]
    if spec.return_lse:
        results.append(((layout.num_kv_heads, num_rows, LANES), jnp.float32))
    scalars = (*work, pages, page_offset)
    tokens_of_rows = jnp.arange(spec.chunk_rows, dtype=jnp.int32) // spec.group_size
    tokens_of_rows = jnp.broadcast_to(tokens_of_rows[:, None], (spec.chunk_rows, LANES))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # Else XLA may place what is small in VMEM, which the kernel copies from by loads and stores.
    inputs = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (queries, kv_pages)]
    arrays = vmem_arrays(
        layout, spec.tiles, spec.pool_dtype, spec.compute_dtype, spec.out_dtype, return_lse=spec.return_lse
    )
    given = pl.pallas_call(
        functools.partial(extend_kernel, spec=spec),
        out_shape=tuple(pltpu.HBM(shape, dtype) for shape, dtype in results),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=[in_hbm, in_hbm, pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=(in_hbm,) * len(results),
            scratch_shapes=[
                *(pltpu.VMEM(shape, dtype) for shape, dtype in arrays[:-1]),
                pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
                pltpu.SMEM((NUM_BUFFERS,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=spec.tiles.vmem_bytes + VMEM_MARGIN_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attention_extend",
    )(*scalars, *inputs, v_scales, tokens_of_rows)
    return given[0], given[1] if spec.return_lse else None


def _name_refs(spec: ExtendSpec, args: tuple[Ref, ...]) -> tuple[ExtendRefs, Ref]:
    """(refs by name, counts) of the kernel's arguments: scalars, inputs, outputs, scratch."""
    items, counts, rows, slots, firsts, lasts, pages, page_offset, queries, pool, v_scales, tokens_of_rows, *rest = args
    out, *rest = rest
    lse = rest.pop(0) if spec.return_lse else None
    buffers, q, results, log_sums, *pairs = rest[:-4]
    semaphores, dirty, q_semaphores, done = rest[-4:]
    scores, weights, decays, maxima, sums, values = (tuple(pairs[i : i + 2]) for i in range(0, 12, 2))
    tiles = TileBuffers(pool, buffers, semaphores, dirty, pages, page_offset[0])
    named = ExtendRefs(
        items,
        rows,
        slots,
        firsts,
        lasts,
        queries,
        v_scales,
        out,
        lse,
        tiles,
        q,
        results,
        log_sums,
        scores,
        weights,
        decays,
        maxima,
        sums,
        values,
        tokens_of_rows,
        q_semaphores,
        done,
    )
    return named, counts


def extend_kernel(*args: Ref, spec: ExtendSpec) -> None:
    """All items. `args`: as `_name_refs` takes them."""
    refs, counts = _name_refs(spec, args)
    num_items = counts[0]
    mark_all_dirty(refs.tiles)
    reset_state(refs)
    pl.when(num_items > 0)(lambda: _walk(spec, refs, num_items))


def _walk(spec: ExtendSpec, refs: ExtendRefs, num_items: Any) -> None:
    first = read_item(refs, 0)
    for index in range(NUM_BUFFERS - 1):
        _start_tile(spec, refs, read_item(refs, index), index, index < num_items)
    query_copy(spec, refs, first.tile).start()
    query_copy(spec, refs, first.tile).wait()
    _wait_for_tile(spec, refs, first, jnp.int32(0), True)
    score(spec, refs, Place(jnp.int32(0), jnp.int32(0), jnp.int32(0)), 0)

    def walk(index: Any, slot: Any) -> Any:
        item, ahead = read_item(refs, index), read_item(refs, index + 1)
        is_last = index == num_items - 1
        starts = (index == 0) | (read_item(refs, jnp.maximum(index - 1, 0)).tile != item.tile)
        ends = is_last | (ahead.tile != item.tile)
        next_slot = next_buffer(slot)
        far = read_item(refs, index + NUM_BUFFERS - 1)
        _start_tile(spec, refs, far, next_buffer(next_slot), index + NUM_BUFFERS - 1 < num_items)
        # The tiles of the list are numbered without a gap.
        last_tile = read_item(refs, num_items - 1).tile
        pl.when(starts & (item.tile < last_tile))(lambda: query_copy(spec, refs, item.tile + 1).start())
        pl.when(ends & ~is_last)(lambda: query_copy(spec, refs, ahead.tile).wait())
        _wait_for_tile(spec, refs, ahead, next_slot, ~is_last)
        clean_rows(spec.layout, refs.tiles, slot, num_live(spec, item), _num_copied(spec, item))
        here = Place(jax.lax.bitwise_and(item.tile, 1), slot, jnp.int32(0))
        # Behind the last item there is nothing to look ahead to: it looks at itself again.
        next_place = Place(
            jnp.where(is_last, here.q_slot, jax.lax.bitwise_and(ahead.tile, 1)),
            jnp.where(is_last, slot, next_slot),
            jnp.int32(0),
        )
        run_item(spec, refs, item, here, next_place)
        pl.when(ends)(lambda: _finish_tile(spec, refs, item))
        return next_slot

    jax.lax.fori_loop(0, num_items, walk, jnp.int32(0))
    last = read_item(refs, num_items - 1)
    for copy in result_copies(spec, refs, last.tile):
        copy.wait()


def _finish_tile(spec: ExtendSpec, refs: ExtendRefs, item: ExtendItem) -> None:
    @pl.when(item.tile > 0)
    def _() -> None:
        for copy in result_copies(spec, refs, item.tile - 1):
            copy.wait()

    def finish(pair: Any, carry: None) -> None:
        for side in range(2):
            finish_rows(spec, refs, pair, side)
        return carry

    jax.lax.fori_loop(0, spec.num_steps // 2, finish, None)
    for copy in result_copies(spec, refs, item.tile):
        copy.start()


def _num_copied(spec: ExtendSpec, item: ExtendItem) -> Any:
    return spec.shape.copies_for(num_live(spec, item)) * spec.shape.copy_len


def _start_tile(spec: ExtendSpec, refs: ExtendRefs, item: ExtendItem, slot: Any, wanted: Any) -> None:
    num = jnp.where(wanted, spec.shape.copies_for(num_live(spec, item)), 0)
    which = range(spec.shape.num_copies)
    start_copies(spec.shape, refs.tiles, slot, item.row * spec.table_width, item.kv_tile, num, which)


def _wait_for_tile(spec: ExtendSpec, refs: ExtendRefs, item: ExtendItem, slot: Any, wanted: Any) -> None:
    num = spec.shape.copies_for(num_live(spec, item))
    pl.when(wanted & (num > 0))(lambda: wait_for_copies(spec.shape, refs.tiles, slot, num))
