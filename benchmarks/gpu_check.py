"""Every check and timing of the GPU kernels on the GPU at hand: python -m benchmarks.gpu_check [--out FILE]

Results are told on stderr as they come; standard output gets one JSON object at the end, and so does the file, after
every section; tables of all of them come last. What fails is noted, makes the exit code 1, and the rest goes on; what
no longer fits the time is dropped, and noted too. Programs are compiled ahead in threads while numerics are checked;
nothing is timed before they are done.

"us" is microseconds a call on the device, by chained calls; shares are of the copy bandwidth and of the matmul rate
that were measured on the same device just before.
"""

import argparse
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.backend import get_backend

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_attention import (
    Entry,
    Rows,
    dense_decode,
    dense_extend,
    entry_of,
    extend_variants,
    jax_entry,
    make_pool,
    make_work,
    measure_entries,
    ours,
    shipped_blocks,
    variants,
    xla,
)
from benchmarks.gpu_model import ModelBench
from benchmarks.gpu_numerics import check_large_pools, check_whole_shapes, check_writes, queue_grid, report_grid
from benchmarks.gpu_report import Report
from benchmarks.gpu_sizes import ExtendShape, GpuSizes, full_sizes
from benchmarks.gpu_timing import Compiler
from benchmarks.gpu_writes import Programs, measure_writes, queue_writes
from radix_jax.cache_dir import user_cache_dir
from radix_jax.device_timing import measure_copy_bandwidth, measure_matmul_peak
from radix_jax.pallas_kernels.paged_attention import attention_backend
from radix_jax.pallas_kernels.paged_attention.oracle_grid import GRID, OracleCase
from radix_jax.runner import keep_compiles
from radix_jax.runner.resolve import default_dtype

LIMIT_S = 225.0
# A compiler that hangs must not keep the process: this much later it ends with what it has.
GRACE_S = 10.0
# Kept for timing, whatever was not checked or compiled until then.
TIMING_S = 95.0
BANDWIDTH_TARGET, PEAK_TARGET = 0.85, 0.60
# What an H200 does, about: for the number of calls in a program alone.
ASSUMED_BANDWIDTH, ASSUMED_PEAK = 4.3e12, 5e14
SLOW_FORM = 20.0


