"""The paged attention kernels that `tpu_static` measures: ours, jax's own two, and those named on the command line.

jax's keep K and V otherwise than ours: each gets a pool of its own form.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_paged
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as jax_ragged

from radix_jax.pallas_kernels.paged_attention import paged_attention
from radix_jax.pallas_kernels.paged_attention.tpu import attend_and_write_tpu, paged_attention_tpu
from radix_jax.pallas_kernels.paged_attention.tpu_decode import spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_decode_spec import DecodeSpec
from radix_jax.pallas_kernels.paged_attention.tpu_extend import extend_spec_of
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import CHIPS
from radix_jax.pallas_kernels.paged_attention.tpu_write import write_kv_tpu

_LANES = 128
TABLE_LEN = 2048
# Query tokens that figures of chunks are for.
Q_LEN = 128
# jax's kernels take minutes to compile each.
JAX_HEADS = ((32, 8, 128), (9, 3, 64))
JAX_PAGE_SIZES = (16, 128)
# The most VMEM that its callers give it; what it takes of that is in the figures.
_RAGGED_VMEM_BYTES = 100 * 2**20
# (tokens of K and V, query tokens) of a block: of decode its own choice where it is not told; of chunks the largest
# that compiles in minutes.
RAGGED_DECODE_BLOCK = (2048, 32)
RAGGED_MIXED_BLOCK = (512, Q_LEN)
PAGED_BLOCK_LEN = 512


@dataclass(frozen=True)
class Shape:
    """A decode step of `num_rows` rows of `context` tokens each; or with more `num_tokens` than rows, a step of chunks,
    num_tokens / num_rows tokens each. Rows may have TABLE_LEN tokens at least."""

    num_rows: int = 64
    num_tokens: int = 64
    context: int = 2048
    page_size: int = 16
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def num_pages(self) -> int:
        """Of the pool: all rows' and the null page."""
        return self.num_rows * self.pages_per_row + 1

    @property
    def pages_per_row(self) -> int:
        """That a row may have."""
        return -(-max(self.context, TABLE_LEN) // self.page_size)

    @property
    def max_q_len(self) -> int:
        """Of a row."""
        return self.num_tokens // self.num_rows


@dataclass(frozen=True)
class Measured:
    """A kernel to compile.

    fn, args, donate_argnums: what is compiled. block_len: tokens of K and V that an iteration of its main loop takes;
    None: told by its copies. passes: how often the main loop goes over a row for all its kv heads, and for Q_LEN query
    tokens. runs_around: of the loops around the main one, the innermost first, how often each runs for a row.
    """

    source: str
    kernel: str
    shape: Shape
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()
    block_len: int | None = None
    passes: float = 1
    runs_around: tuple[float, ...] = field(default=())
    kv_write: bool = False

    @property
    def program(self) -> tuple[Any, ...]:
        """What names the program that is compiled: all but the rows' context."""
        table_len = max(self.shape.context, TABLE_LEN)
        return self.source, self.kernel, self.kv_write, replace(self.shape, context=table_len)


def kernels_of(
    generation: str, decode: Sequence[Shape], mixed: Sequence[Shape], named: Sequence[str], block_len: int | None
) -> list[Measured]:
    """All kernels in all shapes that they are made for. generation: of the TPU. named: import.path:function of the
    contract."""
    kernels: list[Measured] = []
    for shape in decode:
        kernels += our_decode(generation, shape), *_peers("decode", shape, named, block_len)
    for shape in mixed:
        kernels += our_mixed(generation, shape), our_write(shape), *_peers("mixed", shape, named, block_len)
    return kernels


def _peers(kind: str, shape: Shape, named: Sequence[str], block_len: int | None) -> Iterator[Measured]:
    yield from _jax_kernels(kind, shape)
    yield from _named(kind, shape, named, block_len)


def our_decode(generation: str, shape: Shape) -> Measured:
    """Our decode kernel, which writes the new tokens."""
    q, pool, table, kv_lens, cu_q_lens = contract_args(shape)
    new = array((shape.num_rows, shape.num_kv_heads, shape.head_dim), shape.dtype)
    return Measured(
        "ours",
        "decode",
        shape,
        functools.partial(attend_and_write, generation),
        (q, new, new, pool, table, kv_lens, cu_q_lens, array((shape.num_rows,))),
        donate_argnums=(3,),
        block_len=decode_spec(generation, shape).tiles.tile_len,
        kv_write=True,
    )


def decode_spec(generation: str, shape: Shape) -> DecodeSpec:
    """What our decode kernel is compiled for."""
    q, pool, *_ = contract_args(shape)
    return spec_of(
        q,
        pool,
        shape.pages_per_row,
        num_kv_heads=shape.num_kv_heads,
        sliding_window=None,
        logit_soft_cap=None,
        return_lse=False,
        is_scaled=False,
        writes=True,
        chip=CHIPS[generation],
    )


def attend_and_write(generation: str, *arrays: Any) -> Any:
    """(out, pool) of a decode step of ours."""
    q = arrays[0]
    keywords = {"page_offset": 0, "scale": q.shape[-1] ** -0.5, "max_q_len": 1, "chip": CHIPS[generation]}
    return attend_and_write_tpu(*arrays, **keywords)


def our_mixed(generation: str, shape: Shape) -> Measured:
    """Our kernel of chunks."""
    args = contract_args(shape)
    q, pool = args[:2]
    spec = extend_spec_of(
        q,
        pool,
        shape.pages_per_row,
        num_kv_heads=shape.num_kv_heads,
        sliding_window=None,
        logit_soft_cap=None,
        return_lse=False,
        max_q_len=shape.max_q_len,
        chip=CHIPS[generation],
    )
    # A main loop's iteration is two steps; 128 query tokens are that many q tiles.
    num_tiles = Q_LEN / spec.tiles.tokens
    return Measured(
        "ours",
        "mixed",
        shape,
        functools.partial(attend, generation, shape.num_kv_heads, shape.max_q_len),
        args,
        block_len=spec.tiles.tile_len,
        passes=spec.num_steps / 2 * num_tiles,
        runs_around=(math.ceil(shape.context / spec.tiles.tile_len) * num_tiles,),
    )


def attend(generation: str, num_kv_heads: int, max_q_len: int, *arrays: Any) -> Any:
    """Chunks by ours."""
    return paged_attention_tpu(
        *arrays,
        page_offset=0,
        scale=arrays[0].shape[-1] ** -0.5,
        sliding_window=None,
        logit_soft_cap=None,
        return_lse=False,
        num_kv_heads=num_kv_heads,
        kv_scales=None,
        max_q_len=max_q_len,
        chip=CHIPS[generation],
    )


def our_write(shape: Shape) -> Measured:
    """Our kernel that writes the new tokens of a step of chunks, in front of the one above."""
    pool = contract_args(shape)[1]
    new = array((shape.num_tokens, shape.num_kv_heads, shape.head_dim), shape.dtype)
    return Measured(
        "ours", "write", shape, write, (pool, new, new, array((shape.num_tokens,))), donate_argnums=(0,), kv_write=True
    )


def write(*arrays: Any) -> jax.Array:
    """The pool with the new tokens, by ours."""
    return write_kv_tpu(*arrays, page_offset=0)


def _jax_kernels(kind: str, shape: Shape) -> Iterator[Measured]:
    heads = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    if heads not in JAX_HEADS or shape.page_size not in JAX_PAGE_SIZES or shape.kv_dtype != shape.dtype:
        return
    if kind == "decode":
        yield Measured(
            "jax.experimental.pallas.ops.tpu.paged_attention",
            kind,
            shape,
            paged,
            paged_args(shape),
            block_len=PAGED_BLOCK_LEN,
            passes=shape.num_kv_heads,
            runs_around=(shape.num_kv_heads,),
        )
    block = RAGGED_DECODE_BLOCK if kind == "decode" else RAGGED_MIXED_BLOCK
    blocks = shape.max_q_len / block[1]
    yield Measured(
        "jax.experimental.pallas.ops.tpu.ragged_paged_attention",
        kind,
        shape,
        functools.partial(ragged, block=block),
        ragged_args(shape),
        block_len=block[0],
        passes=max(1.0, blocks),
        runs_around=(max(1.0, blocks), blocks),
    )


def _named(kind: str, shape: Shape, named: Sequence[str], block_len: int | None) -> Iterator[Measured]:
    for name in named:
        fn = functools.partial(contract, name, num_kv_heads=shape.num_kv_heads, max_q_len=shape.max_q_len)
        yield Measured(name, kind, shape, fn, contract_args(shape), block_len=block_len)


def contract_args(shape: Shape) -> tuple[Any, ...]:
    """(q, kv_pages, page_table, kv_lens, cu_q_lens) of the contract."""
    width = -(-2 * shape.num_kv_heads * shape.head_dim // _LANES) * _LANES
    return (
        array((shape.num_tokens, shape.num_q_heads, shape.head_dim), shape.dtype),
        array((shape.num_pages, shape.page_size, width), shape.kv_dtype),
        array((shape.num_rows, shape.pages_per_row)),
        array((shape.num_rows,)),
        array((shape.num_rows + 1,)),
    )


def contract(name: str, q: Any, kv_pages: Any, *rows: Any, num_kv_heads: int, max_q_len: int) -> Any:
    """The function `name` of the contract, import.path:function."""
    module, _, attribute = name.partition(":")
    fn = getattr(importlib.import_module(module), attribute)
    page_table, kv_lens, cu_q_lens = rows
    return paged_attention(
        q,
        kv_pages,
        page_table,
        kv_lens,
        cu_q_lens,
        page_offset=0,
        scale=q.shape[-1] ** -0.5,
        num_kv_heads=num_kv_heads,
        max_q_len=max_q_len,
        backend=fn,
    )


def array(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
    """An array that takes no memory."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def ragged_args(shape: Shape) -> tuple[Any, ...]:
    """Arguments of `ragged`."""
    q = array((shape.num_tokens, shape.num_q_heads, shape.head_dim), shape.dtype)
    pool = (shape.num_pages, shape.page_size, 2 * shape.num_kv_heads, shape.head_dim)
    rows = array((shape.num_rows,)), array((shape.num_rows, shape.pages_per_row)), array((shape.num_rows + 1,))
    return q, array(pool, shape.kv_dtype), *rows, array((1,))


def ragged(
    q: Any, pages: Any, kv_lens: Any, page_table: Any, cu_q_lens: Any, num_rows: Any, *, block: tuple[int, int]
) -> jax.Array:
    """jax's ragged_paged_attention, in blocks of (tokens of K and V, query tokens)."""
    return jax_ragged(
        q,
        pages,
        kv_lens,
        page_table,
        cu_q_lens,
        num_rows,
        sm_scale=q.shape[-1] ** -0.5,
        num_kv_pages_per_block=max(1, block[0] // pages.shape[1]),
        num_queries_per_block=block[1],
        vmem_limit_bytes=_RAGGED_VMEM_BYTES,
    )


def paged_args(shape: Shape) -> tuple[Any, ...]:
    """Arguments of `paged`."""
    q = array((shape.num_rows, shape.num_q_heads, shape.head_dim), shape.dtype)
    pool = array((shape.num_kv_heads, shape.num_pages, shape.page_size, shape.head_dim), shape.kv_dtype)
    return q, pool, pool, array((shape.num_rows,)), array((shape.num_rows, shape.pages_per_row))


def paged(q: Any, k_pages: Any, v_pages: Any, kv_lens: Any, page_table: Any) -> jax.Array:
    """jax's paged_attention, of decode steps only, in blocks of PAGED_BLOCK_LEN tokens."""
    pages_per_block = max(1, PAGED_BLOCK_LEN // k_pages.shape[2])
    return jax_paged(q, k_pages, v_pages, kv_lens, page_table, pages_per_compute_block=pages_per_block)
