"""Whether the GPU kernels are right on this device: the oracle grid, writes, large pools, and whole shapes.

On a CPU the same runs by interpretation.
"""

import functools
from concurrent.futures import Future, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_attention import make_work, ours, xla
from benchmarks.gpu_report import Report
from benchmarks.gpu_sizes import ExtendShape, GpuSizes
from benchmarks.gpu_timing import Compiler
from radix_jax.check_kernel import CaseResult, run_case
from radix_jax.pallas_kernels.paged_attention import write_kv
from radix_jax.pallas_kernels.paged_attention.backends import attention_fn
from radix_jax.pallas_kernels.paged_attention.gpu_write import write_kv_gpu
from radix_jax.pallas_kernels.paged_attention.oracle_grid import GRID, OracleCase

XLA_CASES = ("decode", "prefill", "cached-prefix", "mixed")
# Against another order of the same sums, in bfloat16, relative to the largest output.
AGREES_WITHIN = 0.02


def queue_grid(
    sizes: GpuSizes, compiler: Compiler, grid: tuple[OracleCase, ...] = GRID
) -> dict["Future[CaseResult]", str]:
    """Queue every case for the GPU kernels, and a few for XLA; each is compiled, run and compared in a thread."""
    name = "pallas_interpret" if sizes.interpret else "pallas_gpu"
    jobs = [(name, case) for case in grid] + [("xla", case) for case in grid if case.name in XLA_CASES]
    return {compiler.submit(run_case, name, attention_fn(name), case): f"{name} {case.name}" for name, case in jobs}


def report_grid(report: Report, cases: dict["Future[CaseResult]", str]) -> None:
    """A row for each case that is not right, and one for all of them."""
    done: dict[str, CaseResult] = {}
    try:
        for future in as_completed(cases, timeout=max(0.0, report.left_s)):
            done[cases[future]] = result = future.result()
            if result.status != "ok":
                report.row(case=cases[future], status=result.status, error=result.max_error, message=result.message)
    except TimeoutError:
        for future, what in cases.items():
            if what not in done:
                future.cancel()
                report.drop(what, "not done in time")
    errors = {
        what: result.max_error / result.tolerance for what, result in done.items() if result.max_error is not None
    }
    worst = max(errors, key=lambda what: errors[what]) if errors else None
    num_ok = sum(result.status == "ok" for result in done.values())
    share = errors[worst] if worst else None
    report.row(cases=len(cases), ok=num_ok, worst_case=worst, worst_share_of_tolerance=share)
    report.target("numerics: share of the grid's cases that are right", num_ok / len(cases), 1.0)


