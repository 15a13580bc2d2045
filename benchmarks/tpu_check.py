"""Every check and timing of the TPU kernels on the TPU at hand: python -m benchmarks.tpu_check [--out FILE]

Results are told on stderr as they come; standard output gets one JSON object at the end, and so does the file, after
every section. What fails is noted and the rest goes on; what no longer fits the time is dropped, and noted too.

"us" is microseconds a call on the device, by chained calls; shares are of the copy bandwidth and of the matmul rate
that were measured on the same device just before.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_check import memory_of
from benchmarks.gpu_model import ModelBench
from benchmarks.gpu_report import Report
from benchmarks.gpu_sizes import ExtendShape, full_sizes
from benchmarks.gpu_timing import Compiler
from radix_jax.check_kernel import run_case
from radix_jax.device_timing import measure_copy_bandwidth, measure_matmul_peak, time_calls
from radix_jax.pallas_kernels.paged_attention import attention_backend
from radix_jax.pallas_kernels.paged_attention.oracle_grid import GRID, OracleCase
from radix_jax.pallas_kernels.paged_attention.tpu import attend_and_write_tpu, paged_attention_tpu
from radix_jax.pallas_kernels.paged_attention.tpu_heads import LANES

LIMIT_S = 600.0
BANDWIDTH_TARGET, PEAK_TARGET = 0.85, 0.60
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
WIDTH = 2 * NUM_KV_HEADS * HEAD_DIM
DECODE = ((64, 2048), (64, 100), (8, 16384))
EXTEND = (ExtendShape(1, 2048, 0), ExtendShape(4, 512, 4096), ExtendShape(16, 128, 1920))


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What the device does at best: bytes a second, and matmul operations a second in bfloat16."""

    bandwidth: float
    peak: float


def on_tpu(case: OracleCase) -> OracleCase:
    """A case of the grid with a pool that the kernels take: whole groups of lanes, pages of 16 or 32 tokens."""
    width = 2 * case.num_kv_heads * case.head_dim + case.spare_lanes
    least = 32 if "float8" in (case.pool_dtype or "") else 16
    return dataclasses.replace(
        case,
        spare_lanes=case.spare_lanes + -width % LANES,
        page_size=max(case.page_size, least),
        num_pages=None if case.num_pages is None else case.num_pages // least,
    )


def check_numerics(report: Report) -> None:
    """The grid, case by case."""
    for case in map(on_tpu, GRID):
        if report.left_s < 1.0:
            report.drop(case.name, "out of time")
            continue
        result = run_case("pallas_tpu", paged_attention_tpu, case)
        report.row(case=case.name, status=result.status, max_error=result.max_error, message=result.message)