class Check:
    """One run: what is queued, measured and told. Everything is queued first, in the order of its weight."""

    def __init__(self, sizes: GpuSizes, report: Report, grid: tuple[OracleCase, ...] = GRID) -> None:
        self._sizes, self._report, self._grid = sizes, report, grid
        self._compiler = Compiler()
        self._entries: dict[str, list[Entry]] = {name: [] for name in ("decode", "extend", "baselines", "blocks")}
        self._bandwidth: float | None = None
        self._peak: float | None = None
        self._model: ModelBench | None = None
        self._cases: dict[Any, str] = {}
        self._writes: Programs = []

    def run(self) -> None:
        """All sections."""
        try:
            with self._report.section("pools", 30.0):
                self._pool = make_pool(self._sizes, self._sizes.pool_slots)
                self._small_pool = make_pool(self._sizes, self._sizes.small_pool_slots)
            for name, limit_s, work in (*self._queues(), *self._checks()):
                self._run(name, min(limit_s, self._report.total_left_s - TIMING_S), work)
            self._run("compiles", self._report.total_left_s - TIMING_S, self._drain)
            for name, limit_s, work in self._timings():
                self._run(name, limit_s, work)
        finally:
            self._compiler.close()
            if self._model is not None:
                self._model.close()

    def _run(self, name: str, limit_s: float, work: Callable[[], Any]) -> None:
        with self._report.section(name, limit_s):
            if self._report.left_s < 1.0 and name != "compiles":
                self._report.drop(name, "out of time")
            else:
                work()

    def _queues(self) -> list[tuple[str, float, Callable[[], Any]]]:
        return [
            ("steps", 30.0, self._queue_model),
            ("decode", 20.0, self._queue_decode),
            ("extend", 20.0, self._queue_extend),
            ("numerics", 20.0, self._queue_numerics),
            ("baselines", 20.0, self._queue_baselines),
            ("write", 20.0, self._queue_writes),
            ("blocks", 20.0, self._queue_blocks),
        ]

    def _checks(self) -> list[tuple[str, float, Callable[[], Any]]]:
        sizes, report = self._sizes, self._report
        return [
            ("numerics", 90.0, lambda: report_grid(report, self._cases)),
            ("large pools", 25.0, lambda: check_large_pools(report, sizes)),
            ("whole shapes", 20.0, lambda: check_whole_shapes(report, sizes, self._pool)),
            ("writes are right", 10.0, lambda: check_writes(report, sizes)),
        ]

    def _timings(self) -> list[tuple[str, float, Callable[[], Any]]]:
        report = self._report
        return [
            ("peaks", 15.0, self._measure_peaks),
            ("decode", 15.0, self._measure_decode),
            ("extend", 12.0, self._measure_extend),
            ("steps", 12.0, self._measure_steps),
            ("baselines", 12.0, lambda: self._measure("baselines")),
            ("write", 5.0, lambda: measure_writes(report, self._sizes, self._writes)),
            ("blocks", 12.0, lambda: self._measure("blocks")),
            ("offline", 40.0, self._run_offline),
            ("memory", 5.0, lambda: report.row(**memory_of(jax.local_devices()[0]))),
        ]

    def _queue_model(self) -> None:
        if self._sizes.model is None:
            self._report.drop("steps", "the device's memory is too small for the model")
        else:
            self._model = ModelBench(self._sizes.model, self._compiler)

    def _queue_decode(self) -> None:
        sizes = self._sizes
        for rows, context in sizes.decode:
            self._add("decode", _decode_shape(rows, context), "ours", self._pool)
        swept = _decode_shape(*sizes.swept)
        self._add("decode", swept, "ours, pool under 4 GiB", self._small_pool)
        for page_size in sizes.page_sizes:
            self._add("decode", swept, f"ours, page {page_size}", self._pool, page_size=page_size)

    def _queue_extend(self) -> None:
        for shape in self._sizes.extend:
            self._add("extend", shape, "ours", self._pool)

    def _queue_numerics(self) -> None:
        self._cases = queue_grid(self._sizes, self._compiler, self._grid)

    def _queue_baselines(self) -> None:
        sizes = self._sizes
        swept, extend = _decode_shape(*sizes.swept), sizes.extend[0]
        self._add("baselines", swept, "xla", self._pool, xla(sizes, 1), slow=SLOW_FORM)
        self._add("baselines", swept, "dense xla", self._pool, dense_decode(sizes), slow=SLOW_FORM)
        self._add("baselines", extend, "xla", self._pool, xla(sizes, extend.q_len), slow=SLOW_FORM)
        for implementation in ("xla", "cudnn"):
            form = dense_extend(sizes, implementation)
            self._add("baselines", extend, f"dense {implementation}", self._pool, form, slow=SLOW_FORM)
        work = make_work(sizes, swept, self._pool.shape[0])
        self._entries["baselines"].append(
            jax_entry(sizes, self._compiler, work, shape=swept.name, form="jax.paged_attention")
        )

    def _queue_writes(self) -> None:
        self._writes = queue_writes(self._sizes, self._compiler)

    def _queue_blocks(self) -> None:
        sizes, num_slots = self._sizes, self._pool.shape[0]
        shapes = [_decode_shape(*shape) for shape in sizes.decode]
        for shape in (*shapes, sizes.extend[0]):
            if shape.num_slots(sizes.page_size) > num_slots:
                continue
            blocks = shipped_blocks(sizes, make_work(sizes, shape, num_slots), self._pool.dtype)
            changes = (variants if shape.q_len == 1 else extend_variants)(blocks)
            for name, changed in itertools.islice(changes, sizes.num_variants):
                # What a tile is good at hangs on the shape little, how many parts a row is cut into much.
                if shape in (shapes[0], sizes.extend[0]) or name.startswith("num_splits"):
                    self._add("blocks", shape, name, self._pool, ours(sizes, shape.q_len, changed))

    def _add(
        self,
        section: str,
        shape: ExtendShape,
        form: str,
        pool: jax.Array,
        fn: Callable[..., jax.Array] | None = None,
        *,
        page_size: int | None = None,
        slow: float = 1.0,
    ) -> None:
        """Queue a program; one that can't be made is noted."""
        try:
            work = make_work(self._sizes, shape, pool.shape[0], page_size)
            info = {"shape": shape.name, "form": form}
            if fn is None:
                fn = ours(self._sizes, shape.q_len, None)
                info["blocks"] = _as_text(shipped_blocks(self._sizes, work, pool.dtype), shape)
            floor_s = max(work.kv_bytes / ASSUMED_BANDWIDTH, work.num_flops / ASSUMED_PEAK)
            self._entries[section].append(
                entry_of(self._sizes, self._compiler, work, fn, pool, expected_s=slow * floor_s, **info)
            )
        except Exception as error:  # one that can't be made says nothing about the others
            self._report.drop(f"{form} at {shape.name}", f"{type(error).__name__}: {error}"[:500])

    def _drain(self) -> None:
        late = self._compiler.drain(self._report.total_left_s - TIMING_S)
        self._report.row(programs_given_up=late)

    def _measure_peaks(self) -> None:
        self._bandwidth = measure_copy_bandwidth(self._sizes.copy_bytes)
        self._report.row(copy_bytes_per_s=self._bandwidth)
        self._peak = measure_matmul_peak(self._sizes.dtype, self._sizes.matmul_size)
        self._report.row(matmul_flops_per_s=self._peak)

    def _measure(self, section: str) -> Rows:
        return measure_entries(self._report, self._entries[section], self._bandwidth, self._peak)

    def _measure_decode(self) -> None:
        rows, swept = self._measure("decode"), _decode_shape(*self._sizes.swept).name
        share = rows.get((swept, "ours"), {}).get("share_of_bandwidth")
        self._report.target(f"decode {swept}: share of copy bandwidth", share, BANDWIDTH_TARGET)

    def _measure_extend(self) -> None:
        rows = self._measure("extend")
        for shape in self._sizes.extend:
            share = rows.get((shape.name, "ours"), {}).get("share_of_peak")
            self._report.target(f"extend {shape.name}: share of matmul peak", share, PEAK_TARGET)

    def _measure_steps(self) -> None:
        if self._model is not None:
            self._model.time_steps(self._report, self._bandwidth, self._peak)

    def _run_offline(self) -> None:
        if self._model is None:
            self._report.drop("offline", "no model")
        else:
            self._model.run_offline(self._report)


