"""Write new keys and values into the pool on a TPU, in groups of the rows of one tile.

A tile of HBM is 8 rows of lanes (float8: 32) and nothing smaller is written. New tokens come in runs, which are tokens
one after the other whose slots are so too and lie in one group. A group of which a run has all rows is written, another
is read, merged and written. Where two runs of neighbouring blocks meet in a group, which an engine's steps do not bring
about, they are done one after the other.

Everything moves as 32-bit words: new tokens come as rows of words that hold their element in every part, so that a row
of any dtype can be taken from any place, and the part where it belongs be kept.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int32

from radix_jax.arrays import KVPool
from radix_jax.pallas_kernels.paged_attention.pool_lanes import pool_lanes
from radix_jax.pallas_kernels.paged_attention.tpu_copies import Ref, Scalar, part_mask, wait_for, words_below
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import (
    MIB,
    VMEM_MARGIN_BYTES,
    check_pool,
    check_scalars,
    write_group,
)

# New tokens that are in VMEM at a time, and the groups they fall into at the worst.
BLOCK_BYTES = 4 * MIB
MAX_BLOCK_LEN = 128
MIN_BLOCK_LEN = 8


class Runs(NamedTuple):
    """Runs of new tokens, in the order of the tokens.

    tokens, lens, slots: of each run, its first token, how many, and the slot of the first.
    firsts: of each block, its first run; a run is of the block in which it ends.
    meets: of each block, whether a run meets another of this block or the one before in a group.
    """

    tokens: Int32[jax.Array, " T"]
    lens: Int32[jax.Array, " T"]
    slots: Int32[jax.Array, " T"]
    firsts: Int32[jax.Array, " X_plus_1"]
    meets: Int32[jax.Array, " X"]


def write_kv_tpu(
    kv_pages: KVPool,
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    write_slots: Int32[jax.Array, " T"],
    *,
    page_offset: int | Int32[jax.Array, ""],
    kv_scales: Float32[jax.Array, "G 2"] | None = None,
    interpret: Any = False,
) -> KVPool:
    """See `write_kv`. In place where the pool is donated. interpret: as of pallas_call.

    Raises:
        UnsupportedOption: a pool that can't be copied by pages, or more tokens than scalar memory holds.
    """
    num_pages, page_size, width = kv_pages.shape
    check_pool(page_size, width, kv_pages.dtype)
    block_len = choose_block_len(k.shape[0], width, kv_pages.dtype)
    runs = find_runs(
        write_slots, num_slots=num_pages * page_size, group=write_group(kv_pages.dtype), block_len=block_len
    )
    check_scalars(sum(x.size for x in runs), write_slots.shape)
    words = pool_words(rounded_lanes(k, v, width, kv_pages.dtype, kv_scales))
    # By lane groups, as rows are taken from any place of arrays of 128 lanes only.
    words = words.reshape(-1, width // LANES, LANES).swapaxes(0, 1)
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    return call_write_kernel(runs, offset, words, kv_pages, block_len=block_len, interpret=interpret)


def rounded_lanes(
    k: Float[jax.Array, "T G H"],
    v: Float[jax.Array, "T G H"],
    width: int,
    dtype: jnp.dtype,
    kv_scales: Float32[jax.Array, "G 2"] | None,
) -> Float[jax.Array, "T W"]:
    """`pool_lanes`, rounded for certain: XLA, which may keep more precision than is asked for, would leave that out
    where float32 is next."""
    return jax.lax.optimization_barrier(pool_lanes(k, v, width, dtype, kv_scales))


def pool_words(lanes: Float[jax.Array, "T W"]) -> Int32[jax.Array, "T W"]:
    """Each element in every part of a word."""
    bits = lanes.dtype.itemsize * 8
    elements = jax.lax.bitcast_convert_type(lanes, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    factor = sum(1 << (bits * part) for part in range(32 // bits))
    return jax.lax.bitcast_convert_type(elements * jnp.uint32(factor), jnp.int32)


def choose_block_len(num_tokens: int, width: int, dtype: Any) -> int:
    """New tokens of a block: a power of two, no more than there are or than VMEM holds twice with their groups."""
    per_token = width * (4 + write_group(dtype) * jnp.dtype(dtype).itemsize)
    block_len = MAX_BLOCK_LEN
    while block_len > MIN_BLOCK_LEN and (block_len * per_token > BLOCK_BYTES or block_len >= 2 * num_tokens):
        block_len //= 2
    return block_len


def find_runs(write_slots: Int32[jax.Array, " T"], *, num_slots: int, group: int, block_len: int) -> Runs:
    """Runs of tokens whose slot is below `num_slots`; the others are padding."""
    num_tokens = write_slots.shape[0]
    num_blocks = -(-num_tokens // block_len)
    padding = jnp.full(num_blocks * block_len - num_tokens, num_slots, jnp.int32)
    slots = jnp.concatenate([write_slots, padding])
    is_real = slots < num_slots
    goes_on = is_real[1:] & is_real[:-1] & (slots[1:] == slots[:-1] + 1) & (slots[1:] & (group - 1) != 0)
    begins = is_real & ~jnp.concatenate([jnp.zeros(1, bool), goes_on])
    ends = is_real & ~jnp.concatenate([goes_on, jnp.zeros(1, bool)])
    tokens = jnp.argsort(~begins, stable=True).astype(jnp.int32)
    last_tokens = jnp.argsort(~ends, stable=True).astype(jnp.int32)
    ends_before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(ends, dtype=jnp.int32)])
    # A run's group, at the token with which it ends; of other tokens something that is no other's.
    groups = jnp.where(ends, slots // group, -1 - jnp.arange(slots.shape[0], dtype=jnp.int32))
    blocks = groups.reshape(num_blocks, block_len)
    before = jnp.concatenate([jnp.full((1, block_len), -1 - slots.shape[0], jnp.int32), blocks[:-1]])
    same = (blocks[:, :, None] == jnp.concatenate([before, blocks], axis=1)[:, None, :]).sum(axis=(1, 2))
    return Runs(
        tokens=tokens,
        lens=last_tokens - tokens + 1,
        slots=slots[tokens],
        firsts=ends_before[::block_len],
        meets=(same > block_len).astype(jnp.int32),
    )


@functools.partial(jax.jit, static_argnames=("block_len", "interpret"))
def call_write_kernel(
    runs: Runs,
    page_offset: Int32[jax.Array, " 1"],
    words: Int32[jax.Array, "X T 128"],
    kv_pages: KVPool,
    *,
    block_len: int,
    interpret: Any,
) -> KVPool:
    """The pool with the runs' tokens in it."""
    group, width, dtype = write_group(kv_pages.dtype), kv_pages.shape[2], kv_pages.dtype
    num_blocks = runs.meets.shape[0]
    # A run may begin before its block, and what is taken with it may end behind, by less than a group's rows.
    behind = num_blocks * block_len - words.shape[1] + group
    words = jnp.pad(words, ((0, 0), (group, behind), (0, 0)))
    scalars = (*runs, page_offset)
    inputs = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (words, kv_pages)]
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    scratch = [
        ((2, width // LANES, block_len + 2 * group, LANES), jnp.int32),
        ((2, block_len, group, width), dtype),
    ]
    vmem_bytes = 2 * width * (4 * (block_len + 2 * group) + block_len * group * dtype.itemsize)
    return pl.pallas_call(
        functools.partial(write_kernel, block_len=block_len),
        out_shape=pltpu.HBM(kv_pages.shape, dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_blocks,),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[
                *(pltpu.VMEM(*array) for array in scratch),
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
                pltpu.SMEM((2,), jnp.int32),
            ],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_bytes + VMEM_MARGIN_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attention_write",
    )(*scalars, *inputs)


class _Refs(NamedTuple):
    """What the kernel reads and writes.

    rows: new tokens of two blocks. groups: of each run of two blocks. arrived, read, written: semaphores of those.
    num_written: groups of each of the two blocks that are on their way.
    """

    runs: Runs
    page_offset: Scalar
    words: Ref
    pool: Ref
    rows: Ref
    groups: Ref
    arrived: Ref
    read: Ref
    written: Ref
    num_written: Ref


def write_kernel(*args: Ref, block_len: int) -> None:
    """One block of new tokens. args: scalars, words, the pool twice, as it is aliased, scratch."""
    *runs, page_offset, words, _, pool, rows, groups, arrived, read, written, num_written = args
    refs = _Refs(Runs(*runs), page_offset[0], words, pool, rows, groups, arrived, read, written, num_written)
    block, num_blocks = pl.program_id(0), pl.num_programs(0)
    slot, other = jax.lax.bitwise_and(block, 1), jax.lax.bitwise_and(block + 1, 1)

    def rows_of(which: Scalar, to: Scalar) -> Any:
        first_row = pl.multiple_of(which * block_len, MIN_BLOCK_LEN)
        source = words.at[:, pl.ds(first_row, rows.shape[2])]
        return pltpu.make_async_copy(source, rows.at[to], arrived.at[to])

    @pl.when(block == 0)
    def _() -> None:
        num_written[0] = 0
        num_written[1] = 0
        rows_of(block, slot).start()

    pl.when(block + 1 < num_blocks)(rows_of(block + 1, other).start)
    _wait_until_written(refs, slot)
    rows_of(block, slot).wait()
    first, end = refs.runs.firsts[block], refs.runs.firsts[block + 1]
    one_by_one = refs.runs.meets[block] != 0

    @pl.when(one_by_one)
    def _() -> None:
        _wait_until_written(refs, other)

        def step(run: Scalar, carry: None) -> None:
            _read_groups(refs, run, run + 1, first, slot)
            _merge_groups(refs, run, run + 1, first, block * block_len, slot)
            _wait_until_written(refs, slot)
            return carry

        jax.lax.fori_loop(first, end, step, None)

    @pl.when(jnp.logical_not(one_by_one))
    def _() -> None:
        _read_groups(refs, first, end, first, slot)
        _merge_groups(refs, first, end, first, block * block_len, slot)

    @pl.when(block == num_blocks - 1)
    def _() -> None:
        _wait_until_written(refs, other)
        _wait_until_written(refs, slot)


def _wait_until_written(refs: _Refs, slot: Scalar) -> None:
    """For the groups of a block that are on their way to the pool."""

    def wait(_: Scalar, carry: None) -> None:
        wait_for(refs.groups.at[slot, 0], refs.written.at[slot])
        return carry

    jax.lax.fori_loop(0, refs.num_written[slot], wait, None)
    refs.num_written[slot] = 0


def _place(refs: _Refs, run: Scalar) -> Ref:
    """A run's group in the pool."""
    page_size, group = refs.pool.shape[1], refs.groups.shape[2]
    slot = refs.runs.slots[run]
    page = jax.lax.shift_right_logical(slot, page_size.bit_length() - 1) + refs.page_offset
    row = pl.multiple_of(jax.lax.bitwise_and(slot, (page_size - 1) & -group), group)
    return refs.pool.at[page, pl.ds(row, group)]


def _read_groups(refs: _Refs, start: Scalar, end: Scalar, first: Scalar, slot: Scalar) -> None:
    """The groups of runs [start, end) that are not wholly new, to their places behind run `first`."""
    group = refs.groups.shape[2]

    def read(run: Scalar, num_read: Scalar) -> Scalar:
        is_partial = refs.runs.lens[run] < group
        copy = pltpu.make_async_copy(_place(refs, run), refs.groups.at[slot, run - first], refs.read.at[slot])
        pl.when(is_partial)(copy.start)
        return num_read + is_partial.astype(jnp.int32)

    def wait(_: Scalar, carry: None) -> None:
        wait_for(refs.groups.at[slot, 0], refs.read.at[slot])
        return carry

    # All of them, as one may overtake another.
    jax.lax.fori_loop(0, jax.lax.fori_loop(start, end, read, jnp.int32(0)), wait, None)


def _merge_groups(refs: _Refs, start: Scalar, end: Scalar, first: Scalar, first_token: Scalar, slot: Scalar) -> None:
    """New rows into the groups of runs [start, end), and the groups on their way."""
    _, _, group, width = refs.groups.shape
    dtype = refs.groups.dtype
    per_word = 4 // dtype.itemsize

    def merge(run: Scalar, carry: None) -> None:
        row = jax.lax.bitwise_and(refs.runs.slots[run], group - 1)
        mask = words_below(row + refs.runs.lens[run], group, dtype) & ~words_below(row, group, dtype)
        # Where row 0 of the group would lie among the new rows; rows of a group precede those of the block.
        origin = refs.runs.tokens[run] - first_token + group - row
        at = refs.groups.at[slot, run - first]
        for lane in range(0, width, LANES):
            lanes = slice(lane, lane + LANES)
            new = jnp.zeros((group // per_word, LANES), jnp.int32)
            for part in range(per_word):
                rows = pl.ds(origin + part, group // per_word, stride=per_word)
                taken = refs.rows[slot, lane // LANES, rows]
                new = new | (taken & part_mask(part, per_word))
            old = pltpu.bitcast(at[:, lanes], jnp.int32)
            at[:, lanes] = pltpu.bitcast(old ^ ((old ^ new) & mask), dtype)
        pltpu.make_async_copy(at, _place(refs, run), refs.written.at[slot]).start()
        return carry

    jax.lax.fori_loop(start, end, merge, None)
    refs.num_written[slot] = refs.num_written[slot] + end - start