def rows_of(num_rows: int, q_len: int, context: int) -> tuple[jax.Array, ...]:
    """(pool, page table, kv_lens, cu_q_lens) of rows in pages of no order."""
    pages_per_row = -(-context // PAGE_SIZE)
    num_pages = num_rows * pages_per_row
    pool = jax.random.normal(jax.random.key(1), (num_pages + 1, PAGE_SIZE, WIDTH), jnp.bfloat16)
    table = 1 + jax.random.permutation(jax.random.key(2), num_pages).reshape(num_rows, pages_per_row)
    kv_lens = jnp.full(num_rows, context, jnp.int32)
    return pool, table.astype(jnp.int32), kv_lens, jnp.arange(num_rows + 1, dtype=jnp.int32) * q_len


def decode_step(pool: jax.Array, q: jax.Array, new: jax.Array, *rows: jax.Array) -> jax.Array:
    """The pool after attention of a decode step that writes its tokens too. Calls are chained by the pool: one that
    stayed what it was would be copied for each."""
    page_table, kv_lens, cu_q_lens = rows
    slots = jnp.zeros(q.shape[0], jnp.int32)
    keywords = {"page_offset": 0, "scale": HEAD_DIM**-0.5, "max_q_len": 1}
    return attend_and_write_tpu(q, new, new, pool, page_table, kv_lens, cu_q_lens, slots, **keywords)[1]


def extend_step(q_len: int, q: jax.Array, pool: jax.Array, *rows: jax.Array) -> Any:
    """Attention of a step of chunks."""
    return paged_attention_tpu(
        q,
        pool,
        *rows,
        page_offset=0,
        scale=HEAD_DIM**-0.5,
        sliding_window=None,
        logit_soft_cap=None,
        return_lse=False,
        num_kv_heads=NUM_KV_HEADS,
        kv_scales=None,
        max_q_len=q_len,
    )


def time_decode(report: Report, peaks: Peaks) -> None:
    """Decode steps, and the share of the bandwidth that reading K and V takes of them."""
    for num_rows, context in DECODE:
        q = jax.random.normal(jax.random.key(0), (num_rows, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
        new = jax.random.normal(jax.random.key(3), (num_rows, NUM_KV_HEADS, HEAD_DIM), jnp.bfloat16)
        pool, *rows = rows_of(num_rows, 1, context)
        seconds = time_calls(decode_step, (pool, q, new, *rows))
        share = num_rows * context * WIDTH * 2 / peaks.bandwidth / seconds
        report.row(decode=f"{num_rows}x{context:,}", us=seconds * 1e6, share_of_bandwidth=share)
        if (num_rows, context) == DECODE[0]:
            report.target("share of bandwidth, decode", share, BANDWIDTH_TARGET)


def time_extend(report: Report, peaks: Peaks) -> None:
    """Steps of chunks, and the share of the matmul rate that what their queries see takes of them."""
    for shape in EXTEND:
        num_tokens, context = shape.num_rows * shape.q_len, shape.prefix_len + shape.q_len
        q = jax.random.normal(jax.random.key(0), (num_tokens, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
        rows = rows_of(shape.num_rows, shape.q_len, context)
        seconds = time_calls(functools.partial(extend_step, shape.q_len), (q, *rows))
        seen = shape.num_rows * (shape.q_len * shape.prefix_len + shape.q_len * (shape.q_len + 1) // 2)
        share = 4 * seen * NUM_HEADS * HEAD_DIM / peaks.peak / seconds
        report.row(extend=shape.name, us=seconds * 1e6, share_of_peak=share)
        if shape.prefix_len > shape.q_len and shape.q_len >= 512:
            report.target("share of matmul rate, extend", share, PEAK_TARGET)


def time_steps(report: Report, peaks: Peaks) -> None:
    """Whole steps of Llama 3 8B where the memory holds it."""
    memory_bytes = memory_of(jax.local_devices()[0]).get("bytes_limit", 0)
    sizes = full_sizes(memory_bytes, "bfloat16").model
    if sizes is None:
        report.drop("steps", "the device's memory is too small for the model")
        return
    compiler = Compiler()
    try:
        bench = ModelBench(sizes, compiler)
        for program in bench.programs.values():
            program.result()
        bench.time_steps(report, peaks.bandwidth, peaks.peak)
        bench.close()
    finally:
        compiler.close()


def device_facts() -> dict[str, Any]:
    """What runs here, on what."""
    device = jax.local_devices()[0]
    backend, reason = attention_backend("auto", device)
    memory = memory_of(device)
    return {"memory": memory, "jax": jax.__version__, "attention_backend": backend, "why": reason}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all of it, or say that there is no TPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_check", description="The TPU kernels on a TPU.")
    parser.add_argument("--out", type=Path, help="file for the JSON, rewritten after each section")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for everything (default: %(default)s)")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "tpu":
        print(f"no TPU: jax sees {jax.local_devices()[0].platform} only; nothing was run", file=sys.stderr)
        print(json.dumps({"benchmark": "tpu_check", "device": None, "platform": jax.default_backend()}))
        return
    report = Report(options.limit_s, out=options.out)
    report.facts["device"] = jax.local_devices()[0].device_kind
    peaks: list[Peaks] = []

    def measure_peaks() -> None:
        peaks.append(Peaks(measure_copy_bandwidth(), measure_matmul_peak(jnp.bfloat16)))
        report.row(**dataclasses.asdict(peaks[0]))

    sections: list[tuple[str, float, Callable[[], None]]] = [
        ("device", 30.0, lambda: report.row(**device_facts())),
        ("numerics", 240.0, lambda: check_numerics(report)),
        ("peaks", 30.0, measure_peaks),
        ("decode", 60.0, lambda: time_decode(report, peaks[0])),
        ("extend", 60.0, lambda: time_extend(report, peaks[0])),
        ("steps", 180.0, lambda: time_steps(report, peaks[0])),
    ]
    for name, limit_s, work in sections:
        with report.section(name, limit_s):
            work()
    report.save()
    print(json.dumps(report.as_dict()), flush=True)


if __name__ == "__main__":
    main()