def _decode_shape(rows: int, context: int) -> ExtendShape:
    return ExtendShape(rows, 1, context - 1)


def _as_text(blocks: Any, shape: ExtendShape) -> str:
    chosen = blocks.decode if shape.q_len == 1 else blocks.extend
    return " ".join(f"{name}={value}" for name, value in vars(chosen).items())


def memory_of(device: jax.Device) -> dict[str, int]:
    """Bytes of a device that jax may take, takes, and took at most; empty where it doesn't say."""
    stats = device.memory_stats() or {}
    return {name: stats[name] for name in ("bytes_limit", "bytes_in_use", "peak_bytes_in_use") if name in stats}


def device_facts() -> dict[str, Any]:
    """What runs here, on what."""
    device = jax.local_devices()[0]
    backend, reason = attention_backend("auto", device)
    return {
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "num_cores": getattr(device, "core_count", None),
        "memory": memory_of(device),
        "platform_version": get_backend().platform_version,
        "jax": jax.__version__,
        "cpus": os.cpu_count(),
        "attention_backend": backend,
        "why": reason,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all of it, or say that there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="The GPU kernels on a GPU.")
    parser.add_argument("--out", type=Path, help="file for the JSON, rewritten after each section")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for everything (default: %(default)s)")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"no GPU: jax sees {jax.local_devices()[0].platform} only; nothing was run", file=sys.stderr)
        print(json.dumps({"benchmark": "gpu_check", "device": None, "platform": jax.default_backend()}))
        return
    report = Report(options.limit_s, out=options.out)
    watch = threading.Timer(options.limit_s + GRACE_S, _finish, (report,))
    watch.daemon = True
    watch.start()
    keep_compiles(user_cache_dir() / "xla")
    report.facts["device"] = jax.local_devices()[0].device_kind
    with report.section("device", 30.0):
        report.row(**device_facts())
    memory_bytes = memory_of(jax.local_devices()[0]).get("bytes_limit", 0)
    Check(full_sizes(memory_bytes, default_dtype()), report).run()
    _finish(report)


def _finish(report: Report) -> None:
    """Print what there is and end, whatever threads still do."""
    report.save()
    report.print_tables()
    print(json.dumps(report.as_dict()), flush=True)
    os._exit(0 if report.is_right else 1)


if __name__ == "__main__":
    main()
