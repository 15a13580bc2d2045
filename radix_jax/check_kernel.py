"""A kernel of one's own through the oracle grid: is it right, and on an accelerator, how fast.

from radix_jax.check_kernel import check_kernel
report = check_kernel(my_attention)
assert report.passed, report.as_text()
"""

import dataclasses
import fnmatch
import functools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from radix_jax.attention_backends import AttentionFn
from radix_jax.device_timing import measure_copy_bandwidth, time_calls
from radix_jax.pallas_kernels.paged_attention.backends import attention_backend, attention_fn, call_attention_fn
from radix_jax.pallas_kernels.paged_attention.oracle_grid import (
    DECODE,
    GRID,
    MIXED,
    OracleCase,
    PagedRows,
    case_inputs,
    expected,
    tolerance,
)

Status = Literal["ok", "wrong", "raised", "not supported"]
# What matmuls round float32 to unless they are told not to: TF32 on an NVIDIA GPU, bfloat16 on a TPU.
_MATMUL_EPS = {"cpu": 0.0, "gpu": 2.0**-10, "tpu": 2.0**-7}
# (rows, tokens of each) of a decode step of Llama 3 8B: 32 query heads on 8, of 128 lanes, bfloat16.
DECODE_SHAPES = ((1, 4096), (64, 1024), (64, 4096), (64, 16384))
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _PAGE_SIZE = 32, 8, 128, 16
_WIDTH = 2 * _NUM_KV_HEADS * _HEAD_DIM
# 5.2 thousand million elements: an offset that is counted in 32 bits, signed or not, falls short.
LARGE_POOL_PAGES = 40_000
_LARGE = OracleCase(
    "mixed-beyond-32-bit-offsets",
    MIXED,
    page_size=64,
    num_heads=_NUM_HEADS,
    num_kv_heads=_NUM_KV_HEADS,
    head_dim=_HEAD_DIM,
    dtype="bfloat16",
)
LARGE_CASES = (
    dataclasses.replace(_LARGE, name="decode-beyond-32-bit-offsets", lens=DECODE, decode=True),
    _LARGE,
)


@dataclass(frozen=True)
class CaseResult:
    """What a kernel made of one case.

    max_error: the largest difference from the oracle, in out or lse; infinite where something is not finite; None where
    there is no result. message: what was raised, what is lacking, or where the largest error is.
    """

    case: str
    status: Status
    max_error: float | None
    tolerance: float
    message: str = ""


@dataclass(frozen=True)
class DecodeTiming:
    """A decode step of one layer. floor_s: what reading the K and V takes at the bandwidth measured on the device."""

    num_rows: int
    kv_len: int
    seconds: float
    floor_s: float


