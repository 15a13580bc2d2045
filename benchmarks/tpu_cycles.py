"""Cycles that an item of our decode kernel takes, by libtpu's static profile: what `tpu_static` calls cycles_per_512.

The profile tells cycles of a call, stalls included. It counts a loop whose trips it knows that often, any other once,
and the kernel's own loop ends where its rows do. So the very turn of that loop, `compute_item`, is compiled in a loop
of FEW and of MANY trips over the same memory: of the two programs the cycles differ by those of MANY - FEW items.

    cycles_per_512 = (cycles of MANY - cycles of FEW) / (MANY - FEW) * 512 / tokens of an item
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.tpu_peers import Shape, array, contract_args, decode_spec
from radix_jax.aot.tpu_compiling import TpuCompileError, TpuJob, TpuProgram, compile_all
from radix_jax.aot.tpu_targets import TpuTarget
from radix_jax.pallas_kernels.paged_attention.tpu_copies import Ref
from radix_jax.pallas_kernels.paged_attention.tpu_decode import (
    call_decode_kernel,
    compute_item,
    first_item,
    make_records,
    name_refs,
)
from radix_jax.pallas_kernels.paged_attention.tpu_decode_spec import DecodeSpec
from radix_jax.pallas_kernels.paged_attention.tpu_work import decode_work

TOKENS = 512
FEW, MANY = 4, 12


def item_cycles(target: TpuTarget, shapes: Sequence[Shape]) -> dict[Shape, int | TpuCompileError]:
    """Of each shape, the cycles of 512 tokens of a row and all its kv heads, or why libtpu does not tell; empty for a
    target of which it never does."""
    if not target.has_static_cycles:
        return {}
    specs = [decode_spec(target.generation, shape) for shape in shapes]
    jobs = [
        # The pool given away, as a copy of it is nothing that the profile knows.
        TpuJob(functools.partial(run_items, spec, trips), item_args(spec, shape), donate_argnums=4)
        for spec, shape in zip(specs, shapes, strict=True)
        for trips in (FEW, MANY)
    ]
    compiled = compile_all(target, jobs, with_cycles=True)
    return {
        shape: _difference(spec, few, many)
        for shape, spec, few, many in zip(shapes, specs, compiled[::2], compiled[1::2], strict=True)
    }


def _difference(
    spec: DecodeSpec, few: TpuProgram | TpuCompileError, many: TpuProgram | TpuCompileError
) -> int | TpuCompileError:
    if isinstance(few, TpuCompileError):
        return few
    if isinstance(many, TpuCompileError):
        return many
    few_cycles, many_cycles = few.kernels[0].static_cycles, many.kernels[0].static_cycles
    if few_cycles is None or many_cycles is None:
        return TpuCompileError("libtpu wrote no profile")
    return round((many_cycles - few_cycles) / (MANY - FEW) * TOKENS / spec.tiles.tile_len)


def item_args(spec: DecodeSpec, shape: Shape) -> tuple[Any, ...]:
    """Arguments of `run_items`, abstract."""
    q, pool, table, kv_lens, cu_q_lens = contract_args(shape)
    work = jax.eval_shape(
        functools.partial(
            decode_work,
            table_len=shape.pages_per_row * shape.page_size,
            tile_len=spec.tiles.tile_len,
            num_spare=spec.tiles.num_buffers,
            sliding_window=None,
        ),
        kv_lens,
        cu_q_lens,
    )
    records = jax.eval_shape(
        functools.partial(make_records, spec),
        array(q.shape, "float32"),
        jax.ShapeDtypeStruct((shape.num_rows, pool.shape[2]), pool.dtype),
    )
    return work, array((table.size + spec.shape.num_copies,)), array((1,)), records, pool


def run_items(spec: DecodeSpec, trips: int, *arrays: Any) -> Any:
    """That many items of the decode kernel."""
    return call_decode_kernel(*arrays, spec=spec, interpret=False, kernel=functools.partial(items_kernel, trips=trips))


def items_kernel(*args: Ref, spec: DecodeSpec, trips: int) -> None:
    """`decode_kernel`, with a number of items that the compiler knows."""
    refs, counts = name_refs(spec, args)
    jax.lax.fori_loop(0, trips, lambda _, walk: compute_item(spec, refs, walk, counts[0]), first_item(spec, refs))
