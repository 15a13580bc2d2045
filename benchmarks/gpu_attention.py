"""Times of decode and extend over one large pool: ours with several blocks, and others' on the same work.

Every call attends over another layer of the pool than the one before, so that no call finds its KV in the cache.
"""

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_report import Report
from benchmarks.gpu_sizes import ExtendShape, GpuSizes
from benchmarks.gpu_timing import Compiler, time_program
from benchmarks.random_weights import random_array
from radix_jax.pallas_kernels.paged_attention.gpu import paged_attention_gpu
from radix_jax.pallas_kernels.paged_attention.gpu_blocks import GpuBlocks, choose_blocks
from radix_jax.pallas_kernels.paged_attention.xla import paged_attention_xla

NUM_SLOW_CALLS = 2
# What was told of each (shape, form).
Rows = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True)
class Work:
    """One call's arrays but for the pool, and what it has to read and compute.

    num_layers: parts of the pool, of `pages_per_layer` pages each, that the calls take in turn.
    """

    q: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    num_layers: int
    pages_per_layer: int
    page_size: int
    kv_bytes: int
    num_flops: int

    @property
    def rows(self) -> tuple[jax.Array, ...]:
        """What follows q and the pool in a call."""
        return self.page_table, self.kv_lens, self.cu_q_lens


@dataclass(frozen=True)
class Entry:
    """One program to be timed. info: what its row says, `shape` and `form` at least. program: of `length` calls on
    (carry, *operands). comparable: it gives what others of its shape give."""

    info: dict[str, Any]
    work: Work
    program: "Future[Callable[..., Any]]"
    carry: jax.Array
    operands: tuple[jax.Array, ...]
    length: int
    comparable: bool = True


def make_pool(sizes: GpuSizes, num_slots: int, dtype: str | None = None) -> jax.Array:
    """Random [slots, W]; pages of any size are a free view of it inside a program."""
    return jax.jit(random_array, static_argnames=("shape", "spread", "dtype"))(
        jnp.uint32(1), shape=(num_slots, sizes.width), spread=3**0.5, dtype=dtype or sizes.dtype
    )