@dataclass(frozen=True)
class KernelReport:
    """A kernel through the grid. copy_bandwidth: bytes a second, None where nothing was timed."""

    kernel: str
    platform: str
    cases: tuple[CaseResult, ...]
    timings: tuple[DecodeTiming, ...] = ()
    copy_bandwidth: float | None = None

    @property
    def passed(self) -> bool:
        """Nothing is wrong or raised, and something is right."""
        statuses = [case.status for case in self.cases]
        return "ok" in statuses and not {"wrong", "raised"} & set(statuses)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an infinite error becomes the string "inf"."""
        report = {**dataclasses.asdict(self), "passed": self.passed}
        for case in report["cases"]:
            if case["max_error"] == float("inf"):
                case["max_error"] = "inf"
        return report

    def as_text(self) -> str:
        """A line for each case that is not ok, and one for how many there are of each kind."""
        lines = [f"{case.case}: {case.status}, {case.message}" for case in self.cases if case.status != "ok"]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """How many cases there are of each kind."""
        counts = {status: sum(case.status == status for case in self.cases) for status in Status.__args__}
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{self.kernel} on {self.platform}: {told}"


def check_kernel(
    kernel: AttentionFn | str,
    *,
    cases: str = "*",
    timed: bool = True,
    on_case: Callable[[CaseResult], None] | None = None,
) -> KernelReport:
    """Run a kernel through the grid.

    kernel: a function as `register_attention_backend` takes it, or the name of a backend. cases: a pattern as of file
    names. timed: measure decode steps too, where jax sees an accelerator. on_case: called after each case.

    Raises:
        ValueError: an unknown backend, one that the device can't run, or a pattern that fits no case.
        NotImplementedError: a backend that is not built yet.
    """
    chosen = chosen_cases(cases)
    if isinstance(kernel, str):
        name, _ = attention_backend(kernel, jax.local_devices()[0])
        fn = attention_fn(name)
    else:
        name, fn = getattr(kernel, "__name__", type(kernel).__name__), kernel
    results = []
    for case, pool_pages in [*((case, None) for case in chosen), *_large_pools(cases)]:
        results.append(run_case(name, fn, case, pool_pages))
        if on_case is not None:
            on_case(results[-1])
    platform = jax.default_backend()
    report = KernelReport(name, platform, tuple(results))
    if not timed or platform == "cpu" or not report.passed:
        return report
    bandwidth = measure_copy_bandwidth()
    return dataclasses.replace(report, timings=tuple(_time_decode(name, fn, bandwidth)), copy_bandwidth=bandwidth)


def chosen_cases(pattern: str) -> tuple[OracleCase, ...]:
    """The cases whose names fit a pattern as of file names.

    Raises:
        ValueError: there is none.
    """
    chosen = tuple(case for case in GRID if fnmatch.fnmatchcase(case.name, pattern))
    if not chosen:
        first = ", ".join(case.name for case in GRID[:8])
        raise ValueError(f"no case fits {pattern!r}; the first of all {len(GRID)} are {first}; try a pattern with *")
    return chosen


def _large_pools(pattern: str) -> Iterator[tuple[OracleCase, int]]:
    """The cases of a pool with more elements than 32 bits count, where a device's memory holds one."""
    num_bytes = LARGE_POOL_PAGES * LARGE_CASES[0].page_size * _WIDTH * 2
    if jax.default_backend() != "cpu" and num_bytes * 1.2 < _device_bytes():
        for case in LARGE_CASES:
            if fnmatch.fnmatchcase(case.name, pattern):
                yield case, LARGE_POOL_PAGES


def _device_bytes() -> int:
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def run_case(name: str, fn: AttentionFn, case: OracleCase, pool_pages: int | None = None) -> CaseResult:
    """One case, in one compiled program as in an engine's step.

    pool_pages: put the case's pool at the end of one of that many pages, all of which are NaN.
    """
    rows = case_inputs(case)
    allowed = tolerance(case, _MATMUL_EPS.get(jax.default_backend(), 0.0))
    try:
        given = jax.block_until_ready(_call(name, fn, case, rows, pool_pages))
    except NotImplementedError as error:
        return CaseResult(case.name, "not supported", None, allowed, _one_line(error))
    except (Exception, SystemExit) as error:  # whatever a foreign kernel may raise is its result
        message = f"{type(error).__name__}: {_one_line(error)}{_place(fn, error)}"
        return CaseResult(case.name, "raised", None, allowed, message)
    out, lse = given if case.return_lse else (given, None)
    right_out, right_lse = expected(case, rows)
    faults = [_largest_error("out", np.asarray(out, np.float64), right_out, rows)]
    if lse is not None:
        faults.append(_largest_error("lse", np.asarray(lse, np.float64)[:, :, None], right_lse[:, :, None], rows))
    error, where = max(faults, key=lambda fault: fault[0])
    status: Status = "ok" if error <= allowed else "wrong"
    return CaseResult(case.name, status, error, allowed, "" if status == "ok" else where)


