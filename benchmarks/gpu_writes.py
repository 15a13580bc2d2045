"""Times of writing new K and V into the pool: our kernel, and XLA's scatter."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_attention import make_pool
from benchmarks.gpu_report import Report
from benchmarks.gpu_sizes import GpuSizes
from benchmarks.gpu_timing import Compiler, time_program
from radix_jax.pallas_kernels.paged_attention import write_kv

CHAIN_LEN = 32
Programs = list[tuple[str, int, "Future[Callable[..., Any]]"]]


def queue_writes(sizes: GpuSizes, compiler: Compiler) -> Programs:
    """Queue a program for each form and number of tokens, as (form, tokens, program)."""
    kernel = "pallas_interpret" if sizes.interpret else "pallas_gpu"
    pool = jax.ShapeDtypeStruct((sizes.write_pool_slots, sizes.width), jnp.dtype(sizes.dtype))
    return [
        (
            form,
            num_tokens,
            compiler.chain(_body(sizes, backend), pool, *_operands(sizes, num_tokens), length=CHAIN_LEN, donate=True),
        )
        for num_tokens in sizes.write_tokens
        for form, backend in (("ours", kernel), ("xla scatter", "xla"))
    ]


def measure_writes(report: Report, sizes: GpuSizes, programs: Programs) -> None:
    """A row for each program. A write that took as long as copying the pool would show a copy."""
    pool = make_pool(sizes, sizes.write_pool_slots)
    for form, num_tokens, program in programs:
        what = f"{form} of {num_tokens} tokens"
        if report.left_s < 1.0 or not program.done() or program.cancelled():
            report.drop(what, "out of time" if program.done() else "not compiled in time")
            continue
        try:
            pointer = pool.unsafe_buffer_pointer()
            call_s, pool = time_program(program.result(), pool, *_operands(sizes, num_tokens), length=CHAIN_LEN)
        except Exception as error:  # one that does not compile says nothing about the others
            report.drop(what, f"{type(error).__name__}: {error}"[:500])
            if pool.is_deleted():
                pool = make_pool(sizes, sizes.write_pool_slots)
            continue
        row_bytes = sizes.width * jnp.dtype(sizes.dtype).itemsize
        report.row(
            form=form,
            tokens=num_tokens,
            us=call_s * 1e6,
            bytes_per_s=2 * num_tokens * row_bytes / call_s,
            pool_in_place=pool.unsafe_buffer_pointer() == pointer,
        )


def _body(sizes: GpuSizes, backend: str) -> Callable[..., Any]:
    def body(_: jax.Array, pool: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
        pages = pool.reshape(-1, sizes.page_size, sizes.width)
        return write_kv(pages, k, v, slots, page_offset=0, backend=backend).reshape(pool.shape)

    return body


def _operands(sizes: GpuSizes, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shape = (num_tokens, sizes.num_kv_heads, sizes.head_dim)
    k, v = (jnp.asarray(rng.standard_normal(shape, np.float32), sizes.dtype) for _ in range(2))
    return k, v, jnp.asarray(rng.permutation(sizes.write_pool_slots)[:num_tokens].astype(np.int32))