def make_work(sizes: GpuSizes, shape: ExtendShape, num_slots: int, page_size: int | None = None) -> Work:
    """Rows over pages in no order."""
    page_size = page_size or sizes.page_size
    kv_len = shape.prefix_len + shape.q_len
    pages_per_row = -(-kv_len // page_size)
    pages_per_layer = shape.num_rows * pages_per_row
    num_layers = num_slots // page_size // pages_per_layer
    if num_layers < 1:
        raise ValueError(f"{shape.name} needs {shape.num_slots(page_size)} slots, the pool has {num_slots}")
    rng = np.random.default_rng(0)
    table = rng.permutation(pages_per_layer).astype(np.int32).reshape(shape.num_rows, pages_per_row)
    num_tokens = shape.num_rows * shape.q_len
    seen = shape.q_len * shape.prefix_len + shape.q_len * (shape.q_len + 1) // 2
    q = rng.standard_normal((num_tokens, sizes.num_heads, sizes.head_dim), np.float32)
    return Work(
        q=jnp.asarray(q, sizes.dtype),
        page_table=jnp.asarray(table),
        kv_lens=jnp.full(shape.num_rows, kv_len, jnp.int32),
        cu_q_lens=jnp.arange(shape.num_rows + 1, dtype=jnp.int32) * shape.q_len,
        num_layers=num_layers,
        pages_per_layer=pages_per_layer,
        page_size=page_size,
        kv_bytes=shape.num_rows * kv_len * sizes.width * jnp.dtype(sizes.dtype).itemsize,
        num_flops=4 * shape.num_rows * seen * sizes.num_heads * sizes.head_dim,
    )


def keywords_of(sizes: GpuSizes, max_q_len: int) -> dict[str, Any]:
    """What every form of attention is called with, besides arrays and page_offset."""
    return {
        "scale": sizes.head_dim**-0.5,
        "sliding_window": None,
        "logit_soft_cap": None,
        "return_lse": False,
        "num_kv_heads": sizes.num_kv_heads,
        "kv_scales": None,
        "max_q_len": max_q_len,
    }


def shipped_blocks(sizes: GpuSizes, work: Work, pool_dtype: Any) -> GpuBlocks:
    """The blocks that a step of this work gets."""
    return choose_blocks(
        head_dim=sizes.head_dim,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        q_dtype=work.q.dtype,
        pool_dtype=pool_dtype,
        num_rows=work.page_table.shape[0],
        visible_len=work.page_table.shape[1] * work.page_size,
    )


def ours(sizes: GpuSizes, max_q_len: int, blocks: GpuBlocks | None) -> Callable[..., jax.Array]:
    """The GPU kernels; None: with the blocks they choose."""
    kernels: Any = paged_attention_gpu
    return functools.partial(kernels, blocks=blocks, interpret=sizes.interpret, **keywords_of(sizes, max_q_len))


def xla(sizes: GpuSizes, max_q_len: int) -> Callable[..., jax.Array]:
    """Our XLA form."""
    return functools.partial(paged_attention_xla, **keywords_of(sizes, max_q_len))


def paged_body(fn: Callable[..., jax.Array], work: Work) -> Callable[..., Any]:
    """A call whose output is the next one's q."""

    def body(i: jax.Array, q: jax.Array, pool: jax.Array, *rows: jax.Array) -> jax.Array:
        offset = (i % work.num_layers) * work.pages_per_layer
        return fn(q, _as_pages(pool, work.page_size), *rows, page_offset=offset.astype(jnp.int32))

    return body


def offset_body(fn: Callable[..., jax.Array], work: Work) -> Callable[..., Any]:
    """A call that only starts when the one before is done: for outputs too large to be copied into the next q.

    The carry is 0, and stays so, which the compiler can't know.
    """

    def body(i: jax.Array, carry: jax.Array, q: jax.Array, pool: jax.Array, *rows: jax.Array) -> jax.Array:
        offset = (i % work.num_layers) * work.pages_per_layer + carry
        out = fn(q, _as_pages(pool, work.page_size), *rows, page_offset=offset.astype(jnp.int32))
        return jnp.isnan(out[0, 0, 0]).astype(jnp.int32)

    return body


def _as_pages(pool: jax.Array, page_size: int) -> jax.Array:
    return pool[: pool.shape[0] // page_size * page_size].reshape(-1, page_size, pool.shape[1])


def variants(blocks: GpuBlocks) -> Iterator[tuple[str, GpuBlocks]]:
    """Decode blocks one step away from the given ones."""
    decode = blocks.decode
    changes = [
        ("num_splits", max(1, decode.num_splits // 2)),
        ("num_splits", decode.num_splits * 2),
        ("num_splits", decode.num_splits * 4),
        ("block_len", max(16, decode.block_len // 2)),
        ("block_len", decode.block_len * 2),
        ("num_warps", max(1, decode.num_warps // 2)),
        ("num_warps", decode.num_warps * 2),
        ("num_stages", max(1, decode.num_stages - 1)),
        ("num_stages", decode.num_stages + 1),
    ]
    for name, value in changes:
        if value != getattr(decode, name):
            changed = dataclasses.replace(decode, **{name: value})
            yield f"{name}={value}", dataclasses.replace(blocks, decode=changed)


def extend_variants(blocks: GpuBlocks) -> Iterator[tuple[str, GpuBlocks]]:
    """Extend blocks one step away from the given ones."""
    extend = blocks.extend
    changes = [
        {"num_rows": extend.num_rows * 2, "num_warps": 8},
        {"num_rows": extend.num_rows * 2},
        {"block_len": extend.block_len * 2},
        {"block_len": max(16, extend.block_len // 2)},
        {"num_warps": extend.num_warps * 2},
        {"num_stages": max(1, extend.num_stages - 1)},
        {"num_stages": extend.num_stages + 1},
    ]
    for change in changes:
        changed = dataclasses.replace(extend, **change)
        if changed != extend:
            name = " ".join(f"{key}={value}" for key, value in change.items())
            yield name, dataclasses.replace(blocks, extend=changed)


def entry_of(
    sizes: GpuSizes,
    compiler: Compiler,
    work: Work,
    fn: Callable[..., jax.Array],
    pool: jax.Array,
    *,
    expected_s: float,
    **info: Any,
) -> Entry:
    """Queue a program of calls of a paged form."""
    is_decode = work.q.shape[0] == work.page_table.shape[0]
    length = sizes.chain_len(expected_s)
    if is_decode:
        carry, operands = work.q, (pool, *work.rows)
        program = compiler.chain(paged_body(fn, work), carry, *operands, length=length)
    else:
        carry, operands = jnp.int32(0), (work.q, pool, *work.rows)
        program = compiler.chain(offset_body(fn, work), carry, *operands, length=length)
    return Entry(info, work, program, carry, operands, length)


def jax_entry(sizes: GpuSizes, compiler: Compiler, work: Work, **info: Any) -> Entry:
    """Decode by jax's own kernel, on pages of its own layout.

    Raises:
        ImportError: this jax has none.
    """
    kernel = jax_paged_attention()
    num_rows, pages_per_row = work.page_table.shape
    shape = (sizes.num_kv_heads, num_rows * pages_per_row, work.page_size, sizes.head_dim)
    make = jax.jit(random_array, static_argnames=("shape", "spread", "dtype"))
    k_pages, v_pages = (make(jnp.uint32(i), shape=shape, spread=3**0.5, dtype=sizes.dtype) for i in (2, 3))
    k_splits = next(splits for splits in (16, 8, 4, 2, 1) if pages_per_row % splits == 0)
    pages_per_block = next(num for num in (8, 4, 2, 1) if pages_per_row // k_splits % num == 0)

    def body(_: jax.Array, q: jax.Array, *operands: jax.Array) -> jax.Array:
        # It leaves scaling q to its caller; that would be a pass over q, which is left out here.
        return kernel(
            q, *operands, k_splits=k_splits, pages_per_compute_block=pages_per_block, interpret=sizes.interpret
        )

    operands = (k_pages, v_pages, work.page_table, work.kv_lens)
    program = compiler.chain(body, work.q, *operands, length=NUM_SLOW_CALLS)
    return Entry(info, work, program, work.q, operands, NUM_SLOW_CALLS, comparable=False)


def dense_decode(sizes: GpuSizes) -> Callable[..., jax.Array]:
    """Decode by gathering each row's pages and attending densely, as XLA makes it."""

    def attend(
        q: jax.Array, kv_pages: jax.Array, page_table: jax.Array, kv_lens: jax.Array, _: jax.Array, *, page_offset: Any
    ) -> jax.Array:
        num_rows = page_table.shape[0]
        kv = kv_pages[page_table + page_offset].reshape(num_rows, -1, sizes.num_kv_heads, 2, sizes.head_dim)
        out = jax.nn.dot_product_attention(
            q[:, None], kv[:, :, :, 0], kv[:, :, :, 1], key_value_seq_lengths=kv_lens, implementation="xla"
        )
        return out[:, 0].astype(q.dtype)

    return attend


def dense_extend(sizes: GpuSizes, implementation: str) -> Callable[..., jax.Array]:
    """Causal attention of rows without a prefix on gathered K and V, by XLA or cuDNN: gathering included."""

    def attend(
        q: jax.Array, kv_pages: jax.Array, page_table: jax.Array, kv_lens: jax.Array, _: jax.Array, *, page_offset: Any
    ) -> jax.Array:
        num_rows = page_table.shape[0]
        kv = kv_pages[page_table + page_offset].reshape(num_rows, -1, sizes.num_kv_heads, 2, sizes.head_dim)
        dense: Any = jax.nn.dot_product_attention
        out = dense(
            q.reshape(num_rows, -1, *q.shape[1:]),
            kv[:, :, :, 0],
            kv[:, :, :, 1],
            is_causal=True,
            implementation=implementation,
        )
        return out.reshape(q.shape)

    return attend


def jax_paged_attention() -> Callable[..., jax.Array]:
    """jax's own paged attention for GPUs.

    Raises:
        ImportError: this jax has none: it is deprecated since 0.11.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention


def measure_entries(report: Report, entries: list[Entry], bandwidth: float | None, peak: float | None) -> Rows:
    """A row for each entry that is compiled: microseconds a call, shares of bandwidth and peak, and how far the end of
    its program is from that of the first of its shape. Gives the rows by
    (shape, form)."""
    rows: Rows = {}
    firsts: dict[str, np.ndarray] = {}
    for entry in entries:
        what = f"{entry.info['form']} at {entry.info['shape']}"
        if report.left_s < 1.0:
            report.drop(what, "out of time")
            continue
        if not entry.program.done() or entry.program.cancelled():
            report.drop(what, "not compiled in time")
            continue
        try:
            program = entry.program.result()
            once = np.asarray(program(entry.carry, *entry.operands), np.float64)
            call_s, _ = time_program(program, entry.carry, *entry.operands, length=entry.length)
        except Exception as error:  # one that does not compile or run says nothing about the others
            report.drop(what, f"{type(error).__name__}: {error}"[:500])
            continue
        row: dict[str, Any] = {**entry.info, "us": call_s * 1e6}
        if bandwidth:
            row["share_of_bandwidth"] = entry.work.kv_bytes / call_s / bandwidth
        if peak:
            row["share_of_peak"] = entry.work.num_flops / call_s / peak
        if once.ndim and entry.comparable:
            first = firsts.setdefault(f"{entry.info['shape']} {entry.length} {entry.work.page_size}", once)
            row["differs_by"] = float(np.abs(once - first).max() / np.abs(first).max())
        report.row(**row)
        rows[entry.info["shape"], entry.info["form"]] = row
    return rows