def _place(fn: AttentionFn, error: BaseException) -> str:
    """Where in the file of a kernel its error comes from; "" where that can't be told."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return ""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == code.co_filename]
    return f" ({Path(code.co_filename).name}:{own[-1].lineno})" if own else ""


def _call(name: str, fn: AttentionFn, case: OracleCase, rows: PagedRows, pool_pages: int | None) -> Any:
    static = {
        "scale": case.score_scale,
        "sliding_window": case.sliding_window,
        "logit_soft_cap": case.logit_soft_cap,
        "return_lse": case.return_lse,
        "num_kv_heads": case.num_kv_heads,
        "max_q_len": case.max_q_len,
    }
    offset = jnp.int32(rows.page_offset) if case.traced_offset else None

    @jax.jit
    def call(operands: tuple[jax.Array, ...], scales: jax.Array | None, traced: jax.Array | None) -> Any:
        page_offset = rows.page_offset if traced is None else traced
        return call_attention_fn(name, fn, operands, {"page_offset": page_offset, "kv_scales": scales, **static})

    q, kv_pages, page_table, kv_lens, cu_q_lens = map(jnp.asarray, (rows.q, rows.kv_pages, *rows.rows))
    if pool_pages is not None:
        page_table = page_table + (pool_pages - kv_pages.shape[0])
        kv_pages = _at_the_end(kv_pages, pool_pages)
    scales = None if rows.kv_scales is None else jnp.asarray(rows.kv_scales)
    return call((q, kv_pages, page_table, kv_lens, cu_q_lens), scales, offset)


@functools.partial(jax.jit, static_argnums=1)
def _at_the_end(kv_pages: jax.Array, num_pages: int) -> jax.Array:
    large = jnp.full((num_pages, *kv_pages.shape[1:]), jnp.nan, kv_pages.dtype)
    return jax.lax.dynamic_update_slice_in_dim(large, kv_pages, num_pages - kv_pages.shape[0], 0)


def _largest_error(part: str, given: np.ndarray, right: np.ndarray, rows: PagedRows) -> tuple[float, str]:
    """(the largest error, where it is). Of tokens of no row, out has to be finite only, and lse -inf."""
    with np.errstate(invalid="ignore"):
        error = np.abs(given - right)
    if part == "out":
        error[rows.num_tokens :] = np.where(np.isfinite(given[rows.num_tokens :]), 0.0, np.inf)
    # Two infinities of the same sign are the same; NaN is as far from anything as can be.
    error = np.where(given == right, 0.0, np.where(np.isnan(error), np.inf, error))
    token, head, lane = np.unravel_index(int(error.argmax()), error.shape)
    if token >= rows.num_tokens:
        place = f"{part} of token {token}, which belongs to no row"
    else:
        row = int(np.searchsorted(rows.cu_q_lens, token, side="right")) - 1
        position = rows.kv_lens[row] - rows.cu_q_lens[row + 1] + token
        place = f"{part} of token {token} (row {row}, position {position})"
    detail = f"{place}, head {head}{f', lane {lane}' if part == 'out' else ''}"
    return float(error.max()), f"{detail}: {given[token, head, lane]:.6g} instead of {right[token, head, lane]:.6g}"


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _time_decode(name: str, fn: AttentionFn, bandwidth: float) -> Iterator[DecodeTiming]:
    """The decode shapes that fit into the device's memory."""
    for num_rows, kv_len in DECODE_SHAPES:
        kv_bytes = num_rows * kv_len * _WIDTH * 2
        if kv_bytes > _device_bytes() // 2:
            continue
        call = functools.partial(_decode_step, name, fn, num_rows)
        seconds = time_calls(call, _decode_arrays(num_rows, kv_len))
        yield DecodeTiming(num_rows, kv_len, seconds, kv_bytes / bandwidth)


def _decode_arrays(num_rows: int, kv_len: int) -> tuple[jax.Array, ...]:
    pages_per_row = kv_len // _PAGE_SIZE
    num_pages = num_rows * pages_per_row
    q = jax.random.normal(jax.random.key(0), (num_rows, _NUM_HEADS, _HEAD_DIM), jnp.bfloat16)
    kv_pages = jax.random.normal(jax.random.key(1), (num_pages + 1, _PAGE_SIZE, _WIDTH), jnp.bfloat16)
    table = 1 + jax.random.permutation(jax.random.key(2), num_pages).reshape(num_rows, pages_per_row)
    return q, kv_pages, table.astype(jnp.int32), jnp.full(num_rows, kv_len, jnp.int32)


def _decode_step(
    name: str,
    fn: AttentionFn,
    num_rows: int,
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
) -> jax.Array:
    operands = (q, kv_pages, page_table, kv_lens, jnp.arange(num_rows + 1, dtype=jnp.int32))
    keywords = {
        "page_offset": 0,
        "scale": _HEAD_DIM**-0.5,
        "sliding_window": None,
        "logit_soft_cap": None,
        "return_lse": False,
        "num_kv_heads": _NUM_KV_HEADS,
        "kv_scales": None,
        "max_q_len": 1,
    }
    return call_attention_fn(name, fn, operands, keywords)