def check_writes(report: Report, sizes: GpuSizes) -> None:
    """The write kernel against XLA's scatter, bit by bit, padding and scales included."""
    rng = np.random.default_rng(0)
    num_tokens, heads, dim, page_size, num_pages = 37, 3, 80, 16, 12
    k, v = (jnp.asarray(rng.standard_normal((num_tokens, heads, dim)), jnp.float32) * 300 for _ in range(2))
    slots = rng.permutation(num_pages * page_size // 2)[:num_tokens].astype(np.int32)
    slots[-5:] = num_pages * page_size + np.arange(5)
    scales = jnp.asarray(rng.uniform(0.5, 2.0, (heads, 2)), jnp.float32)
    for dtype in sizes.write_dtypes:
        pool = jnp.zeros((num_pages, page_size, 2 * heads * dim), dtype)
        given = {"page_offset": num_pages // 2, "kv_scales": scales if dtype.startswith("float8") else None}
        written = jax.jit(functools.partial(write_kv_gpu, interpret=sizes.interpret, **given))(pool, k, v, slots)
        right = jax.jit(functools.partial(write_kv, backend="xla", **given))(pool, k, v, slots)
        wrong = int((np.asarray(written, np.float32) != np.asarray(right, np.float32)).sum())
        # Division may differ by a rounding between the two compilers, once in a while.
        report.row(kernel="write", pool=dtype, differing_values=wrong, ok=wrong <= num_tokens)


def check_whole_shapes(report: Report, sizes: GpuSizes, pool: jax.Array) -> None:
    """Decode and extend at full size against the XLA form, one call of each."""
    rows, context = sizes.swept
    for shape in (ExtendShape(rows, 1, context - 1), *sizes.extend):
        if report.left_s < 5.0:
            report.drop(f"agreement at {shape.name}", "out of time")
            continue
        work = make_work(sizes, shape, pool.shape[0])
        pages = pool.reshape(-1, work.page_size, pool.shape[1])
        call = functools.partial(_attend, page_offset=(work.num_layers - 1) * work.pages_per_layer)
        # Sharp enough that a wrong score moves an output by more than rounding does.
        operands = (work.q * 3, pages, *work.rows)
        out, right = (
            np.asarray(call(form(sizes, shape.q_len), operands), np.float32)
            for form in (functools.partial(ours, blocks=None), xla)
        )
        error = float(np.abs(out - right).max() / np.abs(right).max())
        report.row(agreement_at=shape.name, relative_error=error, ok=error < AGREES_WITHIN)


def check_large_pools(report: Report, sizes: GpuSizes) -> None:
    """A sequence in the highest pages of a large pool gives what it gives in the lowest ones: no offset overflows.

    A pool that the kernels refuse in words is all right.
    """
    for dtype, num_pages in sizes.large_pools:
        nbytes = num_pages * sizes.large_page_size * sizes.width * jnp.dtype(dtype).itemsize
        row: dict[str, Any] = {"pool": dtype, "pages": num_pages, "pool_bytes": nbytes}
        if report.left_s < 3.0:
            report.drop(f"pool of {num_pages} pages of {dtype}", "out of time")
            continue
        try:
            row |= _compare_ends(sizes, dtype, num_pages)
        except ValueError as refusal:
            row |= {"refused": str(refusal)[:200], "ok": True}
        report.row(**row)


def _compare_ends(sizes: GpuSizes, dtype: str, num_pages: int) -> dict[str, Any]:
    """Write one sequence into the lowest and the highest pages, then decode and extend over both."""
    page_size, num_used = sizes.large_page_size, 5
    kv_len = num_used * page_size - 7
    rng = np.random.default_rng(0)
    k, v = (
        jnp.asarray(rng.standard_normal((kv_len, sizes.num_kv_heads, sizes.head_dim)), sizes.dtype) for _ in range(2)
    )
    order = rng.permutation(num_used).astype(np.int32)
    ends = {"low": 1 + order, "high": num_pages - num_used + order}
    # What isn't written is NaN, so that reading it shows.
    pool = jnp.full((num_pages, page_size, sizes.width), jnp.nan, dtype)
    write = jax.jit(functools.partial(write_kv_gpu, page_offset=0, interpret=sizes.interpret), donate_argnums=0)
    positions = np.arange(kv_len, dtype=np.int32)
    for pages in ends.values():
        pool = write(pool, k, v, jnp.asarray(pages[positions // page_size] * page_size + positions % page_size))
    found: dict[str, Any] = {}
    for kernel, q_len in (("decode", 1), ("extend", 65)):
        q = jnp.asarray(rng.standard_normal((q_len, sizes.num_heads, sizes.head_dim)), sizes.dtype)
        attend = functools.partial(_attend, ours(sizes, q_len, None), page_offset=0)
        rows = jnp.full(1, kv_len, jnp.int32), jnp.array([0, q_len], jnp.int32)
        low, high = (
            np.asarray(attend((q, pool, jnp.asarray(pages[None]), *rows)), np.float32) for pages in ends.values()
        )
        right = _dense(q, k.astype(dtype), v.astype(dtype))
        found[f"{kernel}_same"] = bool(np.isfinite(low).all() and (low == high).all())
        found[f"{kernel}_error"] = float(np.abs(high - right).max())
    found["ok"] = found["decode_same"] and found["extend_same"]
    found["ok"] &= max(found["decode_error"], found["extend_error"]) < AGREES_WITHIN
    return found


def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> np.ndarray:
    """Causal attention of the last tokens of one row, in float64 on the host."""
    queries, keys, values = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    num_new, num_heads, head_dim = queries.shape
    kv_len, group = keys.shape[0], num_heads // keys.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    scores = np.einsum("tnh,snh->nts", queries, keys) * head_dim**-0.5
    sees = np.arange(kv_len)[None, :] <= kv_len - num_new + np.arange(num_new)[:, None]
    weights = np.exp(np.where(sees, scores, -np.inf))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), values)


@functools.partial(jax.jit, static_argnums=0, static_argnames="page_offset")
def _attend(fn: Any, operands: tuple[jax.Array, ...], *, page_offset: int) -> jax.Array:
    return fn(*operands, page_offset=page_offset)
